"""Buffers: the device memory of a package, by purpose and in bytes, before anything is allocated."""

from collections.abc import Iterable
from math import prod

from lorac.plan.kernels import ITEMSIZE, block_of, output_tiles, splits
from lorac.plan.model import Buffer, DecodePlan, KernelPlan, Launch, ModulePlan, PrefillPlan
from lorac.runtime.pairs import MOST_SHARES, block_cap, group_cap, table_size
from lorac.runtime.room import numbers


def slot_buffers(modules: tuple[ModulePlan, ...], slots: int, max_rank: int, dtype: str) -> tuple[Buffer, ...]:
    """A, B, its narrower copies, rank and scale of every module, over all its instances and slots."""
    buffers = []
    for module in modules:
        slices = len(module.slices)
        tables = (module.instances, slots, slices)
        for name, shape in (("a", a_shape(module, slots, max_rank)), ("b", b_shape(module, slots, max_rank))):
            size = prod(shape) * ITEMSIZE[dtype]
            buffers.append(Buffer(f"{name}.{module.name}", shape, dtype, size, f"{name.upper()} of every slot"))
        for width in module.narrow:
            shape = b_shape(module, slots, width)
            purpose = f"B of every slot at {width} columns"
            buffers.append(Buffer(f"b.{module.name}.{width}", shape, dtype, prod(shape) * ITEMSIZE[dtype], purpose))
        buffers.append(Buffer(f"rank.{module.name}", tables, "int32", 4 * prod(tables), "rank of every slot"))
        buffers.append(Buffer(f"scale.{module.name}", tables, "float32", 4 * prod(tables), "scaling of every slot"))
    return tuple(buffers)


def a_shape(module: ModulePlan, slots: int, max_rank: int) -> tuple[int, ...]:
    """A: slice c of slot s at rows c * R; an embedding's A has a row per token, so that a lookup reads one row."""
    rows = len(module.slices) * max_rank
    if module.kind == "embedding":
        return (module.instances, slots, module.in_features, max_rank)
    if module.experts:
        return (module.instances, slots, 1 if module.shared_a else module.local_experts, rows, module.in_features)
    return (module.instances, slots, rows, module.in_features)


def b_shape(module: ModulePlan, slots: int, max_rank: int) -> tuple[int, ...]:
    """B: slots interleaved per output feature, so that one feature's columns of all slots are contiguous."""
    if module.experts:
        experts = 1 if module.shared_b else module.local_experts
        return (module.instances, slots, experts, module.out_features, max_rank)
    return (module.instances, module.out_features, slots, max_rank)


def room(decode: DecodePlan, prefill: PrefillPlan) -> tuple[int, int]:
    """The most rows and the most requests of a step: what its metadata has room for."""
    requests = prefill.max_requests if prefill.buckets else 0
    return max((*decode.buckets, *prefill.buckets, 1)), max((*decode.buckets, requests, 1))


def metadata_buffer(rows: int, requests: int, segments: int, slots: int, widths: int) -> Buffer:
    """The step's int32 metadata: its maps of rows, segments and slots, and what the host sends of them.

    `widths` counts those that B is kept at.
    """
    count = numbers(rows, requests, segments, slots, widths)
    return Buffer("metadata", (count,), "int32", 4 * count, "rows, segments and requests of one step")


def scratch_bytes(
    launched: Iterable[tuple[KernelPlan, Launch]], modules: dict[str, ModulePlan], rows: int, slots: int, max_rank: int
) -> dict[str, int]:
    """Bytes of each scratch buffer at up to `rows` rows, by name: the largest that any of the launches asks for."""
    sizes: dict[str, int] = {}
    for kernel, launch in launched:
        module = modules[kernel.module]
        served = min(rows, launch.rows or rows)
        dims = {
            "rows": served,
            "slices": len(module.slices),
            "columns": len(module.slices) * launch.rank,
            "active": block_of(max(1, launch.adapters), 1),
            "out": module.out_features,
            "slots": slots,
            "max_rank": max_rank,
            "covered": _covered(module, served, dict(launch.tile)),
            "pitch": next((width for width in module.narrow if launch.rank <= width), max_rank),
            **dict(launch.tile),
        }
        if module.experts:
            dims |= _expert_dims(module, served, slots, dims)
        for scratch in kernel.scratch:
            if splits(launch) or not scratch.split:
                count = scratch.itemsize * prod(dims[dim] for dim in scratch.shape)
                sizes[scratch.name] = max(sizes.get(scratch.name, 0), count)
    return sizes


def _covered(module: ModulePlan, rows: int, tile: dict[str, int]) -> int:
    """Elements of the tiles that cover the outputs; blocks that a kernel lacks count one."""
    sizes = {"BLOCK_M": 1, "BLOCK_N": 1} | tile
    return output_tiles(sizes, rows, module) * sizes["BLOCK_M"] * sizes["BLOCK_N"]


def _expert_dims(module: ModulePlan, rows: int, slots: int, tile: dict[str, int]) -> dict[str, int]:
    """Dimensions of scratch that modules of experts have beside those of others; see `lorac.runtime.pairs`."""
    experts, pairs = module.local_experts, rows * module.experts.top_k
    width = module.slices[0].width
    tiles = -(-width // tile.get("BLOCK_N", width))
    blocks = block_cap(pairs, experts, tile.get("BLOCK_M", 1))
    return {
        "pairs": pairs,
        "width": width,
        "shares": tiles if tile.get("AHEAD") and tiles <= MOST_SHARES else 1,
        "tables": table_size(pairs, blocks, group_cap(pairs, experts, slots)),
    }
