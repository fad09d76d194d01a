"""A search finds the known best, leaves out what cannot serve, goes on after an interrupt and keeps to its budget."""

import json

import pytest

from lorac.errors import BuildError
from lorac.plan.kernels import ANY_ADAPTERS
from lorac.tune.report import report
from lorac.tune.run import tune
from lorac.tune.search import Result, Search
from lorac.tune.space import Site

from .conftest import GPU, Compiler, Measurer, search, wide_is_fast


def test_the_best_of_the_space_is_found_and_written(spec):
    measurer, compiler = Measurer(wide_is_fast), Compiler()
    outcome = search(spec, measurer, compiler)
    assert outcome.ended == "nothing is left to try" and compiler.closed
    assert len(measurer.seen) == len(set(measurer.seen)), "a configuration was measured twice"
    for site, found in outcome.searches.items():
        near = min(wide_is_fast(launch) for launch in found.predicted)
        assert wide_is_fast(found.best) <= wide_is_fast(found.declared)
        assert wide_is_fast(found.best) <= 2 * near, site
    text = report(outcome)
    assert "triton   qkv_proj" in text and str(outcome.table) in text


def test_what_cannot_serve_is_never_measured_nor_chosen(spec):
    bad = lambda launch: "spills 8 bytes" if launch.warps == 8 else ""  # noqa: E731
    measurer = Measurer(wide_is_fast)
    outcome = search(spec, measurer, Compiler(bad))
    assert measurer.seen and all(launch.warps != 8 for _, launch in measurer.seen)
    assert all(found.best.warps != 8 for found in outcome.searches.values())
    assert "configurations left out: spills some bytes" in report(outcome)


def test_a_wrong_result_never_wins(spec):
    class Wrong(Measurer):
        def measure(self, site, chosen, tried):
            return [Result(problem="wrong: a row's relative error is 1") for _ in tried]

    outcome = search(spec, Wrong(wide_is_fast), budget=60)
    assert all(found.best == found.declared for found in outcome.searches.values())
    assert "wrong" in report(outcome)


def test_an_interrupted_search_goes_on(spec):
    first = Measurer(wide_is_fast, stop_after=20)
    with pytest.raises(KeyboardInterrupt):
        search(spec, first)
    assert not list((spec.parent / "tuned").glob("*.yaml")), "no table of half a search"
    journal = next((spec.parent / "tuned").glob("*.journal"))
    journal.write_text(journal.read_text() + '{"site": {"cut')  # as a killed process leaves it
    second = Measurer(wide_is_fast)
    resumed = search(spec, second, resume=True)
    assert not set(first.seen) & set(second.seen), "measured again"
    assert len(first.seen) >= 20
    alone = search(spec, Measurer(wide_is_fast))
    best = {site: wide_is_fast(found.best) for site, found in alone.searches.items()}
    assert all(wide_is_fast(found.best) <= 2 * best[site] for site, found in resumed.searches.items())


def test_a_budget_of_nothing_writes_the_table_of_a_journal(spec):
    before = search(spec, Measurer(wide_is_fast)).table.read_text()
    again = Measurer(wide_is_fast)
    assert search(spec, again, resume=True, budget=0).table.read_text() == before
    assert not again.seen


def test_a_journal_of_another_gpu_is_refused(spec):
    search(spec, Measurer(wide_is_fast), budget=10)
    journal = next((spec.parent / "tuned").glob("*.journal"))
    head, *rest = journal.read_text().splitlines()
    journal.write_text("\n".join([json.dumps(json.loads(head) | {"gpu": "NVIDIA L4"}), *rest]))
    with pytest.raises(BuildError, match="another GPU or for other kernels"):
        search(spec, Measurer(wide_is_fast), resume=True)


def test_the_budget_ends_a_search(spec):
    measurer = Measurer(wide_is_fast)
    outcome = search(spec, measurer, budget=15)
    assert outcome.ended == "the budget is spent"
    assert 0 < len(measurer.seen) < 60


def test_a_winner_is_tried_at_the_other_sizes(spec):
    site, other = (Site("triton", "shrink", "qkv_proj", 32, ANY_ADAPTERS, rows) for rows in (1, 64))
    outcome = search(spec, Measurer(wide_is_fast), budget=12)
    found = outcome.searches[other]
    fresh = Search(other, found.declared, found.predicted)
    hopeless = max(found.predicted, key=found.predicted.__getitem__)
    fresh.suggest(hopeless)
    assert fresh.next(1) == [hopeless]
    fresh.suggest(outcome.searches[site].declared)
    assert fresh.next(1) == [hopeless], "what is not legal at a size is not tried there"


def test_the_gpu_must_be_a_target(spec):
    spec.write_text(spec.read_text().replace("sm_90", "sm_80"))
    with pytest.raises(BuildError, match=r"this GPU is sm_90, the spec's targets are sm_80"):
        search(spec, Measurer(wide_is_fast))


def test_an_unknown_backend_is_named(spec):
    with pytest.raises(BuildError, match="no backend 'fsed' with kernels: it has triton"):
        tune(spec, GPU, None, backends=["fsed"], rows=[1], budget=1, resume=False, show=print)
