"""Which adapter is in which slot, who uses it, and which may make room. Plain bookkeeping; callers serialise."""

import itertools
from array import array
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from operator import itemgetter

from lorac.runtime.errors import SlotError

# how an adapter that must stay may go, by its state
REMEDIES = {"pinned": "unpin it", "in use": "call `step.finish()` once its batch is over"}


@dataclass
class Resident:
    """The adapter in one slot. `version` is unique for ever; `users` counts the tickets that refer to the slot."""

    name: str
    version: int
    slot: int
    folder: str
    rank: int  # the largest of any module
    bytes: int
    pinned: bool = False
    users: int = 0
    used: int = field(default=0, repr=False)  # when, by a clock that counts uses

    @property
    def state(self) -> str:
        """Why it must stay, of REMEDIES, "" where it may go."""
        return "pinned" if self.pinned else "in use" if self.users else ""


def slots_of(slots: dict[str | None, int], names: Collection[str | None]) -> array:
    """The slot of each name. A step does this for every row: one call in C takes half as long as any loop."""
    return array("i", itemgetter(None, None, *names)(slots)[2:])  # of fewer than two keys it would not make a tuple


class Residents:
    """The residents of a number of slots, by name and by slot."""

    def __init__(self, slots: int):
        self.by_slot: list[Resident | None] = [None] * slots
        self.by_name: dict[str, Resident] = {}
        self.slots: dict[str | None, int] = {None: -1}  # by name, and what base rows have: a step looks up every row
        self._clock = itertools.count(1)

    def put(self, resident: Resident) -> None:
        """Make it the resident of its slot. A new version of the one there inherits its pin and its users."""
        old = self.by_slot[resident.slot]
        if old is not None:
            if old.name == resident.name:
                resident.pinned, resident.users = old.pinned, old.users
            self.remove(old)
        self.by_slot[resident.slot] = self.by_name[resident.name] = resident
        self.slots[resident.name] = resident.slot
        self.touch(resident)

    def remove(self, resident: Resident) -> None:
        """Empty its slot."""
        del self.by_name[resident.name], self.slots[resident.name]
        self.by_slot[resident.slot] = None

    def rename(self, old: str, new: str) -> None:
        """Give a resident another name."""
        resident = self.by_name[new] = self.by_name.pop(old)
        self.slots[new] = self.slots.pop(old)
        resident.name = new

    def touch(self, resident: Resident) -> None:
        """Make it the most recently used."""
        resident.used = next(self._clock)

    def use(self, slots: Iterable[int]) -> None:
        """One more user of each slot. Raises SlotError, with none counted, where a slot is empty."""
        slots = tuple(slots)
        held = [self.by_slot[slot] for slot in slots]
        if None in held:
            empty = slots[held.index(None)]
            raise SlotError(f"slot {empty} is empty: nothing was loaded there, or it was evicted; look slots up again")
        for resident in held:
            resident.users += 1
            self.touch(resident)

    def release(self, slots: Iterable[int]) -> None:
        """One user less of each slot."""
        for slot in slots:
            resident = self.by_slot[slot]
            if resident is None or not resident.users:
                raise SlotError(f"slot {slot} is not in use; expected one `use` before each `release`")
            resident.users -= 1

    def check_room(self, wanted: Collection[str]) -> None:
        """Raises SlotError if the adapters of a batch cannot be resident all at once."""
        stay = [held for held in self.by_slot if held and held.state and held.name not in wanted]
        if len(wanted) + len(stay) > len(self.by_slot):
            taken = f", of which {_states(stay)} must stay" if stay else ""
            raise SlotError(
                f"the batch has {len(wanted)} adapters, and there are {len(self.by_slot)} slots{taken}; "
                f"{_remedies(stay)}split the batch, or raise adapters.slots in the spec and rebuild"
            )

    def choose(self, name: str, keep: Collection[str] = ()) -> int:
        """The slot `name` may take: its own, the lowest free one, or that of the least recently used which may go."""
        if name in self.by_name:
            return self.by_name[name].slot
        if None in self.by_slot:
            return self.by_slot.index(None)
        may_go = [held for held in self.by_slot if not held.state and held.name not in keep]
        if not may_go:
            raise SlotError(
                f"no slot for adapter {name!r}, all {len(self.by_slot)} are taken: {_states(self.by_slot)}; "
                f"{_remedies(self.by_slot)}or raise adapters.slots in the spec and rebuild"
            )
        return min(may_go, key=lambda held: held.used).slot


def _states(residents: Iterable[Resident]) -> str:
    return ", ".join(f"{held.name} ({held.state or 'in this batch'})" for held in residents)


def _remedies(residents: Iterable[Resident]) -> str:
    """What helps against some of them, each to be followed by another way out."""
    states = {held.state for held in residents}
    return "".join(f"{remedy}, " for state, remedy in REMEDIES.items() if state in states)
