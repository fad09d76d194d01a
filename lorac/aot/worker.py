"""Compiles a share of a package's configurations and prints a JSON object for each: the fields of `lorac.aot.Row`."""

import contextlib
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget

from lorac.plan.kernels import PDL_TARGETS
from lorac.runtime.errors import PackageError
from lorac.runtime.launch import Kernel, Launch
from lorac.runtime.load import load
from lorac.runtime.package import backend_module

Job = tuple[str, Kernel, Launch, str]


def main() -> None:
    """Arguments: the package, targets with commas between, batches as JSON, which share of all, and of how many."""
    folder, targets, batches, share, shares = sys.argv[1:]
    for job in islice(_jobs(Path(folder), targets.split(","), json.loads(batches)), int(share), None, int(shares)):
        print(json.dumps(compile_launch(*job)), flush=True)


def _jobs(folder: Path, targets: list[str], batches: list[tuple] | None) -> Iterator[Job]:
    """Every configuration for every target. Those that differ only in the batches they serve are the same code.

    With `batches` (see `lorac.aot.Served`) those that their backends would launch, as far as they have any.
    """
    package = load(folder)
    backends = {name: backend_module(package.__name__, package.BACKENDS, name) for name in package.BACKENDS}
    kernels = [("step", package.step.ROUTE)]
    kernels += [(name, kernel) for name, module in backends.items() for kernel in module.KERNELS]
    for backend, kernel in kernels:
        serving = kernel.launches if batches is None or backend == "step" else _serving(backend, kernel, batches)
        different = {describe(launch): launch for launch in serving}
        for launch in different.values():
            for target in targets:
                yield backend, kernel, launch, target


def _serving(backend: str, kernel: Kernel, batches: list[tuple]) -> Iterator[Launch]:
    for of, *batch in batches:
        if of == backend:
            with contextlib.suppress(PackageError):  # a batch that this kernel has nothing to do with
                yield kernel.pick(*batch)


def describe(launch: Launch) -> str:
    options = {"warps": launch.options["num_warps"], "stages": launch.options["num_stages"]}
    named = {**launch.constants, **options} | ({"pdl": 1} if launch.pdl else {})
    return " ".join(f"{name}={value}" for name, value in named.items())


def compile_launch(backend: str, kernel: Kernel, launch: Launch, target: str) -> dict[str, object]:
    row = {"backend": backend, "kernel": kernel.name, "target": target, "launch": describe(launch)}
    try:
        constants, options = launch.specialised(target in PDL_TARGETS)
        compiled = triton.compile(kernel.source(launch, constants), target=_gpu(target), options=options)
        registers, stack = _amd_usage(compiled) if "amdgcn" in compiled.asm else _nvidia_usage(compiled.asm["cubin"])
    except Exception as error:  # whatever the compiler raises, it is this configuration's finding
        lines = str(error).strip().splitlines() or [""]
        return row | {"registers": 0, "stack": 0, "shared": 0, "error": f"{type(error).__name__}: {lines[-1]}"}
    return row | {"registers": registers, "stack": stack, "shared": compiled.metadata.shared, "error": ""}


def _gpu(target: str) -> GPUTarget:
    if target.startswith("sm_"):
        return GPUTarget("cuda", int(target.removeprefix("sm_")), 32)
    return GPUTarget("hip", target, 64)


def _nvidia_usage(cubin: bytes) -> tuple[int, int]:
    """Registers and stack bytes of a thread, as the disassembler that comes with Triton reports them."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return int(re.search(r"REG:(\d+)", text)[1]), int(re.search(r"STACK:(\d+)", text)[1])


def _amd_usage(compiled) -> tuple[int, int]:
    """The same from the metadata at the end of the assembly; AMD calls a thread's own memory its private segment."""
    text = compiled.asm["amdgcn"]
    registers = re.search(r"\.vgpr_count:\s*(\d+)", text)
    stack = re.search(r"\.private_segment_fixed_size:\s*(\d+)", text)
    return int(registers[1]), int(stack[1])
