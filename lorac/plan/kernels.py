"""Kernels: which launch configuration serves which rows, rank and module, with blocks no larger than their dimension."""

from dataclasses import replace
from math import gcd

from lorac.plan.model import KernelPlan, Launch, ModulePlan, Variant
from lorac.spec.backend import Declaration, Kernel, Tile

ITEMSIZE = {"float32": 4, "float16": 2, "bfloat16": 2}
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
PDL_TARGETS = {"sm_90", "sm_100", "sm_120"}
UNBOUNDED = 0  # `rows` of the launch that serves any number


def plan_kernels(
    declaration: Declaration,
    modules: tuple[ModulePlan, ...],
    ranks: tuple[int, ...],
    dtype: str,
    slots: int,
    max_rank: int,
    targets: tuple[str, ...],
    tuned: dict[str, tuple[tuple[Tile, str], ...]],
) -> tuple[KernelPlan, ...]:
    """Every kernel of a backend: one per module and stage. `tuned` maps a stage to tiles tried before the declared ones."""
    plans = []
    for module in modules:
        for stage, kernel in declaration.kernels.items():
            if module.kind not in kernel.kinds:
                continue
            tiles = (*tuned.get(stage, ()), *((tile, "default") for tile in kernel.tiles))
            launches = tuple(
                launch for rank in ranks for launch in _launches(kernel, tiles, module, rank, dtype, targets)
            )
            splits = any(dict(launch.tile).get("SPLIT_K", 1) > 1 for launch in launches)
            left_out = set() if splits else {*kernel.when_split, "SPLIT_K"}
            plans.append(
                KernelPlan(
                    name=f"{stage}_{module.name}",
                    stage=stage,
                    module=module.name,
                    template=kernel.template,
                    arguments=tuple((k, _element(v, dtype)) for k, v in kernel.arguments.items() if k not in left_out),
                    constants=tuple(name for name in kernel.constants if name not in left_out),
                    masks=_masks(kernel, module, launches),
                    splits=splits,
                    wide_b=module.out_features * slots * max_rank >= 2**31,
                    aligned=gcd(16, module.in_features),
                    precision="ieee" if dtype == "float32" else "",
                    launches=launches,
                )
            )
    return tuple(plans)


def _element(argument: str, dtype: str) -> str:
    """The type of an argument as Triton names it: `*dtype` is a pointer to the spec's element type."""
    return "*" + TRITON_NAME[dtype] if argument == "*dtype" else argument


def kernel_ranks(variants: tuple[Variant, ...], max_rank: int) -> tuple[int, ...]:
    """The ranks kernels are specialised for: each variant's bound, and R for whatever no variant holds."""
    return tuple(sorted({variant.rank for variant in variants if variant.adapters} | {max_rank}))


def _launches(kernel, tiles, module: ModulePlan, rank: int, dtype: str, targets) -> list[Launch]:
    """One launch per class of rows, neighbours that came out equal merged."""
    bounds = sorted({tile.rows for tile, _ in tiles if tile.rows}) + [UNBOUNDED]
    launches: list[Launch] = []
    for rows in bounds:
        tile, source = next((t, s) for t, s in tiles if _serves(t, rows, rank, module))
        launch = _fit(kernel, tile, source, rows, rank, module, dtype, targets)
        if launches and replace(launches[-1], rows=rows) == launch:
            launches.pop()
        launches.append(launch)
    return launches


def _serves(tile: Tile, rows: int, rank: int, module: ModulePlan) -> bool:
    return (
        (tile.rows is None or UNBOUNDED < rows <= tile.rows)
        and (tile.rank is None or rank <= tile.rank)
        and (tile.in_features is None or module.in_features <= tile.in_features)
        and (tile.out_features is None or module.out_features <= tile.out_features)
        and (tile.module is None or tile.module == module.name)
    )


def _fit(kernel: Kernel, tile: Tile, source: str, rows: int, rank: int, module: ModulePlan, dtype, targets) -> Launch:
    """The tile, cut down to the shape: no block past its dimension, whole splits, stages that fit in shared memory."""
    widest = max(part.width for part in module.slices)
    extent = {"rows": rows or 2**30, "rank": rank, "in": module.in_features, "out": widest}
    sizes = tile.sizes
    for block, dim in kernel.dims.items():
        sizes[block] = min(sizes[block], block_of(extent[dim]))
    if sizes.get("SPLIT_K", 1) > 1:
        sizes["SPLIT_K"] = _whole_splits(sizes["SPLIT_K"], -(-module.in_features // sizes["BLOCK_K"]))
    stage_bytes = sum(sizes[a] * sizes[b] for a, b in kernel.operands) * ITEMSIZE[dtype]
    stages = tile.stages
    while stages > 1 and stages * stage_bytes > shared_limit(targets):
        stages -= 1
    pdl = tile.pdl and bool(targets) and set(targets) <= PDL_TARGETS
    return Launch(rows, rank, tuple(sorted(sizes.items())), tile.warps, stages, pdl, source)


def block_of(extent: int) -> int:
    """The smallest block that covers a dimension: a power of two, and at least the 16 that tl.dot asks of K."""
    return max(16, 1 << (extent - 1).bit_length())


def shared_limit(targets: tuple[str, ...]) -> int:
    """Shared memory every target has; without targets, what every supported CUDA device has."""
    return min((SHARED_LIMIT[target] for target in targets), default=SHARED_LIMIT["sm_86"])


def _whole_splits(splits: int, blocks: int) -> int:
    """At most `splits` equal parts of `blocks` K blocks: a ragged last part would read its neighbour's columns twice."""
    return next(split for split in range(min(splits, blocks), 0, -1) if blocks % split == 0)


def _masks(kernel: Kernel, module: ModulePlan, launches: tuple[Launch, ...]) -> tuple[str, ...]:
    """The dimensions that some launch's blocks do not divide, so that a kernel masks only where a shape needs it."""
    block_names = {dim: [block for block, of in kernel.dims.items() if of == dim] for dim in ("in", "out")}
    extents = {"in": (module.in_features,), "out": tuple(part.width for part in module.slices)}
    return tuple(
        dim
        for dim, blocks in block_names.items()
        if any(size % dict(launch.tile)[block] for launch in launches for block in blocks for size in extents[dim])
    )
