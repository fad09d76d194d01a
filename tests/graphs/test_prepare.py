"""Preparing a batch: what describes none is refused, and whatever is raised, no batch is left and nothing in use."""

import gc
import threading
import weakref

import pytest
import torch

from lorac.runtime.errors import ShapeError, SlotError, TicketError


def users(server) -> list[int]:
    return [resident.users for resident in server.slots.adapters()]


def assert_no_batch(server, old, used=(0, 0, 0, 0)) -> None:
    """The step is as `finish` leaves it; and fit for the next batch."""
    step, x = server.step, server.inputs(2)
    assert step.ticket is None and users(server) == [*used]
    with pytest.raises(TicketError, match="no batch was prepared"):
        server.model(x)
    with pytest.raises(TicketError, match="not the latest"):
        step.check(old)
    server.serve(server.decode(), ["b", None])
    assert users(server) == [used[0], used[1] + 1, *used[2:]]
    step.finish()
    assert users(server) == [*used]


REFUSED = {
    "an adapter nobody knows": (SlotError, "no adapter is called 'x'", lambda s: s.prepare(["a", "x"])),
    "a name": (ShapeError, "rows is of type str; expected a list", lambda s: s.prepare("aaa")),
    "what can be read once": (ShapeError, "rows is of type generator", lambda s: s.prepare(n for n in "ab")),
    "nothing": (ShapeError, "at least one request", lambda s: s.prepare([])),
    "no rows": (ShapeError, "rows_per_request is 0;", lambda s: s.prepare(["a"], rows_per_request=0)),
    "half rows": (ShapeError, "rows_per_request is 1.5;", lambda s: s.prepare(["a"], rows_per_request=1.5)),
    "names alone": (ShapeError, r"'ab'; expected \(adapter's name or", lambda s: s.prepare_prefill(["ab"])),
    "half tokens": (ShapeError, r"tokens is \[3.5\]", lambda s: s.prepare_prefill([("a", 3.5)])),
    "no tokens": (ShapeError, "leave finished requests out", lambda s: s.prepare_mixed([("a", 3), ("b", 0)])),
    "half logits": (ShapeError, r"logits is \[0.5\]", lambda s: s.prepare_prefill([("a", 3)], logits=[0.5])),
    "an unknown phase": (ShapeError, "'decoding'; expected one of", lambda s: s.prepare_slots("decoding", [0], [1])),
    "an empty slot": (SlotError, "slot 3 is empty", lambda s: s.prepare_slots("decode", [0, 3], [1, 1])),
    "a slot there is not": (SlotError, "no slot 4; expected 0", lambda s: s.prepare_slots("decode", [0, 4], [1, 1])),
    "a slot from the end": (SlotError, "no slot -2; expected 0 to 3", lambda s: s.prepare_slots("decode", [-2], [1])),
    "half a slot": (ShapeError, r"slots is \[0.0\]", lambda s: s.prepare_slots("decode", [0.0], [1])),
    "one slot": (ShapeError, "slots is 0; expected a list", lambda s: s.prepare_slots("decode", 0, [1])),
    "other lengths": (ShapeError, "2 counts for 1 requests", lambda s: s.prepare_slots("decode", [0], [1, 1])),
    "no slots": (ShapeError, "at least one request", lambda s: s.prepare_slots("prefill", [], [])),
    "no slots, no logits": (ShapeError, "at least one request", lambda s: s.prepare_slots("prefill", [], [], [])),
    "rows below none": (ShapeError, r"rows is \[-1, 3\]", lambda s: s.prepare_slots("decode", [0, 0], [-1, 3])),
    "rows of no request": (ShapeError, r"rows is \[2, 0\]", lambda s: s.prepare_slots("mixed", [0, 0], [2, 0])),
    "uneven decode rows": (ShapeError, r"\[1, 2\]; expected as", lambda s: s.prepare_slots("decode", [0, 1], [1, 2])),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_describes_no_batch_is_refused_and_leaves_none(server, case):
    s = server("torch", names="abc")
    error, match, prepare = REFUSED[case]
    old = s.step.prepare(["a", "c"])
    s.slots.use([0])  # somebody else, whom no failure concerns
    assert users(s) == [2, 0, 1]
    for _ in range(2):
        with pytest.raises(error, match=match):
            prepare(s.step)
    assert_no_batch(s, old, (1, 0, 0))


@pytest.mark.parametrize("prepare", ["prepare", "prepare_prefill", "prepare_slots"])
def test_a_device_that_fails_leaves_no_batch(server, monkeypatch, prepare):
    s = server("torch")
    given = {"prepare": [["b"]], "prepare_prefill": [[("b", 3)]], "prepare_slots": ["decode", [1], [1]]}[prepare]
    old = s.step.prepare(["a", "c"])

    def fails(maps):
        raise torch.OutOfMemoryError

    with monkeypatch.context() as patched:
        patched.setattr(s.step.metadata, "write", fails)
        with pytest.raises(torch.OutOfMemoryError):
            getattr(s.step, prepare)(*given)
    assert_no_batch(s, old)


@pytest.mark.parametrize("ask", ["adapters", "load", "ensure", "evict"])
def test_a_step_that_is_gone_uses_nothing(server, adapters, ask):
    s = server("torch")
    step = s.package.Step(s.slots, "torch")
    step.prepare([*"abcd"])
    s.step.prepare(["b"])
    s.slots.register("e", adapters("a", 1))
    step = weakref.ref(step)
    gc.collect()
    assert step() is None
    match ask:
        case "load":
            assert s.slots.load(adapters("a", 1), "e") == 0
        case "ensure":
            assert s.slots.ensure([*"bcde"])["e"] == 0
        case "evict":
            s.slots.evict("a")
    assert {of.name: of.users for of in s.slots.adapters() if of.users} == {"b": 1}


def test_a_step_that_is_gone_leaves_no_fault_to_others(server):
    """What it used may have been released by someone else before; the rest is released all the same."""
    s = server("torch")
    step = s.package.Step(s.slots, "torch")
    step.prepare([*"abc"])
    s.slots.release([0])
    del step
    gc.collect()
    assert {of.name: of.users for of in s.slots.adapters()} == dict.fromkeys("abcd", 0)


def test_a_step_may_go_while_another_thread_holds_the_slots(server):
    """It must not wait: that thread may wait for this one."""
    s = server("torch")
    step = s.package.Step(s.slots, "torch")
    step.prepare(["a"])
    held, gone, told = threading.Event(), threading.Event(), []

    def forward():
        with s.slots.reading():
            held.set()
            told.append(gone.wait(5))

    thread = threading.Thread(target=forward)
    thread.start()
    held.wait()
    del step
    gc.collect()
    gone.set()
    thread.join()
    assert told == [True] and users(s) == [0, 0, 0, 0]


def test_requests_named_by_slot_may_have_several_decode_rows(server):
    s = server("csgmv")
    graphs = s.decode(rows_per_request=2)
    graphs.capture([4])
    named = s.step.prepare(["b", None], rows_per_request=torch.tensor(2))  # whatever whole number
    assert type(named.rows_per_request) is int
    numbered = s.step.prepare_slots("decode", [1, -1], [2, 2])
    assert numbered == named._replace(serial=numbered.serial)
    graphs.run(numbered, s.inputs(4))
    assert sum(graphs.stats()["hits"].values()) == 1
