"""The stamp of a finished build: tells by hashes alone, without pydantic or rendering, that there is nothing to do.

A stamp is one hash over everything a package depends on and over the package itself. It lies outside the package: a
change of lorac's source that changes no output must change no committed file. A lost stamp costs one build.
"""

import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from lorac.emit import MANIFEST, owned_files
from lorac.fingerprint import files_below, sha256
from lorac.resources import templates_folder
from lorac.swap import has_leftovers, state_folder

# Only finds the stamp: whether it is this spec's, the hash decides.
_NAME = re.compile(rb"^name:\s*([a-z][a-z0-9_]*)", re.MULTILINE)
_CLOCK = 0.05  # seconds a file's time may lag behind the clock


def fresh_package(spec: Path, output: Path) -> Path | None:
    """The package's folder when building `spec` into `output` would change nothing; None where that is not known."""
    try:
        name = _NAME.search(spec.read_bytes())
        if name is None:
            return None
        folder = output / name[1].decode()
        stamp = json.loads(_stamp_file(folder).read_bytes())
        inputs = [spec.parent / path for path in stamp["inputs"]]
        current = stamp["digest"] == _digest(spec, inputs, folder) and not has_leftovers(folder)
        return folder if current and _is_intact(folder) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def record(spec: Path, inputs: Iterable[Path], folder: Path, started: float) -> None:
    """Note that `folder` is what `spec` gives. `inputs`: the files and folders read beside it and lorac's own.

    Notes nothing where one of them was written after the build `started` (seconds of the epoch): was it read?
    """
    inputs = sorted(inputs)
    temporary = _stamp_file(folder).with_suffix(f".{os.getpid()}")
    try:
        if any(file.stat().st_mtime > started - _CLOCK for _, file in _files(spec, inputs) if file.exists()):
            return
        names = [os.path.relpath(path, spec.parent) for path in inputs]
        temporary.write_text(json.dumps({"inputs": names, "digest": _digest(spec, inputs, folder)}))
        os.replace(temporary, _stamp_file(folder))
    except OSError:
        temporary.unlink(missing_ok=True)  # a full disk: the package is there all the same, and the next build slower


def _stamp_file(folder: Path) -> Path:
    return state_folder(folder.parent) / f"{folder.name}.stamp"


def _is_intact(folder: Path) -> bool:
    return all(sha256((folder / path).read_bytes()) == digest for path, digest in owned_files(folder).items())


def _digest(spec: Path, inputs: list[Path], folder: Path) -> str:
    total = hashlib.sha256((folder / MANIFEST).read_bytes())
    for name, file in _files(spec, inputs):
        there = file.exists()
        total.update(f"\n{name} {there} {sha256(file.read_bytes()) if there else ''}".encode())
    return total.hexdigest()


def _files(spec: Path, inputs: list[Path]) -> Iterator[tuple[str, Path]]:
    """Every file a build depends on, with its name inside the place it belongs to, in a fixed order."""
    for place in (spec, Path(__file__).parent, templates_folder(), *inputs):
        yield from files_below(place) if place.is_dir() else [(place.name, place)]
