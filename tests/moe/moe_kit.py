"""Packages with experts, filled slots, and routed batches whose outputs are compared with the float64 oracle."""

from pathlib import Path

import torch

from lorac import reference
from lorac.verify.slots import numbered

TINY = Path(__file__).parents[2] / "specs" / "tiny_moe.yaml"
TOLERANCE = {torch.float32: 3e-6, torch.float16: 4e-3}  # of each row alone


def spec(hidden=40, width=24, count=5, top_k=3, slots=2, max_rank=12, dtype="float32", ep=1, shared=False):
    """A spec of widths that no block divides, numbers that are no powers of two, and both backends."""
    return {
        "lorac": 1,
        "name": "odd",
        "model": {
            "hidden": hidden, "layers": 2, "vocab": 61, "tied": False,
            "linears": {"o_proj": {"path": "attn.o_proj", "in": hidden, "out": hidden}},
            "experts": {"count": count, "top_k": top_k, "intermediate": width},
        },
        "dtype": dtype,
        "adapters": {"slots": slots, "max_rank": max_rank, "targets": ["experts"], "shared_outer_experts": shared},
        "backends": {"fused": {}, "torch": {}},
        "graphs": {"decode": {"buckets": [1, 4, 18], "variants": {
            "nolora": {"adapters": 0}, "one": {"adapters": 1, "rank": 8}, "lora": {}}},
            "prefill": {"max_tokens": 32, "max_requests": 4, "buckets": [32]}},
        "parallel": {"ep": ep},
    }  # fmt: skip


class Bench:
    """A package with an adapter of each rank in its slots, filled by number, and one step per backend."""

    def __init__(self, package, ranks: tuple[int, ...], generator: torch.Generator):
        self.package, self.generator = package, generator
        self.slots = numbered(package, ranks)("cpu")
        self.layout, self.dtype = package.LAYOUT, self.slots.dtype
        self.gate_up, self.down = (self.layout.by_name[name] for name in ("experts_gate_up", "experts_down"))
        experts = self.gate_up.experts
        self.top_k, self.experts = experts.top_k, experts.local
        self.layer = self.gate_up.layers[-1]
        for module in (self.gate_up, self.down):
            self._fill(module, ranks)
        width, hidden = self.down.in_features, self.gate_up.in_features
        self.w13 = self.random(self.experts, 2 * width, hidden) * hidden**-0.5
        self.w2 = self.random(self.experts, hidden, width) * width**-0.5
        self.steps = {name: package.Step(self.slots, name) for name in package.BACKENDS}

    def _fill(self, module, ranks: tuple[int, ...]) -> None:
        a, b, rank, scale = self.slots.instance(module.name, self.layer)
        limit = self.layout.max_rank
        for slot, own in enumerate(ranks):
            for part, piece in enumerate(module.slices):
                # some adapters have no delta on one slice of a module
                own_rank = 0 if len(module.slices) > 1 and (slot + part) % 5 == 4 else own
                rank[slot, part], scale[slot, part] = own_rank, 0.5 + 0.25 * slot
                rows = a[slot, :, part * limit : part * limit + own_rank]
                rows.copy_(self.random(*rows.shape) * module.in_features**-0.5)
                columns = b[slot, :, piece.start : piece.start + piece.width, :own_rank]
                columns.copy_(self.random(*columns.shape) * max(own, 1) ** -0.5)

    def random(self, *shape) -> torch.Tensor:
        return torch.randn(*shape, generator=self.generator).to(self.dtype)

    def routing(self, rows: int, absent: float = 0.0) -> tuple[torch.Tensor, torch.Tensor]:
        """Distinct experts and weights for each row; a share of the experts is on other ranks."""
        scores = torch.rand(rows, self.experts, generator=self.generator)
        ids = scores.topk(self.top_k, 1)[1].to(torch.int32)
        ids[torch.rand(ids.shape, generator=self.generator) < absent] = -1
        return ids, torch.rand(rows, self.top_k, generator=self.generator) + 0.2

    def moe(self, backend: str, slots: list[int], x, ids, weights, phase: str = "decode") -> torch.Tensor:
        """The mixture for a batch of one request per row, with whatever scratch is read unwritten showing as NaN."""
        step = self.steps[backend]
        step.prepare_slots(phase, slots, [1] * len(slots))
        self.poison(step)
        return self.package.moe(self.layer, x, ids, weights, self.w13, self.w2, step)

    def poison(self, step) -> None:
        for tensor in step.scratch_tensors():
            if tensor.is_floating_point():
                tensor.fill_(float("nan"))

    def expected(self, slots: list[int], x, ids, weights) -> torch.Tensor:
        up, down = (self.slots.instance(module.name, self.layer) for module in (self.gate_up, self.down))
        return reference.moe(x, ids, weights, self.w13, self.w2, up, down, slots)

    def check(self, backend: str, slots: list[int], ids, weights, phase: str = "decode") -> torch.Tensor:
        """The mixture equals the oracle row by row, adapters have an effect, base rows keep their bits; returns x."""
        x = self.random(len(slots), self.gate_up.in_features)
        y = self.moe(backend, slots, x, ids, weights, phase)
        assert_close(y, self.expected(slots, x, ids, weights))
        bare = self.moe(backend, [-1] * len(slots), x, ids, weights, phase)
        assert_close(bare, self.expected([-1] * len(slots), x, ids, weights))
        served = [row for row, slot in enumerate(slots) if slot >= 0 and (ids[row] >= 0).any()]
        base = [row for row, slot in enumerate(slots) if slot < 0]
        assert torch.equal(y[base], bare[base]), "base rows beside adapters changed their bits"
        assert all(not torch.equal(y[row], bare[row]) for row in served), "an adapter had no effect"
        return x


def assert_close(y: torch.Tensor, expected: torch.Tensor) -> None:
    """Every row of y alone, against the oracle."""
    apart, size = (y.double() - expected).norm(dim=1), expected.norm(dim=1)
    wrong = ~(apart <= TOLERANCE[y.dtype] * size)
    assert not wrong.any(), f"rows {wrong.nonzero()[:, 0].tolist()}: relative errors {(apart / size).tolist()}"
