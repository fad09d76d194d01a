"""The whole compiler in one call: spec file -> plan -> files."""

from dataclasses import dataclass
from pathlib import Path

from lorac.errors import SpecError
from lorac.fingerprint import fingerprint
from lorac.plan.build import make_plan
from lorac.plan.model import Plan
from lorac.spec import load_spec, place, tuned
from lorac.spec.folders import BackendFolder, find_folders


@dataclass(frozen=True)
class Compiled:
    """A spec's plan, the files of its package (the manifest last), and what the spec itself refers to."""

    plan: Plan
    files: dict[str, str]
    inputs: tuple[Path, ...]


@dataclass(frozen=True)
class Planned:
    """A spec's plan, each backend block's template folder, and the files and folders the spec itself refers to."""

    plan: Plan
    folders: dict[str, BackendFolder]
    inputs: tuple[Path, ...]


def plan_spec(path: str | Path) -> Planned:
    """The plan of a spec file. Raises SpecError with every problem placed."""
    file = load_spec(path)
    folders = find_folders(file)
    declarations = {name: folder.declaration for name, folder in folders.items()}
    try:
        plan = make_plan(file.spec, file.shapes, declarations, tuned.tuned_tiles(file, declarations))
    except SpecError as error:
        raise SpecError(place(error.problems, file.source)) from None
    # the whole folder of tables, there or not: a table that appears is a change too
    named = [file.spec.model.config, *(backend.templates for backend in file.spec.backends.values()), tuned.FOLDER]
    inputs = tuple(file.folder / name for name in dict.fromkeys(named) if name)
    return Planned(plan, folders, inputs)


def compile_spec(path: str | Path) -> Compiled:
    """Plan and files of a spec file. Raises SpecError for mistakes in the spec, BuildError for those in templates."""
    from lorac.render.package import render  # Jinja is needed by builds alone

    planned = plan_spec(path)
    plan, folders = planned.plan, planned.folders
    digest = fingerprint(plan.canonical(), [folder.path for folder in folders.values()])
    return Compiled(plan, render(plan, folders, digest), planned.inputs)
