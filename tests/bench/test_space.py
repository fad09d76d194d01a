"""The search space: everything in it is what the plan would launch, and nothing of it is cut down or masked in vain."""

from dataclasses import replace

import pytest

from lorac.plan.build import make_plan
from lorac.plan.kernels import ANY_ADAPTERS, ITEMSIZE, SHARED_LIMIT
from lorac.spec import load_spec
from lorac.spec.backend import Tile
from lorac.spec.folders import find_folders
from lorac.tune.batches import Reached, reached
from lorac.tune.model import Machine, Model, live_segments
from lorac.tune.space import Site, candidates, declared, distance, options, settings

from .conftest import SPEC, fused

SLOT_COLUMNS = 3 * 32  # of that spec
FUSED = fused(SPEC)


def planned(tmp_path, text: str = SPEC):
    path = tmp_path / "spec.yaml"
    path.write_text(text)
    file = load_spec(path)
    declarations = {name: folder.declaration for name, folder in find_folders(file).items()}
    return file, declarations, make_plan(file.spec, file.shapes, declarations, {})


@pytest.mark.parametrize("stage", ["shrink", "expand"])
@pytest.mark.parametrize("rows", [1, 64])
def test_every_candidate_is_launched_as_it_is(tmp_path, stage, rows):
    file, declarations, plan = planned(tmp_path)
    kernel, module = declarations["triton"].kernels[stage], plan.module("qkv_proj")
    legal = candidates(
        kernel, module, Site("triton", stage, "qkv_proj", 32, ANY_ADAPTERS, rows), SLOT_COLUMNS, "float32", ("sm_90",)
    )
    assert len(legal) == len(set(legal)) > 10
    chosen = [legal[0], legal[len(legal) // 2], legal[-1]]
    for launch in chosen:
        tile = Tile(module="qkv_proj", warps=launch.warps, stages=launch.stages, **dict(launch.tile))
        tuned = make_plan(file.spec, file.shapes, declarations, {"triton": {stage: ((tile, "x"),)}})
        found = next(k for k in tuned.backends[0].kernels if (k.stage, k.module) == (stage, "qkv_proj")).launches
        wanted = replace(launch, source="x")
        assert [replace(of, rows=rows) for of in found] == [wanted]
        assert not next(k for k in tuned.backends[0].kernels if k.name == f"{stage}_qkv_proj").masks


def test_candidates_fit_in_shared_memory_and_divide_the_inputs(tmp_path):
    _, declarations, plan = planned(tmp_path, SPEC.replace("hidden: 128", "hidden: 2560"))
    kernel, module = declarations["triton"].kernels["shrink"], plan.module("qkv_proj")
    legal = candidates(
        kernel, module, Site("triton", "shrink", "qkv_proj", 32, ANY_ADAPTERS, 64), SLOT_COLUMNS, "float32", ("sm_86",)
    )
    for launch in legal:
        tile = dict(launch.tile)
        assert 2560 % (tile["BLOCK_K"] * tile["SPLIT_K"]) == 0
        held = sum(tile[a] * tile[b] for a, b in kernel.operands) * ITEMSIZE["float32"]
        assert launch.stages * held <= SHARED_LIMIT["sm_86"]
        assert launch.stages <= 2560 // (tile["BLOCK_K"] * tile["SPLIT_K"])
    assert {dict(launch.tile)["SPLIT_K"] for launch in legal} >= {1, 2, 5, 10}


def test_ragged_blocks_are_offered_only_where_no_large_one_divides(tmp_path):
    _, declarations, plan = planned(tmp_path, SPEC.replace("intermediate: 192", "intermediate: 208"))
    shrink = declarations["triton"].kernels["shrink"]
    assert options(shrink, plan.module("down_proj"), 64, 32, SLOT_COLUMNS)["BLOCK_K"] == (
        16,
        32,
        64,
        128,
        256,
    )  # 208 is 13 x 16
    assert options(shrink, plan.module("qkv_proj"), 64, 32, SLOT_COLUMNS)["BLOCK_K"] == (16, 32, 64, 128)
    assert options(shrink, plan.module("qkv_proj"), 1, 32, SLOT_COLUMNS)["BLOCK_M"] == (16,)


def test_a_block_that_holds_all_rows_or_a_whole_rank_is_no_choice(tmp_path):
    _, declarations, plan = planned(tmp_path, FUSED)
    found = options(declarations["fused"].kernels["project"], plan.module("qkv_proj"), 33, 32, SLOT_COLUMNS)
    assert found["BLOCK_M"] == (64,)
    assert found["BLOCK_R"] == (32,)


@pytest.mark.parametrize(("stage", "intermediate"), [("tile_project", 24), ("tile_project", 2048), ("tile_expand", 24)])
def test_blocks_that_a_kernel_sums_wrongly_with_are_no_candidates(tmp_path, stage, intermediate):
    text = FUSED.replace("intermediate: 192", f"intermediate: {intermediate}").replace("slots: 3", "slots: 16")
    _, declarations, plan = planned(tmp_path, text.replace("float32", "bfloat16"))
    kernel, module = declarations["fused"].kernels[stage], plan.module("down_proj")
    legal = candidates(
        kernel, module, Site("fused", stage, "down_proj", 32, ANY_ADAPTERS, 64), 512, "bfloat16", ("sm_90",)
    )
    blocks = {dict(launch.tile)["BLOCK_K"] for launch in legal}
    assert blocks == ({64} if module.in_features < 64 and stage == "tile_project" else {64, 128, 256})


def test_switches_come_as_some_tile_has_them(tmp_path):
    _, declarations, plan = planned(tmp_path, FUSED)
    kernel, module = declarations["fused"].kernels["tile_project"], plan.module("qkv_proj")
    site = Site("fused", "tile_project", "qkv_proj", 32, ANY_ADAPTERS, 64)
    names = ("WIDE", "SPARSE", "LOOP", "EARLY")
    together = lambda sizes: tuple(sizes[name] for name in names)  # noqa: E731
    legal = candidates(kernel, module, site, SLOT_COLUMNS, "float32", ("sm_90",))
    assert {together(dict(launch.tile)) for launch in legal} == {
        together(tile.sizes) for tile in kernel.tiles if not tile.library
    }
    assert len(legal) == len(set(legal))


def test_a_kernel_that_sums_over_no_stated_dimension_is_searched_too(tmp_path):
    _, declarations, plan = planned(tmp_path)
    kernel, module = declarations["triton"].kernels["expand"], plan.module("qkv_proj")
    kernel = kernel.model_copy(update={"dims": {of: dim for of, dim in kernel.dims.items() if of != "BLOCK_K"}})
    site = Site("triton", "expand", "qkv_proj", 32, ANY_ADAPTERS, 64)
    legal = candidates(kernel, module, site, SLOT_COLUMNS, "float32", ("sm_90",))
    model = Model(kernel, module, site, SLOT_COLUMNS, [(3, 22)], "float32", Machine())
    assert len(legal) > 10 and all(model.predict(launch) > 0 for launch in legal)


def test_there_are_candidates_where_no_launch_is_dependent(tmp_path):
    _, declarations, plan = planned(tmp_path, FUSED.replace("sm_90", "sm_80"))
    kernel, module = declarations["fused"].kernels["project"], plan.module("qkv_proj")
    site = Site("fused", "project", "qkv_proj", 32, ANY_ADAPTERS, 8)
    for target, dependent in (("sm_80", False), ("sm_90", True)):
        legal = candidates(kernel, module, site, SLOT_COLUMNS, "float32", (target,))
        assert {launch.pdl for launch in legal} == {dependent}


def test_distance_counts_steps(tmp_path):
    _, declarations, plan = planned(tmp_path)
    kernel, module = declarations["triton"].kernels["shrink"], plan.module("qkv_proj")
    legal = candidates(
        kernel, module, Site("triton", "shrink", "qkv_proj", 32, ANY_ADAPTERS, 64), SLOT_COLUMNS, "float32", ("sm_90",)
    )
    here = settings(legal[0])
    assert distance(here, here) == 0
    assert distance(here, here | {"stages": here["stages"] + 2}) == 2
    assert distance(here, here | {"BLOCK_K": here["BLOCK_K"] * 4, "warps": here["warps"] * 2}) == 3


def test_the_model_prefers_enough_programs_and_deep_pipelines(tmp_path):
    text = SPEC.replace("hidden: 128", "hidden: 4096").replace("float32", "bfloat16")
    _, declarations, plan = planned(tmp_path, text)
    kernel, module = declarations["triton"].kernels["shrink"], plan.module("qkv_proj")
    site = Site("triton", "shrink", "qkv_proj", 32, ANY_ADAPTERS, 16)
    model = Model(kernel, module, site, SLOT_COLUMNS, [(3, 6)], "bfloat16", Machine())
    legal = candidates(kernel, module, site, SLOT_COLUMNS, "bfloat16", ("sm_90",))
    of = {launch: settings(launch) for launch in legal}
    base = {"BLOCK_M": 16, "BLOCK_N": 16, "BLOCK_K": 128, "warps": 4, "pdl": 0}
    time = {(s["SPLIT_K"], s["stages"]): model.predict(of_) for of_, s in of.items() if s.items() >= base.items()}
    assert time[4, 4] < time[1, 4], "an unsplit sum leaves most of the GPU idle"
    assert time[4, 4] < time[4, 1], "one stage waits for every load"


def test_live_segments_are_those_of_an_even_batch(tmp_path):
    text = SPEC.replace("{by: request, cap: 4}", "{by: chunk, chunk: 16}")
    _, _, plan = planned(tmp_path, text)
    rule = plan.backends[0].segments
    assert live_segments(rule, 64, 1) == (4, 16)
    assert live_segments(rule, 50, 3) == (6, 16)
    assert live_segments(rule, 2, 3) == (2, 1)


def test_sites_are_the_bounds_that_batches_get(tmp_path):
    text = FUSED.replace("sm_90", "sm_80")
    _, _, plan = planned(tmp_path, text)
    kernels = {kernel.name: kernel for kernel in plan.backends[0].kernels}
    shrink, project = kernels["shrink_qkv_proj"], kernels["project_qkv_proj"]
    assert reached(plan, shrink, 8) == {(32, 3): Reached([(1, 32), (3, 32)], [3])}, "of one adapter, launched for three"
    assert reached(plan, shrink, 1) == {(32, 1): Reached([(1, 32)], [1])}, "one row has one adapter"
    assert reached(plan, project, 8) == {(32, ANY_ADAPTERS): Reached([(0, 32), (1, 32), (3, 32)], [3])}
    segments = reached(plan, kernels["segment_shrink_qkv_proj"], 8)
    assert segments == {(32, ANY_ADAPTERS): Reached([(1, 32), (3, 32)], [ANY_ADAPTERS])}

    variants = "variants: {nolora: {adapters: 0}, one: {adapters: 1, rank: 16}, lora: {}}"
    _, _, plan = planned(tmp_path, text.replace("[1, 8]", "[1, 8], " + variants))
    kernels = {kernel.name: kernel for kernel in plan.backends[0].kernels}
    narrow, wide = Reached([(1, 16)], [1]), Reached([(1, 32), (3, 32)], [3])
    assert reached(plan, kernels["shrink_qkv_proj"], 8) == {(16, 1): narrow, (32, 3): wide}
    assert reached(plan, kernels["project_qkv_proj"], 8) == {
        (32, ANY_ADAPTERS): Reached([(0, 32), (1, 32), (3, 32)], [3])
    }


def test_tiles_are_searched_at_every_size_for_each_rank_and_number_of_adapters(tmp_path):
    _, _, plan = planned(tmp_path, FUSED)
    kernels = {kernel.name: kernel for kernel in plan.backends[0].kernels}
    assert "project_qkv_proj" not in kernels
    for rows in (8, 64):
        every = [(1, 32), (3, 32)]
        assert reached(plan, kernels["tile_project_qkv_proj"], rows) == {
            (32, ANY_ADAPTERS): Reached([(0, 32), *every], [3])
        }
        assert reached(plan, kernels["tile_shrink_qkv_proj"], rows) == {
            (32, ANY_ADAPTERS): Reached(every, [ANY_ADAPTERS])
        }
        assert reached(plan, kernels["tile_expand_qkv_proj"], rows) == {(32, 3): Reached(every, [3])}


def test_what_is_declared_for_any_number_of_adapters_is_not_that_for_few(tmp_path):
    sizes = (
        ("max_rank: 32", "max_rank: 16"),
        ("intermediate: 192", "intermediate: 14336"),
        ("hidden: 128", "hidden: 4096"),
    )
    text = FUSED.replace("float16", "bfloat16").replace("down_proj]", "gate_up_proj]")
    for size, other in sizes:
        text = text.replace(size, other)
    _, _, plan = planned(tmp_path, text)
    kernel = next(of for of in plan.backends[0].kernels if of.name == "tile_project_gate_up_proj")
    stages = {of.adapters: of.stages for of in reversed(kernel.launches) if of.rank and of.rows >= 16}
    assert stages[1] < stages[3]
    assert declared(kernel, Site("fused", "tile_project", "gate_up_proj", 16, ANY_ADAPTERS, 8)).stages == stages[3]
