"""Whether times can be believed: how far repeats of the same thing lie apart, and what that leaves of a difference."""

from math import sqrt
from statistics import median, quantiles

SPREAD_LIMIT = 0.05  # of the base's times: beyond it something else ran on the machine
DOUBT_LIMIT = 0.01  # of a tax: beyond it the figure says nothing of a point


def spread(samples: tuple[float, ...]) -> float:
    """The middle half of the samples, from its least to its largest, over the median."""
    if len(samples) < 2:
        return 0.0
    low, _, high = quantiles(samples, n=4)
    return (high - low) / median(samples)


def doubt(samples: tuple[float, ...]) -> float:
    """Half the width of the interval that holds the true median with 95 %, for samples spread like a normal law."""
    if len(samples) < 2:
        return float("inf")
    low, _, high = quantiles(samples, n=4)
    deviation = (high - low) / 1.349
    return 1.96 * 1.2533 * deviation / sqrt(len(samples))


def tax_of(base: tuple[float, ...], mine: tuple[float, ...]) -> tuple[float, float]:
    """(tax, doubt) from times taken in turns: the median of mine over base turn by turn, less one."""
    ratios = tuple(own / other for own, other in zip(mine, base, strict=True))
    return median(ratios) - 1, doubt(ratios)


def too_noisy(base: tuple[float, ...], doubts: list[float]) -> str:
    """Why the machine was too noisy to say, or "" if it was not. `doubts` are of the taxes taken beside `base`."""
    if (wide := spread(base)) > SPREAD_LIMIT:
        return f"half of the base's times lie more than {wide:.0%} apart"
    if (least := min(doubts, default=0.0)) > DOUBT_LIMIT:
        return f"every tax is uncertain by more than {least:.1%}"
    return ""
