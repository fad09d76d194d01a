"""Experts on a GPU: bfloat16 against float64, graphs and what they contain, offsets past 2**31, changing batches."""

import random

import pytest
import torch

from lorac import reference
from lorac.verify.slots import numbered

pytestmark = pytest.mark.gpu
SPEC = {
    "lorac": 1,
    "name": "moe_on_gpu",
    "model": {
        "hidden": 704, "layers": 2, "vocab": 128, "tied": False,  # 704: no block of 128 divides it
        "linears": {"o_proj": {"path": "attn.o_proj", "in": 704, "out": 704}},
        "experts": {"count": 24, "top_k": 6, "intermediate": 480},
    },
    "dtype": "bfloat16",
    "adapters": {"slots": 5, "max_rank": 32, "targets": ["experts"]},
    "backends": {"fused": {}, "torch": {}},
    "graphs": {"decode": {"buckets": [1, 2, 8, 16, 64, 200]}, "prefill": {"max_tokens": 512, "buckets": [128, 512]}},
    "targets": ["sm_90"],
}  # fmt: skip
RANKS = (32, 7, 16, 1, 24)
BUCKETS = SPEC["graphs"]["decode"]["buckets"]


class Served:
    """One layer with random weights and an adapter of each rank, in slots named by number."""

    def __init__(self, package, ranks: tuple[int, ...], generator: torch.Generator):
        self.package, self.generator, self.ranks = package, generator, ranks
        self.slots = numbered(package, ranks)("cuda")
        self.up, self.down = (package.LAYOUT.by_name[name] for name in ("experts_gate_up", "experts_down"))
        self.experts, self.top_k = self.up.experts.local, self.up.experts.top_k
        self.step = package.Step(self.slots, "fused")
        for module in (self.up, self.down):
            self.fill(module, range(len(ranks)))
        self.w13 = self.random(self.experts, self.up.out_features, self.up.in_features)
        self.w2 = self.random(self.experts, self.down.out_features, self.down.in_features)
        self.router = self.random(self.experts, self.up.in_features)

    def random(self, *shape: int) -> torch.Tensor:
        made = torch.randn(shape, device="cuda", generator=self.generator) * shape[-1] ** -0.5
        return made.to(torch.bfloat16)

    def fill(self, module, slots) -> None:
        a, b, rank, scale = self.slots.instance(module.name, 0)
        limit = self.package.LAYOUT.max_rank
        for slot in slots:
            own = self.ranks[slot]
            if not own:
                continue
            rank[slot], scale[slot] = own, 0.5 + 0.25 * (slot % 4)
            for part in range(len(module.slices)):
                rows = a[slot, :, part * limit : part * limit + own]
                rows.copy_(self.random(*rows.shape))
            b[slot, ..., :own] = self.random(*b[slot, ..., :own].shape)

    def routing(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        weights, ids = torch.softmax((x @ self.router.T).float(), 1).topk(self.top_k, 1)
        return ids.to(torch.int32), weights

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Two mixtures in a row, so that what one leaves in scratch meets the next."""
        for _ in range(2):
            ids, weights = self.routing(x)
            x = x + self.package.moe(0, x, ids, weights, self.w13, self.w2, self.step)
        return x

    def once(self, x, ids, weights) -> torch.Tensor:
        return self.package.moe(0, x, ids, weights, self.w13, self.w2, self.step)

    def expected(self, x, ids, weights, slots: list[int]) -> torch.Tensor:
        tensors = [self.slots.instance(module.name, 0) for module in (self.up, self.down)]
        return reference.moe(x, ids, weights, self.w13, self.w2, *tensors, slots)


@pytest.fixture
def served(build):
    return Served(build(SPEC), RANKS, torch.Generator("cuda").manual_seed(0))


def assert_close(y: torch.Tensor, expected: torch.Tensor) -> None:
    error = (y.double() - expected).norm(dim=1) / expected.norm(dim=1).clamp_min(1e-9)
    assert error.max() < 1e-2, f"relative errors up to {error.max():.1e}, row {error.argmax()}"


@pytest.mark.parametrize("rows", [1, 2, 3, 16, 17, 130, 600])
def test_every_path_against_float64(served, rows, seed):
    rng = random.Random(seed)
    slots = [rng.randrange(-1, 5) for _ in range(rows)]
    x = served.random(rows, 704) * 30
    ids, weights = served.routing(x)
    ids[torch.rand(ids.shape, device="cuda") < 0.2] = -1
    phase = "decode" if rows <= 200 else "prefill"
    served.step.prepare_slots(phase, slots, [1] * rows)
    y = served.once(x, ids, weights)
    assert torch.equal(y, served.once(x, ids, weights)), "the same batch again gives other bits"
    assert_close(y, served.expected(x, ids, weights, slots))
    served.step.prepare_slots(phase, [-1] * rows, [1] * rows)
    bare = served.once(x, ids, weights)
    base = [row for row, slot in enumerate(slots) if slot < 0]
    assert torch.equal(y[base], bare[base]), "base rows beside adapters changed their bits"
    own = [row for row, slot in enumerate(slots) if slot >= 0 and (ids[row] >= 0).any()]
    assert all(not torch.equal(y[row], bare[row]) for row in own)


def test_replays_of_changing_batches_equal_eager(served, seed):
    rng, step = random.Random(seed), served.step
    graphs = served.package.DecodeGraphs(served.forward, step, served.random(200, 704))
    graphs.capture()
    for number in range(128):
        bucket = rng.choice(BUCKETS)
        below = max((size for size in BUCKETS if size < bucket), default=0)
        slots = [rng.randrange(-1, 5) if number % 4 else -1 for _ in range(rng.randint(below + 1, bucket))]
        x = served.random(len(slots), 704) * 30
        out = graphs.run(step.prepare_slots("decode", slots, [1] * len(slots)), x).clone()
        with torch.no_grad(), step.launching():
            eager = served.forward(graphs.inputs.tensors[0][:bucket] if bucket > len(slots) else x)
        assert torch.equal(out, eager[: len(slots)]), f"step {number}: {len(slots)} rows differ from eager"
    assert sum(graphs.stats()["hits"].values()) == 128


def test_a_graph_of_base_rows_holds_no_lora(served):
    step = served.step
    graphs = served.package.DecodeGraphs(served.forward, step, served.random(200, 704))
    graphs.capture([64])
    counts = {}
    for slot in (-1, 2):
        ticket = step.prepare_slots("decode", [slot] * 64, [1] * 64)
        x = served.random(64, 704)
        graphs.run(ticket, x)
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            graphs.run(ticket, x)
            torch.cuda.synchronize()
        names = [e.name for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
        counts[slot] = {
            part: sum(part in name for name in names) for part in ("shrink", "activate", "align", "pair_sum")
        }
    assert counts[-1] == {"shrink": 0, "activate": 2, "align": 2, "pair_sum": 2}
    assert counts[2]["shrink"] >= 2 and counts[2]["activate"] == 2


def test_offsets_past_two_to_the_31(build):
    """33 slots of 256 experts, 4,096 outputs and rank 64: the last slot's B begins at element 2**31."""
    data = SPEC | {
        "name": "wide",
        "model": SPEC["model"] | {
            "hidden": 64, "layers": 1, "linears": {"o_proj": {"path": "attn.o_proj", "in": 64, "out": 64}},
            "experts": {"count": 256, "top_k": 4, "intermediate": 2048},
        },
        "adapters": {"slots": 33, "max_rank": 64, "targets": ["experts"]},
        "graphs": {"decode": {"buckets": [4, 64]}},
    }  # fmt: skip
    served = Served(build(data), (0,) * 32 + (64,), torch.Generator("cuda").manual_seed(1))
    assert served.slots.b["experts_gate_up"].numel() > 2**31
    for rows in (1, 3, 40):
        slots = [32] * rows
        x = served.random(rows, 64) * 8
        ids, weights = served.routing(x)
        ids[:, 0] = 255
        served.step.prepare_slots("decode", slots, [1] * rows)
        assert_close(served.once(x, ids, weights), served.expected(x, ids, weights, slots))
        y = torch.zeros(rows, 4, 4096, device="cuda", dtype=torch.bfloat16)
        served.package.add_experts("experts_gate_up", 0, x, y, ids, None, served.step)
        tensors = served.slots.instance("experts_gate_up", 0)
        delta = reference.expert_lora(x.repeat_interleave(4, 0), ids.flatten(), *tensors, [2048, 2048], [32] * rows * 4)
        assert_close(y.view(rows * 4, -1), delta)
