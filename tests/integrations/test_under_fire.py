"""Adapters loaded, replaced, pinned and evicted at random while steps run: every output is of the adapters named."""

import itertools
import threading
import time
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from lorac.runtime.adapters import Adapter, read_adapter
from lorac.runtime.errors import SlotError, TicketError
from lorac.runtime.slots import Slots
from lorac.runtime.step import Step

SPEC = Path(__file__).parents[2] / "specs" / "tiny.yaml"
MODULES = ["qkv_proj", "down_proj"]  # what is run; adapters differ in which of these they have
VERSIONS = 6
name_of = st.sampled_from("abcd")
version_of = st.integers(0, VERSIONS - 1)


@pytest.fixture(scope="module")
def package(build):
    return build(SPEC)


@pytest.fixture(scope="module")
def versions(package, tmp_path_factory) -> list[Adapter]:
    return make_versions(package, tmp_path_factory.mktemp("versions"))


def make_versions(package, root: Path) -> list[Adapter]:
    """Adapters that differ in rank, scale and modules."""
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    layout, made = package.LAYOUT, []
    config = LlamaConfig(
        hidden_size=64, intermediate_size=96, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
        num_hidden_layers=2, vocab_size=128,
    )  # fmt: skip
    for number in range(VERSIONS):
        targets = [["q_proj"], ["q_proj", "v_proj", "down_proj"], ["down_proj"]][number % 3]
        peft = get_peft_model(
            LlamaForCausalLM(config), LoraConfig(r=2 * number + 2, lora_alpha=8, target_modules=targets)
        )
        for key, tensor in peft.named_parameters():
            if "lora_B" in key:
                torch.nn.init.normal_(tensor)
        peft.save_pretrained(root / str(number))
        made.append(read_adapter(root / str(number), layout))
    return made


def run(package, step: Step, x: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The deltas of both modules in layer 1, added to zeros."""
    rows = next(iter(x.values())).shape[0]
    outputs = {}
    for name in MODULES:
        y = torch.zeros(rows, package.LAYOUT.by_name[name].out_features)
        outputs[name] = package.add(name, 1, x[name], y, step)
    return outputs


def expected(package, x: dict[str, torch.Tensor], rows: list[Adapter | None]) -> dict[str, torch.Tensor]:
    """The same in float64 from the adapters themselves, row by row."""
    outputs = {}
    for name in MODULES:
        module = package.LAYOUT.by_name[name]
        y = torch.zeros(len(rows), module.out_features, dtype=torch.float64)
        for row, adapter in enumerate(rows):
            for index, piece in enumerate(module.slices):
                part = adapter and adapter.part(name, 1, index)
                if part:
                    delta = part.scale * (part.b.double() @ (part.a.double() @ x[name][row].double()))
                    y[row, piece.start : piece.start + piece.width] = delta
        outputs[name] = y
    return outputs


def inputs(package, rows: int) -> dict[str, torch.Tensor]:
    return {name: torch.randn(rows, package.LAYOUT.by_name[name].in_features) for name in MODULES}


def agree(made: dict, truth: dict) -> bool:
    return all(torch.allclose(made[name].double(), truth[name], rtol=1e-4, atol=1e-4) for name in MODULES)


def machine(package, versions: list[Adapter]):
    """A state machine over one Slots and one Step; `truth` is what each name stands for."""

    class Serving(RuleBasedStateMachine):
        @initialize()
        def start(self):
            total = sum(version.nbytes for version in versions)
            self.slots: Slots = package.Slots("cpu", cache_bytes=total // 3)
            self.step: Step = package.Step(self.slots, "torch")
            self.truth: dict[str, int] = {}  # names to the version last registered
            self.batch: list[tuple[str | None, int]] | None = None  # (name, version) per row of the ticket
            self.stale = False  # a slot of the ticket has changed
            self.decode = package.DecodeGraphs(self.both, self.step, [x[:8] for x in inputs(package, 8).values()])
            self.decode.capture()

        def both(self, *x):
            return tuple(run(package, self.step, dict(zip(MODULES, x, strict=True))).values())

        def names(self) -> set:
            return {resident.name for resident in self.slots.adapters()}

        def changed(self, name: str):
            self.stale = self.stale or (self.batch is not None and name in {of for of, _ in self.batch})

        @rule(name=name_of, version=version_of)
        def register(self, name, version):
            self.slots.register(name, versions[version].folder)
            self.truth[name] = version

        @rule(name=name_of, version=version_of)
        def load(self, name, version):
            try:
                self.slots.load(versions[version].folder, name)
            except SlotError:
                assert name not in self.names()
                return
            self.truth[name] = version
            self.changed(name)

        @rule(name=name_of)
        def evict(self, name):
            in_use = self.batch is not None and name in {of for of, _ in self.batch}
            try:
                self.slots.evict(name)
            except SlotError:
                return
            assert not in_use

        @rule(name=name_of, pinned=st.booleans())
        def pin(self, name, pinned):
            if name in self.names():
                (self.slots.pin if pinned else self.slots.unpin)(name)

        @rule(rows=st.lists(st.one_of(st.none(), name_of), min_size=1, max_size=8), prefill=st.booleans())
        def prepare(self, rows, prefill):
            before = {resident.name: resident.version for resident in self.slots.adapters()}
            try:
                self.slots.ensure(rows)
            except SlotError:
                return
            finally:  # some may have been brought even so, an adapter of the ticket in its new version
                for resident in self.slots.adapters():
                    if resident.version != before.get(resident.name):
                        self.changed(resident.name)
            if prefill:
                self.step.prepare_prefill([(name, 1 + at % 2) for at, name in enumerate(rows)])
                rows = [name for at, name in enumerate(rows) for _ in range(1 + at % 2)]
            else:
                self.step.prepare(rows)
            self.batch, self.stale = [(name, self.truth.get(name)) for name in rows], False

        @precondition(lambda self: self.batch is not None)
        @rule(graph=st.booleans())
        def run(self, graph):
            x = inputs(package, len(self.batch))
            ticket = self.step.ticket
            graph = graph and ticket.phase == "decode"

            def outputs():
                if graph:
                    return dict(zip(MODULES, self.decode.run(ticket, list(x.values())), strict=True))
                return run(package, self.step, x)

            if self.stale:
                with pytest.raises(TicketError):
                    outputs()
                return
            held = [versions[version] if name else None for name, version in self.batch]
            assert agree(outputs(), expected(package, x, held))

        @rule()
        def finish(self):
            self.step.finish()
            self.batch = None
            with pytest.raises(TicketError):
                run(package, self.step, inputs(package, 1))

    return Serving


def test_any_life_of_slots_and_steps(package, versions):
    serving = machine(package, versions).TestCase
    serving.settings = settings(
        max_examples=25, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
    )
    serving("runTest").runTest()


@pytest.mark.parametrize("whole", [False, True], ids=["layer by layer", "whole forward"])
def test_steps_run_while_threads_load(package, versions, whole):
    """Two threads replace what two names stand for. Each output is wholly of one version, or the ticket is refused."""
    slots = package.Slots("cpu")
    contents = {"a": {}, "b": {}}  # by name: generation of its slot to the version
    slot = {}
    for name in contents:
        slot[name] = slots.load(versions[1], name)
        contents[name][slots.slot_generation[slot[name]]] = versions[1]
    step, done, refused, seen = package.Step(slots, "torch"), threading.Event(), 0, set()

    def replace(name: str):
        for turn in itertools.count():
            if done.is_set():
                return
            version = versions[(1, 4)[turn % 2]]
            with slots.lock:
                slots.load(version, name)
                contents[name][slots.slot_generation[slot[name]]] = version
            time.sleep(1e-4)  # a lock that is free for an instant only is never got by the other thread

    threads = [threading.Thread(target=replace, args=(name,)) for name in contents]
    for thread in threads:
        thread.start()
    try:
        for _ in range(150):
            rows = ["a", None, "b", "a"]
            x = inputs(package, len(rows))
            ticket = step.prepare(rows)
            held = dict(zip(ticket.slots, ticket.generations, strict=True))
            try:
                if whole:
                    with step.launching():
                        made = run(package, step, x)
                else:
                    made = run(package, step, x)
            except TicketError:
                refused += 1
                continue
            versions_held = [contents[name][held[slot[name]]] if name else None for name in rows]
            assert agree(made, expected(package, x, versions_held))
            seen |= {version.folder for version in versions_held if version}
    finally:
        done.set()
        for thread in threads:
            thread.join()
    assert refused < 150 and len(seen) == 2


@pytest.mark.parametrize("whole", [False, True], ids=["one layer", "whole forward"])
def test_no_slot_changes_between_a_tickets_check_and_its_last_launch(package, versions, whole, monkeypatch):
    slots = package.Slots("cpu")
    slot, step = slots.load(versions[1], "a"), package.Step(slots, "torch")
    x, add = inputs(package, 1), dict(step.backend.ADD)
    thread = threading.Thread(target=slots.load, args=(versions[4], "a"))
    step.prepare(["a"])
    before = slots.slot_generation[slot]

    def launch(*args):
        if not thread.ident:
            thread.start()
            thread.join(0.2)  # time enough for a load, were there no lock
        assert slots.slot_generation[slot] == before
        add["qkv_proj"](*args)

    monkeypatch.setitem(step.backend.ADD, "qkv_proj", launch)
    if whole:
        with step.launching():
            made = run(package, step, x)
            assert slots.slot_generation[slot] == before
        assert agree(made, expected(package, x, [versions[1]]))
    else:
        y = torch.zeros(1, package.LAYOUT.by_name["qkv_proj"].out_features)
        package.add("qkv_proj", 1, x["qkv_proj"], y, step)
    thread.join()
    assert slots.slot_generation[slot] == before + 1
    with pytest.raises(TicketError):
        run(package, step, x)


def test_memory_that_runs_out_during_a_load_leaves_the_old_state(package, versions, monkeypatch):
    slots = package.Slots("cpu")
    step = package.Step(slots, "torch")
    slots.load(versions[1], "a")
    step.prepare(["a", None])
    x = inputs(package, 2)
    before = run(package, step, x)
    with monkeypatch.context() as patched:

        def full(*args):
            raise torch.OutOfMemoryError("no memory")

        patched.setattr(slots._buffers, "stage", full)
        for name in ("a", "b"):
            with pytest.raises(torch.OutOfMemoryError):
                slots.load(versions[4], name)
    after = run(package, step, x)  # the ticket is as good as it was
    assert all(torch.equal(before[name], after[name]) for name in MODULES) and slots.names == ["a"]


def test_the_oracle_would_notice_another_version(package, versions):
    x = inputs(package, 1)
    outputs = [expected(package, x, [version]) for version in (*versions, None)]
    for one, other in itertools.combinations(outputs, 2):
        assert not agree(one, other)
