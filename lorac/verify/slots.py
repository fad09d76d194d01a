"""Slots that are filled by hand: what verifying and timing kernels need, without adapters' files."""

from collections.abc import Sequence
from types import ModuleType


def numbered(package: ModuleType, ranks: Sequence[int]) -> type:
    """The package's Slots, named by number, with an adapter of `ranks[slot]` in each once its tensors are filled.

    Nothing was loaded, so nothing is looked up, used or released.
    """

    class Numbered(package.Slots):
        def slot_of(self, name: str) -> int:
            return int(name)

        def slot_rank(self, slot: int) -> int:
            return ranks[slot]

        def use(self, slots) -> None: ...

        def release(self, slots) -> None: ...

    return Numbered
