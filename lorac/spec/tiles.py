"""Rules of one tile, declared or tuned: it states every size its kernel is launched with, rightly, and nothing else."""

from typing import Any

from lorac.errors import Problem

from .backend import Declaration, Kernel, Tile
from .wording import nearest

Path = tuple[str | int, ...]


def tile_problems(tile: Tile, declaration: Declaration, stage: str, path: Path) -> list[Problem]:
    """What is wrong with a tile of a stage; a tile left to the library has bounds alone."""
    kernel = declaration.kernels[stage]
    if tile.library:
        said = [*tile.sizes, *(["fill"] if tile.fill else [])]
        problems = [
            Problem(f"{key} is said of a tile left to the library", (*path, key), expected="bounds alone", at_key=True)
            for key in said
        ]
        if not declaration.may_leave(stage):
            problems.append(Problem(f"{stage} cannot leave anything to the library", (*path, "library")))
        return problems
    problems = _names(tile, kernel, path)
    if tile.fill and not {"BLOCK_M", "BLOCK_N"}.issubset(kernel.sizes):
        message = "fill counts programs by BLOCK_M and BLOCK_N, which tiles of this stage lack"
        problems.append(Problem(message, (*path, "fill"), at_key=True))
    for name in kernel.sizes:
        if name in tile.sizes:
            problems += _size(name, tile.sizes[name], kernel, (*path, name))
    return problems


def unknown(message: str, path: Path, known: list[str]) -> Problem:
    """The problem of a name at the end of a path that is none of those known there."""
    return Problem(message, path, expected=", ".join(known), hint=nearest(path[-1], known), at_key=True)


def _names(tile: Tile, kernel: Kernel, path: Path) -> list[Problem]:
    keys = [*kernel.sizes, *Tile.model_fields]
    problems = [
        unknown(f"a tile of this stage has no {key}", (*path, key), keys)
        for key in tile.sizes
        if key not in kernel.sizes
    ]
    meant = {problem.hint for problem in problems}  # a misspelt size is told once, not again as one that is missing
    lacking = [name for name in kernel.sizes if name not in tile.sizes and nearest(name, [name]) not in meant]
    return problems + [Problem(f"the tile lacks {name}", path, expected=", ".join(kernel.sizes)) for name in lacking]


def _size(name: str, size: Any, kernel: Kernel, path: Path) -> list[Problem]:
    least = 0 if any(declared.sizes.get(name) == 0 for declared in kernel.tiles) else 1  # 0 where one may go without
    expected = "a power of two" if name in kernel.blocks else f"a whole number from {least}"
    if _is_power_of_two(size) if name in kernel.blocks else type(size) is int and size >= least:
        low, high = kernel.limits.get(name, (size, size))
        if low <= size <= high:
            return []
        expected = f"from {low} to {high}"
    return [Problem(f"{name} must be {expected}, not {size}", path, expected=expected)]


def _is_power_of_two(value: Any) -> bool:
    return type(value) is int and value > 0 and value & (value - 1) == 0
