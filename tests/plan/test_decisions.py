"""What is switched off says why, and warnings stand where a user would be surprised."""

import plan_kit as kit
import pytest

from lorac.spec.schema import Decode, Prefill

MOE = {"model": {"preset": "qwen3-30b-a3b"}, "dtype": "bfloat16",
       "adapters": {"slots": 4, "max_rank": 16, "targets": ["qkv_proj", "experts"]}}  # fmt: skip


def reasons(plan) -> dict[str, str]:
    return {decision.subject: decision.reason for decision in plan.decisions}


def modes(plan) -> dict[str, str]:
    return {backend.name: backend.prefill_mode for backend in plan.backends}


def prefill(mode: str) -> dict:
    return {"decode": {"max_rows": 4}, "prefill": {"max_tokens": 64, "mode": mode}}


def test_dp_attention_turns_prefill_graphs_off():
    plan = kit.plan_of(kit.spec_data(parallel={"dp_attention": True}))
    assert set(modes(plan).values()) == {"off"}
    assert "ranks" in reasons(plan)["triton: prefill graphs"]
    assert all(not backend.prefill for backend in plan.backends)
    levels = {decision.subject: decision.level for decision in plan.decisions}
    assert levels["triton: prefill graphs"] == "warning" and levels["torch: prefill graphs"] == "note"


def test_a_backend_without_prefill_graphs_keeps_its_own_reason():
    data = kit.spec_data(backends={"ascend": {}, "torch": {}, "csgmv": {}})
    plan = kit.plan_of(data)
    assert modes(plan) == {"ascend": "off", "torch": "off", "csgmv": "breakable"}
    for name in ("ascend", "torch"):
        assert reasons(plan)[f"{name}: prefill graphs"] == kit.declaration(name).no_prefill_graphs != ""
    ascend = plan.backends[0]
    assert not ascend.decode_graphs and ascend.decode == () and "ascend: decode graphs" in reasons(plan)


def test_a_mode_the_backend_lacks():
    triton = kit.declaration("triton").model_copy(update={"prefill_graphs": ("breakable",)})
    plan = kit.plan_of(kit.spec_data(graphs=prefill("full")), triton=triton)
    assert modes(plan)["triton"] == "off" and modes(plan)["csgmv"] == "full"
    assert reasons(plan)["triton: prefill graphs"] == "the backend supports breakable, not full"


@pytest.mark.parametrize("mode", ["full", "breakable"])
def test_experts_and_full_graphs(mode):
    served = kit.declaration("csgmv").model_copy(update={"experts": True})
    plan = kit.plan_of(kit.spec_data(**MOE, backends={"csgmv": {}, "triton": {}}, graphs=prefill(mode)), csgmv=served)
    assert modes(plan)["csgmv"] == ("off" if mode == "full" else "breakable")
    (missing,) = [decision for decision in plan.decisions if decision.subject == "triton: experts"]
    assert missing.level == "warning"


def test_an_unvalidated_moe_runner_keeps_one_variant():
    served = kit.declaration("torch").model_copy(update={"experts": True})
    common = kit.spec_data(**MOE, backends={"torch": {}}, graphs={"decode": {"max_rows": 4}})
    both = kit.plan_of(common, torch=served)
    one = kit.plan_of(common | {"moe": {"runner": "marlin"}}, torch=served)
    assert [variant.name for variant in both.variants] == ["nolora", "lora"]
    assert [variant.name for variant in one.variants] == ["lora"]
    (warning,) = [decision for decision in one.decisions if decision.subject == "variants"]
    assert warning.level == "warning" and "'marlin'" in warning.reason


def test_lm_head_and_tied_weights_are_told():
    model = kit.spec_data()["model"] | {"tied": True}
    plan = kit.plan_of(kit.spec_data(model=model, adapters={"slots": 2, "max_rank": 4, "targets": ["lm_head"]}))
    assert {"lm_head in prefill graphs", "tied embeddings"} <= set(reasons(plan))


def test_a_target_a_backend_does_not_support():
    triton = kit.declaration("triton").model_copy(update={"architectures": ("sm_90",)})
    plan = kit.plan_of(kit.spec_data(targets=["sm_80", "sm_90"]), triton=triton)
    assert reasons(plan)["triton: sm_80"] == "the backend supports sm_90"
    assert "triton: sm_90" not in reasons(plan)


@pytest.mark.parametrize("dtype, max_rank, aligned", [("float16", 12, 16), ("float16", 24, 24), ("float32", 6, 8)])
def test_a_maximal_rank_that_keeps_slots_from_starting_aligned(dtype, max_rank, aligned):
    """Whole tiles are read from 16 bytes on: the reason names the next rank that would do."""
    adapters = {"slots": 8, "max_rank": max_rank, "targets": ["o_proj"]}
    plan = kit.plan_of(kit.spec_data(dtype=dtype, adapters=adapters, backends={"fused": {}}))
    told = reasons(plan).get("fused: tile_project", "")
    assert told.endswith(f"one of {aligned} is") == (aligned != max_rank)
    assert ("tile_project" in {kernel.stage for kernel in plan.backends[0].kernels}) == (aligned == max_rank)


@pytest.mark.parametrize(
    ("dtype", "slots", "outcome"),
    [
        ("bfloat16", 8, "its own, but for rows left to the library above"),
        ("bfloat16", 256, "its own up to 32 rows, the library's past them"),  # too many columns of B for whole tiles
        ("float32", 8, "the library's"),
    ],
)
def test_who_computes_the_base_is_told_as_planned(dtype, slots, outcome):
    adapters = {"slots": slots, "max_rank": 16, "targets": ["qkv_proj", "o_proj", "lm_head"]}
    model = {"preset": "llama-3.1-8b"}
    data = kit.spec_data(model=model, dtype=dtype, adapters=adapters, backends={"fused": {}}, targets=["sm_90"])
    found = {decision.subject: decision.outcome for decision in kit.plan_of(data).decisions}
    assert found["fused: base GEMM of qkv_proj, o_proj"] == outcome
    assert sum("base GEMM" in subject for subject in found) == 1


def test_a_bucket_that_is_added_is_told_and_described():
    graphs = {
        "decode": {"buckets": [2, 4], "max_rows": 6},
        "prefill": {"buckets": [8, 32], "max_tokens": 48},
    }
    found = {decision.subject: decision.outcome for decision in kit.plan_of(kit.spec_data(graphs=graphs)).decisions}
    assert (found["decode buckets"], found["prefill buckets"]) == ("6 added", "48 added")
    for block, maximum in ((Decode, "max_rows"), (Prefill, "max_tokens")):
        assert f"{maximum} is added where the list stops short" in block.model_fields["buckets"].description
