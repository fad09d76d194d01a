"""A backend of one's own is a folder and a block in a spec: no Python of lorac knows it; the same checks find it."""

import random
import re
import shutil

import kernel_kit as kit
import pytest
import yaml

from lorac.compile import compile_spec
from lorac.emit import emit
from lorac.errors import SpecError
from lorac.runtime.errors import PackageError
from lorac.runtime.load import load
from lorac.verify.run import verify

DECLARATION = """
summary: one program per row; no tensor cores, no segments.
prefill_graphs: [breakable]
parameters:
  block: {type: int, default: 64, minimum: 16, maximum: 1024, help: outputs of one step of a program}
kernels:
  gemv:
    template: gemv.py.jinja
    kinds: [linear, lm_head, embedding]
    arguments: {x: "*dtype", x_stride: i32, a: "*dtype", b: "*dtype", rank: "*i32", scale: "*fp32", row_slot: "*i32",
                y: "*dtype", y_stride: i32}
    constants: [BLOCK_R]
    dims: {BLOCK_R: rank}
    tiles: [{BLOCK_R: 512, warps: 4, stages: 1}]
"""
BACKEND = """{{ header }}
{% filter pydoc %}
The `{{ backend.name }}` backend of `{{ package.name }}`: {{ backend.summary }}
{% endfilter %}

import torch
import triton
import triton.language as tl

from lorac.runtime.launch import Kernel
from lorac.runtime.scratch import Scratch
from lorac.runtime.ticket import Batch

{% for module in modules %}
{% set kernel = module.kernels[0] %}

{% include "gemv.py.jinja" %}


{{ kernel.name | upper }} = Kernel(
    {{ kernel.name }},
    {
{% for name, type in kernel.arguments %}
        "{{ name }}": "{{ "*i64" if name == "x" and module.kind == "embedding" else type }}",
{% endfor %}
    },
    {{ kernel.constants | pytuple }},
    (
{% for launch in kernel.launches %}
        {{ launch.row | pytuple }},
{% endfor %}
    ),
)


{% include "shared/signature.py.jinja" %}
    a, b, rank, scale = slot
    rows = x.shape[0]
    {{ kernel.name | upper }}.run(
        {{ kernel.name | upper }}.launches[-1], (rows,), x=x, x_stride=x.stride(0), a=a, b=b, rank=rank, scale=scale,
        row_slot=batch.map.row_slot, y=y, y_stride=y.stride(0),
    )

{% endfor %}

ADD = {
{% for module in modules %}
    "{{ module.name }}": add_{{ module.name }},
{% endfor %}
}
KERNELS = (
{% for module in modules %}
    {{ module.kernels[0].name | upper }},
{% endfor %}
)
"""
KERNEL = '''@triton.jit(do_not_specialize=["x_stride", "y_stride"])
def {{ kernel.name }}(x, x_stride, a, b, rank, scale, row_slot, y, y_stride, BLOCK_R: tl.constexpr):
    """y[row] += scale * B (A x[row]), for one row of {{ module.name }}."""
    BLOCK: tl.constexpr = {{ parameters.block }}
    R: tl.constexpr = {{ package.max_rank }}
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(row_slot + row).to(tl.int64)
    if slot < 0:
        return
    r = tl.arange(0, BLOCK_R)
    n = tl.arange(0, BLOCK)
{% if module.kind == "embedding" %}
    token = tl.load(x + row * x_stride)
    if (token < 0) | (token >= {{ module.in_features }}):
        return
{% endif %}
{% for slice in module.slices %}
    wanted = r < tl.load(rank + slot * {{ module.slices | length }} + {{ loop.index0 }})
{% if module.kind == "embedding" %}
    h = tl.load(a + (slot * {{ module.in_features }} + token) * R + r, mask=wanted, other=0.0).to(tl.float32)
{% else %}
    h = tl.zeros((BLOCK_R,), tl.float32)
    for start in range(0, {{ module.in_features }}, BLOCK):
        inside = start + n < {{ module.in_features }}
        a_row = (slot * {{ module.slices | length }} + {{ loop.index0 }}) * R + r
        a_at = a + a_row[:, None] * {{ module.in_features }}
        a_tile = tl.load(a_at + start + n[None, :], mask=wanted[:, None] & inside[None, :], other=0.0)
        x_tile = tl.load(x + row * x_stride + start + n, mask=inside, other=0.0)
        h += tl.sum(a_tile.to(tl.float32) * x_tile.to(tl.float32)[None, :], axis=1)
{% endif %}
    h *= tl.load(scale + slot * {{ module.slices | length }} + {{ loop.index0 }})
    for start in range(0, {{ slice.width }}, BLOCK):
        inside = start + n < {{ slice.width }}
        b_at = b + (({{ slice.start }} + start + n[:, None]).to(tl.int64) * {{ package.slots }} + slot) * R + r[None, :]
        b_tile = tl.load(b_at, mask=inside[:, None] & wanted[None, :], other=0.0).to(tl.float32)
        y_at = y + row * y_stride + {{ slice.start }} + start + n
        total = tl.load(y_at, mask=inside, other=0.0).to(tl.float32) + tl.sum(b_tile * h[None, :], axis=1)
        tl.store(y_at, total.to(y.dtype.element_ty), mask=inside)
{% endfor %}
'''


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a search path of one backend, `rowwise`, beside which specs are written."""
    folder = tmp_path_factory.mktemp("fourth")
    kind = folder / "mine" / "rowwise"
    kind.mkdir(parents=True)
    (kind / "backend.yaml").write_text(DECLARATION)
    (kind / "backend.py.jinja").write_text(BACKEND)
    (kind / "gemv.py.jinja").write_text(KERNEL)
    return folder


def package_of(folder, name: str, data: dict):
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(data, sort_keys=False))
    compiled = compile_spec(path)
    emit(compiled.files, folder / name)
    return load(folder / name), compiled


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_the_same_checks(folder, generator, seed, dtype):
    (kind,) = kit.kinds(folder / "mine", "mine")
    package, compiled = package_of(folder, f"rowwise_{dtype}", kit.spec_of(kind, dtype, block=128))
    assert "BLOCK: tl.constexpr = 128" in compiled.files["backends/tested.py"]
    bench, rng = kit.Bench(package, kind, generator), random.Random(seed)
    batches = kit.awkward_batches(len(kit.RANKS), rng)
    for name in batches if dtype == "float32" else rng.sample(list(batches), 4):
        row_slot = bench.prepare(*batches[name])
        for module in rng.sample(bench.layout.modules, 2):
            print(name, module.name)
            bench.check(module, 0, row_slot)


def test_beside_the_others_and_twice(folder):
    """Blocks of any kind in one spec, and two tunings of one."""
    (kind,) = kit.kinds(folder / "mine", "mine")
    data = kit.spec_of(kind, "float32")
    block = data["backends"]["tested"]
    data["backends"] = {"triton": {}, "wide": block | {"block": 128}, "narrow": block | {"block": 16}}
    package, compiled = package_of(folder, "several", data)
    assert package.BACKENDS == ("triton", "wide", "narrow")
    assert "BLOCK: tl.constexpr = 128" in compiled.files["backends/wide.py"]
    assert "BLOCK: tl.constexpr = 16" in compiled.files["backends/narrow.py"]
    assert (folder / "mine") in compiled.inputs


def test_its_parameters_are_checked(folder):
    (kind,) = kit.kinds(folder / "mine", "mine")
    with pytest.raises(SpecError, match="block is 8") as caught:
        package_of(folder, "refused", kit.spec_of(kind, "float32", block=8))
    assert "at least 16 and at most 1024" in str(caught.value)


@pytest.mark.parametrize(
    ("file", "old", "new", "message"),
    [
        ("backend", "import torch\n", "import torchh\n", "backend tested: .*/tested.py:5: ModuleNotFoundError: "),
        ("backend", "ADD = {", "ADD = dict() and {", "tested qkv_proj .*: KeyError: 'qkv_proj'"),
        ("backend", "scale=scale,", "", "kernel gemv_qkv_proj takes .*'scale'.*, not .*"),
        ("backend", "rank, scale = slot", "rank = slot", r"tested qkv_proj layer \d, decode: .*/tested.py:\d+: ValueE"),
        ("backend", '{{ "*i64" if', '{{ "*i32" if', r"gemv_embed_tokens takes x as \*i32, not a tensor of torch.int64"),
        ("gemv", "tl.sum(b_tile", "tl.summ(b_tile", "tested qkv_proj .*InterpreterError: .*summ"),
    ],
)
def test_what_fails_when_it_runs_is_an_error_of_the_package(folder, tmp_path, file, old, new, message):
    """Verifying says which module and batch, and where in the package, instead of a traceback."""
    (kind,) = kit.kinds(folder / "mine", "mine")
    shutil.copytree(folder / "mine", tmp_path / "mine")
    changed = tmp_path / "mine" / "rowwise" / f"{file}.py.jinja"
    assert old in changed.read_text()
    changed.write_text(changed.read_text().replace(old, new, 1))
    package_of(tmp_path, "broken", kit.spec_of(kind, "float32"))
    with pytest.raises(PackageError) as caught:
        verify(tmp_path / "broken", "cpu", most_rows=1)
    assert re.search(message, str(caught.value))
