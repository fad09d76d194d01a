"""Write the package of each spec into DIR/<name>/, as a whole or not at all.

Files that you edited are not overwritten, and files of your own are kept. Exit status 1: --check found a difference, or
--aot a kernel that spills or does not fit. Exit status 2: a mistake in a spec, or a folder that cannot be written.
"""

import argparse
import shlex
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from lorac.errors import BuildError, Problem, SpecError, format_problems
from lorac.stamp import fresh_package, record

if TYPE_CHECKING:
    from lorac.plan.model import Decision

EXAMPLE = "lorac build specs/llama31_8b.yaml"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What `lorac build` takes."""
    parser.add_argument("specs", nargs="+", type=Path, metavar="SPEC", help="a YAML file")
    parser.add_argument("--output", type=Path, default=Path("generated"), metavar="DIR", help="default: generated/")
    parser.add_argument("--force", action="store_true", help="overwrite generated files that were edited by hand")
    parser.add_argument("--quiet", action="store_true", help="print nothing but mistakes and differences")
    parser.add_argument(
        "--format", choices=("text", "json", "github"), default="text", help="of mistakes and differences"
    )
    instead = parser.add_mutually_exclusive_group()
    instead.add_argument("--check", action="store_true", help="write nothing; tell whether the package is up to date")
    instead.add_argument("--diff", action="store_true", help="write nothing; print what a build would change")
    instead.add_argument(
        "--dry-run", action="store_true", help="write nothing; list what a build would write and remove"
    )
    instead.add_argument(
        "--aot", action="store_true", help="then compile every kernel for the spec's targets; needs no GPU"
    )


def run(args: argparse.Namespace) -> int:
    """Build every spec, whatever is wrong with the others."""
    mistakes, failures, owners = [], [], {}
    for spec in args.specs:
        try:
            failures += _build(spec, args, owners)
        except SpecError as error:
            mistakes += error.problems
        except BuildError as error:
            mistakes.append(Problem(str(error), file=str(spec)))
    if args.format == "text":
        for problems, stream in ((failures, sys.stdout), (mistakes, sys.stderr)):
            print(format_problems(problems), end="\n" * bool(problems), file=stream)
    elif mistakes or failures or args.format == "json":
        print(format_problems(mistakes + failures, args.format))
    return 2 if mistakes else 1 if failures else 0


def _build(spec: Path, args: argparse.Namespace, owners: dict[Path, Path]) -> list[Problem]:
    """Build, check, or show one spec; `owners` remembers which spec a folder came from."""
    started = time.time()
    only_look = args.check or args.diff or args.dry_run
    folder = None if only_look or args.aot else fresh_package(spec, args.output)
    if folder:
        _claim(folder, spec, owners)
        _say(args, f"{folder}: unchanged")
        return []
    from lorac.compile import compile_spec  # pydantic, YAML and Jinja: an unchanged build does without them

    compiled = compile_spec(spec)
    folder = args.output / compiled.plan.name
    _claim(folder, spec, owners)
    if only_look:
        return _look(spec, compiled.files, folder, args)
    from lorac.emit import emit

    changes = emit(compiled.files, folder, args.force)
    warnings = _warnings(spec, compiled.plan.decisions)
    if not warnings:  # else the next build would find nothing to do, and not say them again
        record(spec, compiled.inputs, folder, started)
    elif not args.quiet:
        print("\n".join(warnings), file=sys.stderr)
    _say(args, f"{folder}: {_summary(changes.written, changes.removed)}")
    return _compile(spec, folder, compiled.plan.targets, args) if args.aot else []


def _look(spec: Path, files: dict[str, str], folder: Path, args: argparse.Namespace) -> list[Problem]:
    from lorac.emit import EXTRA, MISSING, check, diff, edited_files, refuse_edited

    if args.diff:
        print(diff(files, folder), end="")
        return []
    rows = check(files, folder)
    if args.dry_run:
        if not args.force:
            refuse_edited(rows, folder)
        for kind, path in rows:
            print(f"would {'remove' if kind == EXTRA else 'write'} {folder / path}")
        return []
    if not rows:
        _say(args, f"{folder}: up to date")
    command = ["lorac", "build", str(spec)]
    command += ["--output", str(args.output)] if args.output != Path("generated") else []
    command += ["--force"] if edited_files(rows, folder) else []
    if rows == [(MISSING, path) for path in files]:
        rows = [(MISSING, "")]
    says = {MISSING: "is not there", EXTRA: "is no longer generated"}
    return [
        Problem(
            f"{kind}: {says.get(kind, 'is not what the spec gives')}",
            file=str(folder / path),
            # a place on the page for annotations; a person needs none
            line=0 if args.format == "text" else 1,
            hint=f"run {shlex.join(command)}" if number == len(rows) - 1 or args.format != "text" else "",
        )
        for number, (kind, path) in enumerate(rows)
    ]


def _compile(spec: Path, folder: Path, targets: tuple[str, ...], args: argparse.Namespace) -> list[Problem]:
    from lorac.aot import compile_package, failures_of, report

    if not targets:
        raise BuildError("it names no targets to compile for; add a line such as targets: [sm_90]")
    rows = compile_package(folder, targets)
    _say(args, report(rows))
    return [Problem(failure, file=str(spec)) for failure in failures_of(rows)]


def _warnings(spec: Path, decisions: "tuple[Decision, ...]") -> list[str]:
    """What is switched off though the spec asks for it, a line each."""
    return [f"{spec}: warning: {of.subject}: {of.outcome}; {of.reason}" for of in decisions if of.level == "warning"]


def _claim(folder: Path, spec: Path, owners: dict[Path, Path]) -> None:
    if owners.setdefault(folder, spec) != spec:
        raise BuildError(
            f"its package has the name of {owners[folder]}'s, {folder.name}; give one of them another name"
        )


def _summary(written: tuple[str, ...], removed: tuple[str, ...]) -> str:
    done = [f"{len(written)} files written"] * bool(written) + [f"{len(removed)} removed"] * bool(removed)
    return ", ".join(done) or "unchanged"


def _say(args: argparse.Namespace, text: str) -> None:
    if not args.quiet and args.format == "text":
        print(text)
