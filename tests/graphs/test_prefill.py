"""Prefill graphs: which batches they serve, in which mode, and what stays outside of them."""

import pytest
import torch
from serving import spec

from lorac.reference import lora
from lorac.runtime.breakable import break_here
from lorac.runtime.errors import CaptureError, PackageError, ShapeError
from lorac.runtime.stats import GraphKey

WITH_HEAD = spec(adapters__targets=["qkv_proj", "down_proj", "lm_head"])


@pytest.mark.parametrize("backend", ["triton", "csgmv"])
def test_batches_past_a_cap_are_served_eagerly_and_right(server, backend):
    s = server(backend, spec=spec(graphs__prefill__buckets=[8, 32], graphs__prefill__max_tokens=32))
    graphs = s.prefill()
    graphs.table = tuple(entry for entry in graphs.table if entry[1] == "lora")
    graphs.capture()
    five = [("a", 2), ("b", 2), (None, 2), ("c", 2), ("d", 2)]
    ticket, _ = s.serve(graphs, None, five)
    assert ticket.bucket == 0 and ticket.reason == "5 requests are above the 4 of prefill bucket 32"
    ticket, _ = s.serve(graphs, None, [("a", 20), (None, 3), ("b", 10)])
    assert ticket.bucket == 0 and ticket.reason == "33 tokens are above the largest prefill bucket, 32"
    ticket, _ = s.serve(graphs, None, [("a", 9)])
    assert ticket.bucket == 0 and ticket.reason == "bucket 32 is more than 2.0 times the 9 tokens"
    assert not sum(graphs.stats()["hits"].values())
    ticket, _ = s.serve(graphs, None, [("a", 20), (None, 2), ("b", 10)])
    assert ticket.bucket == 32
    ticket, _ = s.serve(graphs, None, [("d", 4)])
    assert ticket.bucket == 8
    assert graphs.stats()["hits"][GraphKey(32, "lora")] == 1
    causes = {"above the request cap": 1, "above the largest bucket": 1, "too much padding": 1}
    assert graphs.stats()["fallbacks"] == causes


def test_segments_past_the_batch_are_empty(server):
    s = server("triton", route=True)
    graphs = s.prefill()
    graphs.table = ((16, "lora"), (16, "nolora"))
    graphs.capture()
    s.serve(graphs, None, [("a", 2), ("b", 3), ("c", 4), ("d", 5)])
    s.serve(graphs, None, [("d", 9)])
    segments = s.step.batch.map
    assert segments.seg_slot.tolist()[1:] == [-1] * (len(segments.seg_slot) - 1)
    assert (segments.seg_end - segments.seg_start).tolist()[1:4] == [0, 0, 0]
    s.serve(graphs, None, [(None, 9)])  # a batch without adapters keeps its graph
    assert sum(graphs.stats()["hits"].values()) == 3


@pytest.mark.parametrize(("mode", "pieces"), [("breakable", 2), ("full", 1), ("tc_piecewise", 2)])
def test_modes_cut_at_breaks_or_do_not(server, mode, pieces, monkeypatch):
    # inductor's code generation is not what is tested, and takes a minute on a CPU
    compiler = torch.compile
    monkeypatch.setattr(torch, "compile", lambda forward, **options: compiler(forward, backend="aot_eager", **options))
    s = server("csgmv", spec=spec(graphs__prefill__mode=mode))
    graphs = s.prefill()
    graphs.table = ((16, "lora"),)
    graphs.capture()
    assert {cost.pieces for cost in graphs._stats.costs.values()} == {pieces}
    s.model.broke.clear()
    s.serve(graphs, None, [("a", 9), (None, 2), ("b", 1)])
    assert s.model.broke == [16]  # the break ran over the padded rows
    s.serve(graphs, None, [("d", 16)])
    assert sum(graphs.stats()["hits"].values()) == 2


def test_a_forward_is_traced_for_more_buckets_than_torch_retraces_for_by_itself(server, monkeypatch):
    compiler = torch.compile
    monkeypatch.setattr(torch, "compile", lambda forward, **options: compiler(forward, backend="eager", **options))
    buckets = [4 * turn for turn in range(1, 13)]
    changed = {"graphs__prefill__buckets": buckets, "graphs__prefill__max_tokens": 48}
    s = server("csgmv", spec=spec(**changed))
    elsewhere = compiler(s.model, backend="eager", dynamic=False)
    s.step.prepare_prefill([("a", 48)])
    for rows in buckets:  # as many as torch compiles of one function, which it then leaves alone
        with s.step.using(s.step.describe("prefill", rows, "lora")), torch.no_grad():
            elsewhere(torch.zeros(rows, 32))
    graphs = s.package.PrefillGraphs(s.model, s.step, torch.zeros(48, 32), mode="tc_piecewise")
    graphs.capture()
    assert {bucket for bucket, *_ in graphs._stats.costs} == set(buckets)
    for tokens in (3, 17, 45):
        s.serve(graphs, None, [("a", tokens)])
    assert sum(graphs.stats()["hits"].values()) == 3
    with pytest.warns(RuntimeWarning, match="decode and prefill requests in one batch"):
        graphs.run(s.step.prepare_mixed([("a", 5), ("b", 1)]), s.inputs(6))  # eagerly, which traces nothing


def test_a_forward_that_cannot_be_traced_leaves_its_graphs_off(server, monkeypatch):
    compiler = torch.compile
    monkeypatch.setattr(torch, "compile", lambda forward, **options: compiler(forward, backend="eager", **options))
    s = server("csgmv")

    def forward(x):
        if x.sum() > 0:  # control flow that depends on data
            return s.model(x)
        return s.model(x) + 0

    graphs = s.package.PrefillGraphs(forward, s.step, torch.zeros(64, 32), mode="tc_piecewise")
    with pytest.warns(RuntimeWarning, match="are off: torch.compile cannot trace"):
        graphs.capture([16])
    s.serve(graphs, None, [("a", 16)])
    assert graphs.stats()["fallbacks"] == {"tc_piecewise is off": 1}


def test_a_backend_that_cannot_keeps_eager_prefill(server):
    s = server("torch")
    graphs = s.prefill()
    graphs.capture()
    ticket, _ = s.serve(graphs, None, [("a", 5), (None, 3), ("b", 4)])
    assert "runs on the host" in ticket.reason and graphs.stats()["hits"] == {}
    with pytest.raises(PackageError, match="'piecewise' is none of"):
        s.prefill(mode="piecewise")


def test_a_mixed_batch_is_served_eagerly(server):
    s = server("csgmv")
    graphs = s.prefill()
    ticket = s.step.prepare_mixed([("a", 7), (None, 1), ("b", 1)])
    x = s.inputs(9)
    with pytest.warns(RuntimeWarning, match="decode and prefill requests in one batch"):
        out = graphs.run(ticket, x)
    expected = s.model.oracle(x, s.slots_of(["a"] * 7 + [None, "b"]))
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)


def test_lm_head_runs_after_the_graph_on_its_own_rows(server, adapters, generator):
    s = server("csgmv", spec=WITH_HEAD, names="")
    layout = s.package.LAYOUT
    from serving import save_adapter

    folder = save_adapter(adapters("a").parent / "head", layout, 8, generator)
    s.slots.load(folder, name="a")
    graphs = s.prefill()
    graphs.table = ((16, "one"),)
    graphs.capture()
    requests, counts = [("a", 6), (None, 3), ("a", 3)], [3, 1, 0]
    ticket = s.step.prepare_prefill(requests, logits=counts)
    hidden = graphs.run(ticket, s.inputs(12))
    rows = torch.tensor([3, 4, 5, 8])  # the last three of the first request, the last of the second
    weight = torch.randn(64, 32, generator=generator)
    logits = s.package.linear("lm_head", 0, hidden[rows], weight, s.step)
    expected = hidden[rows].double() @ weight.double().T
    delta = lora(hidden[rows].double(), *s.slots.instance("lm_head", 0), [64], [0, 0, 0, -1])
    torch.testing.assert_close(logits.double(), expected + delta, rtol=1e-5, atol=1e-5)
    assert delta.abs().max() > 5e-2 and ticket.bucket == 16

    def inside(x):
        return s.package.linear("lm_head", 0, x, weight, s.step)

    with pytest.raises(CaptureError, match="lm_head does not belong in a prefill graph"):
        s.package.PrefillGraphs(inside, s.step, torch.zeros(64, 32)).capture([16])


def test_breaks_are_called_with_live_state_and_keep_their_shapes(server):
    s = server("csgmv")
    factor, width = 1.0, 48

    def attention(h):
        return (h[:, :width] * factor).tanh()

    s.model.attention = break_here(attention)
    graphs = s.package.PrefillGraphs(lambda x: s.model(x), s.step, torch.zeros(64, 32))
    graphs.table = ((16, "nolora"),)
    graphs.capture()
    x = s.inputs(16)
    first = graphs.run(s.step.prepare_prefill([(None, 16)]), x).clone()
    factor = 0.0
    assert torch.equal(graphs.run(s.step.prepare_prefill([(None, 16)]), x), x) and not torch.equal(first, x)
    width = 47
    with pytest.raises(ShapeError, match=r"attention returned tensors of \[\[16, 47\]\]"):
        graphs.run(s.step.prepare_prefill([(None, 16)]), x)


def test_breaks_may_write_in_place_and_return_several(server):
    s = server("csgmv")

    @break_here
    def attention(q, out, *, scale):
        out.copy_(q * scale)
        return out, {"sum": q.sum(1, keepdim=True)}

    def forward(x):
        out, more = attention(x * 2, torch.empty_like(x), scale=3.0)
        return {"y": out + 1, "sums": more["sum"]}

    graphs = s.package.PrefillGraphs(forward, s.step, {"x": torch.zeros(64, 32)})
    graphs.capture([16])
    for tokens in (16, 9):
        x = s.inputs(tokens)
        out = graphs.run(s.step.prepare_prefill([(None, tokens)]), {"x": x})
        torch.testing.assert_close(out["y"], x * 6 + 1)
        torch.testing.assert_close(out["sums"], (x * 2).sum(1, keepdim=True))


@pytest.mark.parametrize(
    ("logits", "why"),
    [
        ([2], "1 counts for 2 requests"),
        ([1, 3], "3 rows for request 1, which has 2"),
        ([-1, 1], "-1 rows for request 0"),
    ],
)
def test_more_logits_than_tokens_are_refused(server, logits, why):
    # the map of rows that reach lm_head has room for those there are
    s = server("csgmv")
    with pytest.raises(ShapeError, match=why):
        s.step.prepare_prefill([("a", 2), (None, 2)], logits=logits)
    with pytest.raises(ShapeError, match=why):
        s.step.prepare_slots("prefill", [0, -1], [2, 2], logits=logits)
