"""Adapters that PEFT itself made and saved: every delta equals what PEFT's own layers compute."""

from dataclasses import replace

import adapter_kit as kit
import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from lorac.runtime.adapters import read_adapter
from lorac.runtime.adapters.patterns import PatternTable, Targets
from lorac.runtime.errors import AdapterError

pytestmark = pytest.mark.filterwarnings("ignore")  # PEFT warns about every unusual setting tried here
COMMON = dict(
    hidden_size=kit.HIDDEN, intermediate_size=kit.INTER, vocab_size=kit.VOCAB, num_hidden_layers=kit.LAYERS,
    num_attention_heads=kit.HEADS, num_key_value_heads=kit.KV, head_dim=kit.HEAD_DIM, pad_token_id=0,
)  # fmt: skip
CONFIGS = {
    "llama": lambda: transformers.LlamaConfig(**COMMON, tie_word_embeddings=False),
    "qwen3": lambda: transformers.Qwen3Config(**COMMON, tie_word_embeddings=False),
    "phi3": lambda: transformers.Phi3Config(**COMMON, tie_word_embeddings=False),
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(**COMMON, num_experts=4, moe_intermediate_size=kit.INTER),
    "mixtral": lambda: transformers.MixtralConfig(**COMMON, num_local_experts=4),
    "gpt_oss": lambda: transformers.GptOssConfig(**COMMON, num_local_experts=4),
}
LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
ALL_AT_ONCE = dict(
    r=6, lora_alpha=10, use_rslora=True, rank_pattern={"down_proj": 3, "layers.1.self_attn.q_proj": 8, "q_proj": 2},
    alpha_pattern={"layers.*o_proj": 5, "down_proj": 7.5},
)  # fmt: skip


def trained(family: str, folder, **settings):
    """A small model with random LoRA, saved by PEFT; returns PEFT's model."""
    with torch.random.fork_rng():
        model = transformers.AutoModelForCausalLM.from_config(CONFIGS[family]())
        wrapped = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **settings))
        for name, parameter in wrapped.named_parameters():
            if "lora_" in name:
                torch.nn.init.normal_(parameter)
    wrapped.save_pretrained(folder)
    return wrapped


def expected(wrapped, layout) -> dict[tuple, torch.Tensor]:
    """PEFT's deltas [out, in] under the keys of `kit.deltas`."""
    found = {}
    for name, layer in wrapped.base_model.model.named_modules():
        if not hasattr(layer, "get_delta_weight"):
            continue
        weight = layer.get_delta_weight("default").detach()
        path = name.replace(".base_layer", "").split(".")
        number = int(path[path.index("layers") + 1]) if "layers" in path else None
        if path[-1] == "experts":
            gate_up = layer.parameter_name == "gate_up_proj"
            module = next(m for m in layout.modules if m.name == ("experts_gate_up" if gate_up else "experts_down"))
            weight = weight.mT if module.experts.transposed else weight
            parts = (weight[:, ::2], weight[:, 1::2]) if module.experts.interleaved else weight.chunk(2, 1)
            for piece, part in zip(module.slices, parts if gate_up else (weight,), strict=True):
                found.update({(module.name, number, piece.name, expert): part[expert] for expert in range(4)})
            continue
        weight = weight.mT if path[-1] == "embed_tokens" else weight
        sites = [
            (module, piece)
            for module in layout.modules
            for piece in module.slices
            if path[-1] in (piece.name, module.path.rpartition(".")[2]) or piece.name in kit.FUSED.get(path[-1], ())
        ]
        for (module, piece), rows in zip(sites, weight.split([piece.full_width for _, piece in sites]), strict=True):
            found[module.name, number, piece.name, None] = rows
    return found


def assert_same(ours: dict, theirs: dict):
    """The same sites, each delta within float32 rounding; PEFT's zeros may be absent."""
    assert set(ours) == set(theirs)
    for site, value in theirs.items():
        assert value.abs().max() > 1e-3, f"{site} would not show a mistake"
        torch.testing.assert_close(ours[site], value, rtol=1e-6, atol=1e-6 * float(value.abs().max()), msg=str(site))


@pytest.mark.parametrize("separate", [False, True], ids=["fused package", "separate package"])
@pytest.mark.parametrize("family", ["llama", "qwen3", "phi3"])
@pytest.mark.parametrize(
    "settings",
    [
        dict(r=4, lora_alpha=6),
        dict(r=5, lora_alpha=16, use_rslora=True),
        ALL_AT_ONCE,
        dict(r=4, layers_to_transform=[1]),
        dict(r=4, exclude_modules=r".*layers\.0\.mlp\..*|.*o_proj"),
        dict(r=4, target_modules="all-linear"),
        dict(r=4, target_modules=r".*\.(self_attn|mlp)\..*(o_proj|down_proj)"),
        dict(r=4, target_modules=["self_attn.o_proj", "model.layers.1.mlp.down_proj"]),
        dict(r=3, lora_alpha=5, target_modules=["lm_head", "embed_tokens", "o_proj"]),
        dict(r=4, velora_config=peft.VeloraConfig()),
        dict(r=4, target_modules=["o_proj"], target_parameters=["mlp.down_proj.weight"]),
    ],
    ids=[
        "plain",
        "rslora",
        "patterns",
        "layers",
        "exclude",
        "all-linear",
        "regex",
        "dotted",
        "head and embedding",
        "velora",
        "linear parameters",
    ],
)
def test_dense(family, separate, settings, tmp_path):
    linears = ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"] if family == "phi3" else LINEARS
    wrapped = trained(family, tmp_path, **{"target_modules": linears, **settings})
    layout = kit.layout(LINEARS + ["lm_head", "embed_tokens"] if separate else kit.EVERYTHING)
    adapter = read_adapter(tmp_path, layout)
    assert_same(kit.deltas(adapter), expected(wrapped, layout))


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "gpt_oss"])
@pytest.mark.parametrize("parameters", [["gate_up_proj", "down_proj"], ["down_proj"], ["gate_up_proj"]], ids="+".join)
def test_expert_parameters(family, parameters, tmp_path):
    wrapped = trained(
        family, tmp_path, r=3, lora_alpha=5, use_rslora=True, target_modules=["q_proj", "o_proj"],
        target_parameters=[f"mlp.experts.{name}" for name in parameters], rank_pattern={"experts.down_proj": 2},
    )  # fmt: skip
    gpt_oss = family == "gpt_oss"
    layout = kit.layout(kit.MOE, transposed=gpt_oss, interleaved=gpt_oss)
    adapter = read_adapter(tmp_path, layout)
    assert_same(kit.deltas(adapter), expected(wrapped, layout))


def layout_of(family: str, **settings):
    """A layout of the family's model, with paths as it has them."""
    if family == "phi3":
        layout = kit.layout()
        fused = ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")
        return replace(layout, paths=(*fused, "lm_head", "embed_tokens"))
    if family in ("llama", "tied"):
        return kit.layout(tied=family == "tied", **settings)
    gpt_oss = family == "gpt_oss"
    return kit.layout((*kit.MOE, "lm_head"), transposed=gpt_oss, interleaved=gpt_oss, **settings)


EVERYWHERE = [*LINEARS, "lm_head", "embed_tokens"]
FUSED = ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]
SAVED = {
    "plain": ("llama", dict(target_modules=["q_proj", "v_proj"])),
    "everything": ("llama", dict(target_modules=EVERYWHERE)),
    "names the model lacks": ("llama", dict(target_modules=["q_proj", "qkv_proj", "w1", "c_attn", "gate_up_proj"])),
    "one layer": ("llama", dict(target_modules=[*LINEARS, "lm_head"], layers_to_transform=[1])),
    "one module": ("llama", dict(target_modules=["model.layers.1.self_attn.q_proj", "k_proj"], layers_to_transform=0)),
    "exclude": ("llama", dict(target_modules=EVERYWHERE, exclude_modules=["layers.0.self_attn.v_proj", "lm_head"])),
    "exclude by regex": ("llama", dict(target_modules=LINEARS, exclude_modules=r".*layers\.1\.mlp\..*")),
    "regex": ("llama", dict(target_modules=r".*\.layers\.(0\.self_attn|1\.mlp)\..*_proj|lm_head|.*embed_tokens")),
    "regex from the start": ("llama", dict(target_modules=r"model\.layers\.\d+\.self_attn\.(q|o|qkv)_proj")),
    "regex of other models": ("llama", dict(target_modules=r"language_model\.layers.*k_proj|model\.layers.*q_proj")),
    "all-linear": ("llama", dict(target_modules="all-linear")),
    "ranks": ("llama", dict(target_modules=LINEARS, rank_pattern={"q_proj": 2}, alpha_pattern={"layers.0": 3})),
    "linear parameters": ("llama", dict(target_modules=["o_proj"], target_parameters=["mlp.down_proj.weight"])),
    "fused": ("phi3", dict(target_modules=FUSED)),
    "fused, of both kinds": ("phi3", dict(target_modules=[*LINEARS, "qkv_proj"])),
    "fused, unfused names": ("phi3", dict(target_modules=LINEARS)),
    "fused, one module": ("phi3", dict(target_modules=["qkv_proj"], layers_to_transform=[1])),
    "tied": ("tied", dict(target_modules=["lm_head", "embed_tokens", "q_proj"])),
    "tied, ensured": ("tied", dict(target_modules=["lm_head", "embed_tokens", "q_proj"], ensure_weight_tying=True)),
    "tied, ensured, of one": ("tied", dict(target_modules=["lm_head"], ensure_weight_tying=True)),
    "tied, ensured, by regex": ("tied", dict(target_modules=r".*v_proj|lm_head", ensure_weight_tying=True)),
    "experts": ("qwen3_moe", dict(target_modules=["q_proj", "o_proj", "gate_proj", "up_proj", "down_proj"])),
    "experts, up": ("mixtral", dict(target_modules=["o_proj", "w1", "w3", "up_proj", "lm_head"])),
    "experts, parameters": ("qwen3_moe", dict(
        target_modules=["k_proj"], target_parameters=["experts.gate_up_proj", "model.layers.1.mlp.experts.down_proj"],
        layers_to_transform=[0],
    )),
    "experts, interleaved": ("gpt_oss", dict(target_modules=[], target_parameters=["gate_up_proj", "down_proj"])),
    "experts, not reached": ("gpt_oss", dict(target_modules=["q_proj", "up_proj", "gate_up_proj", "w2"])),
}  # fmt: skip


@pytest.mark.parametrize(("family", "settings"), SAVED.values(), ids=SAVED)
def test_what_peft_saves_is_complete_and_less_is_not(family, settings, tmp_path):
    """The file loads; without any one of its pairs, PEFT itself would find keys missing, and it is refused."""
    CONFIGS["tied"] = lambda: transformers.LlamaConfig(**COMMON, tie_word_embeddings=True)
    trained(family, tmp_path, r=3, **settings)
    layout = layout_of(family)
    read_adapter(tmp_path, layout)
    path = tmp_path / "adapter_model.safetensors"
    tensors = load_file(path)
    modules = {name.split(".lora_")[0] for name in tensors if ".lora_" in name}
    for module in sorted(modules):
        save_file({name: value for name, value in tensors.items() if not name.startswith(f"{module}.lora_")}, path)
        with pytest.raises(AdapterError):
            read_adapter(tmp_path, layout)


NAMES = [
    "model.layers.0.self_attn.q_proj", "model.layers.11.self_attn.q_proj", "model.layers.1.mlp.down_proj", "lm_head",
    "layers.3.mlp.gate_proj", "model.language_model.layers.2.self_attn.o_proj", "model.layers.1.mlp.experts.7.w1",
    "model_layers.1.self_attn.q_proj", "model.layers.0.mlp.experts.down_proj", "v_proj",
]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_patterns_choose_the_key_peft_chooses(name):
    keys = [
        "layers.1.self_attn.q_proj", "q_proj", r"^model\.layers\.1\..*", r"layers\.(0|2)\..*", "proj", "down_proj",
        "model.layers.1.mlp.experts.7.w1", "^lm_head", "o_proj|gate_proj", "experts.down_proj", "layers",
    ]  # fmt: skip
    for start in range(len(keys)):
        order = keys[start:] + keys[:start]
        theirs = peft.utils.other.get_pattern_key(order, name)
        table = PatternTable({key: index for index, key in enumerate(order)})
        assert table.lookup(name) == (order.index(theirs) if theirs in order else None)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "settings",
    [
        dict(target_modules=["q_proj", "mlp.down_proj"]),
        dict(target_modules=["lm_head", "model.layers.11.self_attn.q_proj"], exclude_modules=["lm_head"]),
        dict(target_modules=r".*\.layers\.\d+\.(self_attn|mlp)\..*_proj", exclude_modules=r".*gate.*"),
        dict(target_modules=["q_proj", "w1", "o_proj"], layers_to_transform=[1, 2]),
        dict(target_modules=["q_proj", "w1"], layers_to_transform=1, layers_pattern="layers"),
        dict(target_modules=["v_proj", "lm_head", "model.layers.1.mlp.down_proj"], layers_to_transform=[0]),
        dict(target_modules=["q_proj", "w1"], layers_to_transform=[0, 1], layers_pattern=["blocks", "layers"]),
    ],
)
def test_targets_are_those_peft_targets(name, settings):
    theirs = peft.tuners.tuners_utils.check_target_module_exists(peft.LoraConfig(**settings), name)
    layers, pattern = settings.get("layers_to_transform"), settings.get("layers_pattern", ())
    targets = Targets(
        settings["target_modules"],
        settings.get("exclude_modules", ()),
        [layers] if isinstance(layers, int) else layers,
        [pattern] if isinstance(pattern, str) else pattern,
    )
    assert targets.matches(name) == bool(theirs)


@pytest.mark.parametrize("module", ["lm_head", "embed_tokens"])
def test_tied_weights_keep_their_adapters_apart(module, tmp_path):
    CONFIGS["tied"] = lambda: transformers.LlamaConfig(**COMMON, tie_word_embeddings=True)
    wrapped = trained("tied", tmp_path, r=4, target_modules=[module])
    layout = kit.layout(tied=True)
    adapter = read_adapter(tmp_path, layout)
    assert [block.module.name for block in adapter.blocks] == [module]
    assert_same(kit.deltas(adapter), expected(wrapped, layout))
