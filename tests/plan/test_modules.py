"""Modules as one tensor-parallel rank holds them, and a plan for every preset on every GPU."""

from pathlib import Path

import plan_kit as kit
import pytest

from lorac.errors import SpecError
from lorac.plan.model import Plan
from lorac.spec import presets, target_names
from lorac.spec.model import preset_shapes


def widths(plan: Plan) -> dict[str, tuple[int, list[int]]]:
    """Inputs and outputs of every module on one rank."""
    return {module.name: (module.in_features, [part.width for part in module.slices]) for module in plan.modules}


def test_shards_add_up():
    whole = widths(kit.plan_of(kit.spec_data(adapters={"slots": 2, "max_rank": 8, "targets": kit.TARGETS})))
    assert whole["qkv_proj"] == (128, [128, 32, 32]) and whole["o_proj"] == (128, [128])
    for tp in (2, 4, 8):
        data = kit.spec_data(adapters={"slots": 2, "max_rank": 8, "targets": kit.TARGETS}, parallel={"tp": tp})
        plan = kit.plan_of(data)
        kv = 16  # two kv heads of 16: one each from two ranks on, replicated beyond
        assert widths(plan) == {
            "qkv_proj": (128, [128 // tp, kv, kv]),
            "o_proj": (128 // tp, [128]),
            "gate_up_proj": (128, [96 // tp, 96 // tp]),
            "down_proj": (96 // tp, [128]),
            "lm_head": (128, [160 // tp]),
            "embed_tokens": (160, [128]),
        }
        for module in plan.modules:
            starts = [part.start for part in module.slices]
            sizes = [part.width for part in module.slices]
            assert starts == [sum(sizes[:index]) for index in range(len(sizes))]
            assert module.out_features == sum(sizes)
            assert [part.full_width for part in module.slices] == whole[module.name][1]
            assert module.full_in_features == whole[module.name][0]


@pytest.mark.parametrize("tp", [3, 16])
def test_what_cannot_be_cut_is_refused(tp):
    with pytest.raises(SpecError, match="cannot be cut evenly over"):
        kit.plan_of(kit.spec_data(parallel={"tp": tp}))


@pytest.mark.parametrize("name", presets())
def test_every_preset(name):
    shapes = preset_shapes(name)
    fused = [whole for whole, _ in shapes.fused]
    parts = {part for _, of in shapes.fused for part in of}
    legal = target_names(shapes)
    together = [target for target in legal if target not in parts]
    apart = [target for target in legal if target not in fused and target != "experts"]
    torch = kit.declaration("torch").model_copy(update={"experts": True})
    for targets in (together, apart):
        data = kit.spec_data(
            model={"preset": name},
            dtype="bfloat16",
            adapters={"slots": 8, "max_rank": 64, "targets": targets},
            backends={"triton": {}, "csgmv": {}, "torch": {}},
            targets=kit.GPUS,
        )
        plan = kit.plan_of(data, torch=torch)
        names = [module.name for module in plan.modules]
        assert names == [
            name for target in targets for name in (
                ["experts_gate_up", "experts_down"] if target == "experts" else [target])
        ]  # fmt: skip
        for backend in plan.backends:
            served = {kernel.module for kernel in backend.kernels}
            dense = {module.name for module in plan.modules if not module.experts}
            assert served == (set() if backend.kind == "torch" else dense)
        for module in plan.modules:
            assert module.layers or module.kind in ("lm_head", "embedding")
            if not module.layers or module.experts:
                continue
            for part in module.slices:
                linear = shapes.linear(part.name)
                assert (linear.in_features, linear.out_features, linear.layers) == (
                    module.in_features, part.width, module.layers
                )  # fmt: skip


def test_paths_are_those_of_the_checkpoint():
    """Of everything in the model, served or not; layers that are stored as one have one path."""
    adapters = {"slots": 2, "max_rank": 16, "targets": ["o_proj"]}
    plans = {
        name: kit.plan_of(kit.spec_data(model={"preset": name}, adapters=adapters))
        for name in ("llama-3.1-8b", "phi-4", "mixtral-8x7b")
    }
    paths = {name: set(plan.paths) - {"lm_head", "embed_tokens"} for name, plan in plans.items()}
    attention = {f"self_attn.{name}_proj" for name in "qkvo"}
    assert paths["llama-3.1-8b"] == attention | {"mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"}
    assert paths["phi-4"] == {"self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj"}
    assert paths["mixtral-8x7b"] == attention | {"block_sparse_moe.experts"}


def test_bytes_are_those_of_the_buffers():
    data = kit.spec_data(
        model={"preset": "llama-3.1-8b"}, dtype="bfloat16",
        adapters={"slots": 8, "max_rank": 64, "targets": ["qkv_proj"]},
    )  # fmt: skip
    found = {buffer.name: buffer.bytes for buffer in kit.plan_of(data).buffers}
    assert found["a.qkv_proj"] == 32 * 8 * (3 * 64) * 4096 * 2
    assert found["b.qkv_proj"] == 32 * (4096 + 1024 + 1024) * 8 * 64 * 2
    assert found["rank.qkv_proj"] == found["scale.qkv_proj"] == 32 * 8 * 3 * 4


def test_the_plan_needs_neither_torch_nor_jinja():
    import subprocess
    import sys

    code = "import sys, lorac.plan.build, lorac.spec; print({'torch', 'jinja2', 'triton'} & set(sys.modules))"
    root = Path(__file__).parents[2]
    assert subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True).stdout == "set()\n"
