"""The whole compiler in one call: spec file -> plan -> files."""

from dataclasses import dataclass
from pathlib import Path

from lorac.errors import SpecError
from lorac.fingerprint import fingerprint
from lorac.plan.build import make_plan
from lorac.plan.model import Plan
from lorac.spec import load_spec, place
from lorac.spec.folders import find_folders


@dataclass(frozen=True)
class Compiled:
    """A spec's plan and the files of its package, the manifest last."""

    plan: Plan
    files: dict[str, str]


def plan_spec(path: str | Path) -> tuple[Plan, dict[str, Path]]:
    """The plan of a spec file and each backend block's template folder. Raises SpecError with every problem placed."""
    file = load_spec(path)
    folders = find_folders(file)
    try:
        plan = make_plan(file.spec, file.shapes, {name: f.declaration for name, f in folders.items()}, {})
    except SpecError as error:
        raise SpecError(place(error.problems, file.source)) from None
    return plan, {name: folder.path for name, folder in folders.items()}


def compile_spec(path: str | Path) -> Compiled:
    """Plan and files of a spec file. Raises SpecError for mistakes in the spec, BuildError for mistakes in templates."""
    from lorac.render.package import render  # Jinja is needed by builds alone

    plan, folders = plan_spec(path)
    return Compiled(plan, render(plan, folders, fingerprint(path)))
