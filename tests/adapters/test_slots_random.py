"""Random lives of slots against a model of the truth, and loads in one thread while another reads."""

import itertools
import tempfile
import threading
import time
from dataclasses import replace
from pathlib import Path

import adapter_kit as kit
import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from lorac.runtime.adapters import read_adapter
from lorac.runtime.errors import SlotError
from lorac.runtime.slots import Slots

SLOTS, FOLDERS = 3, 5
WIDTH = 2  # of a copy of B, which adapters of rank 1 and 2 fit in
LAYOUT = kit.layout(["qkv_proj", "down_proj", "embed_tokens"], slots=SLOTS, max_rank=4)
LAYOUT = replace(
    LAYOUT, modules=tuple(replace(of, narrow=(WIDTH,)) if of.kind == "linear" else of for of in LAYOUT.modules)
)
name_of = st.sampled_from("abcde")
folder_of = st.integers(0, FOLDERS - 1)


def folders(root: Path) -> list:
    """Adapters that differ in rank, modules and layers."""
    made = []
    for index in range(FOLDERS):
        names = [["q_proj"], ["q_proj", "v_proj"], ["down_proj"], ["k_proj", "down_proj"], ["v_proj", "q_proj"]][index]
        rank, layers = (1, 4, 2, 3, 4)[index], [[0, 1], [0, 1], [1], [0, 1], [0]][index]
        tensors = kit.factors(*names, rank=rank, layers=layers)
        targets = list(names)
        if index == 3:
            tensors["base_model.model.model.embed_tokens.lora_embedding_A"] = torch.randn(rank, kit.VOCAB)
            tensors["base_model.model.model.embed_tokens.lora_embedding_B"] = torch.randn(kit.HIDDEN, rank)
            targets.append("embed_tokens")
            layers = None
        folder = kit.write(root / str(index), tensors, r=rank, target_modules=targets, layers_to_transform=layers)
        made.append(read_adapter(folder, LAYOUT))
    return made


ADAPTERS = folders(Path(tempfile.mkdtemp()))


class Lives(RuleBasedStateMachine):
    """The truth: which version each name stands for and each slot holds, who is pinned and used, and in which order.

    A version is (folder, a number of its own).
    """

    @initialize()
    def start(self):
        self.slots = Slots(LAYOUT, "cpu", cache_bytes=3000)
        self.names: dict[str, tuple[int, int]] = {}  # to the version last registered
        self.held: dict[str, tuple[int, int]] = {}  # residents to the version that was loaded
        self.numbers = itertools.count()
        self.slot: dict[str, int] = {}
        self.pinned: set[str] = set()
        self.tickets: list[list[str]] = []
        self.order: list[str] = []  # residents, least recently used first

    def users(self, name) -> int:
        return sum(name in ticket for ticket in self.tickets)

    def touched(self, name):
        self.order = [other for other in self.order if other != name] + [name]

    def place(self, name, keep=()) -> bool:
        """What a load of `name` does to the truth; False where it must be refused."""
        if name not in self.slot:
            taken = set(self.slot.values())
            free = [slot for slot in range(SLOTS) if slot not in taken]
            if free:
                self.slot[name] = free[0]
            else:
                may_go = [n for n in self.order if n not in self.pinned and not self.users(n) and n not in keep]
                if not may_go:
                    return False
                self.slot[name] = self.slot[may_go[0]]
                self.forget(may_go[0])
        self.held[name] = self.names[name]
        self.touched(name)
        return True

    def forget(self, name):
        for table in (self.held, self.slot):
            del table[name]
        self.order.remove(name)
        self.pinned.discard(name)

    @rule(name=name_of, folder=folder_of)
    def register(self, name, folder):
        self.slots.register(name, ADAPTERS[folder])
        self.names[name] = (folder, next(self.numbers))

    @rule(name=name_of, folder=folder_of)
    def load(self, name, folder):
        before = self.names.get(name)
        self.names[name] = (folder, next(self.numbers))
        if self.place(name):
            assert self.slots.load(ADAPTERS[folder].folder, name) == self.slot[name]
        else:
            with pytest.raises(SlotError):
                self.slots.load(ADAPTERS[folder], name)
            self.names.pop(name)
            if before is not None:
                self.names[name] = before

    @rule(names=st.lists(st.one_of(st.none(), name_of), max_size=5))
    def prepare(self, names):
        wanted = list(dict.fromkeys(name for name in names if name))
        stay = [name for name in self.slot if (name in self.pinned or self.users(name)) and name not in wanted]
        known = all(name in self.names for name in wanted)
        missing = [name for name in wanted if known and self.held.get(name) != self.names[name]]
        if not known or (len(wanted) + len(stay) > SLOTS and missing):
            with pytest.raises(SlotError):
                self.slots.ensure(names, use=True)
            return
        for name in missing:
            assert self.place(name, keep=wanted)
        found = self.slots.ensure(names, use=True)
        for name in wanted:
            self.touched(name)
        assert found == {name: self.slot[name] for name in wanted}
        self.tickets.append(wanted)

    @precondition(lambda self: self.tickets)
    @rule(data=st.data())
    def finish(self, data):
        ticket = self.tickets.pop(data.draw(st.integers(0, len(self.tickets) - 1)))
        self.slots.release([self.slot[name] for name in ticket])

    @rule(name=name_of)
    def evict(self, name):
        if name not in self.slot or name in self.pinned or self.users(name):
            with pytest.raises(SlotError):
                self.slots.evict(name)
        else:
            self.slots.evict(name)
            self.forget(name)

    @rule(name=name_of, pinned=st.booleans())
    def pin(self, name, pinned):
        if name not in self.slot:
            with pytest.raises(SlotError):
                self.slots.pin(name)
            return
        (self.slots.pin if pinned else self.slots.unpin)(name)
        (self.pinned.add if pinned else self.pinned.discard)(name)

    @rule(old=name_of, new=name_of)
    def rename(self, old, new):
        if old not in self.names or new in self.names:
            with pytest.raises(SlotError):
                self.slots.rename(old, new)
            return
        self.slots.rename(old, new)
        self.names[new] = self.names.pop(old)
        if old in self.slot:
            self.slot[new], self.held[new] = self.slot.pop(old), self.held.pop(old)
            self.order[self.order.index(old)] = new
            self.tickets = [[new if name == old else name for name in ticket] for ticket in self.tickets]
            if old in self.pinned:
                self.pinned = self.pinned - {old} | {new}

    @invariant()
    def tables_hold_exactly_the_residents(self):
        if not hasattr(self, "slots"):
            return
        residents = {resident.name: resident for resident in self.slots.adapters()}
        assert {name: resident.slot for name, resident in residents.items()} == self.slot
        assert {name for name, resident in residents.items() if resident.pinned} == self.pinned
        assert all(resident.users == self.users(name) for name, resident in residents.items())
        expected = expected_tables({self.slot[name]: ADAPTERS[folder] for name, (folder, _) in self.held.items()})
        for ours, truth in zip((self.slots.a, self.slots.b, self.slots.rank, self.slots.scale), expected, strict=True):
            assert all(torch.equal(ours[module], truth[module]) for module in truth)
        _, b, rank, _ = expected
        for module in (of for of in LAYOUT.modules if of.narrow):
            for layer, slot in itertools.product(module.layers, range(SLOTS)):
                fits = rank[module.name][:, slot].max() <= WIDTH  # of the layer it is loaded for, and of the others
                copy = self.slots.instance(module.name, layer).narrow[WIDTH][:, slot]
                assert torch.equal(copy, fits * b[module.name][module.layers.index(layer), :, slot, :WIDTH])


def expected_tables(contents: dict):
    """The tables, written part by part into zeros."""
    slots = Slots(LAYOUT, "cpu")
    for slot, adapter in contents.items():
        for module in LAYOUT.modules:
            for instance in range(module.instances):
                for index, piece in enumerate(module.slices):
                    part = adapter.part(module.name, instance, index)
                    if part is None:
                        continue
                    a, b = slots.a[module.name][instance, slot], slots.b[module.name][instance]
                    if module.kind == "embedding":
                        a[:, : part.rank] = part.a.T
                    else:
                        a[index * 4 : index * 4 + part.rank] = part.a
                    b[piece.start : piece.start + piece.width, slot, : part.rank] = part.b
                    slots.rank[module.name][instance, slot, index] = part.rank
                    slots.scale[module.name][instance, slot, index] = part.scale
    return slots.a, slots.b, slots.rank, slots.scale


Lives.TestCase.settings = settings(
    max_examples=40, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)
TestLives = Lives.TestCase


def test_a_reader_sees_one_whole_adapter_or_another(tmp_path):
    """One thread swaps without pause; every step reads the tables of exactly one version."""
    layout = kit.layout(slots=1)
    versions = []
    for value in (1.0, 2.0):
        tensors = {name: torch.full_like(tensor, value) for name, tensor in kit.factors("q_proj", "down_proj").items()}
        folder = kit.write(tmp_path / str(value), tensors, target_modules=["q_proj", "down_proj"])
        versions.append(read_adapter(folder, layout))
    slots = Slots(layout, "cpu")
    slots.load(versions[0], "x")
    done, seen, failures = threading.Event(), set(), []

    def swap():
        turn = 0
        while not done.is_set():
            turn += 1
            slots.load(versions[turn % 2], "x")

    thread = threading.Thread(target=swap)
    thread.start()
    try:
        reads, until = 0, time.monotonic() + 60
        while reads < 400 or (len(seen) < 2 and time.monotonic() < until):
            reads += 1
            if reads > 400:
                time.sleep(0.01)  # on a busy machine the lock may not have been the other's yet
            with slots.reading():
                generation = slots.slot_generation[0]
                values = torch.cat(
                    [t[t != 0] for t in (slots.a["qkv_proj"], slots.b["down_proj"], slots.a["down_proj"])]
                )
                if values.unique().numel() != 1 or slots.slot_generation[0] != generation:
                    failures.append(values.unique())
                seen.add(float(values[0]))
    finally:
        done.set()
        thread.join()
    assert not failures and seen == {1.0, 2.0}


def test_many_threads_ensure_what_they_use(tmp_path):
    layout = kit.layout(["qkv_proj"], slots=4, max_rank=4)
    slots, problems = Slots(layout, "cpu", cache_bytes=20_000), []
    for number in range(1, 13):
        tensors = kit.factors("q_proj", fill=float(number))
        slots.register(str(number), kit.write(tmp_path / str(number), tensors, target_modules=["q_proj"]))

    def serve(seed):
        generator = torch.Generator().manual_seed(seed)
        for _ in range(60):
            pair = (torch.randperm(12, generator=generator)[:2] + 1).tolist()
            held = slots.ensure(map(str, pair), use=True)
            with slots.reading():
                for name, slot in held.items():
                    value = slots.b["qkv_proj"][0, 0, slot, 0]
                    if value != float(name) or slots.slot_of(name) != slot:
                        problems.append((name, slot, value))
            slots.release(held.values())

    threads = [threading.Thread(target=serve, args=(seed,)) for seed in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not problems and slots.host_bytes <= 20_000
