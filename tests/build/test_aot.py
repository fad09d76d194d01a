"""Kernels compiled for GPUs that are not here: what fits passes, what spills or asks for too much is named."""

import hashlib
import json
import os
import subprocess
import sys

import pytest
from packages import ROOT, copy_of_tiny

from lorac.aot import Row, Served, compile_package, failures_of, report
from lorac.aot.worker import describe
from lorac.cli import main
from lorac.errors import BuildError
from lorac.runtime.load import FORMAT, load
from lorac.runtime.package import backend_module

PACKAGE = '''
import triton
import triton.language as tl

from lorac.runtime.launch import ANY, Kernel


@triton.jit
def copy(x, y, BLOCK: tl.constexpr):
    """y = x."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + at, tl.load(x + at))


@triton.jit
def center(x, y, BLOCK: tl.constexpr):
    """y = x - mean(x), with all of x in registers at once."""
    at = tl.arange(0, BLOCK)
    values = tl.load(x + at)
    tl.store(y + at, values - tl.sum(values) / BLOCK)


@triton.jit
def product(x, y, N: tl.constexpr):
    """y = x @ x, [N, N], in one program."""
    at = tl.arange(0, N)[:, None] * N + tl.arange(0, N)[None, :]
    tile = tl.load(x + at)
    tl.store(y + at, tl.dot(tile, tile))


def row(constant, warps=4, rows=0):
    """A configuration for up to `rows` rows, of one stage."""
    return (rows, 8, ANY, warps, 1, False, constant)


ROUTE = Kernel(copy, {"x": "*fp32", "y": "*fp32"}, ("BLOCK",), (row(256, rows=16), row(256)))
KERNELS = (
    Kernel(center, {"x": "*fp32", "y": "*fp32"}, ("BLOCK",), (row(16384, warps=1),)),
    Kernel(product, {"x": "*fp16", "y": "*fp32"}, ("N",), (row(64), row(24))),
)
'''


@pytest.fixture
def handmade(tmp_path):
    """A package with a configuration listed twice, one that spills, and one that cannot be compiled."""
    files = {
        "__init__.py": 'from . import step\n\nBACKENDS = ("one",)\n',
        "step.py": PACKAGE,
        "backends/__init__.py": "",
        "backends/one.py": "from ..step import KERNELS as KERNELS\n",
    }
    hashes = {path: hashlib.sha256(text.encode()).hexdigest() for path, text in files.items()}
    files["manifest.json"] = json.dumps({"lorac": FORMAT, "name": "handmade", "fingerprint": "", "files": hashes})
    for path, text in files.items():
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text(text)
    return tmp_path


def test_every_configuration_is_compiled_once_and_spills_are_named(handmade, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # as in a test run on a CPU; the compiler must not notice
    rows = compile_package(handmade, ("sm_80", "gfx942"))
    found = {(row.kernel, row.launch, row.target): row for row in rows}
    assert len(found) == len(rows) == 4 * 2, "configurations that differ in the batches they serve are the same code"
    for target in ("sm_80", "gfx942"):
        copy = found["copy", "BLOCK=256 warps=4 stages=1", target]
        assert (copy.backend, copy.stack, copy.shared, copy.error) == ("step", 0, 0, "") and 0 < copy.registers < 64
        product = found["product", "N=64 warps=4 stages=1", target]
        assert product.stack == 0 and product.shared >= 64 * 64 * 2
        assert found["product", "N=24 warps=4 stages=1", target].error
    # 512 values per thread: twice what an NVIDIA thread has registers for; AMD's have 512
    spilled, held = (found["center", "BLOCK=16384 warps=1 stages=1", target] for target in ("sm_80", "gfx942"))
    assert spilled.stack > 0 and (held.stack, held.registers > 256) == (0, True)
    failures = failures_of(rows)
    assert len(failures) == 3
    assert any(line.startswith("one.center on sm_80 (BLOCK=16384 warps=1 stages=1) spills") for line in failures)
    assert any(line.startswith("one.product on gfx942 (N=24 warps=4 stages=1) does not compile") for line in failures)
    assert [line.split()[:4] for line in report(rows).splitlines()[1:]] == [
        ["one", "center", "sm_80", "1"],
        ["one", "center", "gfx942", "1"],
        ["one", "product", "sm_80", "2"],
        ["one", "product", "gfx942", "2"],
        ["step", "copy", "sm_80", "1"],
        ["step", "copy", "gfx942", "1"],
    ]


def test_only_what_batches_need_is_compiled(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    folder = ROOT / "generated" / "tiny"
    package = load(folder)
    batches = [Served("csgmv", 4, 8, 1), Served("csgmv", 64, 8, 4)]
    rows = compile_package(folder, ("sm_90",), batches=batches)
    needed = {("step", "route", describe(launch)) for launch in package.step.ROUTE.launches}
    every = set()
    for kernel in backend_module(package.__name__, package.BACKENDS, "csgmv").KERNELS:
        every |= {("csgmv", kernel.name, describe(launch)) for launch in kernel.launches}
        needed |= {("csgmv", kernel.name, describe(kernel.pick(*batch[1:]))) for batch in batches}
    assert {(row.backend, row.kernel, row.launch) for row in rows} == needed
    assert every - needed and not any(row.error for row in rows)


@pytest.mark.parametrize(("target", "limit"), [("sm_80", 166_912), ("sm_90", 232_448), ("gfx942", 65_536)])
def test_shared_memory_is_held_against_the_target(target, limit):
    row = Row("one", "k", target, "N=1", 10, 0, limit, "")
    assert failures_of([row]) == []
    (failure,) = failures_of([Row("one", "k", target, "N=1", 10, 0, limit + 1, "")])
    assert failure.startswith(f"one.k on {target} (N=1) needs {limit + 1} bytes of shared memory, of {limit}: ")


def test_a_broken_package_is_named(handmade):
    (handmade / "step.py").write_text("")
    with pytest.raises(BuildError, match="could not be compiled:(.|\n)*step.py is not the file that was built"):
        compile_package(handmade, ("sm_90",), workers=1)


def test_build_aot_compiles_what_the_spec_lists(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    spec = copy_of_tiny(
        tmp_path,
        # one module, one variant and one backend: enough to see that a real package compiles
        modules="[qkv_proj, o_proj, gate_up_proj, down_proj, lm_head, embed_tokens] -> [o_proj]",
        variants="one: {adapters: 1, rank: 8},  -> ",
        csgmv="  csgmv: -> # csgmv:",
    )
    assert main(["build", str(spec), "--aot"]) == 2
    assert "names no targets" in capsys.readouterr().err
    spec.write_text(spec.read_text() + "targets: [sm_90]\n")
    assert main(["build", str(spec), "--aot"]) == 0, capsys.readouterr()
    out = capsys.readouterr().out
    for kernel in ("route", "shrink_o_proj", "expand_o_proj"):
        assert f" {kernel} " in out


def compiled_by(script: str, *arguments: str, **environment: str) -> str:
    """What a script prints that compiles for real, in a process where Triton's interpreter is off."""
    environment = {name: of for name, of in os.environ.items() if name != "TRITON_INTERPRET"} | environment
    command = [sys.executable, "-c", script, *arguments]
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return run.stdout


PIPELINED = """
from lorac.aot.worker import compile_launch
from lorac.runtime.load import load
from lorac.runtime.package import backend_module

package = load("generated/llama31_8b")
for kernel in backend_module(package.__name__, package.BACKENDS, "fused").KERNELS:
    for launch in kernel.launches:
        looked_at = launch.adapters == 8 and launch.rows in (16, 256)
        if looked_at and kernel.name in ("tile_project_o_proj", "tile_project_down_proj"):
            stages = launch.options["num_stages"]
            tiles = 2 * (launch.BLOCK_M + launch.BLOCK_N) * launch.BLOCK_K
            shared = compile_launch("fused", kernel, launch, "sm_90")["shared"]
            print(kernel.name, launch.rows, stages * tiles <= shared, sep=",")
"""


def test_loops_whose_steps_may_wait_are_pipelined_all_the_same():
    """Triton 3.9 pipelines none with its own wait inside: then every step waits for loads of its own."""
    found = [line.split(",") for line in compiled_by(PIPELINED).split()]
    assert {kernel for kernel, *_ in found} == {"tile_project_o_proj", "tile_project_down_proj"} and len(found) == 4
    assert [line for line in found if line[2] != "True"] == []


WAITED = r"""
import re

import triton
from triton.backends.compiler import GPUTarget

from lorac.runtime.load import load
from lorac.runtime.package import backend_module

BLOCK = re.compile(
    r"setp.eq.s32 now, (%r\d+), (%r\d+);\s+@now griddepcontrol.wait;\s+setp.eq.s32 now, %r\d+, %r\d+;"
    r"\s+@now griddepcontrol.launch_dependents;\s+mov.b32 (%r\d+), %r\d+;"
)
LOAD = re.compile(r"cp.async.bulk.tensor.2d.shared::\S+global\S+ \[%r\d+\], \[%rd\d+, \{(%r\d+), %r\d+\}\]")
package = load("generated/llama31_8b")
for kernel in backend_module(package.__name__, package.BACKENDS, "fused").KERNELS:
    for launch in kernel.launches:
        if kernel.name != "tile_project_o_proj" or launch.rows not in (16, 64, 256):
            continue
        constants, options = launch.specialised(True)
        compiled = triton.compile(kernel.source(launch, constants), target=GPUTarget("cuda", 90, 32), options=options)
        lines = (line.split("//")[0] for line in compiled.asm["ptx"].splitlines())
        text = "\n".join(line for line in lines if not line.lstrip().startswith((".loc", "$L__tmp")))
        blocks = list(BLOCK.finditer(text))
        told = {block[3] for block in blocks}
        told |= {made for made, one, other in re.findall(r"add.s32\s+(%r\d+), (%r\d+), (\S+);", text) if one in told}
        late = [(load.start(), load[1] in told) for load in LOAD.finditer(text)]
        value = dict(re.findall(r"mov.b32\s+(%r\d+), (\d+);", text))
        step, awaited = value.get(blocks[0][1]), value.get(blocks[0][2])
        begun = text[: late[0][0]].count("griddepcontrol.wait")
        counts = len(late), sum(of for _, of in late)
        print(launch.ACTIVE, launch.BLOCK_K, *counts, late[0][1], step, awaited, begun, sep=",")
"""


def test_what_a_launch_before_writes_is_read_after_the_wait_for_it():
    """In the assembly of a projection: W and B are asked for first, x, and with adapters h, where the wait says."""
    found = {tuple(line.split(",")) for line in compiled_by(WAITED).split()}
    assert {active for active, *_ in found} == {"0", "1", "8"}
    for active, block, loads, late, first, step, awaited, begun in found:
        assert int(loads) == 2 * int(late) > 0 and first == "False"
        assert step == "0" and int(awaited) == (0 if active == "0" else 4096 // int(block))
        assert int(begun) == (active == "0"), "a weight that does not last is waited for"


BESIDE = """
import sys
from lorac.aot.worker import compile_launch
from lorac.runtime.load import load
from lorac.runtime.package import backend_module

package = load(sys.argv[1])
kernels = {kernel.name: kernel for kernel in backend_module(package.__name__, package.BACKENDS, "fused").KERNELS}
for module, rows in (("qkv_proj", 256), ("o_proj", 1024), ("down_proj", 1024)):
    for stage in ("tile_shrink", "tile_project"):
        kernel = kernels[f"{stage}_{module}"]
        launch = kernel.pick(rows, 64, 8)
        found = compile_launch("fused", kernel, launch, "sm_90")
        print(module, found["shared"], 32 * launch.options["num_warps"] * found["registers"], sep=",")
"""
# a multiprocessor's shared memory and what it keeps of it for each program; its registers (CUDA programming guide)
SHARED, RESERVED, REGISTERS = 233_472, 1024, 65_536


def test_declared_shrinks_fit_on_a_multiprocessor_beside_their_projection(tmp_path):
    """Where that pays. Else the projection begins there when the shrink has ended: 10 us late of 48, for o_proj and
    1,024 rows. Of a spec that has no table."""
    assert main(["build", "--quiet", "--output", str(tmp_path), str(ROOT / "specs" / "tax_r64.yaml")]) == 0
    lines = compiled_by(BESIDE, str(tmp_path / "tax_r64")).split()
    found: dict[str, list[tuple[int, int]]] = {}
    for module, shared, registers in (line.split(",") for line in lines):
        found.setdefault(module, []).append((int(shared) + RESERVED, int(registers)))
    assert len(found) == 3
    for module, programs in found.items():
        shared, registers = (sum(of) for of in zip(*programs, strict=True))
        assert len(programs) == 2 and shared <= SHARED and registers <= REGISTERS, module


COMPILED_BEFORE = """
import os
import torch
from triton.runtime.driver import driver
from lorac.aot.worker import _gpu, compile_launch
from lorac.runtime import launch as launching
from lorac.runtime.load import load
from lorac.runtime.package import backend_module

package = load("generated/llama31_8b")
kernels = {kernel.name: kernel for kernel in backend_module(package.__name__, package.BACKENDS, "fused").KERNELS}


class Driver:
    get_current_target = staticmethod(lambda: _gpu("sm_90"))


class Compiled:
    def __init__(self, compiled, constants, pdl):
        assert compiled.asm["cubin"]

    prefer_shared = lambda self: self


for name in ("tile_shrink_o_proj", "tile_project_o_proj"):
    kernel = kernels[name]
    compile_launch("fused", kernel, kernel.launches[-1], "sm_90")
driver.set_active(Driver())
launching.Compiled = Compiled
torch.cuda.current_device, torch.cuda.get_device_capability = lambda: 0, lambda device: (9, 0)
torch.cuda.is_current_stream_capturing = lambda: False
for name in ("tile_shrink_o_proj", "tile_project_o_proj"):
    before = set(os.listdir(os.environ["TRITON_CACHE_DIR"]))
    kernels[name].compile(kernels[name].launches[-1])
    kernels[name].compile(kernels[name].launches[-2])
    print(len(set(os.listdir(os.environ["TRITON_CACHE_DIR"])) - before))
"""


def test_the_runtime_finds_what_was_compiled_ahead_of_time(tmp_path):
    """Of two configurations of each kernel one was: only the other adds to the cache."""
    assert compiled_by(COMPILED_BEFORE, TRITON_CACHE_DIR=str(tmp_path)).split() == ["1", "1"]
