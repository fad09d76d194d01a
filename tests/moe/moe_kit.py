"""Packages with experts, filled slots, and routed batches whose outputs are compared with the float64 oracle."""

import torch

from lorac import reference


class Bench:
    """A package with an adapter of each rank in its slots, filled by number, and one step per backend."""

    def __init__(self, package, ranks: tuple[int, ...], generator: torch.Generator):
        class Filled(package.Slots):
            """Slots that nothing was loaded into, so nothing is looked up or counted."""

            def slot_rank(self, slot: int) -> int:
                return ranks[slot]

            def use(self, slots): ...

            def release(self, slots): ...

        self.package, self.generator = package, generator
        self.slots = Filled("cpu")
        self.layout = package.LAYOUT
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

    def _fill(self, module, ranks):
        a, b, rank, scale = self.slots.instance(module.name, self.layer)
        limit = self.layout.max_rank
        for slot, own in enumerate(ranks):
            for part, piece in enumerate(module.slices):
                # some adapters have no delta on one slice of a module
                own_rank = 0 if len(module.slices) > 1 and (slot + part) % 5 == 4 else own
                rank[slot, part], scale[slot, part] = own_rank, 0.5 + 0.25 * slot
                rows = slice(part * limit, part * limit + own_rank)
                a[slot, :, rows] = self.random(*a[slot, :, rows].shape) * module.in_features**-0.5
                outs = slice(piece.start, piece.start + piece.width)
                b[slot, :, outs, :own_rank] = self.random(*b[slot, :, outs, :own_rank].shape) * max(own, 1) ** -0.5

    def random(self, *shape) -> torch.Tensor:
        return torch.randn(*shape, generator=self.generator)

    def routing(self, rows: int, absent: float = 0.0) -> tuple[torch.Tensor, torch.Tensor]:
        """Distinct experts and weights for each row; a share of the experts is on other ranks."""
        scores = torch.rand(rows, self.experts, generator=self.generator)
        ids = scores.topk(self.top_k, 1)[1].to(torch.int32)
        ids[torch.rand(ids.shape, generator=self.generator) < absent] = -1
        return ids, torch.rand(rows, self.top_k, generator=self.generator) + 0.2

    def moe(self, backend: str, x, ids, weights) -> torch.Tensor:
        step = self.steps[backend]
        for tensor in step.scratch_tensors():
            if tensor.is_floating_point():
                tensor.fill_(float("nan"))
        return self.package.moe(self.layer, x, ids, weights, self.w13, self.w2, step)

    def expected(self, x, ids, weights, row_slot) -> torch.Tensor:
        up, down = (self.slots.instance(module.name, self.layer) for module in (self.gate_up, self.down))
        return reference.moe(x, ids, weights, self.w13, self.w2, up, down, row_slot)


def error(y: torch.Tensor, expected: torch.Tensor) -> float:
    """The relative error of the worst row."""
    apart = (y.double() - expected).norm(dim=-1)
    return float((apart / expected.norm(dim=-1).clamp_min(1e-12)).max()) if apart.numel() else 0.0
