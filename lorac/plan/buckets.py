"""Buckets: the padded sizes graphs are captured for. The stated maximum is one, none exceeds it, every size has one."""

from itertools import chain


def decode_buckets(buckets: tuple[int, ...] | None, max_rows: int | None) -> tuple[int, ...]:
    """The listed buckets, with the maximum added where the list stops short; without a list, `default_decode`."""
    if buckets is None:
        return default_decode(max_rows)
    return covering(buckets, max_rows or buckets[-1])


def prefill_buckets(buckets: tuple[int, ...] | None, max_tokens: int) -> tuple[int, ...]:
    """The listed buckets, with the maximum added where the list stops short; without a list, `default_prefill`."""
    return default_prefill(max_tokens) if buckets is None else covering(buckets, max_tokens)


def default_decode(max_rows: int) -> tuple[int, ...]:
    """1, 2, 4, then steps of 8 to 32, of 16 to 128, of 32 to 256 and of 64 beyond: a step is at most half the size."""
    steps = chain((1, 2, 4), range(8, 32, 8), range(32, 128, 16), range(128, 256, 32), range(256, max_rows, 64))
    return covering(tuple(steps), max_rows)


def default_prefill(max_tokens: int) -> tuple[int, ...]:
    """Steps of 4 to 32, then four steps to each power of two: from 32 tokens on padding stays under a quarter."""
    sizes = list(range(4, 32, 4))
    power = 32
    while power < max_tokens:
        sizes += range(power, 2 * power, power // 4)
        power *= 2
    return covering(tuple(sizes), max_tokens)


def covering(sizes: tuple[int, ...], maximum: int) -> tuple[int, ...]:
    """The sizes below the maximum, and the maximum."""
    return (*(size for size in sizes if size < maximum), maximum)


def bucket_of(buckets: tuple[int, ...], size: int) -> int:
    """The smallest bucket that holds `size`; 0 when none does."""
    return next((bucket for bucket in buckets if bucket >= size), 0)
