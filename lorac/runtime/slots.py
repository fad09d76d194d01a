"""Adapters by name over a few slots: registered on the host, resident on the device, swapped under load.

Two locks. `_loading` lets one load run at a time; `lock` guards names, slots and device tables, and is held briefly: by a
load while it commits, and by a step from checking its ticket to the end of its launches (`reading`). Taken in that order.
"""

import difflib
import itertools
import os
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from lorac.runtime.adapters import Adapter, read_adapter
from lorac.runtime.buffers import Buffers
from lorac.runtime.cache import HostCache
from lorac.runtime.errors import AdapterError, SlotError
from lorac.runtime.layout import Layout

_CACHE_BYTES = 8 << 30


@dataclass
class Resident:
    """The adapter in one slot. `version` is unique for ever; `users` counts the tickets that refer to the slot."""

    name: str
    version: int
    slot: int
    source: str
    rank: int
    bytes: int
    pinned: bool = False
    users: int = 0
    used: int = field(default=0, repr=False)  # by a clock of uses


@dataclass(frozen=True)
class _Source:
    """What a name stands for: a folder, or an adapter that was prepared elsewhere."""

    version: int
    what: str | Adapter


class Slots:
    """The slots of one package on one device (and one rank, under tensor or expert parallelism).

    `a`, `b`, `rank` and `scale` are the tables kernels read, by module; their shapes stand in `Buffers`, and their addresses
    never change. `generation` grows with every change of a name or a slot, `slot_generation[slot]` with every change of
    what that slot holds.
    """

    def __init__(
        self,
        layout: Layout,
        device: str | torch.device = "cuda",
        *,
        tp_rank: int = 0,
        ep_rank: int = 0,
        cache_bytes: int = _CACHE_BYTES,
    ):
        self.layout, self.device = layout, torch.device(device)
        if self.device.type == "cuda" and self.device.index is None:
            self.device = torch.device("cuda", torch.cuda.current_device())
        self.lock = threading.RLock()
        self.generation = 0
        self.slot_generation = [0] * layout.slots
        self._ranks = {"tp_rank": tp_rank, "ep_rank": ep_rank}
        self._buffers = Buffers(layout, self.device)
        self.a, self.b = self._buffers.a, self._buffers.b
        self.rank, self.scale = self._buffers.rank, self._buffers.scale
        self._loading = threading.Lock()
        self._cache = HostCache(cache_bytes)
        self._sources: dict[str, _Source] = {}
        self._residents: dict[str, Resident] = {}
        self._slots: list[Resident | None] = [None] * layout.slots
        self._versions, self._clock = itertools.count(1), itertools.count(1)

    # --- names

    def register(self, name: str, source: str | os.PathLike | Adapter) -> None:
        """Let `name` stand for an adapter folder (or a prepared adapter), which `ensure` reads when it is needed.

        A name registered again stands for a new version: the old one is served until `ensure` or `load` replaces it.
        """
        with self.lock:
            self._register(name, _Source(next(self._versions), source if isinstance(source, Adapter) else str(source)))

    def unregister(self, name: str) -> None:
        """Forget a name, and evict its adapter if it is resident. Raises SlotError as `evict` does."""
        with self.lock:
            self._known(name)
            if name in self._residents:
                self.evict(name)
            self._cache.drop(self._sources.pop(name).version)

    def rename(self, old: str, new: str) -> None:
        """Give an adapter another name, wherever it is. Raises SlotError if `new` is taken."""
        with self.lock:
            self._known(old)
            if new in self._sources:
                raise SlotError(f"adapter {new!r} exists already; unregister it, or choose another name for {old!r}")
            self._sources[new] = self._sources.pop(old)
            if old in self._residents:
                resident = self._residents[new] = self._residents.pop(old)
                resident.name = new
            self.generation += 1

    def slot_of(self, name: str) -> int:
        """The slot of a resident adapter. Raises SlotError for one that is not resident or not known."""
        with self.lock:
            return self._resident(name).slot

    def adapters(self) -> list[Resident]:
        """Copies of what the slots hold, by slot."""
        with self.lock:
            return [Resident(**vars(resident)) for resident in self._slots if resident is not None]

    @property
    def registered(self) -> list[str]:
        """All known names, resident or not."""
        with self.lock:
            return list(self._sources)

    @property
    def bytes(self) -> dict[str, int]:
        """Device bytes of each module's tables."""
        return self._buffers.bytes

    # --- residence

    def load(self, source: str | os.PathLike | Adapter, name: str) -> int:
        """Read an adapter and make it resident under `name`; returns its slot.

        A resident adapter of that name is replaced in its own slot, all at once. Otherwise the lowest free slot is taken, or
        that of the least recently used adapter that is neither pinned nor in use. Raises AdapterError or SlotError, and
        then slots and names are as they were. May be called from any thread while steps run.
        """
        with self._loading:
            item = _Source(next(self._versions), source if isinstance(source, Adapter) else str(source))
            adapter = self._prepare(item, name)
            staged = self._buffers.stage(adapter)
            with self.lock:
                slot = self._choose(name, keep=())
                self._register(name, item)
                self._occupy(name, item, adapter, staged, slot)
                if not isinstance(item.what, Adapter):
                    self._cache.put(item.version, adapter)
                return slot

    def ensure(self, names: Iterable[str | None], *, use: bool = False) -> dict[str, int]:
        """Make every named adapter resident in its registered version; returns name to slot. None stands for base rows.

        With `use`, the slots are in use when this returns, as after `use`. Raises SlotError for an unknown name or more
        adapters than there are slots to have, AdapterError for one that cannot be read; others of the batch may have been
        loaded by then.
        """
        wanted = list(dict.fromkeys(name for name in names if name is not None))
        if len(wanted) > self.layout.slots:
            raise SlotError(
                f"a batch of {len(wanted)} adapters, and package {self.layout.name} has {self.layout.slots} slots; "
                "split the batch, or raise adapters.slots in the spec and rebuild"
            )
        while True:
            with self.lock:
                missing = [name for name in wanted if not self._is_current(name)]
                if not missing:
                    return self._found(wanted, use)
            with self._loading:
                for name in missing:
                    self._bring(name, wanted)

    def evict(self, name: str) -> None:
        """Empty an adapter's slot; the name stays registered. Raises SlotError if it is pinned or in use."""
        with self.lock:
            resident = self._resident(name)
            if resident.pinned or resident.users:
                state = "pinned; unpin it first" if resident.pinned else f"in use by {resident.users} tickets"
                raise SlotError(f"adapter {name!r} in slot {resident.slot} is {state}")
            self._buffers.commit(resident.slot, (), None)
            self._vacate(resident)
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
            held = [self._slots[slot] for slot in slots]
            if None in held:
                raise SlotError(f"slot {list(slots)[held.index(None)]} is empty and cannot be used")
            for resident in held:
                resident.users += 1
                resident.used = next(self._clock)

    def release(self, slots: Iterable[int]) -> None:
        """Count one user less of each slot."""
        with self.lock:
            for slot in slots:
                if self._slots[slot] is None or not self._slots[slot].users:
                    raise SlotError(f"slot {slot} is not in use; expected one `use` before each `release`")
                self._slots[slot].users -= 1

    def before_step(self, stream: "torch.cuda.Stream | None" = None) -> None:
        """Make `stream` wait for the adapters committed so far. Hold `lock` from here to `after_step`, or use `reading`."""
        self._buffers.before_step(stream)

    def after_step(self, stream: "torch.cuda.Stream | None" = None) -> None:
        """Keep later commits from overtaking what `stream` has been given."""
        self._buffers.after_step(stream)

    @contextmanager
    def reading(self, stream: "torch.cuda.Stream | None" = None) -> Iterator[None]:
        """A step's launches go inside: no slot changes between them."""
        with self.lock:
            self.before_step(stream)
            try:
                yield
            finally:
                self.after_step(stream)

    # --- inside: `lock` is held, except in _prepare and _bring

    def _prepare(self, source: _Source, name: str) -> Adapter:
        if not isinstance(source.what, Adapter):
            return read_adapter(source.what, self.layout, pin=self.device.type == "cuda", **self._ranks)
        adapter, shard = source.what, source.what.shard
        if adapter.layout != self.layout or {"tp_rank": shard.tp, "ep_rank": shard.ep} != self._ranks:
            raise AdapterError(
                f"adapter {name!r} was prepared for package {adapter.layout.name} on rank {shard}; "
                f"expected {self.layout.name} on {self._ranks}: read it again with that layout and rank"
            )
        return adapter

    def _bring(self, name: str, keep: list[str]) -> None:
        """Make one registered adapter resident without displacing those of `keep`; `_loading` is held."""
        with self.lock:
            if self._is_current(name):
                return
            source = self._sources[name]
            adapter = self._cache.get(source.version)
        if adapter is None:
            adapter = self._prepare(source, name)
            if not isinstance(source.what, Adapter):
                with self.lock:
                    self._cache.put(source.version, adapter)
        staged = self._buffers.stage(adapter)
        with self.lock:
            if self._sources.get(name) is source:  # else renamed or registered anew meanwhile: the caller looks again
                self._occupy(name, source, adapter, staged, self._choose(name, keep))

    def _found(self, names: list[str], use: bool) -> dict[str, int]:
        slots = {name: self._residents[name].slot for name in names}
        if use:
            self.use(slots.values())
        for name in names:
            self._residents[name].used = next(self._clock)
        return slots

    def _choose(self, name: str, keep: Iterable[str]) -> int:
        """The slot `name` may take: its own, a free one, or that of the least recently used which may go."""
        if name in self._residents:
            return self._residents[name].slot
        if None in self._slots:
            return self._slots.index(None)
        may_go = [held for held in self._slots if not (held.pinned or held.users or held.name in keep)]
        if not may_go:
            holders = ", ".join(
                f"{held.name} ({'pinned' if held.pinned else 'in use' if held.users else 'in this batch'})"
                for held in self._slots
            )
            raise SlotError(f"no slot for adapter {name!r}: all {self.layout.slots} are taken by {holders}")
        return min(may_go, key=lambda held: held.used).slot

    def _occupy(self, name: str, source: _Source, adapter: Adapter, staged: torch.Tensor, slot: int) -> None:
        self._buffers.commit(slot, adapter.blocks, staged)
        old = self._slots[slot]
        if old is not None:
            self._vacate(old)
        resident = Resident(
            name, source.version, slot, adapter.folder, adapter.rank, adapter.nbytes, used=next(self._clock)
        )
        if old is not None and old.name == name:  # a new version in the same place: who holds it still does
            resident.pinned, resident.users = old.pinned, old.users
        self._slots[slot] = self._residents[name] = resident
        self._changed(slot)

    def _vacate(self, resident: Resident) -> None:
        del self._residents[resident.name]
        self._slots[resident.slot] = None

    def _changed(self, slot: int) -> None:
        self.generation += 1
        self.slot_generation[slot] += 1

    def _register(self, name: str, source: _Source) -> None:
        if not isinstance(name, str) or not name:
            raise SlotError(f"an adapter's name is {name!r}; expected a string that is not empty")
        if name in self._sources:
            self._cache.drop(self._sources[name].version)
        self._sources[name] = source

    def _is_current(self, name: str) -> bool:
        self._known(name)
        resident = self._residents.get(name)
        return resident is not None and resident.version == self._sources[name].version

    def _resident(self, name: str) -> Resident:
        self._known(name)
        if name not in self._residents:
            raise SlotError(f"adapter {name!r} is registered but in no slot; `ensure` or `load` it first")
        return self._residents[name]

    def _known(self, name: str) -> None:
        if name not in self._sources:
            near = difflib.get_close_matches(str(name), self._sources, n=3) or list(self._sources)[:3]
            hint = f"did you mean {', '.join(map(repr, near))}?" if near else "nothing is registered yet"
            raise SlotError(f"no adapter is called {name!r}; {hint}")
