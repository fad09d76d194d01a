"""The search space of one site: every launch configuration legal for a kernel, a module, a rank and a batch size.

It follows from the backend's declaration alone (`dims`, `operands`, constants and declared tiles), so a new backend is
tuned without a line here.
"""

from dataclasses import dataclass, replace
from itertools import product
from math import ceil, log2

from lorac.plan.kernels import ANY_ADAPTERS, UNLIMITED, block_of, extents, fit, sharing
from lorac.plan.model import KernelPlan, Launch, ModulePlan
from lorac.spec.backend import Kernel, Tile

# block sizes beyond these never paid
LARGEST = {"rows": 128, "rank": 128, "columns": 128, "slot_columns": 256, "in": 512, "out": 256}
SPLITS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16)  # the plan takes those that divide a module's inputs
WARPS = (2, 4, 8)
STAGES = (1, 2, 3, 4, 5, 6)
ROWS_BLOCK = "BLOCK_M"  # cuts the rows, also where a kernel does not state it, for then it is never cut down
WARP_GROUP = 4  # tiles read by descriptor are multiplied by whole groups of warps
BARE = 0  # `adapters` of a site of batches without any
_ACCUMULATORS = 128  # fp32 registers of a thread that a tile of results may take: more of them spill


@dataclass(frozen=True, order=True)
class Site:
    """One place where a launch configuration is chosen: batches of up to `rows` rows, adapters of up to `rank`.

    `adapters` bounds how many of them, for a kernel that is specialised for that number; ANY_ADAPTERS elsewhere. A
    kernel with the base has one for batches with and without, that of most adapters, and may get another for those
    without: BARE.
    """

    backend: str
    stage: str
    module: str
    rank: int
    adapters: int
    rows: int

    @property
    def kernel(self) -> str:
        """The name of the kernel launched there."""
        return f"{self.stage}_{self.module}"


def options(kernel: Kernel, module: ModulePlan, rows: int, rank: int, slot_columns: int) -> dict[str, tuple[int, ...]]:
    """The values of each size of the kernel's tiles but for its switches, ascending.

    A block may be smaller than its dimension, and divides it where the shape has a block of 64 that does: masks cost.
    Two are no choice: rows of a kernel for few of them, which one block holds, and a block declared beyond any extent.
    Blocks of rows that are never cut down have the values that are declared. A kernel with the base, which takes long
    to compile and to time, keeps within a doubling of those.
    """
    extent = extents(module, rows, rank, slot_columns)
    divided = {"in": (module.in_features,), "out": tuple(part.width for part in module.slices)}
    found = {}
    for name in _size_names(kernel):
        values = sorted({tile.sizes[name] for tile in own_tiles(kernel)})
        least, most = values[0], values[-1]
        if name in kernel.dims:
            dim = kernel.dims[name]
            if least > LARGEST[dim] or (dim == "rows" and kernel.max_rows):
                blocks = (block_of(extent[dim]),)
            else:
                blocks = _blocks(extent[dim], LARGEST[dim], divided.get(dim, ()))
                if kernel.base:
                    blocks = tuple(of for of in blocks if least <= 2 * of and of <= 2 * most) or blocks[-1:]
            lower, upper = kernel.limits.get(name, (blocks[0], blocks[-1]))
            found[name] = tuple(of for of in blocks if lower <= of <= upper) or (lower,)
        elif name == "SPLIT_K":
            found[name] = SPLITS
        elif name == ROWS_BLOCK:
            found[name] = tuple(value for value in values if value < 2 * rows) or (least,)
    return found


def switches(kernel: Kernel) -> list[dict[str, int]]:
    """The sizes of the kernel's tiles that cut no stated dimension, together as some tile declares them.

    Each of those combinations had a reason; no prediction tells the others, several times as many, apart.
    """
    cutting = {*kernel.dims, "SPLIT_K", ROWS_BLOCK}
    names = [name for name in _size_names(kernel) if name not in cutting]
    return [
        dict(zip(names, values, strict=True))
        for values in sorted({tuple(tile.sizes[name] for name in names) for tile in own_tiles(kernel)})
    ]


def own_tiles(kernel: Kernel) -> list[Tile]:
    """The kernel's tiles that launch it: the others leave their batches to the library."""
    return [tile for tile in kernel.tiles if not tile.library]


def candidates(
    kernel: Kernel, module: ModulePlan, site: Site, slot_columns: int, dtype: str, targets: tuple[str, ...]
) -> list[Launch]:
    """Every legal configuration that the plan would leave as it is."""
    sizes = options(kernel, module, site.rows, site.rank, slot_columns)
    tiles = own_tiles(kernel)
    # where no target has dependent launches, what is declared to be one is none
    early = sorted({of.pdl for of in declared_anywhere(kernel, module, site, slot_columns, dtype, targets)})
    depths = sorted({*STAGES, *(tile.stages for tile in tiles)})
    if kernel.base:
        depths = [depth for depth in depths if depth >= min(tile.stages for tile in tiles) - 1]
    groups = [warps for warps in WARPS if warps >= WARP_GROUP or not kernel.tiled]
    found: list[Launch] = []
    for switched, *values in product(switches(kernel), *sizes.values()):
        tile = dict(zip(sizes, values, strict=True)) | switched
        asked = Tile(stages=depths[-1], pdl=early[-1], **tile)
        fitted = fit(kernel, asked, "", site.rows, site.rank, module, slot_columns, dtype, targets)
        if dict(fitted.tile) != tile:
            continue  # cut down, so another of the space
        deepest = min(fitted.stages, max(depths[0], _steps(kernel, module, site, slot_columns, tile)))
        results = _results(kernel, tile)
        for warps, stages, pdl in product(groups, depths, early):
            if results <= _ACCUMULATORS * 32 * warps and stages <= deepest:
                found.append(replace(fitted, warps=warps, stages=stages, pdl=pdl))
    return found


def settings(launch: Launch) -> dict[str, int]:
    """A launch's sizes and options as one flat dict."""
    return dict(launch.tile) | {"warps": launch.warps, "stages": launch.stages, "pdl": int(launch.pdl)}


def distance(a: dict[str, int], b: dict[str, int]) -> int:
    """Steps between two configurations: doublings of a size, single stages; from or to zero is one."""
    apart = 0
    for name, value in a.items():
        other = b[name]
        if name in ("stages", "pdl"):
            apart += abs(value - other)
        elif value != other:
            apart += ceil(abs(log2(value / other))) if value and other else 1
    return apart


def library(site: Site) -> Launch:
    """The configuration that launches nothing: the library has the base."""
    return Launch(site.rows, site.rank, ANY_ADAPTERS, (), 0, 0, False, "")


def in_library(launch: Launch) -> bool:
    """Whether it is that one."""
    return launch.warps == 0


def declared(plan: KernelPlan, site: Site) -> Launch:
    """The configuration that the plan launches at a site."""
    if plan.leaves(site.rows, bare=False):
        return library(site)
    return _planned(plan, site, site.rank)


def open_ended(plan: KernelPlan, site: Site) -> bool:
    """Whether what the plan launches at a site serves all larger batches too."""
    if plan.leaves(site.rows, bare=False):
        return any(not part.bare and part.least <= site.rows and part.most == UNLIMITED for part in plan.library)
    beyond = any(not part.bare and part.least > site.rows for part in plan.library)
    return not beyond and not _found(plan, site, site.rank).rows


def declared_bare(kernel: Kernel, plan: KernelPlan, site: Site) -> Launch:
    """That of a kernel with the base for batches without adapters, in blocks of the rank as with them."""
    if plan.leaves(site.rows, bare=True):
        return library(site)
    adapted = declared(plan, site)
    if in_library(adapted):
        return _planned(plan, site, 0)
    bare = _planned(plan, site, 0)
    of_rank = {block: size for block, size in adapted.tile if kernel.dims.get(block) == "rank"}
    return replace(bare, tile=tuple((dict(bare.tile) | of_rank).items()))


def _planned(plan: KernelPlan, site: Site, rank: int) -> Launch:
    found = _found(plan, site, rank)
    return replace(found, rows=site.rows, rank=site.rank, adapters=ANY_ADAPTERS, source="")


def _found(plan: KernelPlan, site: Site, rank: int) -> Launch:
    """The first that serves the site; of a kernel that may take another tile for few adapters, that of the most."""
    serving = [
        launch
        for launch in plan.launches
        if launch.rank == rank
        and (not rank or site.adapters in (launch.adapters, ANY_ADAPTERS))
        and (not launch.rows or site.rows <= launch.rows)
    ]
    most = max(launch.adapters for launch in serving)
    return next(launch for launch in serving if launch.adapters == most)


def declared_anywhere(
    kernel: Kernel, module: ModulePlan, site: Site, slot_columns: int, dtype: str, targets: tuple[str, ...]
) -> list[Launch]:
    """The kernel's own tiles for whatever batch, cut to this site: somebody had a reason for each of them."""
    fitted = (
        fit(kernel, tile, "", site.rows, site.rank, module, slot_columns, dtype, targets) for tile in own_tiles(kernel)
    )
    return list(dict.fromkeys(fitted))


def reduction(kernel: Kernel) -> str:
    """The block that every operand has: the dimension the kernel sums over; empty where none is declared."""
    shared = set.intersection(*(set(pair) for pair in kernel.operands)) if kernel.operands else set()
    return min(shared, default="")


def extent(kernel: Kernel, module: ModulePlan, site: Site, slot_columns: int, block: str) -> int:
    """The size of the stated dimension that a block cuts."""
    return extents(module, site.rows, site.rank, slot_columns)[kernel.dims[block]]


def _steps(kernel: Kernel, module: ModulePlan, site: Site, slot_columns: int, tile: dict[str, int]) -> int:
    """Turns of the kernel's loop; a pipeline deeper than that holds nothing."""
    block = reduction(kernel)
    if block not in kernel.dims:
        return max(STAGES)
    return -(-extent(kernel, module, site, slot_columns, block) // (tile[block] * sharing(tile)))


def _size_names(kernel: Kernel) -> list[str]:
    return sorted(own_tiles(kernel)[0].sizes)


def _results(kernel: Kernel, tile: dict[str, int]) -> int:
    """Elements of the tile of results one program holds."""
    held = {block for pair in kernel.operands for block in pair} - {reduction(kernel)}
    size = 1
    for block in held:
        size *= tile[block]
    return size if held else 0


def _blocks(size: int, largest: int, divide: tuple[int, ...]) -> tuple[int, ...]:
    blocks = [1 << power for power in range(4, 11) if 1 << power <= min(largest, block_of(size))]
    whole = [block for block in blocks if all(each % block == 0 for each in divide)]
    return tuple(whole if whole and (whole[-1] >= 64 or whole == blocks) else blocks)
