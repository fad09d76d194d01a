"""Importing a peer's kernel modules without the engine around them.

An engine's LoRA kernels are plain Triton files that import a few helpers from all over the engine, which may not import
here at all. So the kernels' own folders are imported for real, without running any package's __init__, and every other
module of the engine is a stand-in: an object that can be called, read and used as a decorator, and means nothing.
"""

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

FOLDER = "LORAC_PEERS"


class PeerError(Exception):
    """A peer that cannot run here, and why."""


def stand_in(engine: str, real: tuple[str, ...], given: Mapping[str, Mapping[str, object]]) -> None:
    """Make `engine`'s modules below the `real` prefixes importable; `given` are values of those stood in for.

    An engine that imports by itself is left alone. Raises PeerError where its files are nowhere.
    """
    if engine in sys.modules:
        return
    folder = _folder(engine)
    sys.meta_path.insert(0, _Finder(engine, folder, real, given))
    importlib.invalidate_caches()


def import_module(name: str) -> ModuleType:
    """importlib.import_module, with whatever goes wrong as a PeerError."""
    try:
        return importlib.import_module(name)
    except Exception as error:
        raise PeerError(f"{name} cannot be imported: {type(error).__name__}: {error}") from error


def _folder(engine: str) -> Path:
    """Where the engine's files lie: unpacked in $LORAC_PEERS, else where it is installed."""
    unpacked = os.environ.get(FOLDER)
    if unpacked and (Path(unpacked) / engine).is_dir():
        return Path(unpacked) / engine
    spec = importlib.util.find_spec(engine)
    if spec and spec.submodule_search_locations:
        return Path(next(iter(spec.submodule_search_locations)))
    raise PeerError(f"{engine} is neither installed nor unpacked in ${FOLDER}")


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds modules of one engine: real ones by their file, packages without their __init__, stand-ins for the rest."""

    def __init__(self, engine: str, folder: Path, real: tuple[str, ...], given):
        self.engine, self.folder, self.real, self.given = engine, folder, real, given

    def find_spec(self, fullname, path=None, target=None):
        if fullname != self.engine and not fullname.startswith(self.engine + "."):
            return None
        place = self.folder.joinpath(*fullname.split(".")[1:])
        wanted = any(_related(fullname, prefix) for prefix in self.real) and fullname not in self.given
        if wanted and place.is_dir():
            spec = importlib.machinery.ModuleSpec(fullname, None, is_package=True)
            spec.submodule_search_locations = [str(place)]
            return spec
        if wanted and place.with_suffix(".py").is_file():
            return importlib.util.spec_from_file_location(fullname, place.with_suffix(".py"))
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec):
        module = ModuleType(spec.name)
        module.__getattr__ = _attribute
        return module

    def exec_module(self, module):
        module.__dict__.update(self.given.get(module.__name__, {}))


def _related(name: str, prefix: str) -> bool:
    """Whether a module lies below a prefix, or is a package on the way there."""
    return f"{name}.".startswith(f"{prefix}.") or f"{prefix}.".startswith(f"{name}.")


def _attribute(name: str) -> object:
    if name.startswith("__"):
        raise AttributeError(name)
    return Nothing()


class Nothing:
    """Stands for anything of an engine that its kernels name but do not need."""

    def __init__(self, *args, **kwargs): ...

    def __call__(self, *args, **kwargs):
        return args[0] if len(args) == 1 and callable(args[0]) and not kwargs else Nothing()

    def __getattr__(self, name: str):
        return _attribute(name)

    def __or__(self, other):
        return other  # in annotations

    __ror__ = __or__

    def __bool__(self) -> bool:
        return False
