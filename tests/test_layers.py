"""Who may import whom. Imports inside functions count as well, for it is the statements themselves that are read."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
COMPILER = ["pydantic", "pydantic_core", "yaml", "jinja2"]
HEAVY = [*COMPILER, "torch", "triton", "safetensors", "numpy"]


def imports(part: str) -> dict[str, set[str]]:
    """File to the modules it imports, in full, for `lorac/<part>`: a file, or every file below a folder."""
    place = ROOT / "lorac" / part
    found = {}
    for file in sorted(place.rglob("*.py")) if place.is_dir() else [place]:
        package = file.relative_to(ROOT).with_suffix("").parts[:-1]
        names = set()
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
                names |= {".".join(filter(None, (base, node.module, alias.name))) for alias in node.names}
        found[str(file.relative_to(ROOT))] = names
    assert found
    return found


def starts_with(name: str, *prefixes: str) -> bool:
    return any(name == prefix or name.startswith(prefix + ".") for prefix in prefixes)


def test_the_runtime_knows_itself_and_three_libraries():
    allowed = ("lorac.runtime", "torch", "triton", "safetensors", *sys.stdlib_module_names)
    for file, names in imports("runtime").items():
        assert [name for name in names if not starts_with(name, *allowed)] == [], file


@pytest.mark.parametrize("part", ["spec", "plan"])
def test_spec_and_plan_know_neither_torch_nor_templates(part):
    for file, names in imports(part).items():
        assert [name for name in names if starts_with(name, "torch", "triton", "jinja2", "lorac.render")] == [], file


def test_only_render_knows_jinja():
    for file, names in imports("").items():
        if not file.startswith("lorac/render/"):
            assert [name for name in names if starts_with(name, "jinja2")] == [], file


@pytest.mark.parametrize(
    "part",
    ["errors.py", "runtime/errors.py", "runtime/pairs.py", "runtime/segments.py", "resources.py", "swap.py"],
)
def test_these_files_need_the_standard_library_alone(part):
    for file, names in imports(part).items():
        assert [name for name in names if not starts_with(name, *sys.stdlib_module_names)] == [], file


def python(code: str, blocked: list[str]) -> str:
    """Output of `code` in a new process where the blocked modules cannot be imported."""
    block = f"import sys; sys.modules.update(dict.fromkeys({blocked}))\n"
    done = subprocess.run([sys.executable, "-c", block + code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_importing_lorac_is_light():
    assert python("import lorac; print(lorac.__version__, 'lorac.runtime' in sys.modules)", HEAVY).endswith("False\n")


def test_planning_needs_no_torch():
    code = "from lorac.compile import plan_spec; print(plan_spec('specs/tiny.yaml').plan.name)"
    assert python(code, ["torch", "triton", "jinja2"]) == "tiny\n"


def test_a_serving_machine_needs_no_compiler(tmp_path):
    """Every module of the runtime imports, and a package loads with its backends, where the compiler cannot."""
    build = [sys.executable, "-m", "lorac", "build", "specs/tiny.yaml", "--output", str(tmp_path), "--quiet"]
    subprocess.run(build, cwd=ROOT, check=True)
    parts = ["spec", "plan", "render", "compile", "cli", "commands", "emit", "aot", "explain"]
    code = f"""
import importlib, pkgutil
import lorac, lorac.runtime
for module in pkgutil.walk_packages(lorac.runtime.__path__, "lorac.runtime."):
    importlib.import_module(module.name)
package = lorac.load({str(tmp_path / "tiny")!r})
for name in ("admission", "decode", "prefill", "step", *(f"backends.{{name}}" for name in package.BACKENDS)):
    importlib.import_module(f"{{package.__name__}}.{{name}}")
print(package.LAYOUT.name)
"""
    assert python(code, COMPILER + [f"lorac.{part}" for part in parts]) == "tiny\n"


def test_a_package_imports_by_its_own_name_from_anywhere(tmp_path):
    build = [
        sys.executable,
        "-m",
        "lorac",
        "build",
        "specs/tiny.yaml",
        "--output",
        str(tmp_path / "anywhere"),
        "--quiet",
    ]
    subprocess.run(build, cwd=ROOT, check=True)
    command = [sys.executable, "-c", "from anywhere.tiny import *; print(LAYOUT.name)"]
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "tiny\n"), done.stderr
