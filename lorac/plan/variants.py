"""Variants: bounds on a batch that graphs and kernels are specialised for, tried from narrow to wide."""

from lorac.plan.model import Variant


def resolve(variants: dict, slots: int, max_rank: int) -> tuple[Variant, ...]:
    """Variants with their bounds filled in, by the work they allow; `nolora`, which allows none, comes first."""
    resolved = []
    for name, bounds in variants.items():
        adapters = slots if bounds.adapters is None else min(bounds.adapters, slots)
        rank = max_rank if bounds.rank is None else min(bounds.rank, max_rank)
        resolved.append(Variant(name, adapters, rank if adapters else 0))
    return tuple(sorted(resolved, key=lambda v: (v.adapters * v.rank, v.adapters, v.name)))


def occurring(variants: tuple[Variant, ...], rows: int) -> tuple[str, ...]:
    """Names of the variants that some batch of up to `rows` rows can get: those no narrower one already covers.

    A batch of `rows` rows has at most `rows` distinct adapters, so wider bounds on adapters are the same bound there.
    """
    planned: list[Variant] = []
    for variant in variants:
        adapters = min(variant.adapters, rows)
        if not any(min(v.adapters, rows) >= adapters and v.rank >= variant.rank for v in planned):
            planned.append(variant)
    return tuple(variant.name for variant in planned)


def admitted(variants: tuple[Variant, ...], adapters: int, rank: int) -> str:
    """The first variant whose bounds hold for a batch of that many distinct adapters of up to that rank; "" if none."""
    return next((v.name for v in variants if adapters <= v.adapters and rank <= v.rank), "")
