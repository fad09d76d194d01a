"""What published adapters contain, read right: scales, key prefixes, fused and separate parts, experts, shards."""

from dataclasses import replace

import adapter_kit as kit
import pytest
import torch

from lorac.runtime.adapters import read_adapter
from lorac.runtime.errors import AdapterError


@pytest.mark.parametrize(
    ("rank", "alpha", "plain", "rslora"),
    [
        (8, 16, 2.0, 5.656854),
        (16, 32, 2.0, 8.0),
        (64, 16, 0.25, 2.0),
        (128, 256, 2.0, 22.627417),
        (12, 24, 2.0, 6.928203),
    ],
)
def test_scales(rank, alpha, plain, rslora, tmp_path):
    layout = kit.layout(max_rank=128)
    for flag, scale in ((False, plain), (True, rslora)):
        kit.write(tmp_path, kit.factors("q_proj", "v_proj", rank=rank), r=rank, lora_alpha=alpha, use_rslora=flag)
        part = read_adapter(tmp_path, layout).part("qkv_proj", 1, 2)
        assert (part.scale, part.rank) == (pytest.approx(scale, rel=1e-6), rank)


def test_rank_pattern_and_alpha_pattern_each_alone_and_together(tmp_path):
    cases = [({"down_proj": 8}, {"down_proj": 9}, 9 / 8), ({"down_proj": 8}, {}, 2.0), ({}, {"down_proj": 64}, 16.0)]
    for ranks, alphas, scale in cases:
        tensors = kit.factors("q_proj") | kit.factors("down_proj", rank=ranks.get("down_proj", 4))
        kit.write(tmp_path, tensors, lora_alpha=16.0, rank_pattern=ranks, alpha_pattern=alphas, target_modules=None)
        adapter = read_adapter(tmp_path, kit.layout())
        assert adapter.part("down_proj", 0, 0).scale == scale
        assert adapter.part("qkv_proj", 0, 0).scale == 4.0


PREFIXES = {
    "causal": "base_model.model.model.",
    "headless": "base_model.model.",
    "wrapper": "base_model.model.model.language_model.",
    "older wrapper": "base_model.model.language_model.model.",
    "none": "model.",
    "none, headless": "",
    "raw": "_orig_mod.module.base_model.model.model.",
    "data parallel inside": "base_model.model.module.model.",
    "fsdp": "_fsdp_wrapped_module.base_model.model._fsdp_wrapped_module.model.",
}


@pytest.mark.parametrize("prefix", PREFIXES.values(), ids=PREFIXES)
def test_key_prefixes(prefix, tmp_path):
    tensors = kit.factors("q_proj", "v_proj", prefix="base_model.model.model.")
    expected = kit.deltas(read_adapter(kit.write(tmp_path / "plain", tensors), kit.layout()))
    renamed = {name.replace("base_model.model.model.", prefix): tensor for name, tensor in tensors.items()}
    if prefix.startswith("_"):
        renamed = {name.replace(".weight", ".default.weight"): tensor for name, tensor in renamed.items()}
    folder = kit.write(tmp_path / "renamed", renamed, target_modules=r"model\.layers\.\d+\.self_attn\.[qv]_proj")
    ours = kit.deltas(read_adapter(folder, kit.layout()))
    assert ours.keys() == expected.keys()
    assert all(torch.equal(ours[site], expected[site]) for site in expected)


@pytest.mark.parametrize(
    "names", [("q_proj",), ("k_proj",), ("v_proj",), ("q_proj", "v_proj"), ("q_proj", "k_proj", "o_proj")]
)
def test_missing_parts_are_exact_zeros(names, tmp_path):
    tensors = kit.factors(*names)
    adapter = read_adapter(kit.write(tmp_path, tensors, target_modules=list(names)), kit.layout())
    block = adapter.blocks[0]
    tables = block.tables(adapter.buffer)
    for index, part in enumerate(block.module.slices):
        present = part.name in names
        rows = tables.b[:, part.start : part.start + part.width]
        assert present == bool(rows.any()) == bool(tables.a[:, index].any()) == bool(tables.rank[:, index].any())
        if present:
            key = f"base_model.model.model.layers.1.self_attn.{part.name}.lora_B.weight"
            assert torch.equal(rows[1], tensors[key])


def test_one_fused_pair_is_split_by_part_sizes(tmp_path):
    a, b = torch.randn(3, kit.HIDDEN), torch.randn(kit.HEADS * 6 + 2 * kit.KV * 6, 3)
    name = "base_model.model.model.layers.0.self_attn.qkv_proj.lora_{}.weight"
    settings = dict(r=3, lora_alpha=3, target_modules=["qkv_proj"], layers_to_transform=[0])
    kit.write(tmp_path, {name.format("A"): a, name.format("B"): b}, **settings)
    parts = [read_adapter(tmp_path, kit.layout()).part("qkv_proj", 0, index) for index in range(3)]
    assert all(torch.equal(part.a, a) for part in parts)
    assert torch.equal(torch.cat([part.b for part in parts]), b)
    kit.write(tmp_path, {name.format("A"): a, name.format("B"): b[:-6]}, **settings)
    with pytest.raises(AdapterError, match=r"shape \[42, 3\] where .* \[48, 3\]"):
        read_adapter(tmp_path, kit.layout())


def test_values_are_converted_once_and_scaled_never(tmp_path):
    tensors = kit.factors("q_proj", "v_proj")
    half = {name: tensor.half() for name, tensor in tensors.items()}
    for given in (tensors, half, {name: tensor.to(torch.float8_e4m3fn) for name, tensor in tensors.items()}):
        adapter = read_adapter(kit.write(tmp_path, given, lora_alpha=100), kit.layout(dtype="bfloat16"))
        part = adapter.part("qkv_proj", 0, 0)
        key = "base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight"
        assert torch.equal(part.b, given[key].to(torch.bfloat16))


def test_a_frozen_copy_of_the_embedding_is_accepted_only_in_its_own_shape(tmp_path):
    embedding = {
        "base_model.model.model.embed_tokens.lora_embedding_A": torch.randn(4, kit.VOCAB),
        "base_model.model.model.embed_tokens.lora_embedding_B": torch.randn(kit.HIDDEN, 4),
    }
    copy = "base_model.model.model.embed_tokens.base_layer.weight"
    for rows in (kit.VOCAB, kit.VOCAB + 3):
        tensors = embedding | {copy: torch.randn(rows, kit.HIDDEN)}
        kit.write(tmp_path, tensors, target_modules=["embed_tokens"])
        if rows == kit.VOCAB:
            part = read_adapter(tmp_path, kit.layout()).part("embed_tokens", 0, 0)
            assert torch.equal(part.a, embedding["base_model.model.model.embed_tokens.lora_embedding_A"])
        else:
            with pytest.raises(AdapterError, match="vocabulary was resized"):
                read_adapter(tmp_path, kit.layout())


@pytest.mark.parametrize("name", ["lm_head", "model.lm_head", "model.unembed_tokens"])
def test_names_of_the_head(name, tmp_path):
    tensors = {
        f"base_model.model.{name}.lora_A.weight": torch.randn(4, kit.HIDDEN),
        f"base_model.model.{name}.lora_B.weight": torch.randn(kit.VOCAB, 4),
    }
    kit.write(tmp_path, tensors, target_modules="all-linear")
    part = read_adapter(tmp_path, kit.layout()).part("lm_head", 0, 0)
    assert all(map(torch.equal, (part.a, part.b), tensors.values()))


# --- experts


def stacked(rank: int, swapped: bool, transposed: bool = False) -> tuple[dict, torch.Tensor, torch.Tensor]:
    """gate_up and down of 4 experts as `target_parameters` saves them, and the deltas [4, out, in] they stand for."""
    tensors, found = {}, []
    for key, (inside, out) in {".base_layer": (kit.HIDDEN, 2 * kit.INTER), "": (kit.INTER, kit.HIDDEN)}.items():
        swap = swapped and not transposed
        a, b = torch.randn(4 * rank, out if swap else inside), torch.randn(inside if swap else out, 4 * rank)
        name = f"base_model.model.model.layers.0.mlp.experts{key}.lora_"
        tensors |= {f"{name}A.weight": a, f"{name}B.weight": b}
        by_expert = torch.einsum("ore,eri->eio" if swap else "ore,eri->eoi", b.view(-1, rank, 4), a.view(4, rank, -1))
        found.append(by_expert)
    return tensors, *found


PARAMETERS = dict(
    target_modules=[], target_parameters=[f"layers.0.mlp.experts.{name}_proj" for name in ("gate_up", "down")], r=2
)


@pytest.mark.parametrize("version", ["0.18.1", "0.19.1", None])
@pytest.mark.parametrize("swapped", [True, False], ids=["swapped", "straight"])
def test_both_conventions_of_expert_parameters(swapped, version, tmp_path):
    tensors, gate_up, down = stacked(2, swapped)
    kit.write(tmp_path, tensors, **PARAMETERS, lora_alpha=2, peft_version=version)
    ours = kit.deltas(read_adapter(tmp_path, kit.layout(kit.MOE)))
    for expert in range(4):
        pair = [ours["experts_gate_up", 0, name, expert] for name in ("gate", "up")]
        torch.testing.assert_close(torch.cat(pair), gate_up[expert])
        torch.testing.assert_close(ours["experts_down", 0, "down", expert], down[expert])


@pytest.mark.parametrize(("version", "swapped"), [("0.18.1", True), ("0.21.2", False), (None, None)])
def test_square_experts_need_the_version(version, swapped, tmp_path):
    a, b = torch.randn(8, kit.HIDDEN), torch.randn(kit.HIDDEN, 8)
    name = "base_model.model.model.layers.0.mlp.experts.lora_{}.weight"
    settings = {**PARAMETERS, "target_parameters": ["layers.0.mlp.experts.down_proj"]}
    kit.write(tmp_path, {name.format("A"): a, name.format("B"): b}, **settings, lora_alpha=2, peft_version=version)
    layout = kit.layout(kit.MOE)
    down = layout.by_name["experts_down"]
    square = replace(down, in_features=kit.HIDDEN, full_in_features=kit.HIDDEN)
    layout = replace(layout, modules=(*layout.modules[:-1], square))
    if version is None:
        with pytest.raises(AdapterError, match="peft_version is absent"):
            read_adapter(tmp_path, layout)
        return
    expected = torch.einsum("ore,eri->eio" if swapped else "ore,eri->eoi", b.view(-1, 2, 4), a.view(4, 2, -1))
    assert torch.allclose(kit.deltas(read_adapter(tmp_path, layout))["experts_down", 0, "down", 3], expected[3])


def test_transposed_interleaved_experts(tmp_path):
    tensors, gate_up, _ = stacked(2, swapped=False)
    for version in ("0.18.1", "0.20.0"):  # the same in both, for such modules
        kit.write(tmp_path, tensors, **PARAMETERS, lora_alpha=2, peft_version=version)
        ours = kit.deltas(read_adapter(tmp_path, kit.layout(kit.MOE, transposed=True, interleaved=True)))
        torch.testing.assert_close(ours["experts_gate_up", 0, "gate", 2], gate_up[2, ::2])
        torch.testing.assert_close(ours["experts_gate_up", 0, "up", 2], gate_up[2, 1::2])


def per_expert(names=("gate_proj", "up_proj", "down_proj"), parent="mlp", experts=range(4), rank=2) -> dict:
    """One pair per expert and projection in layer 0."""
    tensors = {}
    for expert in experts:
        for name in names:
            inside, out = (kit.INTER, kit.HIDDEN) if name in ("down_proj", "w2") else (kit.HIDDEN, kit.INTER)
            key = f"base_model.model.model.layers.0.{parent}.experts.{expert}.{name}.lora_"
            tensors |= {f"{key}A.weight": torch.randn(rank, inside), f"{key}B.weight": torch.randn(out, rank)}
    return tensors


@pytest.mark.parametrize(
    ("names", "parent"), [(("gate_proj", "up_proj", "down_proj"), "mlp"), (("w1", "w3", "w2"), "block_sparse_moe")]
)
def test_experts_one_by_one(names, parent, tmp_path):
    tensors = per_expert(names, parent)
    kit.write(
        tmp_path, tensors, r=2, lora_alpha=32, use_rslora=True, target_modules=list(names), layers_to_transform=[0]
    )
    ours = kit.deltas(read_adapter(tmp_path, kit.layout(kit.MOE)))
    sites = {"gate": names[0], "up": names[1], "down": names[2]}
    for (_, layer, role, expert), value in ours.items():
        key = f"base_model.model.model.layers.{layer}.{parent}.experts.{expert}.{sites[role]}.lora_"
        torch.testing.assert_close(value, 32 / 2**0.5 * tensors[f"{key}B.weight"] @ tensors[f"{key}A.weight"])
    assert len(ours) == 12


def test_only_some_experts_and_only_up(tmp_path):
    targets = ["layers.0.mlp.experts.1.up_proj", "layers.0.mlp.experts.3.up_proj"]
    kit.write(tmp_path, per_expert(("up_proj",), experts=[1, 3]), r=2, target_modules=targets)
    adapter = read_adapter(tmp_path, kit.layout(kit.MOE))
    tables = adapter.blocks[0].tables(adapter.buffer)
    assert [bool(tables.b[0, expert].any()) for expert in range(4)] == [False, True, False, True]
    assert not tables.a[:, :, 0].any() and not tables.b[:, :, : kit.INTER].any()  # gate
    assert tables.rank.tolist() == [[0, 2], [0, 0]]


def test_expert_parallelism_keeps_the_local_experts(tmp_path):
    tensors = per_expert()
    kit.write(tmp_path, tensors, r=2, target_modules=["gate_proj", "up_proj", "down_proj"], layers_to_transform=[0])
    whole = kit.deltas(read_adapter(tmp_path, kit.layout(kit.MOE)))
    for rank in range(2):
        ours = kit.deltas(read_adapter(tmp_path, kit.layout(kit.MOE, local=2), ep_rank=rank))
        for (module, layer, role, expert), value in ours.items():
            assert torch.equal(value, whole[module, layer, role, 2 * rank + expert])
        assert len(ours) == 6


def test_shared_outer_experts_must_share(tmp_path):
    tensors = per_expert()
    settings = dict(r=2, target_modules=["gate_proj", "up_proj", "down_proj"], layers_to_transform=[0])
    layout = kit.layout(kit.MOE, shared_outer=True)
    with pytest.raises(AdapterError, match="(?s)differ in B.*differ in A.*shared_outer_experts"):
        read_adapter(kit.write(tmp_path, tensors, **settings), layout)
    for name in [name for name in tensors if ("lora_B" if "down" in name else "lora_A") in name]:
        tensors[name] = tensors[_expert_zero(name)]
    adapter = read_adapter(kit.write(tmp_path, tensors, **settings), layout)
    for expert in range(4):
        key = f"base_model.model.model.layers.0.mlp.experts.{expert}."
        gate, down = adapter.part("experts_gate_up", 0, 0, expert), adapter.part("experts_down", 0, 0, expert)
        assert torch.equal(gate.a, tensors[f"{key}gate_proj.lora_A.weight"])
        assert torch.equal(gate.b, tensors[f"{key}gate_proj.lora_B.weight"])
        assert torch.equal(down.b, tensors[f"{key}down_proj.lora_B.weight"])
    assert gate.a.data_ptr() == adapter.part("experts_gate_up", 0, 0, 0).a.data_ptr()


def _expert_zero(name: str) -> str:
    head, _, tail = name.partition(".experts.")
    return f"{head}.experts.0.{tail.partition('.')[2]}"


# --- tensor parallelism


@pytest.mark.parametrize("tp", [2, 4])
def test_shards_gather_to_the_whole(tp, tmp_path):
    names = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    head = {
        "base_model.model.lm_head.lora_A.weight": torch.randn(3, kit.HIDDEN),
        "base_model.model.lm_head.lora_B.weight": torch.randn(kit.VOCAB, 3),
    }
    kit.write(tmp_path, kit.factors(*names, rank=3) | head, r=3, target_modules=[*names, "lm_head"])
    whole = kit.deltas(read_adapter(tmp_path, kit.layout()))
    layout = kit.layout(tp=tp)
    ranks = [kit.deltas(read_adapter(tmp_path, layout, tp_rank=rank)) for rank in range(tp)]
    for (module, layer, name, _), value in whole.items():
        shares = [rank[module, layer, name, None] for rank in ranks]
        if module in ("o_proj", "down_proj"):
            torch.testing.assert_close(torch.cat(shares, 1), value)
        elif name in ("k_proj", "v_proj"):  # 2 heads: rank t of 4 holds head floor(t * 2 / 4)
            head_rows = value.split(kit.HEAD_DIM)
            torch.testing.assert_close(shares, [head_rows[rank * 2 // tp] for rank in range(tp)])
        else:
            torch.testing.assert_close(torch.cat(shares)[: value.shape[0]], value)
            assert not torch.cat(shares)[value.shape[0] :].any()  # the vocabulary's padding


def test_fused_pairs_are_cut_by_part_and_then_by_rank(tmp_path):
    b = torch.arange(48.0)[:, None].repeat(1, 2) + 1
    name = "base_model.model.model.layers.0.self_attn.qkv_proj.lora_{}.weight"
    tensors = {name.format("A"): torch.ones(2, kit.HIDDEN), name.format("B"): b}
    kit.write(tmp_path, tensors, r=2, target_modules=["qkv_proj"], layers_to_transform=[0])
    q, k, v = b.split([24, 12, 12])
    for rank in range(2):
        adapter = read_adapter(tmp_path, kit.layout(tp=2), tp_rank=rank)
        assert torch.equal(adapter.part("qkv_proj", 0, 0).b, q[rank * 12 : rank * 12 + 12])
        assert torch.equal(adapter.part("qkv_proj", 0, 1).b, k[rank * 6 : rank * 6 + 6])
        assert torch.equal(adapter.part("qkv_proj", 0, 2).b, v[rank * 6 : rank * 6 + 6])
