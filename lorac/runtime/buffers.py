"""The device memory of all slots: A and B of every module, at addresses that never change, and the copy into a slot."""

from typing import TYPE_CHECKING

import torch
from triton.runtime.driver import driver

from lorac.runtime.errors import SlotError
from lorac.runtime.layout import Layout, Module

if TYPE_CHECKING:
    from lorac.runtime.adapters import Adapter
    from lorac.runtime.adapters.pack import Block, Tables


class Instance(tuple):
    """(a, b, rank, scale) of a module in one layer; `narrow` has the copies of b by their width, narrow to wide."""

    narrow: dict[int, torch.Tensor]

    def narrowest(self, rank: int, spans: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The narrowest B that adapters of `rank` fit in, as a matrix [out, slots * width], and the spans it has in a
        map.
        """
        for place, (width, copy) in enumerate(self.narrow.items(), 1):
            if rank <= width:
                return copy.flatten(1), spans[place]
        return self[1].flatten(1), spans[0]


class Buffers:
    """One tensor per module and table, zero where no adapter is. Per module of `layout`:

    a: [instances, slots, slices * R, in]; of the embedding [1, slots, vocab, R]
    b: [instances, out, slots, R]
    of experts, a: [instances, slots, experts, slices * R, in], b: [instances, slots, experts, out, R]
    rank, scale: [instances, slots, slices], int32 and float32; rank 0 where the slot has nothing
    narrow: copies of b by the columns a slot has in them, for kernels that read all columns of a slot; of adapters
        that fit

    On a CUDA device an adapter is copied to a staging buffer first (`stage`), beside running work, and then spread into
    its slot on the device (`commit`), which is short. `staging` grows to the largest adapter and stays.
    """

    def __init__(self, layout: Layout, device: torch.device):
        self.layout, self.device = layout, device
        self.a, self.b, self.rank, self.scale = {}, {}, {}, {}
        self.narrow: dict[str, dict[int, torch.Tensor]] = {}
        dtype = getattr(torch, layout.dtype)
        for module in layout.modules:
            for tables, (shape, kind) in zip(
                (self.a, self.b, self.rank, self.scale), shapes(module, layout), strict=True
            ):
                tables[module.name] = torch.zeros(shape, dtype=kind or dtype, device=device)
            shape = self.b[module.name].shape[:-1]
            self.narrow[module.name] = {
                width: torch.zeros(*shape, width, dtype=dtype, device=device) for width in module.narrow
            }
        self._extents: list[dict[str, int]] = [{} for _ in range(layout.slots)]  # the rank each slot's tables hold
        self._tables: dict[tuple[str, int], Tables] = {}  # views by module and slot: making them costs as a launch does
        self._cuda = device.type == "cuda"
        if self._cuda:
            self.stream = torch.cuda.Stream(device)
            self.staging = torch.empty(0, dtype=torch.uint8, device=device)
            self._committed = torch.cuda.Event()
            self._commits = 0
            # by handle: streams whose steps may read slots, with the commits each has waited for
            self._readers: dict[int, tuple[torch.cuda.Stream, int]] = {}
            self.stream.wait_stream(torch.cuda.current_stream(device))
            self._committed.record(self.stream)

    @property
    def bytes(self) -> dict[str, int]:
        """Bytes of each module's tables."""
        every = (self.a, self.b, self.rank, self.scale)
        copies = {name: sum(copy.nbytes for copy in of.values()) for name, of in self.narrow.items()}
        return {name: copies[name] + sum(tables[name].nbytes for tables in every) for name in self.a}

    def instance(self, module: str, index: int) -> Instance:
        """A module's tensors in the `index`-th of the layers that have it."""
        made = Instance(table[module][index] for table in (self.a, self.b, self.rank, self.scale))
        made.narrow = {width: copy[index] for width, copy in self.narrow[module].items()}
        return made

    def renew_copies(self) -> None:
        """Make the copies of B again, for who has written to `b` itself."""
        for name, copies in self.narrow.items():
            for width, copy in copies.items():
                copy.copy_(self.b[name][..., :width])

    def stage(self, adapter: "Adapter") -> torch.Tensor:
        """The adapter's bytes on the device, when they have arrived; may run beside steps, and changes no slot.

        Raises torch.OutOfMemoryError where the staging buffer cannot grow, SlotError while a graph is being captured.
        """
        if not self._cuda:
            return adapter.buffer
        with torch.cuda.device(self.device):
            if torch.cuda.is_current_stream_capturing():
                raise SlotError("an adapter cannot be loaded while a CUDA graph is captured; load it before or after")
        with torch.cuda.stream(self.stream):
            if self.staging.numel() < adapter.nbytes:
                self.staging = torch.empty(0, dtype=torch.uint8, device=self.device)  # give back before growing
                self.staging = torch.empty(adapter.nbytes, dtype=torch.uint8, device=self.device)
            staged = self.staging[: adapter.nbytes]
            staged.copy_(adapter.buffer, non_blocking=True)
            arrived = self.stream.record_event()
        # waited for here, so that a step only ever waits for the short commit, and the host's bytes outlive the copy
        arrived.synchronize()
        return staged

    def commit(self, slot: int, blocks: "tuple[Block, ...]", staged: torch.Tensor | None) -> None:
        """Make a slot hold exactly `blocks` of `staged` (nothing, if there are none): after the steps that read it."""
        if not self._cuda:
            self._write(slot, blocks, staged)
            return
        with torch.cuda.stream(self.stream):
            for reader, _ in self._readers.values():
                self.stream.wait_stream(reader)
            self._write(slot, blocks, staged)
            self._committed.record(self.stream)
            self._commits += 1

    def before_step(self, stream: "torch.cuda.Stream | None") -> None:
        """Let `stream` (None: the current one) read slots: it waits for what has been committed, commits wait for it.

        Steps are many and commits few: what a step has enqueued when a commit comes is what the commit waits for.
        """
        if not self._cuda:
            return
        # asking torch for a stream costs as much as a launch, so its handle is asked for
        handle = stream.cuda_stream if stream else driver.active.get_current_stream(self.device.index)
        if handle not in self._readers or self._readers[handle][1] != self._commits:
            stream = stream or torch.cuda.current_stream(self.device)
            stream.wait_event(self._committed)
            self._readers[handle] = stream, self._commits

    def _write(self, slot: int, blocks: "tuple[Block, ...]", staged: torch.Tensor | None) -> None:
        old, new = self._extents[slot], {block.module.name: block.rank for block in blocks}
        for name, held in old.items():
            covered = new.get(name, 0)
            if covered >= held:
                continue
            tables = self._slot_tables(self.layout.by_name[name], slot)
            tables.a[..., covered:held, :].zero_()
            tables.b[..., covered:held].zero_()
            for width, copy in self._copies(name, slot):
                copy[..., min(covered, width) : held].zero_()
            if not covered:
                tables.rank.zero_()
                tables.scale.zero_()
        for block in blocks:
            tables, source = self._slot_tables(block.module, slot), block.tables(staged)
            # the embedding's A has a row per token, and its rank last
            tables.a[..., : block.rank, :].copy_(source.a.mT if block.module.kind == "embedding" else source.a)
            tables.b[..., : block.rank].copy_(source.b)
            for width, copy in self._copies(block.module.name, slot):
                if block.rank <= width:
                    copy[..., : block.rank].copy_(source.b)
                elif 0 < old.get(block.module.name, 0) <= width:
                    copy.zero_()
            tables.rank.copy_(source.rank)
            tables.scale.copy_(source.scale)
        self._extents[slot] = new

    def _copies(self, name: str, slot: int) -> list[tuple[int, torch.Tensor]]:
        """One slot's part of a module's copies of B, [instances, out, width]."""
        return [(width, copy[:, :, slot]) for width, copy in self.narrow[name].items()]

    def _slot_tables(self, module: Module, slot: int) -> "Tables":
        """One slot's part of a module's tables: a [..., R, in], b [..., out, R]."""
        if (module.name, slot) not in self._tables:
            self._tables[module.name, slot] = self._cut(module, slot)
        return self._tables[module.name, slot]

    def _cut(self, module: Module, slot: int) -> "Tables":
        from lorac.runtime.adapters.pack import Tables  # with the first adapter: it takes half as long as all the rest

        a, b, name = self.a[module.name][:, slot], self.b[module.name], module.name
        if module.kind == "embedding":
            a = a.mT
        else:
            a = a.unflatten(-2, (len(module.slices), self.layout.max_rank))
        b = b[:, slot] if module.experts else b[:, :, slot]
        return Tables(a, b, self.rank[name][:, slot], self.scale[name][:, slot])


def shapes(module: Module, layout: Layout) -> list[tuple[tuple[int, ...], torch.dtype | None]]:
    """(shape, dtype) of a module's a, b, rank and scale; None is the package's dtype."""
    slots, rank, slices, experts = layout.slots, layout.max_rank, len(module.slices), module.experts
    if module.kind == "embedding":
        a, b = (1, slots, module.in_features, rank), (1, module.out_features, slots, rank)
    elif experts is not None:
        a_experts, b_experts = (1 if shared else experts.local for shared in (experts.shared_a, experts.shared_b))
        a = (module.instances, slots, a_experts, slices * rank, module.in_features)
        b = (module.instances, slots, b_experts, module.out_features, rank)
    else:
        a = (module.instances, slots, slices * rank, module.in_features)
        b = (module.instances, module.out_features, slots, rank)
    table = (module.instances, slots, slices)
    return [(a, None), (b, None), (table, torch.int32), (table, torch.float32)]
