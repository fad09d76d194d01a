"""What a generated package is made of at run time: its classes' bases, its backends' modules, warm-up and sealing."""

import importlib
from types import ModuleType

from lorac.runtime import together
from lorac.runtime.errors import PackageError
from lorac.runtime.launch import interpreted
from lorac.runtime.ops import add, add_experts, linear, moe
from lorac.runtime.slots import Slots
from lorac.runtime.step import Step

__all__ = ["Slots", "Step", "add", "add_experts", "backend_module", "linear", "moe", "part", "seal", "warm"]

# what of a package is imported on first use: modules, and classes by the module they are in
MODULES = ("admission", "decode", "prefill", "step")
CLASSES = {"DecodeGraphs": "decode", "PrefillGraphs": "prefill"}


def part(package: str, name: str) -> object:
    """What the generated package imports on first use, by its name. Raises AttributeError for any other name."""
    module = CLASSES.get(name, name)
    if module not in MODULES:
        raise AttributeError(f"module {package!r} has no attribute {name!r}")
    found = importlib.import_module(f"{package}.{module}")
    return getattr(found, name) if name in CLASSES else found


def backend_module(package: str, backends: tuple[str, ...], name: str) -> ModuleType:
    """The generated module of a backend, imported on first use. Raises PackageError for a name the package lacks."""
    if name not in backends:
        built = importlib.import_module(f"{package}.layout").LAYOUT.name  # the module's own name has a digest in it
        raise PackageError(f"package {built} has no backend {name!r}: it has {', '.join(backends)}")
    return importlib.import_module(f"{package}.backends.{name}")


def warm(step: Step) -> int:
    """Compile every kernel of the step's backend for the current device; returns how many configurations there are.

    For a step on a CPU none is compiled.
    """
    kernels = (step.tables.ROUTE, *step.backend.KERNELS)
    configurations = [(kernel, launch) for kernel in kernels for launch in kernel.launches]
    if step.device.type == "cuda" and not interpreted():
        together.tools()  # compiles too
        for kernel, launch in configurations:
            kernel.compile(launch)
    return len(configurations)


def seal(step: Step) -> None:
    """From now on a compilation by the step's backend raises PackageError, so none can happen while serving."""
    for kernel in (step.tables.ROUTE, *step.backend.KERNELS):
        kernel.sealed = True
