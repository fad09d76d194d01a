"""Whole calls of kernels with the base, measured on the CPU: every choice computes the right thing, and is what ran."""

from dataclasses import replace

import pytest
import torch

from lorac.emit import emit
from lorac.plan import kernels
from lorac.plan.kernels import ANY_ADAPTERS
from lorac.runtime.launch import Kernel
from lorac.runtime.load import load
from lorac.spec import load_spec
from lorac.spec.folders import find_folders
from lorac.tune import measure
from lorac.tune.space import BARE, Site, in_library, library
from lorac.tune.task import Task

from .conftest import A100, GPU, SPEC

ROWS = 40  # past what kernels by pointers serve


class Timing:
    us = 10.0


@pytest.fixture
def gpu():
    """The one searched for, unless a test has another."""
    return GPU


@pytest.fixture
def task(tmp_path, gpu, monkeypatch):
    # the interpreter has no registers to spill, and in float32 bits differ where sums do
    monkeypatch.setattr(kernels, "spills", lambda *_: False)
    path = tmp_path / "small.yaml"
    path.write_text(SPEC.replace("triton: {segments: {by: request, cap: 4}}", "fused: {}"))
    file = load_spec(path)
    return Task(file, find_folders(file), gpu, ["fused"], [8, ROWS])


@pytest.fixture
def measurer(task, tmp_path, monkeypatch):
    """On the CPU: graphs never run, and their times are alike."""
    monkeypatch.setattr(measure, "capture", lambda run, pool: run)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 0))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (2, 3))
    monkeypatch.setattr(measure, "interleaved", lambda graphs, *_: [Timing() for _ in graphs])
    emit(task.files, tmp_path / "generated" / "small")
    return measure.Measurer(load(tmp_path / "generated" / "small"), task.rows, task.batches, "cpu")


@pytest.fixture
def ran(monkeypatch):
    """(kernel, its constants) of every launch."""
    seen, run = [], Kernel.run

    def spy(self, launch, grid, **arguments):
        seen.append((self.name, launch.constants))
        run(self, launch, grid, **arguments)

    monkeypatch.setattr(Kernel, "run", spy)
    return seen


def site(stage, rows=ROWS, adapters=ANY_ADAPTERS):
    return Site("fused", stage, "down_proj", 32, adapters, rows)


def _breadth(launch):
    """Few programs come first, each of few rows: the interpreter takes its time."""
    tile = dict(launch.tile)
    return tile["BLOCK_N"], -tile["BLOCK_M"]


def best(task, of):
    return {other: task.searches[other].best for other in task.beside(of)}


def test_the_library_and_a_tile_are_two_choices_of_one_site(task, measurer, ran):
    of = site("tile_project")
    chosen = best(task, of)
    own = next(launch for launch in task.searches[of].next(3) if not in_library(launch))
    after = replace(own, warps=12 - own.warps)  # not seen before, while the kernel has no configuration at all
    by_library, by_tile = measurer.measure(of, chosen | {of: own}, [library(of), after])
    assert by_library.problem == by_tile.problem == ""
    assert by_tile.us == (10.0, 10.0, 10.0), "none, one and three adapters"
    assert by_tile.bits == by_tile.best_bits
    assert {name for name, _ in ran} - {"route"} == {
        f"{stage}_down_proj" for stage in ("tile_shrink", "tile_project", "tile_expand")
    }
    assert {constants["ACTIVE"] for name, constants in ran if name == "tile_project_down_proj"} == {0, 4}


def test_a_kernel_by_the_librarys_side_is_measured_with_it(task, measurer, ran):
    of, leader = site("tile_expand", adapters=3), site("tile_project")
    chosen = best(task, of) | {leader: library(leader)}
    (result,) = measurer.measure(of, chosen, [task.searches[of].next(1)[0]])
    assert result.problem == "" and result.us == (10.0, 10.0)
    assert not any(name == "tile_project_down_proj" for name, _ in ran)


@pytest.mark.parametrize(
    ("gpu", "stage", "rows", "blocks"),
    [(A100, "project", 8, (16, 64)), (GPU, "tile_project", 8, (64, 128)), (GPU, "tile_project", ROWS, (64, 128))],
)
def test_base_rows_must_keep_their_bits(task, measurer, stage, rows, blocks):
    """Two tiles that sum K in different steps: right, but not to the bit."""
    of = site(stage, rows)
    own = max(task.searches[of].predicted, key=_breadth)
    short, long = ({**dict(own.tile), "BLOCK_K": size} for size in blocks)
    short, long = (replace(own, tile=tuple(tile.items())) for tile in (short, long))
    chosen = best(task, of)
    same, other = measurer.measure(of, chosen | {of: short}, [short, long])
    assert same.problem == other.problem == ""
    assert same.bits == same.best_bits != other.bits
    declared = {name: launch for name, launch in chosen.items() if name.stage != "tile_expand"} | {of: short}
    assert measurer.compare(declared, declared, {}) and measurer.compare(declared, declared | {of: long}, {})
    mixed = declared | {replace(of, adapters=BARE): long}
    assert measurer.compare(declared, mixed, {}) == {}, "base rows would change with their neighbours"
    if stage == "tile_project":
        alone = declared | {replace(of, adapters=BARE): library(of)}
        assert measurer.compare(declared, alone, {}), "but the library may have them where they are alone"


def test_a_call_as_chosen_is_compared_over_all_its_batches(task, measurer):
    declared = task.declared(task.beside(site("tile_project", 8)))
    assert measurer.compare(declared, declared, {}) == dict.fromkeys([(0, 32), (1, 32), (3, 32)], (10.0, 10.0))


def test_a_call_is_compared_in_whole_layers(task, measurer, monkeypatch):
    """All modules of each layer run, the other ones' calls as they are said to be."""
    here, other = (
        task.declared(task.beside(Site("fused", "tile_project", of, 32, ANY_ADAPTERS, 8)))
        for of in ("down_proj", "qkv_proj")
    )
    of = next(site for site in other if site.stage == "tile_shrink")
    tried = max(task.searches[of].predicted, key=_breadth)
    assert tried != other[of]
    calls = []
    monkeypatch.setattr(measurer.workload, "run", lambda step, module, layer: calls.append((module, layer)))
    monkeypatch.setattr(measurer, "_checked", lambda *_: (0, ""))
    monkeypatch.setattr(measure, "capture", lambda run, pool: run())
    assert measurer.compare(here, here, other | {of: tried})
    layers, graphs = measurer.workload.common, 2 * 3
    assert calls == [(module, layer) for layer in layers for module in ("qkv_proj", "down_proj")] * graphs
    installed = measurer._kernel(of).launches
    assert {launch.BLOCK_N for launch in installed} == {dict(tried.tile)["BLOCK_N"]}


def test_programs_that_share_a_sum_can_be_run_though_none_were_declared(task):
    """A kernel takes what sharing needs only where some tile of its plan shares."""
    kernels = ("fused", "tile_project_down_proj"), ("fused", "tile_project_qkv_proj")
    tried = [
        dict(of.tile)["SHARES"]
        for search in task.searches.values()
        for of in search.predicted
        if "SHARES" in dict(of.tile)
    ]
    assert {1, 2} <= set(tried)
    for kernel in kernels:
        assert {"SHARES", "shares"} <= {*task._kernels[kernel].constants, *dict(task._kernels[kernel].arguments)}
