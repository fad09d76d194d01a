"""A tax is taken only of results that are right; whoever cannot be timed stands in the table with the reason."""

import pytest
import torch

from lorac.bench import tax
from lorac.bench.peer_imports import PeerError
from lorac.bench.tax import Batch, measure
from lorac.bench.timing import Timing
from lorac.bench.workload import Workload

from .test_measure import DATA


def right(workload, rows, adapters):
    step = workload.step("torch", rows, adapters)
    return lambda module, layer: workload.run(step, module, layer)


def without_lora(workload, rows, adapters):
    return lambda module, layer: workload.base(module, layer, rows)


def absent(workload, rows, adapters):
    raise PeerError("its kernels need a newer GPU")


def broken(workload, rows, adapters):
    def run(module, layer):
        raise ValueError("no such rank")

    return run


@pytest.fixture
def workload(build, seed, monkeypatch):
    """On the CPU; base takes 100, each of the others 20 more than the one before it."""
    monkeypatch.setattr(tax, "capture", lambda run, pool: run)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 0))
    monkeypatch.setattr(
        tax, "interleaved", lambda graphs, *_: [Timing((100.0 + 20 * at,) * 15) for at in range(len(graphs))]
    )
    return Workload(build(DATA), "cpu", 2, seed)


def test_taxes_and_reasons(workload):
    peers = {"right": right, "none": without_lora, "absent": absent, "broken": broken}
    cell, bare = measure(
        workload, ["torch"], peers, [Batch(8, 2, 16, "lora"), Batch(8, 0, 0, "nolora")], 0.1, lambda *_: None
    )
    of = cell.contenders
    assert cell.base_us == 50.0, "a layer's share of two"
    assert (of["torch"].tax, of["right"].tax) == (pytest.approx(0.2), pytest.approx(0.4))
    assert of["torch"].us == 60.0 and 0 < of["torch"].error < 1e-5
    assert of["none"].problem.startswith("wrong: a row's relative error is")
    assert of["absent"].problem == "its kernels need a newer GPU"
    assert of["broken"].problem == "ValueError: no such rank"
    assert bare.contenders.keys() == {"torch"}, "engines hold adapters; without any there is nothing to compare"


def test_a_backend_without_lora_would_not_be_timed(workload, monkeypatch):
    monkeypatch.setattr(workload, "run", lambda step, module, layer: workload.base(module, layer, step.batch.padded))
    (cell,) = measure(workload, ["torch"], {}, [Batch(8, 2, 16, "lora")], 0.1, lambda *_: None)
    assert cell.contenders["torch"].problem.startswith("wrong")


@pytest.mark.parametrize("spread, rounds", [(0.0, 1), (0.8, 3), (8.0, 6)])
def test_what_is_in_doubt_is_timed_again(workload, monkeypatch, spread, rounds):
    """Until all samples together leave less of it, and no more often than that."""
    asked, doubts, tax_of = [], [], tax.tax_of

    def noisy(graphs, seconds, least):
        asked.append(least)
        own = tuple(120.0 + spread * (at % 3 - 1) for at in range(least))
        return [Timing((100.0,) * least), Timing(own), Timing((200.0, 900.0) * (least // 2) + (200.0,))]

    def noting(base, mine):
        found = tax_of(base, mine)
        doubts.append((len(mine), found[1]))
        return found

    monkeypatch.setattr(tax, "interleaved", noisy)
    monkeypatch.setattr(tax, "tax_of", noting)
    (cell,) = measure(workload, ["torch"], {"right": right}, [Batch(8, 2, 16, "lora")], 0.1, lambda *_: None)
    assert len(asked) == rounds, "a peer's doubt asks for no more"
    assert [samples for samples, _ in doubts[:rounds]] == [15 * (at + 1) for at in range(rounds)]
    assert all(doubt > tax.DOUBT_LIMIT / 2 for _, doubt in doubts[: rounds - 1])
    assert rounds == 6 or doubts[rounds - 1][1] <= tax.DOUBT_LIMIT / 2
    assert cell.contenders["torch"].tax == pytest.approx(0.2)
