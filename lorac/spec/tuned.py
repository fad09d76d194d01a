"""Tuned tables: launch configurations measured on one GPU, which `lorac tune` writes beside a spec as data.

A table lies in `tuned/<name>.<gpu>.yaml` beside the spec `<name>` and serves it where its target is one of the spec's.
"""

from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, StrictInt, StrictStr

from lorac.errors import Problem, SpecError

from .backend import Declaration, Identifier, Tile
from .described import read_described
from .load import SpecFile
from .source import Source
from .tiles import tile_problems, unknown

FOLDER = "tuned"

Tiles = dict[str, dict[str, tuple[tuple[Tile, str], ...]]]  # backend block -> stage -> tiles with the GPU's name


class Table(BaseModel):
    """One table."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    lorac_tuned: StrictInt = Field(ge=1, le=1, description="version of the format of tuned tables")
    gpu: StrictStr = Field(min_length=1, max_length=80, description="the GPU it was measured on, by its full name")
    target: StrictStr = Field(description="that GPU's target, such as sm_90")
    spec: Identifier = Field(description="name of the spec it belongs to")
    tiles: dict[Identifier, dict[Identifier, tuple[Tile, ...]]] = Field(
        description="tiles by backend block and stage, as in backend.yaml"
    )


def read_table(path: Path) -> tuple[Source, Table]:
    """One table with the positions of what it says. Raises SpecError."""
    return read_described(path, Table)


def tuned_tiles(file: SpecFile, declarations: dict[str, Declaration]) -> Tiles:
    """The tiles of every table that serves a spec, in the order of its targets. Raises SpecError, placed in tables."""
    spec, problems = file.spec, []
    tables: dict[str, tuple[Table, Source]] = {}
    for path in sorted((file.folder / FOLDER).glob(f"{spec.name}.*.yaml")):
        try:
            source, table = read_table(path)
        except SpecError as error:
            problems += error.problems
            continue
        if table.target not in spec.targets:
            continue
        found = _check(table, spec.name, declarations)
        if table.target in tables:
            other = Path(tables[table.target][1].file).name
            message = f"{other} is for {table.target} too, and a package has one table for a target"
            found.append(Problem(message, ("target",), hint="remove one of them"))
        problems += [source.place(problem) for problem in found]
        tables[table.target] = (table, source)
    if problems:
        raise SpecError(problems)
    tiles: Tiles = {}
    for target in spec.targets:
        table = tables[target][0] if target in tables else None
        for backend, stages in table.tiles.items() if table else ():
            into = tiles.setdefault(backend, {})
            for stage, rows in stages.items():
                into[stage] = (*into.get(stage, ()), *((tile, table.gpu) for tile in rows))
    return tiles


def _check(table: Table, name: str, declarations: dict[str, Declaration]) -> list[Problem]:
    """What does not fit the spec it is for, or its backends' kernels."""
    problems = []
    if table.spec != name:
        problems.append(Problem(f"the table belongs to {table.spec}, not to {name}", ("spec",), expected=name))
    for backend, stages in table.tiles.items():
        path = ("tiles", backend)
        if backend not in declarations:
            problems.append(unknown(f"the spec has no backend {backend}", path, list(declarations)))
            continue
        kernels = declarations[backend].kernels
        for stage, tiles in stages.items():
            if stage not in kernels:
                problems.append(unknown(f"backend {backend} has no stage {stage}", (*path, stage), list(kernels)))
                continue
            for index, tile in enumerate(tiles):
                place = (*path, stage, index)
                if kernels[stage].base and tile.adapters:
                    problems.append(_few_adapters((*place, "adapters")))
                else:
                    problems += tile_problems(tile, declarations[backend], stage, place)
    return problems


def _few_adapters(path: tuple[str | int, ...]) -> Problem:
    message = "tiles of a kernel with the base are for any number of adapters, or base rows would have other bits"
    return Problem(message, path, expected="no bound by adapters", at_key=True)
