"""What a generated package is made of at run time: its classes' bases, its backends' modules, warm-up and sealing."""

import importlib
from types import ModuleType

from lorac.runtime.errors import PackageError
from lorac.runtime.ops import add, add_experts, linear, moe
from lorac.runtime.slots import Slots
from lorac.runtime.step import Step

__all__ = ["Slots", "Step", "add", "add_experts", "backend_module", "linear", "moe", "seal", "warm"]


def backend_module(package: str, backends: tuple[str, ...], name: str) -> ModuleType:
    """The generated module of a backend, imported on first use. Raises PackageError for a name the package lacks."""
    if name not in backends:
        raise PackageError(f"package {package} has no backend {name!r}: it has {', '.join(backends)}")
    return importlib.import_module(f"{package}.backends.{name}")


def warm(step: Step) -> int:
    """Compile every kernel of the step's backend for the current device; returns how many configurations there are."""
    kernels = (step.tables.ROUTE, *step.backend.KERNELS)
    configurations = [(kernel, launch) for kernel in kernels for launch in kernel.launches]
    for kernel, launch in configurations:
        kernel.compile(launch)
    return len(configurations)


def seal(step: Step) -> None:
    """From now on a compilation by the step's backend raises PackageError, so none can happen while serving."""
    for kernel in (step.tables.ROUTE, *step.backend.KERNELS):
        kernel.sealed = True
