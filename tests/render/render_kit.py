"""Specs and backend folders made of a few lines, and what they render to."""

from pathlib import Path

import yaml

from lorac.compile import compile_spec
from lorac.render.package import render
from lorac.spec.folders import BackendFolder, read_declaration

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "specs").glob("*.yaml"))

SPEC = """
lorac: 1
name: demo
model: {hidden: 64, intermediate: 96, heads: 4, layers: 2, vocab: 128, tied: false}
dtype: float32
adapters: {slots: 3, max_rank: 16, targets: [o_proj]}
backends: {mine: {templates: kinds}}
"""
DECLARATION = """
summary: adds nothing
parameters: {width: {type: int, default: 4, minimum: 1, maximum: 9, help: a number}}
kernels:
  only:
    template: kernel.py.jinja
    arguments: {x: "*dtype"}
    constants: [BLOCK_M]
    dims: {BLOCK_M: rows}
    tiles: [{BLOCK_M: 16}]
"""
BACKEND = """{{ header }}
{% filter pydoc %}
The `{{ backend.name }}` backend.
{% endfilter %}

WIDTH = {{ parameters.width }}
{% for module in modules %}
{% for kernel in module.kernels %}
{% include kernel.template %}
{% endfor %}
{% endfor %}
ADD = {
{% for module in modules %}
    "{{ module.name }}": print,
{% endfor %}
}
KERNELS = ()
"""
KERNEL = "{{ kernel.name | upper }} = {{ module.in_features }}\n"


def write(folder: Path, declaration: str = DECLARATION, backend: str = BACKEND, kernel: str = KERNEL) -> Path:
    """A spec in `folder` whose one backend is made of these texts."""
    kind = folder / "kinds" / "mine"
    kind.mkdir(parents=True)
    (kind / "backend.yaml").write_text(declaration)
    (kind / "backend.py.jinja").write_text(backend)
    (kind / "kernel.py.jinja").write_text(kernel)
    (folder / "demo.yaml").write_text(SPEC)
    return folder / "demo.yaml"


def line_of(text: str, part: str) -> int:
    """The number of the line that holds `part`, from 1."""
    return next(number for number, line in enumerate(text.splitlines(), 1) if part in line)


def files_of(data: dict, folder: Path) -> dict[str, str]:
    """The package of a spec given as data, from a file in `folder`."""
    path = folder / "spec.yaml"
    path.write_text(yaml.safe_dump(data, sort_keys=False))
    return compile_spec(path).files


def files_of_plan(plan) -> dict[str, str]:
    """The package of a plan whose backends are all lorac's own."""
    folders = {}
    for backend in plan.backends:
        name = f"templates/backends/{backend.kind}"
        folders[backend.name] = BackendFolder(ROOT / name, read_declaration(ROOT / name), name, beside_spec=False)
    return render(plan, folders, "0" * 64)
