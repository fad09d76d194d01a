"""Every size up to the stated maximum has one bucket, the maximum is one, and none exceeds it."""

import plan_kit as kit
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lorac.plan import buckets

LISTS = st.none() | st.lists(st.integers(1, 400), min_size=1, unique=True).map(sorted).map(tuple)


def check(found: tuple[int, ...], maximum: int, listed: tuple[int, ...] = ()):
    assert list(found) == sorted(set(found))
    assert found[-1] == maximum and found[0] >= 1
    assert set(found) - set(listed) <= {maximum} or not listed
    for size in range(1, maximum + 1):
        holding = [bucket for bucket, before in zip(found, (0, *found), strict=False) if before < size <= bucket]
        assert holding == [buckets.bucket_of(found, size)]
    assert buckets.bucket_of(found, maximum + 1) == 0


@pytest.mark.parametrize("maximum", kit.MAXIMA)
def test_chosen_buckets(maximum):
    decode, prefill = buckets.decode_buckets(None, maximum), buckets.prefill_buckets(None, maximum)
    check(decode, maximum)
    check(prefill, maximum)
    for size in range(1, maximum + 1):
        assert buckets.bucket_of(decode, size) <= 2 * size
    for size in range(32, maximum + 1):
        assert buckets.bucket_of(prefill, size) < 1.25 * size + 1


@given(LISTS, st.integers(1, 400))
def test_listed_buckets(listed, maximum):
    listed = listed and tuple(size for size in listed if size <= maximum) or None
    check(buckets.decode_buckets(listed, maximum), maximum, listed or ())
    check(buckets.prefill_buckets(listed, maximum), maximum, listed or ())


def test_the_largest_listed_bucket_is_the_maximum_where_none_is_stated():
    assert buckets.decode_buckets((2, 7), None) == (2, 7)


@settings(max_examples=60)
@given(kit.specs())
def test_buckets_of_a_plan(data):
    plan = kit.plan_of(data)
    graphs = data.get("graphs", {})
    for phase, found, most in (("decode", plan.decode, "max_rows"), ("prefill", plan.prefill, "max_tokens")):
        asked = graphs.get(phase)
        if asked is None or asked.get("mode") == "off":
            assert found.buckets == ()
            continue
        check(found.buckets, asked[most], tuple(asked.get("buckets") or ()))
        for backend in plan.backends:
            planned = [bucket.size for bucket in getattr(backend, phase)]
            assert planned in ([], list(found.buckets))
            assert planned or phase == "prefill" and backend.prefill_mode == "off"
