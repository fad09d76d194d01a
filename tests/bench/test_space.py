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
from lorac.tune.space import Site, candidates, distance, options, settings

from .conftest import SPEC


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
    legal = candidates(kernel, module, Site("triton", stage, "qkv_proj", 32, ANY_ADAPTERS, rows), "float32", ("sm_90",))
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
        kernel, module, Site("triton", "shrink", "qkv_proj", 32, ANY_ADAPTERS, 64), "float32", ("sm_86",)
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
    assert options(shrink, plan.module("down_proj"), 64, 32)["BLOCK_K"] == (16, 32, 64, 128, 256)  # 208 is 13 x 16
    assert options(shrink, plan.module("qkv_proj"), 64, 32)["BLOCK_K"] == (16, 32, 64, 128)
    assert options(shrink, plan.module("qkv_proj"), 1, 32)["BLOCK_M"] == (16,)


def test_a_block_that_holds_all_rows_or_a_whole_rank_is_no_choice(tmp_path):
    _, declarations, plan = planned(tmp_path, SPEC.replace("triton: {segments: {by: request, cap: 4}}", "fused: {}"))
    found = options(declarations["fused"].kernels["project"], plan.module("qkv_proj"), 33, 32)
    assert found["BLOCK_M"] == (64,)
    assert found["BLOCK_R"] == (32,)


def test_distance_counts_steps(tmp_path):
    _, declarations, plan = planned(tmp_path)
    kernel, module = declarations["triton"].kernels["shrink"], plan.module("qkv_proj")
    legal = candidates(
        kernel, module, Site("triton", "shrink", "qkv_proj", 32, ANY_ADAPTERS, 64), "float32", ("sm_90",)
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
    model = Model(kernel, module, site, [(3, 6)], "bfloat16", Machine())
    legal = candidates(kernel, module, site, "bfloat16", ("sm_90",))
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
    text = SPEC.replace("triton: {segments: {by: request, cap: 4}}", "fused: {}")
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
