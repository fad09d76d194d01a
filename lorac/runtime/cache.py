"""Prepared adapters kept on the host, so that bringing one back to a slot is one copy."""

import threading
from collections import OrderedDict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lorac.runtime.adapters import Adapter


class HostCache:
    """Adapters by version, the least recently used dropped first when they pass `limit` bytes together. Thread-safe."""

    def __init__(self, limit: int):
        self.limit, self.bytes = limit, 0
        self._kept: OrderedDict[int, Adapter] = OrderedDict()
        self._lock = threading.RLock()

    def get(self, version: int) -> "Adapter | None":
        """The adapter of that version, now the most recently used."""
        with self._lock:
            if version in self._kept:
                self._kept.move_to_end(version)
            return self._kept.get(version)

    def put(self, version: int, adapter: "Adapter") -> None:
        """Keep an adapter, unless it alone passes the limit."""
        with self._lock:
            self.drop(version)
            if adapter.nbytes > self.limit:
                return
            self._kept[version] = adapter
            self.bytes += adapter.nbytes
            while self.bytes > self.limit:
                self.drop(next(iter(self._kept)))

    def drop(self, version: int) -> None:
        """Forget that version."""
        with self._lock:
            if (adapter := self._kept.pop(version, None)) is not None:
                self.bytes -= adapter.nbytes
