"""Shapes agree with the modules transformers builds from the same config.json."""

import json
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lorac.errors import SpecError
from lorac.resources import presets_folder
from lorac.spec import presets
from lorac.spec.geometry import families, shapes_from_config
from lorac.spec.model import preset_shapes

# A linear of every family is tested by at least one preset; the layers are cut to a few, which builds at once.
LAYERS = 5


def preset_config(name):
    return json.loads((presets_folder() / f"{name}.json").read_text())


def with_layers(config, layers):
    if "text_config" in config:
        return {**config, "text_config": {**config["text_config"], "num_hidden_layers": layers}}
    return {**config, "num_hidden_layers": layers}


def built(config):
    """The text model transformers builds from it, without memory for its weights."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    fields = dict(config.get("text_config", config), pad_token_id=0)
    fields.pop("_name_or_path", None)
    made = transformers.AutoConfig.for_model(fields.pop("model_type"), **fields)
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(made)


def stored(shapes):
    """(layer, path, in, out) of every linear, with the layers the checkpoint stores fused put together."""
    inside = {part: name for name, parts in shapes.fused if name in shapes.stored_fused for part in parts}
    found = {}
    for linear in shapes.linears:
        name = inside.get(linear.name, linear.path.rpartition(".")[2])
        path = f"{linear.path.rpartition('.')[0]}.{name}"
        for layer in linear.layers:
            found[layer, path, linear.in_features] = (
                found.get((layer, path, linear.in_features), 0) + linear.out_features
            )
    return {(*key, out) for key, out in found.items()}


CONFIGS = {name: with_layers(preset_config(name), LAYERS) for name in presets()}
CONFIGS["qwen3-moe-sparse"] = {**CONFIGS["qwen3-30b-a3b"], "decoder_sparse_step": 2, "mlp_only_layers": [1]}
CONFIGS["deepseek-direct-query"] = {**CONFIGS["deepseek-v3"], "q_lora_rank": None, "first_k_dense_replace": 0}
CONFIGS["llama-no-kv-heads"] = {k: v for k, v in CONFIGS["llama-3.1-8b"].items() if k != "num_key_value_heads"}


@pytest.mark.parametrize("name", CONFIGS)
def test_agrees_with_transformers(name):
    model = built(CONFIGS[name])
    shapes = shapes_from_config(CONFIGS[name])
    linears = set()
    for layer, block in enumerate(model.model.layers):
        for path, module in block.named_modules():
            if type(module).__name__ == "Linear":
                linears.add((layer, path, module.in_features, module.out_features))
    assert stored(shapes) == linears
    assert model.lm_head.weight.shape == (shapes.vocab, shapes.hidden)
    assert model.config.tie_word_embeddings == shapes.tied
    sparse = {i: block.mlp.experts for i, block in enumerate(model.model.layers) if hasattr(block.mlp, "experts")}
    assert tuple(sparse) == (shapes.experts.layers if shapes.experts else ())
    for experts in sparse.values():
        count, hidden, inner = shapes.experts.count, shapes.hidden, shapes.experts.intermediate
        wide = (count, hidden, 2 * inner) if shapes.experts.transposed else (count, 2 * inner, hidden)
        assert tuple(experts.gate_up_proj.shape) == wide
        assert shapes.experts.top_k == model.config.num_experts_per_tok


def test_every_family_has_a_config_here():
    tested = {config["model_type"] for config in CONFIGS.values()}
    assert tested | {"gemma3_text"} == set(families())


# The published number of parameters less those of norms, biases and routers, which belong to no linear layer.
@pytest.mark.parametrize(
    ("name", "weights"),
    [
        ("llama-3.1-8b", 8_030_261_248 - 4096 * 65),
        ("llama-3.1-70b", 70_553_706_496 - 8192 * 161),
        ("llama-3.2-1b", 1_235_814_400 - 2048 * 33),
        ("llama-3.2-3b", 3_212_749_824 - 3072 * 57),
        ("qwen2.5-7b", 7_615_616_512 - 3584 * 57 - 28 * (3584 + 512 + 512)),
        ("qwen3-0.6b", 596_049_920 - 1024 * 57 - 28 * 256),
        ("qwen3-4b", 4_022_468_096 - 2560 * 73 - 36 * 256),
        ("qwen3-8b", 8_190_735_360 - 4096 * 73 - 36 * 256),
        ("qwen3-32b", 32_762_123_264 - 5120 * 129 - 64 * 256),
        ("qwen3-30b-a3b", 30_532_122_624 - 2048 * 97 - 48 * (256 + 128 * 2048)),
        ("mistral-7b", 7_248_023_552 - 4096 * 65),
        ("mixtral-8x7b", 46_702_792_704 - 4096 * 65 - 32 * 8 * 4096),
        ("gemma-2-9b", 9_241_705_984 - 3584 * (42 * 4 + 1)),
        ("phi-4", 14_659_507_200 - 5120 * 81),
        ("gpt-oss-20b", 20_914_757_184 - 2880 * 49 - 24 * (64 + 5120 + 2880 + 32 * (2881 + 3 * 2880))),
        ("deepseek-v3", 671_026_419_200 - 7168 * 123 - 61 * (1536 + 512) - 58 * 256 * 7169),
    ],
)
def test_preset_has_the_published_number_of_weights(name, weights):
    shapes = preset_shapes(name)
    total = sum(linear.in_features * linear.out_features * len(linear.layers) for linear in shapes.linears)
    total += shapes.hidden * shapes.vocab * (1 if shapes.tied else 2)
    if shapes.experts:
        total += 3 * shapes.hidden * shapes.experts.intermediate * shapes.experts.count * len(shapes.experts.layers)
    assert total == weights


@pytest.mark.parametrize(
    ("name", "column", "row", "replicated"),
    [
        ("llama-3.1-8b", {"q_proj": 32, "k_proj": 8, "v_proj": 8, "gate_proj": 0, "up_proj": 0},
         {"o_proj": 32, "down_proj": 0}, {}),
        ("deepseek-v3", {"q_b_proj": 128, "kv_b_proj": 128, "gate_proj": 0, "up_proj": 0, "shared_gate_proj": 0,
                         "shared_up_proj": 0},
         {"o_proj": 128, "down_proj": 0, "shared_down_proj": 0}, {"q_a_proj": 0, "kv_a_proj_with_mqa": 0}),
    ],
)  # fmt: skip
def test_sharding(name, column, row, replicated):
    linears = preset_shapes(name).linears
    for kind, expected in {"column": column, "row": row, "replicated": replicated}.items():
        assert {linear.name: linear.units for linear in linears if linear.sharding == kind} == expected


def test_fused_layers_and_the_names_experts_have():
    assert preset_shapes("phi-4").stored_fused == ("qkv_proj", "gate_up_proj")
    assert [name for name, _ in preset_shapes("mixtral-8x7b").fused] == ["qkv_proj"]
    assert preset_shapes("mixtral-8x7b").experts.names == ("w1", "w3", "w2")
    assert preset_shapes("gpt-oss-20b").experts.interleaved
    assert preset_shapes("gemma-3-4b").family == "gemma3"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 1 << 40) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=4,
)


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_a_senseless_config_is_a_spec_error(data):
    config = dict(data.draw(st.sampled_from([*CONFIGS.values()])))
    for key in data.draw(st.lists(st.sampled_from(sorted(config)), max_size=3)):
        config[key] = data.draw(JSON)
    with suppress(SpecError):
        shapes_from_config(config)
