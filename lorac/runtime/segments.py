"""Segments: how the rows of a batch are grouped by adapter, and exactly how many groups a batch can need.

The plan writes these caps out for every bucket; the runtime asks for those of eager batches. Standard library only.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Segments:
    """How a backend groups rows. `chunks` are (from rows, chunk) pairs; `cap` bounds a prefill graph's requests."""

    by: str  # none | request | chunk
    cap: int
    chunks: tuple[tuple[int, int], ...]
    floor: int


@dataclass(frozen=True)
class Grid:
    """What a launch over a batch must cover: `segments` of at most `segment_rows` rows, cut at `chunk` (0: uncut)."""

    segments: int
    segment_rows: int
    chunk: int
    requests: int  # most requests the batch may have


def chunk_of(segments: Segments, rows: int) -> int:
    """Rows of a chunk for a batch of `rows`: the entry with the largest threshold not above it; 0 where uncut."""
    if segments.by != "chunk":
        return 0
    return next(chunk for least, chunk in reversed(segments.chunks) if rows >= least)


def chunk_cap(rows: int, slots: int, chunk: int) -> int:
    """Most chunks that `rows` rows over `slots` adapters need, each adapter's rows cut into chunks of `chunk`.

    With k = min(slots, rows) adapters present, k rows open k chunks and every further `chunk` rows at most one more:
    k + floor((rows - k) / chunk). Exact: k - 1 adapters with one row each and one with the rest reach it.
    """
    present = min(slots, rows)
    return present + (rows - present) // chunk


def decode_grid(segments: Segments, rows: int, slots: int) -> Grid:
    """The grid of a decode batch: chunks, or one segment per adapter."""
    if segments.by == "none":
        return Grid(0, 0, 0, rows)
    chunk = chunk_of(segments, rows)
    if chunk:
        return Grid(chunk_cap(rows, slots, chunk), min(rows, chunk), chunk, rows)
    return Grid(min(rows, slots), rows, 0, rows)


def prefill_grid(segments: Segments, tokens: int, slots: int, requests: int) -> Grid:
    """The grid of a prefill batch of up to `requests` requests: chunks, or one segment per request."""
    requests = min(tokens, requests)
    if segments.by == "request":
        return Grid(requests, tokens, 0, requests)
    chunk = chunk_of(segments, tokens)
    if chunk:
        return Grid(chunk_cap(tokens, slots, chunk), min(tokens, chunk), chunk, requests)
    return Grid(0, 0, 0, requests)


def segment_slots(segments: Segments, rows: int, slots: int, requests: int) -> int:
    """Segment entries of the static metadata for batches up to `rows`: the largest cap of any, at least `floor`.

    The cap is not monotonic in the rows, for chunks grow with them; within one chunk size it is, so the ends decide.
    """
    if segments.by == "none":
        return 1
    if segments.by == "request":
        return max(segments.floor, min(rows, max(requests, slots)))
    ends = [least - 1 for least, _ in segments.chunks if 1 < least <= rows] + [rows]
    return max(segments.floor, *(chunk_cap(end, slots, chunk_of(segments, end)) for end in ends))
