"""Backend folders: found by kind in the spec's own search path and in lorac's, their declarations read."""

import difflib
import os
from dataclasses import dataclass
from pathlib import Path

from lorac.errors import Problem, SpecError
from lorac.resources import templates_folder

from .backend import Declaration, declaration_path
from .backend_rules import declaration_problems
from .described import read_described
from .load import SpecFile
from .source import place


@dataclass(frozen=True)
class BackendFolder:
    """A backend's template folder, with its declaration read.

    `name` is its path from lorac's own folder, or from the spec's that it lies beside: wherever those are.
    """

    path: Path
    declaration: Declaration
    name: str
    beside_spec: bool


def find_folders(file: SpecFile) -> dict[str, BackendFolder]:
    """The folder of every backend block. Raises SpecError for kinds without a folder, or declarations at fault."""
    folders, problems = {}, []
    for block, backend in file.spec.backends.items():
        kind = backend.kind or block
        try:
            path, name, beside = _locate(file.folder, backend.templates, kind, block)
            folders[block] = BackendFolder(path, read_declaration(path), name, beside)
        except SpecError as error:
            problems += [problem if problem.file else file.source.place(problem) for problem in error.problems]
    if problems:
        raise SpecError(problems)
    return folders


def read_declaration(folder: Path) -> Declaration:
    """A folder's `backend.yaml`. Raises SpecError with its problems placed in that file."""
    source, declaration = read_described(declaration_path(folder), Declaration)
    if problems := declaration_problems(declaration):
        raise SpecError(place(problems, source))
    return declaration


def serving_experts() -> list[str]:
    """The kinds among lorac's own backends that serve modules of experts."""
    folders = sorted(path.parent for path in (templates_folder() / "backends").glob("*/backend.yaml"))
    return [folder.name for folder in folders if read_declaration(folder).experts]


def _locate(base: Path, templates: str | None, kind: str, block: str) -> tuple[Path, str, bool]:
    """A kind's folder, as BackendFolder has it: below `templates` in the spec's folder, or else among lorac's own."""
    own = templates_folder() / "backends"
    roots = {own: ("templates/backends", False)}
    if templates is not None:
        root = (base / templates).resolve()
        if not root.is_relative_to(base.resolve()):
            path = ("backends", block, "templates")
            raise SpecError(
                [Problem(f"{templates!r} leaves the spec's folder", path, "a folder beside or below the spec")]
            )
        roots = {root: (os.path.normpath(templates), True)} | roots
    for root, (name, beside) in roots.items():
        if declaration_path(root / kind).is_file():
            return root / kind, f"{name}/{kind}", beside
    known = sorted(path.parent.name for root in roots for path in root.glob("*/backend.yaml"))
    near = difflib.get_close_matches(kind, known, 1)
    hint = (
        f"did you mean {near[0]!r}?" if near else "a new backend is a folder with a backend.yaml, named by `templates:`"
    )
    path = ("backends", block, "kind")
    raise SpecError([Problem(f"there is no backend {kind!r}", path, f"one of {', '.join(known)}", hint)])
