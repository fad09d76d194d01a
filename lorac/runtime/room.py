"""How large a step's metadata is, in int32 numbers: the plan states it in bytes, the runtime allocates it.

Standard library only.
"""

HEADER = 4  # requests, rows, chunk, unused: per map
MAPS = 2  # of the rows of the forward, and of those whose logits are computed
UNIT = 64  # rows that one entry of a map's spans describes
SPAN = 64  # columns of B, those of all slots side by side, that one of its bits stands for


def round_up(count: int) -> int:
    """The next multiple of 16: every tensor starts on 64 bytes, for kernels are compiled for aligned pointers."""
    return -(-count // 16) * 16


def map_sizes(rows: int, segments: int, slots: int, widths: int) -> tuple[int, ...]:
    """Of one map: slot and order of every row, the spans at each of the widths B is kept at, slot, start and end of
    every segment, the active slots.
    """
    spans = widths * round_up(-(-rows // UNIT))
    return (*[round_up(rows)] * 2, spans, *[round_up(segments)] * 3, round_up(slots))


def table_size(requests: int) -> int:
    """Of one map as the host sends it: the slot of every request, where its rows start, and the end of the last."""
    return 2 * requests + 1


def numbers(rows: int, requests: int, segments: int, slots: int, widths: int) -> int:
    """Of everything together."""
    return MAPS * (sum(map_sizes(rows, segments, slots, widths)) + HEADER + table_size(requests))
