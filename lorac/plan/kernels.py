"""Kernels: which launch configuration serves which rows, rank and module, no block larger than its dimension."""

import re
from dataclasses import replace
from math import gcd, prod

from lorac.plan.model import KernelPlan, Launch, LibraryPlan, ModulePlan, ScratchPlan, Variant
from lorac.spec.backend import Declaration, Kernel, Scratch, Tile

ITEMSIZE = {"float32": 4, "float16": 2, "bfloat16": 2}
SCRATCH_ITEMSIZE = {"fp32": 4, "i32": 4}
TRITON_NAME = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}
# bytes of shared memory one program may use, by target (CUDA programming guide, per-block opt-in; LDS on gfx942)
SHARED_LIMIT = {
    "sm_80": 166_912,
    "sm_86": 101_376,
    "sm_89": 101_376,
    "sm_90": 232_448,
    "sm_100": 232_448,
    "sm_120": 101_376,
    "gfx942": 65_536,
}
TMA_TARGETS = {"sm_90", "sm_100", "sm_120"}  # those that copy whole tiles; kernels read by tile spill on others
PDL_TARGETS = {"sm_90", "sm_100", "sm_120"}  # those with dependent launches; others leave them out when they compile
# multiprocessors of a target's largest card (H100 and H200, B200, RTX PRO 6000)
PROCESSORS = {"sm_90": 132, "sm_100": 148, "sm_120": 188}
LEAST_BLOCK = 16  # tl.dot asks for as much
TILE_ALIGN = 16  # bytes at which rows of a tensor start that is taken by descriptor (CUDA programming guide, TMA)
SPLITS = ("SPLIT_K", "SHARES")  # constants that say how many programs share a sum over K
UNBOUNDED = 0  # `rows` of the launch that serves any number
UNLIMITED = 2**31  # more rows than any batch has
ANY_ADAPTERS = -1  # `adapters` of the launch that serves any number


def plan_kernels(
    declaration: Declaration,
    modules: tuple[ModulePlan, ...],
    ranks: tuple[int, ...],
    adapters: tuple[int, ...],
    dtype: str,
    slots: int,
    max_rank: int,
    targets: tuple[str, ...],
    tuned: dict[str, tuple[tuple[Tile, str], ...]],
) -> tuple[KernelPlan, ...]:
    """Every kernel of a backend, one per module and stage. `tuned` holds tiles by stage, tried before the declared."""
    plans: list[KernelPlan] = []
    for module in modules:
        for stage, kernel in declaration.kernels.items():
            if module.kind not in kernel.kinds or (kernel.modules and module.name not in kernel.modules):
                continue
            served = {plan.stage: plan for plan in plans if plan.module == module.name}
            if kernel.unless in served or (kernel.beside and kernel.beside not in served):
                continue
            if spills(kernel, dtype, targets):
                continue
            if kernel.in_library and all(part.bare for part in served[kernel.beside].library):
                continue
            if kernel.tiled and not _readable_in_tiles(kernel, module, dtype, slots, max_rank, targets):
                continue
            leaders = {plan.stage: plan.launches for plan in plans}
            tiles = (*tuned.get(stage, ()), *((tile, "default") for tile in kernel.tiles))
            beside = declaration.may_leave(stage)
            launches = tuple(
                replace(launch, adapters=bound)
                for rank, bound in _bounds(kernel, ranks, adapters)
                for launch in _launches(
                    kernel, tiles, module, rank, bound, slots, max_rank, dtype, targets, leaders, beside
                )
            )
            if not launches:  # the library has the base at any size
                continue
            split = any(splits(launch) for launch in launches)
            whole = any(launch.whole for launch in launches)
            left_out = set() if split else {*kernel.when_split, *SPLITS}
            left_out |= set() if whole else {*kernel.when_whole, "WHOLE"}
            plans.append(
                KernelPlan(
                    name=f"{stage}_{module.name}",
                    stage=stage,
                    module=module.name,
                    template=kernel.template,
                    arguments=tuple((k, _element(v, dtype)) for k, v in kernel.arguments.items() if k not in left_out),
                    constants=tuple(name for name in kernel.constants if name not in left_out),
                    masks=_masks(kernel, module, launches),
                    splits=split,
                    whole=whole,
                    stands_in=kernel.stands_in,
                    max_rows=kernel.max_rows or UNBOUNDED,
                    library=tuple(
                        part
                        for bare in (False, True)
                        for part in _library(kernel, tiles, module, max_rank, targets, bare)
                    ),
                    in_library=kernel.in_library,
                    base=kernel.base,
                    wide_b=module.out_features * slots * max_rank >= 2**31,
                    aligned=gcd(16, module.in_features),
                    aligned_out=gcd(16, module.out_features),
                    precision="ieee" if dtype == "float32" else "",
                    scratch=tuple(
                        _scratch(name, scratch, name in kernel.when_split, dtype)
                        for name, scratch in kernel.scratch.items()
                        if name not in left_out
                    ),
                    launches=launches,
                )
            )
    return tuple(plans)


def spills(kernel: Kernel, dtype: str, targets: tuple[str, ...]) -> bool:
    """Whether it is left out because tensor cores, which its tiles are made for, multiply no float32 exactly."""
    return kernel.tensor_cores and dtype == "float32" and bool(targets)


def sharing(tile: dict[str, int]) -> int:
    """How many programs share a sum over K."""
    return prod(tile.get(name, 1) for name in SPLITS)


def splits(launch: Launch) -> bool:
    """Whether several of its programs do."""
    return sharing(dict(launch.tile)) > 1


def _scratch(name: str, declared: Scratch, split: bool, dtype: str) -> ScratchPlan:
    return ScratchPlan(name, SCRATCH_ITEMSIZE.get(declared.dtype) or ITEMSIZE[dtype], declared.shape, split)


def launched(kernels: tuple[KernelPlan, ...], rows: int, adapters: bool = True) -> list[KernelPlan]:
    """Of a backend's kernels, those that layers of `rows` rows with adapters (or without) launch, base included.

    Kernels that stand in for a module's others do so up to the rows they serve; one with the base does not where it
    leaves that to the library.
    """
    left = {of.module for of in kernels if of.leaves(rows, bare=not adapters)}
    found = [
        of
        for of in kernels
        if rows <= (of.max_rows or rows)
        and (adapters or of.base)
        and not (of.base if of.module in left else of.in_library)
    ]
    replaced = {of.module for of in found if of.stands_in}
    return [of for of in found if of.stands_in or of.module not in replaced]


def _readable_in_tiles(
    kernel: Kernel, module: ModulePlan, dtype: str, slots: int, max_rank: int, targets: tuple[str, ...]
) -> bool:
    """Whether every target copies whole tiles, rows of x and W and slots in h and B start aligned, and B has not too
    many columns.
    """
    aligned = not module.in_features * ITEMSIZE[dtype] % TILE_ALIGN and tile_rank(max_rank, dtype) == max_rank
    return aligned and TMA_TARGETS.issuperset(targets) and kernel.takes(slots * max_rank)


def tile_rank(max_rank: int, dtype: str) -> int:
    """The least maximal rank from this one on with which every slot starts aligned in h and B."""
    step = TILE_ALIGN // ITEMSIZE[dtype]
    return -(-max_rank // step) * step


def _element(argument: str, dtype: str) -> str:
    """The type of an argument as the runtime takes it: `*dtype` is a pointer to the spec's element type."""
    return argument.replace("dtype", TRITON_NAME[dtype])


def kernel_ranks(variants: tuple[Variant, ...], max_rank: int) -> tuple[int, ...]:
    """The ranks kernels are specialised for: each variant's bound, and R for whatever no variant holds."""
    return tuple(sorted({variant.rank for variant in variants if variant.adapters} | {max_rank}))


def narrow_widths(ranks: tuple[int, ...], max_rank: int) -> tuple[int, ...]:
    """Columns per slot, below R, at which B is kept once more for kernels that read it in whole tiles.

    Those read every column of a slot; others read no more than they need. Sixteen columns are what one step of
    tl.dot takes.
    """
    return tuple(sorted({width for width in (-(-rank // 16) * 16 for rank in ranks) if width < max_rank}))


def kernel_adapters(variants: tuple[Variant, ...], slots: int) -> tuple[int, ...]:
    """The numbers of adapters kernels are specialised for: one, each variant's bound, and all slots."""
    return tuple(sorted({1, slots, *(variant.adapters for variant in variants if variant.adapters)}))


def _bounds(kernel: Kernel, ranks: tuple[int, ...], adapters: tuple[int, ...]) -> list[tuple[int, int]]:
    """(rank, adapters) of a kernel's launches, narrow to wide; no adapters at all first, for a kernel with the base."""
    bare = [(0, 0)] * kernel.base
    if "ACTIVE" in kernel.constants:
        pairs = [(rank, bound) for rank in ranks for bound in adapters]
        return bare + sorted(pairs, key=lambda pair: pair[0] * pair[1])
    if "RANK" not in kernel.constants and "rank" not in kernel.dims.values():
        return [(ranks[-1], ANY_ADAPTERS)]
    return bare + [(rank, ANY_ADAPTERS) for rank in ranks]


def _launches(
    kernel, tiles, module: ModulePlan, rank: int, bound: int, slots: int, max_rank: int, dtype: str, targets,
    leaders: dict[str, tuple[Launch, ...]], beside: bool,
) -> list[Launch]:  # fmt: skip
    """One launch per class of rows, neighbours that came out equal merged. `leaders` are those of stages it follows.

    A kernel with the base takes one tile whatever the adapters, or for few of them one of the same sizes, or one that
    sums alike where it is bare of them: base rows come out in the same bits with and without, but where the library has
    them without. Where the library has the base at any size, there are launches all the same if another stage stands
    beside this one (`beside`), for it is planned where this is.
    """
    followed = {name: (leaders[of.partition(".")[0]], of.partition(".")[2]) for name, of in kernel.follows.items()}
    their_rows = {launch.rows for launches, _ in followed.values() for launch in launches if launch.rank == rank}
    bounds = (max_rank, ANY_ADAPTERS) if kernel.base else (rank, bound)
    launches: list[Launch] = []
    for rows in _classes(kernel, tiles, their_rows):
        tile, source = _serving(tiles, rows, *bounds, module, targets, bare=not bound)
        if tile.library:
            continue
        if kernel.base and bound:
            tile, source = _for_few(tiles, tile, source, rows, max_rank, bound, module)
        led = {name: _led(launches, constant, rows, rank) for name, (launches, constant) in followed.items()}
        led_tile = tile.model_copy(update=led)
        launch = fit(kernel, led_tile, source, rows, rank, module, slots * max_rank, dtype, targets)
        if launches and replace(launches[-1], rows=rows) == launch:
            launches.pop()
        launches.append(launch)
    own = [(tile, source) for tile, source in tiles if not tile.library]
    if not launches and beside and own:
        return _launches(kernel, own[-1:], module, rank, bound, slots, max_rank, dtype, targets, leaders, beside=False)
    return launches


def _classes(kernel: Kernel, tiles, more: set[int]) -> list[int]:
    """The most rows of each class of batches, ascending."""
    classes = {tile.rows for tile, _ in tiles if tile.rows} | more
    bounded = {rows for rows in classes if rows and not (kernel.max_rows and rows >= kernel.max_rows)}
    return [*sorted(bounded), kernel.max_rows or UNBOUNDED]


def _library(kernel: Kernel, tiles, module: ModulePlan, max_rank: int, targets, bare: bool) -> list[LibraryPlan]:
    """The rows of the classes whose tile says so, neighbours joined."""
    parts: list[LibraryPlan] = []
    least = 1
    for most in _classes(kernel, tiles, set()):
        most = most or UNLIMITED
        tile, source = _serving(tiles, most % UNLIMITED, max_rank, ANY_ADAPTERS, module, targets, bare)
        if tile.library:
            if parts and (parts[-1].most, parts[-1].source) == (least - 1, source):
                least = parts.pop().least
            parts.append(LibraryPlan(bare, least, most, source))
        least = most + 1
    return parts


def _serving(
    tiles, rows: int, rank: int, adapters: int, module: ModulePlan, targets: tuple[str, ...], bare: bool = False
) -> tuple[Tile, str]:
    """The first tile whose bounds hold, and where it comes from; some serve only batches that are `bare`."""
    fitting = ((tile, source) for tile, source in tiles if bare or not tile.bare)
    within = ((tile, source) for tile, source in fitting if _serves(tile, rows, rank, adapters, module))
    return next((tile, source) for tile, source in within if _fills(tile, rows, module, targets))


def _for_few(
    tiles, tile: Tile, source: str, rows: int, rank: int, adapters: int, module: ModulePlan
) -> tuple[Tile, str]:
    """The first tile for no more than few adapters that sums as `tile` does; that one itself where there is none."""
    few = ((of, where) for of, where in tiles if of.adapters and of.sizes == tile.sizes)
    return next(((of, where) for of, where in few if _serves(of, rows, rank, adapters, module)), (tile, source))


def _fills(tile: Tile, rows: int, module: ModulePlan, targets: tuple[str, ...]) -> bool:
    """Whether so many rows give the programs of a tile enough multiprocessors, where targets say how many there are.

    What counts is the last turn, which may leave most of them idle: tiles over the turns' places for tiles.
    """
    if not tile.fill or not rows:
        return True
    tiles = output_tiles(tile.sizes, rows, module)
    counts = [PROCESSORS[target] for target in targets if target in PROCESSORS]
    return all(100 * tiles >= tile.fill * -(-tiles // count) * count for count in counts)


def output_tiles(sizes: dict[str, int], rows: int, module: ModulePlan) -> int:
    """How many tiles of BLOCK_M rows and BLOCK_N outputs cover a module's slices."""
    return -(-rows // sizes["BLOCK_M"]) * sum(-(-part.width // sizes["BLOCK_N"]) for part in module.slices)


def _led(launches: tuple[Launch, ...], constant: str, rows: int, rank: int) -> int:
    """The constant of a leading stage's launch for as many rows at that rank."""
    of = next(of for of in launches if of.rank == rank and (not of.rows or UNBOUNDED < rows <= of.rows))
    return dict(of.tile)[constant]


def _serves(tile: Tile, rows: int, rank: int, adapters: int, module: ModulePlan) -> bool:
    return (
        (tile.rows is None or UNBOUNDED < rows <= tile.rows)
        and (tile.rank is None or rank <= tile.rank)
        and (tile.adapters is None or ANY_ADAPTERS < adapters <= tile.adapters)
        and (tile.in_features is None or module.in_features <= tile.in_features)
        and (tile.out_features is None or module.out_features <= tile.out_features)
        and (tile.module is None or tile.module == module.name)
    )


def extents(module: ModulePlan, rows: int, rank: int, slot_columns: int) -> dict[str, int]:
    """The size of every dimension a block may cut, by name; the widest slice for outputs."""
    return {
        "rows": rows,
        "rank": rank,
        "columns": len(module.slices) * block_of(rank),
        "slot_columns": slot_columns,
        "in": module.in_features,
        "out": max(part.width for part in module.slices),
    }


def fit(
    kernel: Kernel, tile: Tile, source: str, rows: int, rank: int, module: ModulePlan, slot_columns: int, dtype, targets
) -> Launch:
    """The tile, cut down to the shape: no block past its dimension, whole splits, stages that fit in shared memory."""
    extent = extents(module, rows or 2**30, max(rank, 1), slot_columns)
    sizes = tile.sizes
    for block, dim in kernel.dims.items():
        sizes[block] = min(sizes[block], block_of(extent[dim]))
    for block, (least, most) in kernel.limits.items():
        sizes[block] = min(max(sizes[block], least), most)
    stages = _fit_shared(kernel, sizes, tile.stages, ITEMSIZE[dtype], shared_limit(targets))
    if sizes.get("SPLIT_K", 1) > 1:
        sizes["SPLIT_K"] = _whole_splits(sizes["SPLIT_K"], -(-module.in_features // sizes["BLOCK_K"]))
    while sizes.get("SHARES", 1) > 1 and not _shares(sizes, module.in_features, slot_columns):
        sizes["SHARES"] //= 2
    pdl = tile.pdl and (not targets or bool(PDL_TARGETS & set(targets)))
    whole = _whole(kernel, sizes, module, dtype)
    return Launch(rows, rank, ANY_ADAPTERS, tuple(sorted(sizes.items())), tile.warps, stages, pdl, source, whole)


def _whole(kernel: Kernel, sizes: dict[str, int], module: ModulePlan, dtype: str) -> bool:
    """Whether whole tiles of outputs are stored by descriptor, in parts: where programs take one tile after another,
    so that the next one's sum goes on meanwhile, slices are whole tiles, and rows start aligned.
    """
    if not kernel.when_whole or not sizes["LOOP"] or sizes["WIDE"] or sizes["SHARES"] > 1:
        return False
    parts = [int(size) for name in kernel.when_whole for size in re.findall(r", (\d+)\]", kernel.arguments[name])]
    rest = [sizes["BLOCK_N"] % part for part in parts] + [part.width % sizes["BLOCK_N"] for part in module.slices]
    return not any([*rest, module.out_features * ITEMSIZE[dtype] % TILE_ALIGN])


def _fit_shared(kernel: Kernel, sizes: dict[str, int], stages: int, itemsize: int, limit: int) -> int:
    """The stages that fit in shared memory; where not even one does, the largest blocks in `sizes` are halved."""
    least = {name: kernel.limits.get(name, (LEAST_BLOCK,))[0] for pair in kernel.operands for name in pair}
    while stages * itemsize * sum(sizes[a] * sizes[b] for a, b in kernel.operands) > limit:
        large = [name for name in sorted(least) if sizes[name] > least[name]]
        if stages > 1:
            stages -= 1
        elif large:
            sizes[max(large, key=sizes.__getitem__)] //= 2
        else:
            break
    return stages


def block_of(extent: int, least: int = LEAST_BLOCK) -> int:
    """The smallest block that covers a dimension: a power of two."""
    return max(least, 1 << (extent - 1).bit_length())


def shared_limit(targets: tuple[str, ...]) -> int:
    """Shared memory every target has; without targets, what every supported CUDA device has."""
    return min((SHARED_LIMIT[target] for target in targets), default=SHARED_LIMIT["sm_86"])


def _whole_splits(splits: int, blocks: int) -> int:
    """At most `splits` equal parts of `blocks` K blocks: a ragged last part reads its neighbour's inputs twice."""
    return next(split for split in range(min(splits, blocks), 0, -1) if blocks % split == 0)


def _shares(sizes: dict[str, int], inputs: int, columns: int) -> bool:
    """Whether so many programs can share a tile: each for one tile alone, with rows of its own.

    All steps over h are to be the last share's, for only from the first on do they know their columns.
    """
    shares = sizes["SHARES"]
    steps, more = (-(-extent // sizes["BLOCK_K"]) for extent in (inputs, columns))
    last_has_h = -(-(steps + more) // shares) * (shares - 1) <= steps
    return not sizes["LOOP"] and shares <= sizes["BLOCK_M"] and last_has_h


def _masks(kernel: Kernel, module: ModulePlan, launches: tuple[Launch, ...]) -> tuple[str, ...]:
    """The dimensions that some launch's blocks do not divide, so that a kernel masks only where a shape needs it."""
    block_names = {dim: [block for block, of in kernel.dims.items() if of == dim] for dim in ("in", "out")}
    extents = {"in": (module.in_features,), "out": tuple(part.width for part in module.slices)}
    return tuple(
        dim
        for dim, blocks in block_names.items()
        if any(size % dict(launch.tile)[block] for launch in launches for block in blocks for size in extents[dim])
    )
