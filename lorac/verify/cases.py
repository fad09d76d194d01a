"""Awkward batches: every bucket's edges, base rows everywhere, one adapter and all of them, uneven requests."""

import random
from dataclasses import dataclass

Request = tuple[int, int]  # slot (-1: base), rows


@dataclass(frozen=True)
class Case:
    """One batch by slot numbers: requests in order, each with its rows."""

    phase: str  # decode | prefill
    requests: tuple[Request, ...]

    @property
    def rows(self) -> int:
        """Rows of the batch."""
        return sum(rows for _, rows in self.requests)

    def bare(self) -> "Case":
        """The same batch without adapters."""
        return Case(self.phase, tuple((-1, rows) for _, rows in self.requests))

    def describe(self) -> str:
        """`decode: 0 -1 2`, or `prefill: 0x7 -1x3` with rows."""
        if self.phase == "decode":
            return "decode: " + " ".join(str(slot) for slot, _ in self.requests)
        return "prefill: " + " ".join(f"{slot}x{rows}" for slot, rows in self.requests)


def edges(buckets: tuple[int, ...], most: int) -> list[int]:
    """Sizes on both sides of every bucket's edge, up to `most`; without buckets, a few sizes."""
    sizes = {size for bucket in buckets or (1, 16, 17) for size in (bucket - 1, bucket, bucket + 1)}
    return sorted(size for size in sizes if 1 <= size <= most)


def decode_cases(buckets: tuple[int, ...], slots: int, most: int, rng: random.Random) -> list[Case]:
    """Decode batches: patterns of adapters over every edge size."""
    cases = []
    for rows in edges(buckets, most):
        anything = [rng.choice([-1, *range(slots)]) for _ in range(rows)]
        patterns = {
            (-1,) * rows,
            (rng.randrange(slots),) * rows,
            tuple(i % slots for i in range(rows)),
            tuple(anything),
            tuple(sorted(anything)),
            (-1, *([slots - 1] * (rows - 1))),
            (*([0] * (rows - 1)), -1),
        }
        cases += [Case("decode", tuple((slot, 1) for slot in pattern)) for pattern in sorted(patterns)]
    return cases


def prefill_cases(buckets: tuple[int, ...], slots: int, most: int, requests: int, rng: random.Random) -> list[Case]:
    """Prefill batches: one long request, many short ones, uneven ones, over every edge size."""
    cases = []
    for tokens in edges(buckets, most):
        for count in sorted({1, min(2, tokens), min(requests, tokens), min(requests + 1, tokens)}):
            cuts = sorted(rng.sample(range(1, tokens), count - 1))
            lengths = [b - a for a, b in zip([0, *cuts], [*cuts, tokens], strict=True)]
            owners = [rng.choice([-1, *range(slots)]) for _ in lengths]
            cases.append(Case("prefill", tuple(zip(owners, lengths, strict=True))))
        cases.append(Case("prefill", ((rng.randrange(slots), tokens),)))
    return cases


def smaller(case: Case) -> list[Case]:
    """Cases one step simpler, without some requests or with fewer rows, for the search for a smallest failure."""
    found, count = [], len(case.requests)
    size = count // 2
    while size:
        for start in range(0, count, size):
            rest = case.requests[:start] + case.requests[start + size :]
            found += [Case(case.phase, rest)] if rest else []
        size //= 2
    for index, (slot, rows) in enumerate(case.requests):
        if rows > 1:
            fewer = (*case.requests[:index], (slot, rows // 2), *case.requests[index + 1 :])
            found.append(Case(case.phase, fewer))
    return found
