"""Which launches of a kernel the batches of a size get: an admitted batch has its variant's bounds, not its own."""

from dataclasses import dataclass, field

from lorac.plan.kernels import ANY_ADAPTERS
from lorac.plan.model import KernelPlan, Plan, Variant
from lorac.plan.variants import admitted, occurring

Batch = tuple[int, int]  # adapters, their rank


@dataclass
class Reached:
    """The batches that stand for all that get some launches, and the bounds on the adapters of those launches."""

    batches: list[Batch] = field(default_factory=list)
    bounds: list[int] = field(default_factory=list)


def reached(plan: Plan, kernel: KernelPlan, rows: int) -> dict[Batch, Reached]:
    """By (rank, adapters) of a kernel's launches, as far as batches of `rows` rows get them; (rank, any) for any bound.

    A variant's batches are one of as many adapters as it takes and, where no narrower variant does, one of a single
    one. A kernel with the base has a tile of the same sizes for every variant: that of most adapters is judged, at the
    full rank, and without adapters.
    """
    found: dict[Batch, Reached] = {}
    variants = _variants(plan, rows)
    full = max(variant.rank for variant in variants)
    for variant in variants:
        most = min(variant.adapters, rows)
        launch = next(
            of
            for of in kernel.launches
            if of.rank >= variant.rank and (of.adapters == ANY_ADAPTERS or of.adapters >= most)
        )
        if kernel.base and variant.rank < full:
            continue
        key = (launch.rank, ANY_ADAPTERS if kernel.base else launch.adapters)
        of = found.setdefault(key, Reached([(0, launch.rank)] if kernel.base else []))
        for count in sorted({1, most}):
            if (count, variant.rank) not in of.batches and _gets(plan, variant, count):
                of.batches.append((count, variant.rank))
        if launch.adapters not in of.bounds:
            of.bounds.append(launch.adapters)
    return found


def _variants(plan: Plan, rows: int) -> list[Variant]:
    """Those with adapters that occur at a size; where no graph is for any, what an eager batch may be."""
    names = occurring(plan.variants, rows)
    found = [variant for variant in plan.variants if variant.name in names and variant.adapters]
    return found or [Variant("", plan.slots, plan.max_rank)]


def _gets(plan: Plan, variant: Variant, count: int) -> bool:
    return admitted(plan.variants, count, variant.rank) in ("", variant.name)
