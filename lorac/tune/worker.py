"""What a compiling process runs: one configuration of one kernel at a time, for a GPU it need not see.

Triton's cache on disk hands the result to the process that measures.
"""

import os

os.environ.pop("TRITON_INTERPRET", None)  # an interpreted kernel cannot be compiled; this process only compiles

from pathlib import Path

from lorac.aot.worker import compile_launch
from lorac.runtime.launch import Kernel
from lorac.runtime.load import load
from lorac.runtime.package import backend_module
from lorac.tune.launches import runtime_launch

_kernels: dict[tuple[str, str], Kernel] = {}


def start(folder: str) -> None:
    """Load the package whose kernels this process will compile."""
    package = load(Path(folder))
    for backend in package.BACKENDS:
        module = backend_module(package.__name__, package.BACKENDS, backend)
        _kernels.update({(backend, kernel.name): kernel for kernel in module.KERNELS})


def compile_one(backend: str, kernel: str, row: tuple, target: str) -> dict[str, object]:
    """Registers, stack, shared bytes and error of one row of a launch table; see `lorac.aot.Row`."""
    of = _kernels[backend, kernel]
    return compile_launch(backend, of, runtime_launch(of, row), target)
