"""A forward of two mixtures in decode and prefill graphs: replay equals eager, and base-only graphs hold no LoRA."""

import random

import moe_kit as kit
import pytest
import torch

from lorac.runtime.launch import Kernel

HIDDEN = 40
RANKS = (3, 12)


class Model(torch.nn.Module):
    """x -> x + moe(x), some times over, each routed by its own router."""

    def __init__(self, bench: kit.Bench, step, depth: int):
        super().__init__()
        self.bench, self.step = bench, step
        self.routers = [bench.random(bench.experts, HIDDEN) for _ in range(depth)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        bench = self.bench
        for router in self.routers:
            weights, ids = torch.softmax(x @ router.T, 1).topk(bench.top_k, 1)
            x = x + bench.package.moe(bench.layer, x, ids, weights, bench.w13, bench.w2, self.step)
        return x

    def oracle(self, x: torch.Tensor, slots: list[int]) -> torch.Tensor:
        for router in self.routers:
            weights, ids = torch.softmax(x @ router.to(x.dtype).T, 1).topk(self.bench.top_k, 1)
            x = x + self.bench.expected(slots, x, ids, weights)
        return x


@pytest.fixture
def bench(build, generator):
    """3 experts, of which each row has one, so that Triton's interpreter has little to do."""
    return kit.Bench(build(kit.spec(count=3, top_k=1)), RANKS, generator)


@pytest.fixture
def launched(monkeypatch):
    """(kernel, its RANK) of every launch."""
    seen, run = [], Kernel.run

    def noting(self, launch, grid, **arguments):
        seen.append((self.name, launch.constants.get("RANK", 0)))
        run(self, launch, grid, **arguments)

    monkeypatch.setattr(Kernel, "run", noting)
    return seen


@pytest.mark.parametrize("backend", ["fused", "torch"])
def test_replay_equals_eager_and_the_oracle(bench, backend, seed):
    rng, step = random.Random(seed), bench.steps[backend]
    model = Model(bench, step, depth=2)
    graphs = bench.package.DecodeGraphs(model, step, torch.zeros(18, HIDDEN))
    graphs.capture([4])
    for rows in (3, 4):
        slots = [rng.randrange(-1, 2) for _ in range(rows)]
        x = bench.random(rows, HIDDEN)
        ticket = step.prepare_slots("decode", slots, [1] * rows)
        bench.poison(step)
        y = graphs.run(ticket, x).clone()
        assert ticket.bucket >= rows
        assert torch.equal(y, model(x)), "a replay differs from what runs eagerly"
        kit.assert_close(y, model.oracle(x, slots))
    assert sum(graphs.stats()["hits"].values()) == 2


def test_a_graph_of_base_rows_holds_no_lora(bench, launched):
    step = bench.steps["fused"]
    graphs = bench.package.DecodeGraphs(Model(bench, step, depth=1), step, torch.zeros(18, HIDDEN))
    graphs.capture([1, 18])
    for rows in (1, 18):
        for slot, base in ((-1, True), (1, False)):
            launched.clear()
            graphs.run(step.prepare_slots("decode", [slot] * rows, [1] * rows), bench.random(rows, HIDDEN))
            names = [name for name, _ in launched if name != "route"]
            ranks = {rank for name, rank in launched if name.startswith(("pair_activate", "pair_project", "align"))}
            assert names and base == (ranks == {0})
            assert not (base and any("shrink" in name for name in names))


def test_a_prefill_graph_in_pieces(bench):
    step = bench.steps["fused"]
    model = Model(bench, step, depth=1)
    graphs = bench.package.PrefillGraphs(model, step, torch.zeros(32, HIDDEN))
    bucket = 32
    graphs.capture([bucket])
    x = bench.random(21, HIDDEN)
    ticket = step.prepare_slots("prefill", [1, -1, 0], [9, 5, 7])
    y = graphs.run(ticket, x).clone()
    assert ticket.bucket == bucket and sum(graphs.stats()["hits"].values()) == 1
    kit.assert_close(y, model.oracle(x, [1] * 9 + [-1] * 5 + [0] * 7))
