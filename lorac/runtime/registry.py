"""What adapter names stand for, and the adapters behind them on the host."""

import difflib
import itertools
import os
from contextlib import nullcontext
from typing import TYPE_CHECKING, NamedTuple

import torch

from lorac.runtime.cache import HostCache
from lorac.runtime.errors import AdapterError, SlotError
from lorac.runtime.layout import Layout

if TYPE_CHECKING:
    from lorac.runtime.adapters import Adapter


class Source(NamedTuple):
    """One version of a name: a folder, or an adapter that was prepared elsewhere. Versions are never used twice."""

    version: int
    what: "str | Adapter"


class Registry:
    """Names to sources; callers serialise changes of names. `cache` holds what was read from folders."""

    def __init__(self, layout: Layout, tp_rank: int, ep_rank: int, device: torch.device, cache_bytes: int):
        self.layout, self.cache = layout, HostCache(cache_bytes)
        self._ranks, self._device = (tp_rank, ep_rank), device
        self._sources: dict[str, Source] = {}
        self._versions = itertools.count(1)

    def source(self, what: "str | os.PathLike | Adapter") -> Source:
        """A new version, of no name yet."""
        from lorac.runtime.adapters import Adapter  # with the first adapter: it takes half as long as all the rest

        return Source(next(self._versions), what if isinstance(what, Adapter) else os.fspath(what))

    def register(self, name: str, source: Source) -> None:
        """Let `name` stand for a source, instead of what it stood for."""
        if not isinstance(name, str) or not name:
            raise SlotError(f"an adapter's name is {name!r}; expected a string that is not empty")
        if name in self._sources:
            self.cache.drop(self._sources[name].version)
        self._sources[name] = source

    def unregister(self, name: str) -> None:
        """Forget a name and what is kept for it."""
        self.cache.drop(self[name].version)
        del self._sources[name]

    def rename(self, old: str, new: str) -> None:
        """Let `new` stand for what `old` stood for. Raises SlotError if `new` is taken."""
        source = self[old]
        if new in self._sources:
            raise SlotError(f"adapter {new!r} exists already; unregister it, or choose another name for {old!r}")
        self.register(new, source)
        del self._sources[old]

    def names(self) -> list[str]:
        """All names, in the order they were registered."""
        return list(self._sources)

    def get(self, name: str) -> Source | None:
        """What a name stands for, if anything."""
        return self._sources.get(name)

    def __getitem__(self, name: str) -> Source:
        """What a name stands for. Raises SlotError with the nearest names where that is nothing."""
        if name not in self._sources:
            near = difflib.get_close_matches(str(name), self._sources, n=3) or self.names()[:3]
            hint = f"did you mean {', '.join(map(repr, near))}?" if near else "nothing is registered yet"
            raise SlotError(f"no adapter is called {name!r}; {hint}")
        return self._sources[name]

    def prepare(self, source: Source) -> "Adapter":
        """The adapter of a source, from the cache or read now. Raises AdapterError for one this rank cannot serve."""
        from lorac.runtime.adapters import Adapter, read_adapter

        if isinstance(source.what, Adapter):
            shard = source.what.shard
            if source.what.layout != self.layout or (shard.tp, shard.ep) != self._ranks:
                raise AdapterError(
                    f"adapter {source.what.folder} was prepared for package {source.what.layout.name} and {shard}; "
                    f"expected {self.layout.name} and ranks {self._ranks}: read it with this package's layout"
                )
            return source.what
        adapter = self.cache.get(source.version)
        if adapter is None:
            (tp_rank, ep_rank), pin = self._ranks, self._device.type == "cuda"
            # a thread's current device is the first one until it says otherwise, and pinning would open a context there
            with torch.cuda.device(self._device) if pin else nullcontext():
                adapter = read_adapter(source.what, self.layout, tp_rank=tp_rank, ep_rank=ep_rank, pin=pin)
            self.cache.put(source.version, adapter)
        return adapter
