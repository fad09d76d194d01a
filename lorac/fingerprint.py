"""What a package was made of, as one hash: its plan and its templates. Comments in a spec, and places, do not count."""

import hashlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from lorac.resources import templates_folder


def fingerprint(plan: str, folders: Iterable[Path]) -> str:
    """SHA-256, in hex, of a plan's canonical JSON and of the templates it is rendered with.

    `folders` are the template folders of the plan's backends, in its order.
    """
    total = hashlib.sha256(plan.encode())
    for place in (templates_folder() / "package", templates_folder() / "shared", *folders):
        for name, file in files_below(place):
            if name.endswith(".jinja"):
                total.update(f"\n{name} {sha256(file.read_bytes())}".encode())
    return total.hexdigest()


def files_below(place: Path) -> Iterator[tuple[str, Path]]:
    """Every file of a folder but bytecode: its path inside the folder, and where it is, in a fixed order."""
    for parent, folders, names in os.walk(place):
        folders[:] = sorted(name for name in folders if name != "__pycache__")
        for name in sorted(names):
            file = Path(parent, name)
            yield file.relative_to(place).as_posix(), file


def sha256(content: bytes) -> str:
    """SHA-256 in hex."""
    return hashlib.sha256(content).hexdigest()
