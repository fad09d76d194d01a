"""Experts in the plan: kernels that must agree do, scratch and slots are sized before anything runs."""

import plan_kit as kit
import pytest

from lorac.runtime.pairs import MOST_SHARES, block_cap, group_cap, table_size

MODEL = {"preset": "qwen3-30b-a3b"}
ADAPTERS = {"slots": 8, "max_rank": 16, "targets": ["qkv_proj", "experts"]}
VARIANTS = {"nolora": {"adapters": 0}, "narrow": {"rank": 8}, "lora": {}}


def plan_of(**changes):
    graphs = {"decode": {"max_rows": 300, "variants": VARIANTS}, "prefill": {"max_tokens": 2048}}
    data = {"model": MODEL, "dtype": "bfloat16", "adapters": ADAPTERS, "backends": {"fused": {}}, "graphs": graphs}
    return kit.plan_of(kit.spec_data(**(data | changes)))


def launches(plan, stage: str, module: str):
    (kernel,) = (k for k in plan.backends[0].kernels if (k.stage, k.module) == (stage, module))
    return kernel.launches


def picked(plan, stage: str, module: str, rows: int, rank: int) -> dict[str, int]:
    """The tile launched for so many rows; rank 0 without adapters."""
    return dict(next(
        of.tile for of in launches(plan, stage, module)
        if rank <= of.rank and (rows <= of.rows or not of.rows) and (of.adapters != 0 or rank == 0)
    ))  # fmt: skip


@pytest.mark.parametrize("max_rank", [16, 64])
@pytest.mark.parametrize("rows", [1, 2, 3, 16, 17, 64, 128, 129, 256, 257, 5000])
def test_launches_of_one_batch_agree(rows, max_rank):
    plan = plan_of(adapters=ADAPTERS | {"max_rank": max_rank})
    for rank in (0, 8, max_rank):
        up = picked(plan, "pair_activate", "experts_gate_up", rows, rank)
        down = picked(plan, "pair_project", "experts_down", rows, rank)
        assert all(down[name] == up[name] for name in ("ROWS", "BLOCK_M"))
        assert not up["SELF"] or up["ROWS"] == 1
        if rows <= 2:
            row = picked(plan, "row_project", "experts_down", rows, rank)
            assert (row["AHEAD"], row["BLOCK_UP"]) == (up["AHEAD"], up["BLOCK_N"])
        else:
            assert not up["AHEAD"], "only `row_project` adds up shares of h"
        assert not up["ROWS"] or rows <= up["ROWS"], "what is compared without tables holds the whole batch"
        if rank:
            for module in ("experts_gate_up", "experts_down"):
                for stage in ("pair_shrink", "pair_expand"):
                    own = picked(plan, stage, module, rows, rank)
                    assert own["ROWS"] == up["ROWS"]
                    assert own["BLOCK_R"] == up["BLOCK_R"] >= rank


def test_base_rows_are_summed_in_the_same_tiles_with_and_without_adapters():
    """Bits of base rows may not depend on the adapters beside them."""
    plan = plan_of()
    for rows in (1, 2, 8, 16, 64, 200, 512):
        for stage, module in (("pair_activate", "experts_gate_up"), ("pair_project", "experts_down")):
            bare, lora = (picked(plan, stage, module, rows, rank) for rank in (0, 16))
            assert all(bare[name] == lora[name] for name in ("BLOCK_M", "BLOCK_N", "BLOCK_K"))


def test_scratch_covers_the_largest_bucket():
    plan = plan_of()
    sizes = dict(plan.backends[0].scratch)
    pairs = 2048 * 8
    up = picked(plan, "pair_activate", "experts_gate_up", 2048, 16)
    tables = table_size(pairs, block_cap(pairs, 128, up["BLOCK_M"]), group_cap(pairs, 128, 8))
    assert sizes["experts_tables"] >= 4 * tables
    assert sizes["experts_h"] == 4 * pairs * 2 * 16
    assert sizes["experts_act"] == 2 * pairs * 768 and sizes["experts_y"] == 2 * pairs * 2048
    assert 4 * pairs * 16 <= sizes["experts_h_down"] <= 4 * pairs * 16 * MOST_SHARES


def test_experts_of_one_rank_and_shared_outer_adapters():
    def bytes_of(plan):
        return {buffer.name: buffer.bytes for buffer in plan.buffers}

    whole, half = bytes_of(plan_of()), bytes_of(plan_of(parallel={"ep": 2}))
    shared = bytes_of(plan_of(adapters=ADAPTERS | {"shared_outer_experts": True}))
    for name in ("a.experts_gate_up", "b.experts_gate_up", "a.experts_down", "b.experts_down"):
        assert whole[name] == 2 * half[name]
        outer = name in ("a.experts_gate_up", "b.experts_down")
        assert shared[name] * (128 if outer else 1) == whole[name]
    # 48 layers, 8 slots, 128 experts, two slices of rank 16, 2,048 inputs, bfloat16
    assert whole["a.experts_gate_up"] == 48 * 8 * 128 * 2 * 16 * 2048 * 2


@pytest.mark.parametrize("mode", ["full", "breakable"])
def test_prefill_graphs_of_experts(mode):
    plan = plan_of(graphs={"prefill": {"max_tokens": 64, "mode": mode}})
    assert plan.backends[0].prefill_mode == ("off" if mode == "full" else "breakable")
