"""The generated admission: every batch gets a bucket that holds it, and its narrowest variant; or eager and why."""

import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from serving import SPEC, spec

BARE = {"torch": {}}


def tables(build, data):
    package = build(data)
    slots = package.Slots("cpu")
    return package.Step(slots).tables


@pytest.mark.parametrize("most", [1, 3, 5, 12, 100, 300])
def test_every_size_up_to_the_maximum_has_a_bucket(build, most):
    t = tables(build, spec(backends=BARE, graphs__decode={"max_rows": most}))
    buckets = list(t.GRIDS["torch"]["decode"])
    assert max(buckets) == most
    for rows in range(1, most + 1):
        admission = t.admit("torch", "decode", rows, rows, 1, 4)
        assert admission.bucket == min(size for size in buckets if size >= rows)
    assert not t.admit("torch", "decode", most + 1, most + 1, 1, 4).bucket


def test_a_stated_maximum_is_captured(build):
    t = tables(build, spec(backends=BARE, graphs__decode={"buckets": [8, 64, 88], "max_rows": 96}))
    assert t.admit("torch", "decode", 96, 96, 0, 0).bucket == 96


def test_variants_that_cannot_occur_have_no_graphs(build):
    bounds = {"nolora": {"adapters": 0}, "one": {"adapters": 1}, "two": {"adapters": 2}, "lora": {}}
    package = build(spec(backends=BARE, graphs__decode={"buckets": [1, 2, 8], "variants": bounds}))
    graphs = package.DecodeGraphs(None, package.Step(package.Slots("cpu")), torch.zeros(8, 1))
    variants = {size: {name for bucket, name in graphs.table if bucket == size} for size in (1, 2, 8)}
    assert variants == {1: {"nolora", "one"}, 2: {"nolora", "one", "two"}, 8: {"nolora", "one", "two", "lora"}}


@given(st.data())
def test_admission_holds_the_batch_in_its_narrowest_variant(build, data):
    t = tables(build, SPEC)
    backend = data.draw(st.sampled_from(["triton", "csgmv", "torch"]))
    phase = data.draw(st.sampled_from(["decode", "prefill", "mixed"]))
    requests = data.draw(st.integers(1, 12))
    if phase == "decode":
        rows = requests * data.draw(st.integers(1, 4))
    else:
        rows = requests + data.draw(st.integers(0, 80))
    adapters = data.draw(st.integers(0, min(4, requests)))
    rank = data.draw(st.integers(1, 16)) if adapters else 0
    admission = t.admit(backend, phase, rows, requests, adapters, rank)

    def work(bound):
        return bound[0] * bound[1]

    most, highest = t.VARIANTS[admission.variant]
    assert adapters <= most and rank <= highest
    assert (admission.variant == "nolora") == (adapters == 0)
    fitting = [b for b in t.VARIANTS.values() if adapters <= b[0] and rank <= b[1]]
    assert work((most, highest)) == min(map(work, fitting))
    if not admission.bucket:
        assert admission.reason and admission.cause
        return
    assert phase != "mixed" and not admission.reason
    grid = t.GRIDS[backend][phase][admission.bucket]
    assert rows <= admission.bucket and requests <= grid.requests
    if phase == "decode":
        assert admission.bucket % (rows // requests) == 0
    else:
        assert admission.bucket <= 2.0 * rows
    package = build(SPEC)
    table = {"decode": package.DecodeGraphs, "prefill": package.PrefillGraphs}[phase]
    captured = sys.modules[table.__module__].GRAPHS[backend]
    assert (admission.bucket, admission.variant) in captured
