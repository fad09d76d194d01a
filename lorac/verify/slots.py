"""Slots that are filled by hand: what verifying and timing kernels need, without adapters' files."""

from array import array
from collections.abc import Sequence
from types import ModuleType

from lorac.runtime.residents import slots_of


def numbered(package: ModuleType, ranks: Sequence[int]) -> type:
    """The package's Slots, named by number, with an adapter of `ranks[slot]` in each once its tensors are filled.

    Nothing was loaded, so nothing is looked up, used or released.
    """

    numbers = {None: -1} | {str(slot): slot for slot in range(len(ranks))}

    class Numbered(package.Slots):
        def lookup(self, names) -> array:
            return slots_of(numbers, names)

        def slot_rank(self, slot: int) -> int:
            return ranks[slot]

        def use(self, slots) -> None: ...

        def release(self, slots) -> None: ...

    return Numbered
