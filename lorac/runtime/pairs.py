"""Pairs: how the rows of a mixture of experts are grouped, and exactly how many groups a batch can need.

A pair is one row and one of its chosen experts: row r with top_k choices has pairs r * top_k to r * top_k + top_k - 1.
A block is up to so many pairs of one expert, a group all pairs of one adapter and one expert. Standard library only.
"""

# parts of an intermediate that its reader adds up; where there would be more, a launch of its own computes it
MOST_SHARES = 32


def block_cap(pairs: int, experts: int, rows: int) -> int:
    """Most blocks of `rows` pairs that `pairs` pairs over `experts` experts can need.

    With k = min(pairs, experts) experts met, k pairs open k blocks and every further `rows` pairs at most one more:
    k + floor((pairs - k) / rows). Exact, as `segments.chunk_cap` is, and for the same reason.
    """
    met = min(pairs, experts)
    return met + (pairs - met) // rows


def group_cap(pairs: int, experts: int, slots: int) -> int:
    """Most groups that `pairs` pairs can form over `slots` adapters: each may be alone, and no group is met twice."""
    return min(pairs, slots * experts)


def table_size(pairs: int, blocks: int, groups: int) -> int:
    """int32 elements of the alignment's tables.

    In order: pairs by expert, pairs by expert and slot; expert, start and end of each block; slot, expert, start and
    end of each group.
    """
    return 2 * pairs + 3 * blocks + 4 * groups
