"""Kernels that have the base: judged with adapters and without, against the library, and held to base rows' bits."""

import itertools
from dataclasses import replace

import pytest

from lorac.compile import plan_spec
from lorac.explain import explain
from lorac.plan.kernels import launched
from lorac.resources import templates_folder
from lorac.spec.folders import read_declaration
from lorac.tune.report import report
from lorac.tune.search import DeviceLost, Result, Search
from lorac.tune.space import BARE, in_library, settings, switches

from .conftest import A100, GPU, SPEC, Compiler, fused, search

ROWS = (8, 64, 256)
# so many outputs that at all of those rows tiles of our own are declared, not the library
MANY_OUTPUTS = SPEC.replace("hidden: 128", "hidden: 4096").replace(
    "heads: 8, kv_heads: 8, head_dim: 16", "heads: 32, kv_heads: 32, head_dim: 128"
)


@pytest.fixture
def spec(spec):
    spec.write_text(fused(MANY_OUTPUTS))
    return spec


class Measurer:
    """Times a call, batch by batch: what each of its sites asks, each batch of it, in sum; the base first, if any."""

    def __init__(self, time, bits=lambda launch: 1, again=lambda declared, chosen: None):
        self.time, self.bits, self.again, self.seen = time, bits, again, []

    def measure(self, site, chosen, tried):
        self.seen += [(site, launch) for launch in tried]
        us = [self._us(site, chosen | {site: launch}) for launch in (chosen[site], *tried)]
        best = self.bits(chosen[site])
        return [Result(of, us[0], "", self.bits(launch), best) for of, launch in zip(us[1:], tried, strict=True)]

    def compare(self, declared, chosen, around):
        once_more = self.again(declared, chosen)
        if once_more:
            return once_more
        total = [sum(self.time(site, launch, batch) for site, launch in of.items() if self.has(site, of, batch))
                 for of in (declared, chosen) for batch in range(3)]  # fmt: skip
        return {(batch, 32): (total[batch], total[3 + batch]) for batch in range(3)}

    def has(self, site, of, batch):
        """A tile for batches without adapters has those to itself."""
        parted = any(other.adapters == BARE and other.stage == site.stage for other in of)
        return (batch == 0) == (site.adapters == BARE) if parted else True

    def _us(self, site, of):
        batches = range(3) if site.stage in ("project", "tile_project") else range(1, 3)  # the first: no adapter
        return tuple(sum(self.time(other, launch, batch) for other, launch in of.items()) for batch in batches)


def steady(site, launch, batch):
    """The library is fastest at 256 rows of qkv_proj; elsewhere deep pipelines of wide and short blocks are."""
    if in_library(launch):
        return 1.0 if (site.module, site.rows) == ("qkv_proj", 256) else 900.0
    tile = dict(launch.tile)
    looped = 10 * tile.get("LOOP", 0)
    return 10.0 + 1000.0 / tile["BLOCK_N"] + 50.0 / launch.stages + tile.get("BLOCK_K", 0) / 8 + looped


def _kernel(plan, stage, module):
    return next(kernel for kernel in plan.backends[0].kernels if (kernel.stage, kernel.module) == (stage, module))


def at(plan, stage, module, rows, rank=32):
    launches = _kernel(plan, stage, module).launches
    return next(of for of in launches if of.rank == rank and (not of.rows or rows <= of.rows))


def names(plan, rows):
    return {kernel.name for kernel in launched(plan.backends[0].kernels, rows)}


def test_the_library_is_chosen_where_it_is_faster_and_its_expand_is_searched_there_alone(spec):
    measurer = Measurer(steady)
    outcome = search(spec, measurer, rows=ROWS)
    assert outcome.ended == "nothing is left to try"
    plan = plan_spec(spec).plan
    assert {"tile_expand_qkv_proj", "tile_project_down_proj"} <= names(plan, 256)
    assert {"tile_project_qkv_proj", "tile_project_down_proj"} <= names(plan, 64)
    expanded = {(site.module, site.rows) for site, _ in measurer.seen if site.stage == "tile_expand"}
    assert expanded == {("qkv_proj", 256)}, "what the library's side runs is measured where that is chosen"
    assert "left to the library's GEMM" in explain(plan) and "NVIDIA H200" in explain(plan)
    library = _kernel(plan, "tile_project", "qkv_proj").library
    tuned = [part for part in library if part.source == "NVIDIA H200"]
    assert [(part.bare, part.least, part.most) for part in tuned] == [(False, 129, 256), (True, 129, 256)]


@pytest.mark.parametrize(
    ("gpu", "stage", "rows"),
    [
        (A100, "shrink", 8),
        (A100, "project", 8),
        (GPU, "tile_shrink", 8),
        (GPU, "tile_project", 8),
        (GPU, "tile_shrink", 64),
        (GPU, "tile_project", 64),
        (GPU, "tile_expand", 256),
    ],
)
def test_every_stage_gets_its_fastest_tile(spec, gpu, stage, rows):
    spec.write_text(spec.read_text().replace(GPU.target, gpu.target))
    measurer = Measurer(steady)
    outcome = search(spec, measurer, rows=ROWS, gpu=gpu)
    plan = plan_spec(spec).plan
    measured = {site for site, _ in measurer.seen if (site.stage, site.rows) == (stage, rows)}
    assert {site.module for site in measured} == {"qkv_proj"} | ({"down_proj"} if stage != "tile_expand" else set())
    for site in measured:
        found = outcome.searches[site]
        own = [launch for launch in found.predicted if not in_library(launch)]
        assert steady(site, found.best, 1) <= 1.1 * min(steady(site, launch, 1) for launch in own)
        assert steady(site, at(plan, stage, site.module, rows), 1) == steady(site, found.best, 1)
        assert f"fused    {site.module}" in report(outcome)


@pytest.mark.parametrize("stage", ["tile_project", "tile_expand"])
def test_every_declared_combination_of_switches_is_tried_and_no_other(spec, stage):
    measurer = Measurer(steady)
    search(spec, measurer, rows=ROWS)
    declared = switches(read_declaration(templates_folder() / "backends" / "fused").kernels[stage])
    tried = [dict(launch.tile) for site, launch in measurer.seen if site.stage == stage and not in_library(launch)]
    assert len(declared) == {"tile_project": 10, "tile_expand": 2}[stage]
    for tile in tried:
        assert [of for of in declared if of.items() <= tile.items()], tile
        assert 64 <= tile["BLOCK_K"] <= 256, "a step takes whole spans of columns"
    for combination in declared:
        assert [tile for tile in tried if combination.items() <= tile.items()], combination


def test_the_library_may_have_every_size(spec):
    always = lambda site, launch, batch: 1.0 if in_library(launch) else steady(site, launch, batch)  # noqa: E731
    search(spec, Measurer(always), rows=ROWS)
    plan = plan_spec(spec).plan
    both = ("qkv_proj", "down_proj")
    for rows in (40, 256):
        assert names(plan, rows) == {f"{of}_{m}" for of in ("tile_shrink", "tile_expand") for m in both}
    assert {f"tile_project_{m}" for m in both} <= names(plan, 5000), "tiles of their own are declared from there on"


def bare_likes_loops(site, launch, batch):
    loop = dict(launch.tile).get("LOOP", 0) if not in_library(launch) else 0
    return steady(site, launch, batch) - (40 * loop if batch == 0 else 0)


def test_batches_without_adapters_get_a_tile_of_their_own_where_it_sums_alike(spec):
    search(spec, Measurer(bare_likes_loops), rows=ROWS)
    plan = plan_spec(spec).plan
    assert dict(at(plan, "tile_project", "down_proj", 64, rank=0).tile)["LOOP"] == 1
    assert dict(at(plan, "tile_project", "down_proj", 64).tile)["LOOP"] == 0


def test_a_tile_that_sums_otherwise_is_not_for_them(spec):
    search(spec, Measurer(bare_likes_loops, bits=lambda launch: dict(launch.tile).get("LOOP", 0)), rows=ROWS)
    plan = plan_spec(spec).plan
    bare, adapted = (dict(at(plan, "tile_project", "down_proj", 64, rank=rank).tile) for rank in (0, 32))
    assert bare["LOOP"] == adapted["LOOP"]


def test_what_wins_alone_and_loses_in_layers_stays_as_declared(spec):
    """Or does not clearly win. The other calls of a layer are there as they are chosen by then, and only they."""
    seen = []

    class InLayers(Measurer):
        def compare(self, declared, chosen, around):
            modules, rows = {site.module for site in chosen}, {site.rows for site in (*chosen, *around)}
            assert len(modules) == len(rows) == 1 and not modules & {site.module for site in around}
            seen.append((modules.pop(), rows.pop(), around))
            return {(1, 32): (10.0, 9.97) if seen[-1][0] == "down_proj" else (10.0, 9.9)}

    before = plan_spec(spec).plan
    search(spec, InLayers(steady), rows=ROWS)
    after = plan_spec(spec).plan
    assert {module for module, *_ in seen} == {"qkv_proj", "down_proj"}
    old, new = (settings(at(plan, "tile_project", "down_proj", 64)) for plan in (before, after))
    assert old == new
    old, new = (settings(at(plan, "tile_project", "qkv_proj", 64)) for plan in (before, after))
    assert old != new
    assert all({site.module for site in around} == {"qkv_proj", "down_proj"} - {module} for module, _, around in seen)


@pytest.mark.parametrize("few_outputs", [False, True])
def test_sizes_between_those_searched_stay_as_declared(spec, few_outputs):
    """A tile serves every size up to its own, but nothing was measured there; with few outputs the library has all."""
    if few_outputs:
        spec.write_text(spec.read_text().replace("hidden: 4096", "hidden: 128").replace("head_dim: 128", "head_dim: 4"))
    before = plan_spec(spec).plan
    search(spec, Measurer(lambda site, *of: steady(replace(site, module="down_proj"), *of)), rows=(64, 512))
    after = plan_spec(spec).plan
    old, new = (_served(plan, "tile_project", 64) for plan in (before, after))
    assert old != new
    for stage, rows, bare in itertools.product(("tile_project", "tile_shrink"), (16, 32, 128, 256), (False, True)):
        if stage == "tile_project" or not bare:
            old, new = (_served(plan, stage, rows, bare) for plan in (before, after))
            assert old == new, f"{stage} at {rows} rows, bare {bare}"


def _served(plan, stage, rows, bare=False):
    """The sizes of what down_proj launches, or that the library has its base."""
    if stage == "tile_project" and _kernel(plan, stage, "down_proj").leaves(rows, bare):
        return "library"
    return settings(at(plan, stage, "down_proj", rows, 0 if bare else 32))


def test_what_is_no_faster_once_more_stays_as_declared_also_from_the_journal(spec):
    before = plan_spec(spec).plan
    slower = Measurer(steady, again=lambda declared, chosen: {(1, 32): (10.0, 10.0)})
    outcome = search(spec, slower, rows=ROWS)
    text = outcome.table.read_text()
    assert "configurations left out: not clearly faster than what is declared" in report(outcome)
    after = plan_spec(spec).plan
    for rows in ROWS:
        assert names(after, rows) == names(before, rows)
        for stage in ("tile_shrink", "tile_project"):
            old, new = (settings(at(plan, stage, "down_proj", rows)) for plan in (before, after))
            assert old == new
    assert search(spec, Measurer(steady), rows=ROWS, resume=True, budget=0).table.read_text() == text


def test_what_the_plan_leaves_to_the_library_stays_there_unless_beaten(spec):
    spec.write_text(spec.read_text().replace("hidden: 4096", "hidden: 128").replace("head_dim: 128", "head_dim: 4"))
    left = {f"{of}_{m}" for of in ("tile_shrink", "tile_expand") for m in ("qkv_proj", "down_proj")}
    assert all(names(plan_spec(spec).plan, rows) == left for rows in ROWS), "they fill too little of the GPU"
    outcome = search(spec, Measurer(steady, again=lambda declared, chosen: {(1, 32): (10.0, 10.0)}), rows=ROWS)
    projected = [found for site, found in outcome.searches.items() if site.stage == "tile_project"]
    assert projected and all(in_library(found.declared) and found.tried for found in projected)
    assert all(names(plan_spec(spec).plan, rows) == left for rows in ROWS)


def test_a_compiler_that_never_ends_does_not_outlast_the_budget(spec):
    class Stuck(Compiler):
        waited = 0

        def ready(self, site, launch, served=False):
            return False

        def wait(self, seconds):
            assert 0 < seconds <= 0.5
            self.waited += 1

    compiler, measurer = Stuck(), Measurer(steady)
    outcome = search(spec, measurer, compiler, rows=ROWS, budget=30)
    assert outcome.ended == "the budget is spent" and not measurer.seen and compiler.closed
    assert 0 < compiler.waited <= 30


def test_what_cannot_be_compiled_for_every_batch_gives_way_to_the_next_best(spec):
    class Spills(Compiler):
        def problem(self, site, launch, served=False):
            return "spills 8 bytes" if served and not in_library(launch) and launch.stages == 6 else ""

    outcome = search(spec, Measurer(steady), Spills(), rows=ROWS)
    for site, found in outcome.searches.items():
        if found.best != found.declared:
            assert found.best.stages != 6, site
    found = next(of for site, of in outcome.searches.items() if (site.stage, site.rows) == ("tile_shrink", 8))
    assert 6 in {launch.stages for launch in found.tried}, "it was measured, and fast"
    assert found.best != found.declared and found.gain < 1.0


def test_what_breaks_the_gpu_is_left_out_when_the_search_goes_on(spec):
    class Broken(Measurer):
        def measure(self, site, chosen, tried):
            if site.stage == "tile_project" and any(launch.warps == 8 for launch in tried):
                raise DeviceLost("broke the GPU's context: go on with --resume")
            return super().measure(site, chosen, tried)

    ended = []
    for _ in range(40):
        try:
            ended.append(search(spec, Broken(steady), rows=(8,), resume=True))
            break
        except DeviceLost:
            continue
    (outcome,) = ended
    assert "configurations left out: broke the GPU's context" in report(outcome)
    projected = [found for site, found in outcome.searches.items() if site.stage == "tile_project"]
    assert projected and all(found.best.warps != 8 for found in projected)


class Launch(int):
    """Stands for a launch with a tile of its own."""

    warps = 4


def fresh(declared) -> Search:
    found = Search.__new__(Search)
    found.declared = found.best = declared
    found.tried, found.times, found.bits, found.bare = {}, {}, {}, None
    return found


def test_the_next_best_takes_the_place_of_one_with_a_problem():
    declared, good, better = map(Launch, range(3))
    found = fresh(declared)
    found.note({good: Result((9.0,), (10.0,))})
    found.note({better: Result((4.0,), (4.5,))})
    assert found.best == better and found.gain == pytest.approx(0.8)
    found.note({better: Result(problem="no faster")})
    assert found.best == good and found.gain == pytest.approx(0.9)
    found.note({good: Result(problem="no faster")})
    assert found.best == declared and found.gain == 1.0 and found.parted() == (declared, declared)


def test_the_library_may_have_batches_without_adapters_alone():
    declared, slower = Launch(0), Launch(2)
    by_library = Launch(1)
    by_library.warps = 0
    found = fresh(declared)
    found.bare = by_library
    found.note({by_library: Result((80.0, 120.0, 120.0), (110.0, 108.0, 108.0))})
    found.note({slower: Result((112.0, 104.0, 104.0), (80.0, 120.0, 120.0))})
    assert found.best == by_library and found.parted() == (by_library, slower)


def test_of_what_is_measured_together_the_fastest_is_the_best():
    declared, middling, fastest, slow = map(Launch, range(4))
    found = fresh(declared)
    beside = (10.0, 10.0)
    found.note(
        {middling: Result((8.0, 8.0), beside), fastest: Result((5.0, 7.0), beside), slow: Result((9.0, 9.0), beside)}
    )
    assert found.best == fastest and found.gain == pytest.approx(0.6)
    assert found.times[slow] == (9.0, 9.0), "beside what was the best then"
