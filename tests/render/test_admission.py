"""The generated `admit` against the plan: smallest bucket, first variant, and a reason where there is none."""

import plan_kit
import render_kit as kit
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from lorac.plan.buckets import bucket_of
from lorac.plan.variants import admitted


def admit_of(plan):
    space = {}
    exec(compile(kit.files_of_plan(plan)["admission.py"], "admission.py", "exec"), space)
    return space["admit"]


@st.composite
def batches(draw, slots: int, max_rank: int):
    """(phase, rows, requests, adapters, rank) of a batch that can be."""
    phase = draw(st.sampled_from(["decode", "prefill"]))
    requests = draw(st.integers(1, 420))
    rows = (
        requests * draw(st.sampled_from([1, 1, 1, 2, 3]))
        if phase == "decode"
        else requests + draw(st.integers(0, 2100))
    )
    adapters = draw(st.integers(0, min(slots, requests)))
    return phase, rows, requests, adapters, draw(st.integers(1, max_rank)) if adapters else 0


@settings(max_examples=40)
@given(plan_kit.specs(), st.data())
def test_admission(data, draw):
    plan = plan_kit.plan_of(data)
    admit = admit_of(plan)
    padding = data.get("graphs", {}).get("prefill", {}).get("max_padding", 2.0)
    for backend in plan.backends:
        for _ in range(10):
            phase, rows, requests, adapters, rank = draw.draw(batches(plan.slots, plan.max_rank))
            planned = {bucket.size: bucket for bucket in getattr(backend, phase)}
            sizes = tuple(planned)
            if phase == "decode":
                sizes = tuple(size for size in sizes if size % (rows // requests) == 0)
            bucket = bucket_of(sizes, rows)
            if phase == "prefill" and bucket:
                bucket *= requests <= planned[bucket].grid.requests and bucket <= padding * rows
            got = admit(backend.name, phase, rows, requests, adapters, rank)
            assert got.bucket == bucket
            assert got.variant == admitted(plan.variants, adapters, rank)
            assert bool(got.reason) == (not bucket)
            if bucket:
                # what replays is captured, and covers the batch
                assert got.variant in planned[bucket].variants
                assert rows <= bucket and requests <= planned[bucket].grid.requests


@settings(max_examples=15)
@given(plan_kit.specs(), st.data())
def test_a_mixed_batch_has_no_graph(data, draw):
    plan = plan_kit.plan_of(data)
    assume(plan.decode.buckets)
    got = admit_of(plan)(plan.backends[0].name, "mixed", 1, 1, 1, 1)
    assert got.bucket == 0 and got.reason


def test_reasons_say_what_and_how_much():
    plan = plan_kit.plan_of(plan_kit.spec_data(graphs={
        "decode": {"max_rows": 4}, "prefill": {"max_tokens": 64, "buckets": [32, 64], "max_requests": 3},
    }))  # fmt: skip
    admit = admit_of(plan)
    assert admit("csgmv", "decode", 5, 5, 1, 1).reason == "5 rows are above the largest decode bucket, 4"
    assert "64" in admit("csgmv", "prefill", 65, 1, 1, 1).reason
    assert "4 requests" in admit("csgmv", "prefill", 30, 4, 1, 1).reason
    assert "2.0 times" in admit("csgmv", "prefill", 3, 1, 1, 1).reason
    assert admit("torch", "prefill", 30, 1, 1, 1).reason == plan_kit.declaration("torch").no_prefill_graphs
    assert admit("csgmv", "prefill", 30, 3, 1, 1).bucket == 32
