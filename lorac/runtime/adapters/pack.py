"""One adapter as one buffer in the slots' own order, so that bringing it to the device is a single copy."""

import math
from dataclasses import dataclass
from functools import lru_cache
from math import prod

import torch

from lorac.runtime.adapters.names import Pair
from lorac.runtime.adapters.place import Placement
from lorac.runtime.adapters.problems import Problems
from lorac.runtime.adapters.tensors import Header, TensorFile
from lorac.runtime.layout import Layout, Module

_ALIGN = 256  # bytes; every table starts on such a boundary


@dataclass(frozen=True)
class Shard:
    """The rank of this process: in tensor parallelism, and in expert parallelism."""

    tp: int = 0
    ep: int = 0


@dataclass(frozen=True)
class Tables:
    """One module's part of a buffer, as typed views. Ranks below `Block.rank` are padded with zeros.

    a: [instances, slices, r, in] (embedding [1, vocab, r]; experts [instances, experts, slices, r, in])
    b: [instances, out, r] (experts [instances, experts, out, r])
    rank, scale: [instances, slices], int32 and float32
    """

    a: torch.Tensor
    b: torch.Tensor
    rank: torch.Tensor
    scale: torch.Tensor


@dataclass(frozen=True)
class Block:
    """Where one module's tables lie in an adapter's buffer; `rank` is the module's largest."""

    module: Module
    rank: int
    dtype: torch.dtype
    offset: int

    def fields(self) -> list[tuple[torch.dtype, tuple[int, ...]]]:
        """(dtype, shape) of a, b, rank and scale."""
        module, rank, slices, experts = self.module, self.rank, len(self.module.slices), self.module.experts
        table = (module.instances, slices)
        if module.kind == "embedding":
            a, b = (1, module.in_features, rank), (1, module.out_features, rank)
        elif experts is not None:
            a = (module.instances, 1 if experts.shared_a else experts.local, slices, rank, module.in_features)
            b = (module.instances, 1 if experts.shared_b else experts.local, module.out_features, rank)
        else:
            a, b = (*table, rank, module.in_features), (module.instances, module.out_features, rank)
        return [(self.dtype, a), (self.dtype, b), (torch.int32, table), (torch.float32, table)]

    @property
    def end(self) -> int:
        """The first byte behind the block, aligned."""
        return self.offset + sum(_aligned(dtype, shape) for dtype, shape in self.fields())

    def tables(self, buffer: torch.Tensor) -> Tables:
        """The block's views of a buffer of bytes, on whatever device it is."""
        views, at = [], self.offset
        for dtype, shape in self.fields():
            views.append(buffer[at : at + prod(shape) * dtype.itemsize].view(dtype).view(shape))
            at += _aligned(dtype, shape)
        return Tables(*views)


@dataclass(frozen=True)
class Part:
    """One slice of an adapter: its delta is scale * b @ a. a: [rank, in], b: [width, rank], in the package's dtype."""

    a: torch.Tensor
    b: torch.Tensor
    scale: float
    rank: int


@dataclass(frozen=True, eq=False)
class Adapter:
    """An adapter ready for one rank's slots: validated, converted to the package's dtype once, never written again."""

    folder: str
    layout: Layout
    shard: Shard
    blocks: tuple[Block, ...]
    buffer: torch.Tensor  # bytes on the host, pinned where that was asked for

    @property
    def nbytes(self) -> int:
        """Bytes on the host, and of the copy to the device."""
        return self.buffer.numel()

    @property
    def rank(self) -> int:
        """The largest rank of any module."""
        return max(block.rank for block in self.blocks)

    def part(self, module: str, instance: int, index: int, expert: int = 0) -> Part | None:
        """The slice `index` of one module, views of the buffer; None where the adapter has nothing there.

        `expert` is local to this rank.
        """
        block = next((block for block in self.blocks if block.module.name == module), None)
        if block is None:
            return None
        tables, piece = block.tables(self.buffer), block.module.slices[index]
        rank = int(tables.rank[instance, index])
        if not rank:
            return None
        a, b = _factors(block.module, tables, instance, index, expert)
        return Part(
            a[:rank], b[piece.start : piece.start + piece.width, :rank], float(tables.scale[instance, index]), rank
        )


def pack(folder: str, placed: list[Placement], file: TensorFile, layout: Layout, shard: Shard, pin: bool) -> Adapter:
    """Reads every tensor once into its place. Raises AdapterError for numbers the dtype lacks or all without effect."""
    problems, dtype, blocks, offset = Problems(folder), getattr(torch, layout.dtype), [], 0
    for module in layout.modules:
        if ranks := [item.rank for item in placed if item.module.name == module.name]:
            blocks.append(Block(module, max(ranks), dtype, offset))
            offset = blocks[-1].end
    buffer = torch.zeros(offset, dtype=torch.uint8, pin_memory=pin)
    tables = {block.module.name: block.tables(buffer) for block in blocks}
    by_pair: dict[Pair, list[Placement]] = {}
    for item in placed:
        by_pair.setdefault(item.pair, []).append(item)
    effective, shared = False, set()

    @lru_cache(8)  # one factor that all experts share is in the pair of each
    def read(header: Header) -> torch.Tensor:
        return _convert(file.read(header.name).view(header.shape), header.name, dtype, problems)

    for pair, items in by_pair.items():
        a, b = read(pair.a), read(pair.b)
        effective = effective or bool(a.any() and b.any() and any(item.scale for item in items))
        if stack := items[0].stack:
            a, b = stack.by_expert(a, b)
        for item in items:
            _write(item, a, b[..., item.rows, :], tables[item.module.name], layout, shard, shared, problems)
    file.check_unchanged()
    if not effective and not problems.found:
        problems.add(
            "every delta is zero (all A, all B or all alphas are): an untrained adapter, which would change nothing"
        )
    problems.raise_if_any()
    return Adapter(folder, layout, shard, tuple(blocks), buffer)


def _convert(tensor: torch.Tensor, name: str, dtype: torch.dtype, problems: Problems) -> torch.Tensor:
    converted = tensor.to(dtype)
    # the sum says which conversions to look at value by value, at a fraction of the cost of that: a finite one proves
    # every value finite, and one that is not zero that some value is not
    total = float(converted.sum(dtype=torch.float32))
    if not math.isfinite(total) and not converted.isfinite().all():
        finite = bool(tensor.double().isfinite().all())
        problems.add(f"values beyond the range of the package's {dtype}" if finite else "NaN or infinite values", name)
    if total == 0 and not converted.any() and tensor.double().any():
        problems.add(
            f"values too small for the package's {dtype}, in which all of them would be zero; "
            "build the package in a dtype of a wider range, such as bfloat16",
            name,
        )
    return converted


def _write(
    item: Placement,
    a: torch.Tensor,
    b: torch.Tensor,
    tables: Tables,
    layout: Layout,
    shard: Shard,
    shared: set,
    problems: Problems,
) -> None:
    """Copy this rank's share of a pair into its place."""
    module, piece = item.module, item.module.slices[item.slice]
    a = _share(a, -1, module.in_features, module.full_in_features, shard.tp, layout.tp)
    b = _share(b, -2, piece.width, piece.full_width, shard.tp, layout.tp)
    tables.rank[item.instance, item.slice] = max(int(tables.rank[item.instance, item.slice]), item.rank)
    tables.scale[item.instance, item.slice] = item.scale
    for expert in _experts(item, module, shard):
        own_a, own_b = (a[expert], b[expert]) if item.stack else (a, b)
        local = expert - shard.ep * module.experts.local if module.experts else 0
        into_a, into_b = _factors(module, tables, item.instance, item.slice, local)
        into_b = into_b[piece.start : piece.start + own_b.shape[0]]
        for side, into, own in (
            ("a", into_a[: item.rank, : own_a.shape[1]], own_a),
            ("b", into_b[:, : item.rank], own_b),
        ):
            if module.experts and getattr(module.experts, f"shared_{side}"):
                key = (module.name, item.instance, item.slice, side)
                if key in shared and not torch.equal(into, own):
                    problems.add(
                        f"the experts of {module.name} differ in {side.upper()}, of which {layout.name} keeps one; "
                        "set adapters.shared_outer_experts to false in the spec and rebuild"
                    )
                shared.add(key)
            into.copy_(own)


def _experts(item: Placement, module: Module, shard: Shard) -> range | tuple[int, ...]:
    """The experts of a placement that live on this rank; one stand-in for a module without experts."""
    if module.experts is None:
        return (0,)
    local = range(shard.ep * module.experts.local, (shard.ep + 1) * module.experts.local)
    if item.expert is None:
        return local
    return (item.expert,) if item.expert in local else ()


def _factors(
    module: Module, tables: Tables, instance: int, index: int, expert: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """A [r, in] of one slice and B [out, r] of the whole module, as views."""
    if module.kind == "embedding":
        return tables.a[0].mT, tables.b[0]
    if module.experts is None:
        return tables.a[instance, index], tables.b[instance]
    at_a, at_b = (0 if shared else expert for shared in (module.experts.shared_a, module.experts.shared_b))
    return tables.a[instance, at_a, index], tables.b[instance, at_b]


def _share(tensor: torch.Tensor, dim: int, size: int, full: int, rank: int, ranks: int) -> torch.Tensor:
    """This rank's share of a dimension. With fewer shares than ranks (kv heads), neighbours hold the same one."""
    if size == full:
        return tensor
    shares = -(-full // size)
    start = min(full, (rank * shares // ranks) * size)
    return tensor.narrow(dim, start, min(size, full - start))


def _aligned(dtype: torch.dtype, shape: tuple[int, ...]) -> int:
    return -(-prod(shape) * dtype.itemsize // _ALIGN) * _ALIGN
