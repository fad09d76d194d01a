"""Segment caps against brute force: no batch needs more, and one needs exactly as many."""

from collections.abc import Iterator

import plan_kit as kit
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lorac.plan.parameters import parse_segments
from lorac.runtime.segments import chunk_cap, decode_grid, prefill_grid, segment_slots


def batches(rows: int, slots: int) -> Iterator[tuple[int, ...]]:
    """Every way to hand `rows` rows to `slots` adapters and to none: rows per adapter."""
    if slots == 0:
        yield ()
        return
    for first in range(rows + 1):
        for rest in batches(rows - first, slots - 1):
            yield (first, *rest)


@pytest.mark.parametrize("slots", [1, 2, 3, 4])
@pytest.mark.parametrize("rows", range(1, 13))
def test_chunk_caps_are_exact(rows, slots):
    every = list(batches(rows, slots))
    assert all(sum(batch) <= rows for batch in every) and len(set(every)) == len(every)
    for chunk in (1, 2, 3, 4, 5, 8, 16):
        needed = max(sum(-(-count // chunk) for count in batch) for batch in every)
        assert chunk_cap(rows, slots, chunk) == needed


@settings(max_examples=100)
@given(kit.segments_by_chunk() | kit.segments_by_request(), st.integers(1, 300), st.integers(1, 20), st.integers(1, 50))
def test_the_room_for_segments_covers_every_size(written, most, slots, requests):
    segments, problems = parse_segments(written, ())
    assert not problems
    room = segment_slots(segments, most, slots, requests)
    needed = segments.floor
    for rows in range(1, most + 1):
        decode, prefill = decode_grid(segments, rows, slots), prefill_grid(segments, rows, slots, requests)
        needed = max(needed, decode.segments, prefill.segments)
        for grid in (decode, prefill):
            # whatever a grid promises to cover holds every row: no segment is longer, none is left out
            assert grid.segment_rows == min(rows, grid.chunk or rows)
            assert grid.segments * grid.segment_rows >= rows or grid.segments >= min(slots, rows)
        assert prefill.requests == min(rows, requests)
        for fewer in range(1, slots):
            assert decode_grid(segments, rows, fewer).segments <= decode.segments
    assert room == needed


@settings(max_examples=60)
@given(kit.specs(), st.data())
def test_no_batch_exceeds_the_grid_of_its_bucket(data, draw):
    plan = kit.plan_of(data)
    for backend in plan.backends:
        rule = backend.segments
        for bucket in backend.decode:
            rows = draw.draw(st.integers(1, bucket.size))
            cuts = sorted(draw.draw(st.lists(st.integers(0, rows), min_size=plan.slots, max_size=plan.slots)))
            counts = [b - a for a, b in zip([0, *cuts], cuts, strict=False)]
            chunk = bucket.grid.chunk or 1 << 30
            if rule.by != "none":
                assert sum(-(-count // chunk) for count in counts) <= bucket.grid.segments
                assert max(counts) <= bucket.grid.segment_rows or bucket.grid.chunk
            assert bucket.grid == decode_grid(rule, bucket.size, plan.slots)  # its own cap, not the largest bucket's
        for bucket in backend.prefill:
            limit = min(data["graphs"]["prefill"]["max_requests"], bucket.size)
            assert bucket.grid.requests == (min(limit, rule.cap) if rule.by == "request" else limit)
