"""What stands in for the forward of a model's layers: the model's own output, and LoRA added to it in place.

The base output is always computed by the model's own layer, so that base rows keep its bits, whatever computes it; but
a mixture of experts is the generated one.
"""

from collections.abc import Callable
from functools import partial
from types import ModuleType

import torch

from lorac.integrations.sites import Site
from lorac.runtime.errors import PackageError, ShapeError
from lorac.runtime.step import Step

Forward = Callable[..., torch.Tensor]


def forwards(site: Site, package: ModuleType, step: Step) -> list[Forward]:
    """A new forward for each of the site's layers, in their order."""
    bases = [part.forward for part in site.parts]
    if len(bases) > 1:
        together = _Together(site, bases, package, step)
        return [partial(together.forward, index) for index in range(len(bases))]
    if site.module.experts is not None:
        if not hasattr(step.backend, "MOE"):
            raise PackageError(f"backend {step.backend_name} has no kernels for experts: make the Step with another")
        return [partial(_mixed, site, package, step)]
    scale = getattr(site.parts[0], "embed_scale", None)
    if scale is not None:
        return [partial(_scaled, site, bases[0], scale, package, step)]
    return [partial(_added, site, bases[0], package, step)]


def _added(site: Site, base: Forward, package: ModuleType, step: Step, x: torch.Tensor) -> torch.Tensor:
    return package.add(site.module.name, site.layer, x, base(x), step)


def _mixed(
    site: Site, package: ModuleType, step: Step, x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor
) -> torch.Tensor:
    """A mixture of experts is the generated one, base rows too: what the model's own makes of a row depends, in its
    rounding, on the rows beside it, and it cannot be captured.
    """
    experts = site.parts[0]
    return package.moe(site.layer, x, topk_ids, topk_weights, experts.gate_up_proj, experts.down_proj, step)


def _scaled(
    site: Site, base: Forward, scale: torch.Tensor, package: ModuleType, step: Step, x: torch.Tensor
) -> torch.Tensor:
    """An embedding whose layer multiplies what it looks up, and so what an adapter adds to that."""
    y = base(x)
    if not _has_adapters(site, step):
        return y
    delta = package.add(site.module.name, site.layer, x, torch.zeros_like(y), step)
    return y.add_(delta.mul_(scale.to(y.dtype)))


class _Together:
    """Layers of the model that are one module of the package: the first one called computes all of them.

    Each result has the memory layout the model's own would have, for what follows may round differently by layout.
    """

    def __init__(self, site: Site, bases: list[Forward], package: ModuleType, step: Step):
        self.site, self.bases, self.package, self.step = site, bases, package, step
        self.widths = [part.width for part in site.module.slices]
        self._x: torch.Tensor | None = None
        self._made: list[torch.Tensor] = []  # results that are still to be asked for, the last one first

    def forward(self, index: int, x: torch.Tensor) -> torch.Tensor:
        if not _has_adapters(self.site, self.step):
            return self.bases[index](x)
        if index == 0:
            self._compute(x)
        left = len(self.bases) - index
        if self._x is not x or len(self._made) != left:
            names = ", ".join(part.name for part in self.site.module.slices)
            raise ShapeError(
                f"the model does not call {names} in this order on one tensor, as {self.site.module.name} needs"
            )
        made = self._made.pop()
        if not self._made:
            self._x = None
        return made

    def _compute(self, x: torch.Tensor) -> None:
        y = torch.cat([base(x) for base in self.bases], dim=-1)
        self.package.add(self.site.module.name, self.site.layer, x, y, self.step)
        self._x, self._made = x, [part.contiguous() for part in reversed(y.split(self.widths, dim=-1))]


def _has_adapters(site: Site, step: Step) -> bool:
    batch, _ = step.enter(site.module.name, site.layer)  # raises for a batch that was not prepared, or is stale
    return batch.adapters > 0
