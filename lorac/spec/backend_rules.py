"""Rules across the fields of a `backend.yaml`: names that stand for others exist, and tiles serve every batch."""

import re

from lorac.errors import Problem

from .backend import Declaration, Kernel
from .tiles import Path, tile_problems, unknown

_BOUNDS = ("rows", "rank", "adapters", "in_features", "out_features", "module", "fill", "bare")


def declaration_problems(declaration: Declaration) -> list[Problem]:
    """Every broken rule, by its key path in the file."""
    problems, earlier = [], {}
    for stage, kernel in declaration.kernels.items():
        path = ("kernels", stage)
        problems += _names(kernel, path) + _stages(kernel, earlier, path) + _last_tile(kernel, path)
        for index, tile in enumerate(kernel.tiles):
            problems += tile_problems(tile, declaration, stage, (*path, "tiles", index))
        problems += _sums_alike(kernel, path)
        earlier[stage] = kernel
    return problems


def _names(kernel: Kernel, path: Path) -> list[Problem]:
    """Sizes and arguments that are named are the kernel's."""
    sizes, arguments = [*kernel.sizes, *kernel.follows], list(kernel.arguments)
    blocks = [("dims", name) for name in kernel.dims] + [("limits", name) for name in kernel.limits]
    problems = [
        unknown(f"{name} is no constant of the kernel that tiles state", (*path, key, name), sizes)
        for key, name in blocks
        if name not in sizes
    ]
    listed = [("operands", i, j, name, sizes) for i, pair in enumerate(kernel.operands) for j, name in enumerate(pair)]
    for key in ("when_split", "when_whole"):
        listed += [(key, index, name, arguments) for index, name in enumerate(getattr(kernel, key))]
    for *place, name, known in listed:
        if name not in known:
            problems.append(_unknown_value(name, (*path, *place), known))
    for argument, of in kernel.arguments.items():
        for extent in re.findall(r"[\[ ](\w+)", of):
            if not extent.isdigit() and extent not in kernel.constants:
                problems.append(_unknown_value(extent, (*path, "arguments", argument), list(kernel.constants)))
    return problems


def _stages(kernel: Kernel, earlier: dict[str, Kernel], path: Path) -> list[Problem]:
    """Stages that are named come before, with the constants that are followed."""
    problems = [
        _unknown_value(stage, (*path, key), list(earlier))
        for key in ("beside", "unless")
        if (stage := getattr(kernel, key)) and stage not in earlier
    ]
    leading = [f"{stage}.{name}" for stage, of in earlier.items() for name in (*of.sizes, *of.follows)]
    for name, leader in kernel.follows.items():
        if name not in kernel.constants:
            problems.append(
                unknown(f"the kernel has no constant {name}", (*path, "follows", name), [*kernel.constants])
            )
        if leader not in leading:
            problems.append(_unknown_value(leader, (*path, "follows", name), leading))
    return problems


def _last_tile(kernel: Kernel, path: Path) -> list[Problem]:
    """Some tile serves every batch of every module: the last."""
    last = len(kernel.tiles) - 1
    return [
        Problem(
            f"the last tile has a bound, {bound}: what it does not serve, none would",
            (*path, "tiles", last, bound),
            expected="a last tile without bounds",
            at_key=True,
        )
        for bound in _BOUNDS
        if getattr(kernel.tiles[last], bound)
    ]


def _sums_alike(kernel: Kernel, path: Path) -> list[Problem]:
    """Base rows have the same bits beside few adapters as beside many."""
    alike = [tile.sizes for tile in kernel.tiles if not tile.adapters]
    message = "a tile for few adapters has sizes that none for any number has: base rows would have other bits there"
    return [
        Problem(message, (*path, "tiles", index), hint="let it differ in warps, stages or pdl alone")
        for index, tile in enumerate(kernel.tiles if kernel.base else ())
        if tile.adapters and (tile.library or tile.sizes not in alike)
    ]


def _unknown_value(name: str, path: Path, known: list[str]) -> Problem:
    return Problem(f"{path[-1] if isinstance(path[-1], str) else path[2]} cannot be {name}", path, ", ".join(known))
