"""A batch gets the first variant whose bounds hold; its bucket has that variant planned, and none that cannot occur."""

import plan_kit as kit
from hypothesis import given, settings
from hypothesis import strategies as st

from lorac.plan.variants import admitted, occurring, resolve
from lorac.spec.schema import Variant


@st.composite
def resolved(draw):
    slots, max_rank = draw(st.integers(1, 6)), draw(st.integers(1, 8))
    written = {name: Variant(**bounds) for name, bounds in draw(kit.variants(slots, max_rank)).items()}
    return written, resolve(written, slots, max_rank), slots, max_rank


def batches(slots: int, max_rank: int, rows: int):
    """(adapters, rank) of every batch of up to `rows` rows; without adapters there is no rank."""
    yield 0, 0
    for adapters in range(1, min(slots, rows) + 1):
        for rank in range(1, max_rank + 1):
            yield adapters, rank


@settings(max_examples=150)
@given(resolved(), st.integers(1, 8))
def test_the_first_that_holds_is_planned(case, rows):
    written, variants, slots, max_rank = case
    assert sorted(v.name for v in variants) == sorted(written)
    planned = occurring(variants, rows)
    gotten = {admitted(variants, *batch) for batch in batches(slots, max_rank, rows)}
    assert gotten <= set(planned) and "" not in gotten
    # every planned variant is some batch's, but for bounds another of the same width shadows in this bucket alone
    assert set(planned) == gotten


@settings(max_examples=100)
@given(resolved())
def test_narrow_to_wide(case):
    written, variants, slots, max_rank = case
    for index, variant in enumerate(variants):
        bounds = written[variant.name]
        assert variant.adapters == (slots if bounds.adapters is None else bounds.adapters)
        assert variant.rank == (0 if variant.adapters == 0 else max_rank if bounds.rank is None else bounds.rank)
        for wider in variants[index + 1 :]:
            # a later one never fits inside an earlier one, unless they are equal
            inside = wider.adapters <= variant.adapters and wider.rank <= variant.rank
            assert not inside or (wider.adapters, wider.rank) == (variant.adapters, variant.rank)


def test_nolora_admits_no_adapter():
    data = kit.spec_data(graphs={"decode": {"max_rows": 8, "variants": {"lora": {}, "nolora": {"adapters": 0}}}})
    plan = kit.plan_of(data)
    assert [variant.name for variant in plan.variants] == ["nolora", "lora"]
    assert admitted(plan.variants, 0, 0) == "nolora"
    assert all(admitted(plan.variants, adapters, 1) == "lora" for adapters in range(1, plan.slots + 1))


@settings(max_examples=60)
@given(kit.specs())
def test_buckets_plan_the_variants_that_occur(data):
    plan = kit.plan_of(data)
    for backend in plan.backends:
        for bucket in backend.decode:
            assert bucket.variants == occurring(plan.variants, bucket.size)
        for bucket in backend.prefill:
            assert bucket.variants == occurring(plan.variants, bucket.grid.requests)
