"""Decode graphs: what a replay serves, however the batch differs from the one that was captured."""

import random
import warnings

import pytest
import torch
from serving import spec

from lorac.runtime.errors import CaptureError, PackageError, ShapeError, TicketError
from lorac.runtime.stats import GraphKey

SEGMENTED = ["triton", "csgmv"]
ONE_VARIANT = spec(graphs__decode__variants={"lora": {}})


def hits(graphs) -> int:
    return sum(graphs.stats()["hits"].values())


@pytest.mark.parametrize("backend", SEGMENTED)
def test_a_replay_covers_every_adapter_the_bucket_can_have(server, backend):
    # captured grids that follow the capture's batch drop the adapters of later ones
    s = server(backend, spec=ONE_VARIANT)
    graphs = s.decode()
    graphs.capture([4])
    for batch in (["a"] * 4, ["a", "b", "c", "d"], ["c"] * 4, ["d", "a", None, "b"], [None, "c", None, None]):
        ticket, _ = s.serve(graphs, batch)
        assert ticket.bucket == 4
    assert hits(graphs) == 5 and not graphs.stats()["fallbacks"]


@pytest.mark.parametrize("backend", [*SEGMENTED, "torch"])
def test_rows_past_the_batch_belong_to_no_adapter_and_are_not_written(server, backend):
    s = server(backend, spec=ONE_VARIANT)
    graphs = s.decode()
    graphs.capture([8])
    s.serve(graphs, ["b"] * 8)
    ticket, _ = s.serve(graphs, [None, "c", None, "c", None])
    assert s.step.batch.map.row_slot[:8].tolist() == [-1, 2, -1, 2, -1, -1, -1, -1]
    assert s.step.batch.map.seg_slot.tolist().count(2) <= 1
    padded = graphs._recordings[GraphKey(8, ticket.variant)].outputs[5:]
    assert not padded.any()  # the model maps the padding, zeros, to zeros


def test_variants_count_adapters_and_never_base_rows(server):
    s = server()
    graphs = s.decode()
    graphs.capture([4])
    for batch, variant in [
        ([None, None, None], "nolora"),
        (["a", "a", None], "one"),
        (["b", "b", "b"], "lora"),  # one adapter, but of a rank above the bound
        (["a", None, "c"], "lora"),
    ]:
        ticket, _ = s.serve(graphs, batch)
        assert ticket.variant == variant and graphs.stats()["hits"][GraphKey(4, variant)] > 0


def test_a_batch_with_an_adapter_does_not_take_a_nolora_graph(server):
    s = server()
    graphs = s.decode()
    graphs.table = tuple(entry for entry in graphs.table if entry == (8, "nolora"))
    graphs.capture()
    s.serve(graphs, [None] * 5)
    s.serve(graphs, [None, None, "a", None, None])
    assert graphs.stats() == {"hits": {GraphKey(8, "nolora"): 1}, "fallbacks": {"not captured": 1}}


def test_nothing_that_changes_from_step_to_step_is_fixed_at_capture(server):
    # the number of adapters is 0 when the graph is captured, 3 and then 1 when it is replayed
    s = server(spec=ONE_VARIANT)
    graphs = s.decode()
    graphs.capture([4])
    for batch in ([None] * 4, ["a", "b", "c", None], ["d"] * 4):
        s.serve(graphs, batch)
    assert hits(graphs) == 3


@pytest.mark.parametrize("backend", SEGMENTED)
def test_launches_of_a_bucket_do_not_depend_on_the_batch(server, backend, monkeypatch):
    s = server(backend)
    calls = []

    def record(kernel, launch, grid, **arguments):
        numbers = {name: value for name, value in arguments.items() if not isinstance(value, torch.Tensor)}
        addresses = {name: arguments[name].data_ptr() for name in ("order", "seg_slot", "seg_end") if name in arguments}
        calls.append((kernel.name, launch.constants, grid, numbers, addresses))

    monkeypatch.setattr("lorac.runtime.launch.Kernel.run", record)
    seen = []
    for batch in (["a", "b"], ["b", "a", None], ["a", "b", "c", "d"], [None, None, None, "b"]):
        ticket = s.step.prepare(batch)
        assert (ticket.bucket, ticket.variant) in [(2, "lora"), (4, "lora")]
        calls.clear()
        s.model(torch.zeros(ticket.bucket, 32))
        seen.append(list(calls))
    assert len(seen[1]) == 4 and seen[1] == seen[2] == seen[3] != seen[0]


def test_one_slot_serves_base_rows_beside_its_adapter(server):
    s = server(spec=spec(adapters__slots=1), names="a")
    graphs = s.decode()
    graphs.capture([2])
    s.serve(graphs, ["a", None])
    s.serve(graphs, [None, "a"])
    assert hits(graphs) == 2


def test_a_batch_above_the_largest_bucket_is_served_eagerly_with_one_warning(server):
    s = server("torch")
    graphs = s.decode()
    graphs.capture([8])
    ticket, _ = s.serve(graphs, ["a"] * 9)
    assert ticket.bucket == 0 and "9 rows" in ticket.reason and ticket.reason.endswith("8")
    other = s.decode()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for rows in (9, 10, 11):
            other.run(s.step.prepare(["a"] * rows), s.inputs(rows))
    assert len(caught) == 1 and "9 rows are above the largest decode bucket, 8" in str(caught[0].message)
    assert other.stats()["fallbacks"] == {"above the largest bucket": 3}
    strict = s.decode(strict=True)
    with pytest.raises(TicketError, match="12 rows"):
        strict.run(s.step.prepare([None] * 12), s.inputs(12))


def test_only_the_latest_ticket_of_unchanged_slots_is_replayed(server, adapters):
    s = server("torch")
    graphs = s.decode()
    graphs.capture([2])
    old = s.step.prepare(["a", "b"])
    s.step.prepare(["a", "c"])
    with pytest.raises(TicketError, match="not the latest"):
        graphs.run(old, s.inputs(2))
    changed = s.step.prepare(["a", "c"])
    s.slots.load(adapters("c", 1), name="c")
    with pytest.raises(TicketError, match="slot 2 changed"):
        graphs.run(changed, s.inputs(2))
    s.serve(graphs, ["a", "c"])
    stale = s.step.prepare(["a"])
    graphs.capture([2])
    with pytest.raises(TicketError, match="not the latest"):
        graphs.run(stale, s.inputs(1))


def test_phases_cannot_be_confused(server):
    s = server("csgmv")
    decode, prefill, verify = s.decode(), s.prefill(), s.decode(rows_per_request=2)
    for graphs, ticket, match in [
        (decode, s.step.prepare_prefill([("a", 2)]), "phase prefill"),
        (prefill, s.step.prepare(["a", "b"]), "phase decode"),
        (decode, s.step.prepare_mixed([("a", 2)]), "phase mixed"),
        (decode, s.step.prepare(["a"], rows_per_request=2), "2 rows per request"),
        (verify, s.step.prepare(["a", "b"]), "1 rows per request"),
    ]:
        s.step.ticket = ticket
        with pytest.raises(TicketError, match=match):
            graphs.run(ticket, s.inputs(2))


def test_a_verify_step_has_graphs_of_whole_requests(server):
    s = server("csgmv", spec=spec(graphs__decode={"buckets": [1, 2, 4, 6, 8], "variants": {"lora": {}}}))
    graphs = s.decode(rows_per_request=3)
    assert {bucket for bucket, _ in graphs.table} == {6}
    graphs.capture()
    ticket, _ = s.serve(graphs, ["a"], rows_per_request=3)
    assert ticket.bucket == 6
    ticket, _ = s.serve(graphs, ["b", None], rows_per_request=3)
    assert ticket.bucket == 6 and hits(graphs) == 2
    ticket, _ = s.serve(graphs, ["b", None, "a"], rows_per_request=3)
    assert ticket.reason == "9 rows are above the largest decode bucket, 6"


def test_memory_that_moved_since_the_capture_is_not_read(server):
    s = server("torch")
    graphs = s.decode()
    graphs.capture([1])
    s.model.down.data = s.model.down.data.clone()
    with pytest.raises(CaptureError, match="parameter 'down' moved"):
        s.serve(graphs, [None])
    graphs.capture([1])
    graphs.inputs.tensors[0].data = torch.zeros(8, 32)
    with pytest.raises(CaptureError, match="static input 0 moved"):
        s.serve(graphs, [None])


def test_inputs_are_copied_and_checked(server):
    s = server("torch")
    graphs = s.decode(padding={0: 7})
    graphs.capture([4])
    static = graphs.inputs.tensors[0]
    s.serve(graphs, ["a", "b", "c", "d"])
    s.serve(graphs, [None, "a", None])
    assert (static[3] == 7).all() and not (static[:3] == 7).any()
    x = s.inputs(3)
    static[:3] = x  # written in place by the caller: nothing to copy
    ticket = s.step.prepare([None, None, "b"])
    assert torch.equal(graphs.run(ticket, static[:3]).clone(), graphs.run(ticket, x))
    with pytest.raises(ShapeError, match=r"\[4, 32\].*expected \[3, 32\]"):
        graphs.run(ticket, s.inputs(4))
    with pytest.raises(ShapeError, match="at least 8 rows"):
        s.package.DecodeGraphs(s.model, s.step, torch.zeros(4, 32)).capture()


@pytest.mark.parametrize("eager", [False, True], ids=["replayed", "eager"])
def test_inputs_that_are_not_as_the_static_ones_are_refused_with_a_graph_and_without(server, eager):
    s = server("torch")
    seen = []

    def forward(x, place):
        seen.append(place.clone())
        return x + place[:, None]

    named = s.package.DecodeGraphs(forward, s.step, {"x": torch.zeros(8, 32), "place": torch.zeros(8).long()})
    listed = s.package.DecodeGraphs(forward, s.step, [torch.zeros(8, 32), torch.zeros(8).long()])
    if not eager:
        named.capture([2])
        listed.capture([2])
    ticket = s.step.prepare(["a", None])
    x, place = s.inputs(2), torch.arange(2)
    bad = [
        (named, {"x": x, "place": place.int()}, r"'place' is \[2\] torch.int32; expected \[2\] torch.int64"),
        (named, {"x": x}, "inputs are x; expected x, place"),
        (named, [x, place], "inputs are 0, 1; expected x, place"),
        (named, {"x": x, "place": [0, 1]}, "'place' is of type list; expected a tensor"),
        (listed, {"x": x, "place": place}, "inputs are x, place; expected 0, 1"),
        (listed, x, "inputs are 0; expected 0, 1"),
        (listed, [x[:1], place], r"0 is \[1, 32\] torch.float32; expected \[2, 32\]"),
        (listed, [x[0], place], r"0 is \[32\] torch.float32; expected \[2, 32\]"),
        (listed, None, "inputs are NoneType; expected a tensor, or tensors by name or in order"),
    ]
    seen.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        for graphs, given, match in bad:
            with pytest.raises(ShapeError, match=match):
                graphs.run(ticket, given)
        assert not seen
        for graphs, given in ((named, {"place": place, "x": x}), (listed, {1: place, 0: x})):
            assert torch.equal(graphs.run(ticket, given), x + place[:, None])
        assert eager == (not hits(named)) == (not hits(listed))


def test_more_rows_than_the_static_inputs_have_are_served_eagerly(server):
    s = server("torch")
    graphs = s.decode()
    s.serve(graphs, ["a", None] * 6)
    with pytest.raises(ShapeError, match=r"expected \[12, 32\]"):
        graphs.run(s.step.ticket, s.inputs(8))


def test_a_capture_takes_the_place_of_earlier_ones_unless_it_is_refused(server):
    s = server("torch")
    graphs = s.decode()
    graphs.capture([2])
    ticket = s.step.prepare(["a", "b"])
    for buckets, match in (
        ([2, 5], r"is \[2, 5\]; .*decode graphs, which are 1, 2, 4, 8"),
        (2, "is 2; expected a list"),
    ):
        with pytest.raises(ShapeError, match=f"buckets {match}"):
            graphs.capture(buckets)
    graphs.run(ticket, s.inputs(2))
    assert hits(graphs) == 1
    graphs.capture(bucket for bucket in (4,))
    s.serve(graphs, ["a", "b"])
    s.serve(graphs, ["a", "b", "c"])
    assert graphs.stats()["fallbacks"] == {"not captured": 1}


def test_a_run_needs_a_ticket(server):
    s = server("torch")
    graphs = s.decode()
    for prepare in (s.step.finish, lambda: s.step.prepare(["a"])):
        prepare()
        with pytest.raises(TicketError, match="the ticket is None; expected what step.prepare"):
            graphs.run(None, s.inputs(1))


def test_graphs_are_captured_from_the_largest_and_the_widest(server):
    s = server("csgmv")
    table = s.decode().table
    assert list(table) == sorted(table, key=lambda entry: (-entry[0], ["lora", "one", "nolora"].index(entry[1])))
    assert s.decode().step.engine is s.prefill().step.engine  # one memory pool


def test_streams_have_their_own_keys_metadata_and_pool(server):
    s = server("torch", spec=spec(graphs__decode__streams=2))
    other = s.package.Step(s.slots, "torch", stream=1)
    assert other.metadata.tensors.data_ptr() != s.step.metadata.tensors.data_ptr()
    assert other.engine is not s.step.engine
    graphs = s.package.DecodeGraphs(
        lambda x: s.package.add("down_proj", 0, x[:, :48], x.clone(), other), other, torch.zeros(8, 48)
    )
    with pytest.raises(Exception, match="no stream 2"):
        s.package.Step(s.slots, "torch", stream=2)
    assert "stream 1" in str(GraphKey(4, "lora", other.stream)) and graphs.step is other


@pytest.mark.parametrize(("backend", "steps"), [("torch", 256), ("triton", 6), ("csgmv", 6)])
def test_changing_batches_and_swapped_adapters_stay_right(server, adapters, backend, steps, seed):
    rng = random.Random(seed)
    s = server(backend) if backend == "torch" else server(backend, spec=ONE_VARIANT, route=backend == "csgmv")
    graphs = s.decode()
    graphs.capture([2, 4])
    for _ in range(steps):
        if rng.random() < 0.2:
            name = rng.choice("abcd")
            s.slots.load(adapters(name, rng.randrange(3)), name=name)
        s.serve(graphs, [rng.choice([None, *"abcd"]) for _ in range(rng.choice([2, 3, 4]))])
    assert hits(graphs) == steps and not graphs.stats()["fallbacks"]


def test_the_report_names_graphs_and_causes(server):
    s = server("torch")
    graphs = s.decode()
    graphs.capture([2])
    s.serve(graphs, [None, None])
    s.serve(graphs, [None] * 9)
    text = graphs.report()
    assert "3 graphs" in text and "2 nolora" in text and "1 hits" in text
    assert "eager 1 times: above the largest bucket" in text


def test_rows_past_a_batch_are_padding_whoever_wrote_there(server):
    s = server("csgmv")
    seen = []

    def forward(x, place):
        seen.append(place.clone())
        return x

    static = {"x": torch.zeros(64, 32), "place": torch.zeros(64, dtype=torch.int64)}
    decode = s.package.DecodeGraphs(forward, s.step, static, padding={"place": -1})
    prefill = s.package.PrefillGraphs(forward, s.step, static, padding={"place": -2})
    decode.capture()
    prefill.capture()

    def live(rows: int) -> dict[str, torch.Tensor]:
        return {"x": s.inputs(rows), "place": torch.arange(100, 100 + rows)}

    for _ in range(2):
        decode.run(s.step.prepare(["a"] * 3), live(3))
        assert seen[-1].tolist() == [100, 101, 102, -1]
        prefill.run(s.step.prepare_prefill([("a", 13)]), live(13))
        assert seen[-1].tolist() == [*range(100, 113), -2, -2, -2]
        static["place"][:] = 7  # as a caller that writes more than is live
    assert hits(decode) == hits(prefill) == 2


def test_requests_that_fit_no_bucket_whole_are_told_so(server):
    s = server("csgmv")
    assert "no decode bucket is a multiple of 3 rows" in s.step.prepare(["a"], rows_per_request=3).reason
    with pytest.raises(ShapeError, match="no decode bucket holds whole requests of 3 rows"):
        s.decode(rows_per_request=3)
    for rows in (0, -1, 1.5, "1"):
        with pytest.raises(ShapeError, match=f"rows_per_request is {rows!r}; expected a whole number, at least 1"):
            s.decode(rows_per_request=rows)
    with pytest.raises(ShapeError, match="rows_per_request is 0"):
        s.step.prepare(["a"], rows_per_request=0)


def test_slots_of_another_package_are_refused(build):
    package, other = build(spec()), build(spec(name="wider", adapters__max_rank=32))
    with pytest.raises(PackageError, match="to package small is of package wider: max_rank 32 instead of 16"):
        package.Step(other.Slots("cpu"), "torch")
    alike = build(spec(name="alike", backends={"torch": {}}))
    assert package.Step(alike.Slots("cpu"), "torch").layout.name == "small"
