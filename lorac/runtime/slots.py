"""Adapters by name over a few slots: registered on the host, resident on the device, swapped while steps run."""

import os
import threading
from array import array
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from lorac.runtime.buffers import Buffers, Instance
from lorac.runtime.errors import PackageError, ShapeError, SlotError
from lorac.runtime.layout import Layout
from lorac.runtime.registry import Registry, Source
from lorac.runtime.residents import REMEDIES, Resident, Residents, slots_of

if TYPE_CHECKING:
    from lorac.runtime.adapters import Adapter


class Slots:
    """The slots of one package on one device, and on one rank under tensor or expert parallelism.

    `a`, `b`, `rank` and `scale` are the tables kernels read, by module; `Buffers` gives their shapes, and their
    addresses never change. Who writes to `b` itself calls `renew_copies`. `generation` grows with every change of a
    slot or a resident's name, `slot_generation[slot]` with every change of what that slot holds. `cache_bytes` bounds
    the adapters kept on the host. Raises PackageError for a rank that the package was not built for, and where `device`
    is a GPU and there is none.

    Any thread may call any method. `lock` guards names, slots and tables, and is held briefly: by a load while it
    commits, and by a step from looking slots up or checking its ticket to the end of its launches (`reading`).
    """

    def __init__(
        self,
        layout: Layout,
        device: str | torch.device = "cuda",
        *,
        tp_rank: int = 0,
        ep_rank: int = 0,
        cache_bytes: int = 8 << 30,
    ):
        layout.check_ranks(tp_rank, ep_rank)
        self.layout, self.dtype, self.device = layout, getattr(torch, layout.dtype), torch.device(device)
        if self.device.type == "cuda":
            if not torch.cuda.is_available():
                raise PackageError(
                    f"package {layout.name} cannot have its slots on {device}: torch finds no GPU here; "
                    'device="cpu" serves for tests'
                )
            if self.device.index is None:
                self.device = torch.device("cuda", torch.cuda.current_device())
        self.lock = threading.RLock()
        self.generation = 0
        self.slot_generation = [0] * layout.slots
        self._buffers = Buffers(layout, self.device)
        self.a, self.b = self._buffers.a, self._buffers.b
        self.rank, self.scale = self._buffers.rank, self._buffers.scale
        self._registry = Registry(layout, tp_rank, ep_rank, self.device, cache_bytes)
        self._residents = Residents(layout.slots)
        self._abandoned: deque[Sequence[int]] = deque()
        self._staging = threading.Lock()  # one copy at a time; taken before `lock`, never inside it
        self._instances = {
            (module.name, layer): self._buffers.instance(module.name, index)
            for module in layout.modules
            for index, layer in enumerate(module.layers or (0,))
        }

    # --- names

    def register(self, name: str, source: "str | os.PathLike | Adapter") -> None:
        """Let `name` stand for an adapter folder (or a prepared adapter), which `ensure` reads when it is needed.

        A name registered again stands for a new version; the old one is served until `ensure` or `load` replaces it.
        """
        with self.lock:
            self._registry.register(name, self._registry.source(source))

    def unregister(self, name: str) -> None:
        """Forget a name, and evict its adapter if it is resident. Raises SlotError as `evict` does."""
        with self.lock:
            if name in self._residents.by_name:
                self.evict(name)
            self._registry.unregister(name)

    def rename(self, old: str, new: str) -> None:
        """Give an adapter another name, wherever it is. Raises SlotError if `new` is taken."""
        with self.lock:
            self._registry.rename(old, new)
            if old in self._residents.by_name:
                self._residents.rename(old, new)
                self.generation += 1

    @property
    def names(self) -> list[str]:
        """All registered names, resident or not."""
        with self.lock:
            return self._registry.names()

    # --- what the slots hold

    def slot_of(self, name: str) -> int:
        """The slot of a resident adapter. Raises SlotError for one that is not resident, or not known."""
        with self.lock:
            return self._resident(name).slot

    def lookup(self, names: Collection[str | None]) -> array:
        """The slot of each name, -1 for None. Raises SlotError as `slot_of`."""
        with self.lock:
            slots = self._residents.slots
            for absent in set(names).difference(slots):
                self._resident(absent)  # which raises: it is in no slot
            return slots_of(slots, names)

    def slot_rank(self, slot: int) -> int:
        """The largest rank of the adapter in a slot, 0 for an empty one."""
        resident = self._residents.by_slot[slot]
        return resident.rank if resident else 0

    def renew_copies(self) -> None:
        """Make the narrower copies of B again, for who has written to `b` itself; loading does so on its own."""
        self._buffers.renew_copies()

    def instance(self, module: str, layer: int = 0) -> Instance:
        """(a, b, rank, scale) of a module in one decoder layer; layer 0 for lm_head and embed_tokens."""
        found = self._instances.get((module, layer))
        if found is None:
            raise ShapeError(f"package {self.layout.name} has no module {module!r} in layer {layer}")
        return found

    def adapters(self) -> list[Resident]:
        """Copies of what the slots hold, by slot."""
        with self.lock:
            self._reclaim()
            return [replace(resident) for resident in self._residents.by_slot if resident is not None]

    @property
    def bytes(self) -> dict[str, int]:
        """Device bytes of each module's tables."""
        return self._buffers.bytes

    @property
    def host_bytes(self) -> int:
        """Bytes of the adapters kept on the host, at most `cache_bytes`."""
        return self._registry.cache.bytes

    # --- residence

    def load(self, source: "str | os.PathLike | Adapter", name: str) -> int:
        """Read an adapter now, register it and make it resident under `name`; returns its slot.

        A resident adapter of that name is replaced in its own slot, all at once. Otherwise the lowest free slot is
        taken, or that of the least recently used adapter that is neither pinned nor in use. Raises AdapterError,
        SlotError or torch.OutOfMemoryError; then every slot and name is as it was.
        """
        version = self._registry.source(source)
        adapter = self._registry.prepare(version)
        with self._staging:
            staged = self._buffers.stage(adapter)
            with self.lock:
                self._reclaim()
                slot = self._residents.choose(name)
                self._registry.register(name, version)
                self._occupy(slot, name, version, adapter, staged)
                return slot

    def ensure(self, names: Iterable[str | None], *, use: bool = False) -> dict[str, int]:
        """Make every named adapter resident in its registered version; returns name to slot. None stands for base rows.

        With `use`, the slots are in use when this returns, as after `use`. Raises SlotError for an unknown name, and
        where the batch needs more slots than it can have; AdapterError where an adapter cannot be read (those named
        before it may have been loaded then).
        """
        wanted = list(dict.fromkeys(name for name in names if name is not None))
        while True:
            with self.lock:
                missing = [name for name in wanted if not self._is_current(name)]
                if not missing:
                    return self._found(wanted, use)
                self._reclaim()
                self._residents.check_room(wanted)
            for name in missing:
                self._bring(name, wanted)

    def evict(self, name: str) -> None:
        """Empty an adapter's slot; the name stays registered. Raises SlotError if it is pinned or in use."""
        with self.lock:
            self._reclaim()
            resident = self._resident(name)
            if resident.state:
                remedy = REMEDIES[resident.state]
                raise SlotError(f"adapter {name!r} in slot {resident.slot} is {resident.state}; {remedy}")
            self._buffers.commit(resident.slot, (), None)
            self._residents.remove(resident)
            self._changed(resident.slot)

    def pin(self, name: str) -> None:
        """Keep a resident adapter from being evicted."""
        with self.lock:
            self._resident(name).pinned = True

    def unpin(self, name: str) -> None:
        """Let a pinned adapter be evicted again."""
        with self.lock:
            self._resident(name).pinned = False

    # --- steps

    def use(self, slots: Iterable[int]) -> None:
        """Count one more user of each slot, which keeps its adapter from being evicted until `release`."""
        with self.lock:
            self._residents.use(slots)

    def release(self, slots: Iterable[int]) -> None:
        """Count one user less of each slot."""
        with self.lock:
            self._residents.release(slots)

    def abandon(self, slots: Sequence[int]) -> None:
        """`release`, for finalisers: it is done when a method next asks who uses the slots.

        A finaliser runs in the middle of anything. It must not wait for `lock`, whose holder may wait for what the
        interrupted thread holds; and where that thread holds it, a method is half done.
        """
        self._abandoned.append(slots)

    def before_step(self, stream: "torch.cuda.Stream | None" = None) -> None:
        """Order `stream` (None: the current one) with commits; `lock` is to be held until its launches are made."""
        self._buffers.before_step(stream)

    @contextmanager
    def reading(self, stream: "torch.cuda.Stream | None" = None) -> Iterator[None]:
        """A step's launches on `stream` (None: the current one) go inside: no slot changes between them."""
        with self.lock:
            self.before_step(stream)
            yield

    # --- inside

    def _reclaim(self) -> None:
        while self._abandoned:
            for slot in self._abandoned.popleft():
                with suppress(SlotError):  # released by someone before, which is no fault of who asks now
                    self.release((slot,))

    def _found(self, names: list[str], use: bool) -> dict[str, int]:
        slots = {name: self._residents.by_name[name].slot for name in names}
        for name in names:
            self._residents.touch(self._residents.by_name[name])
        if use:
            self._residents.use(slots.values())
        return slots

    def _bring(self, name: str, keep: list[str]) -> None:
        """Make a registered adapter resident without displacing those of `keep`."""
        with self.lock:
            if self._is_current(name):
                return
            source = self._registry[name]
        adapter = self._registry.prepare(source)
        with self._staging:
            staged = self._buffers.stage(adapter)
            with self.lock:
                if self._registry.get(name) is source:  # else renamed or registered anew: the caller looks again
                    self._occupy(self._residents.choose(name, keep), name, source, adapter, staged)

    def _occupy(self, slot: int, name: str, source: Source, adapter: "Adapter", staged: torch.Tensor) -> None:
        self._buffers.commit(slot, adapter.blocks, staged)
        self._residents.put(Resident(name, source.version, slot, adapter.folder, adapter.rank, adapter.nbytes))
        self._changed(slot)

    def _changed(self, slot: int) -> None:
        self.generation += 1
        self.slot_generation[slot] += 1

    def _is_current(self, name: str) -> bool:
        source, resident = self._registry[name], self._residents.by_name.get(name)
        return resident is not None and resident.version == source.version

    def _resident(self, name: str) -> Resident:
        self._registry[name]  # an unknown name has its own error
        if name not in self._residents.by_name:
            raise SlotError(f"adapter {name!r} is registered but in no slot; `ensure` or `load` it first")
        return self._residents.by_name[name]
