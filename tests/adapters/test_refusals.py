"""What must not be served: each refusal names the field or tensor, and what to do. Nothing is read half."""

import dataclasses
import itertools
import json

import adapter_kit as kit
import pytest
import torch

from lorac.inspect import inspect_adapter
from lorac.runtime.adapters import read_adapter
from lorac.runtime.adapters.config import read_config
from lorac.runtime.adapters.problems import Problems
from lorac.runtime.errors import AdapterError

ROOT = "base_model.model.model."
Q = f"{ROOT}layers.0.self_attn.q_proj."


def refusal(folder, layout=None) -> str:
    with pytest.raises(AdapterError) as caught:
        read_adapter(folder, layout or kit.layout())
    assert str(folder) in str(caught.value)
    return str(caught.value)


FIELDS = {
    "dora": (dict(use_dora=True), "use_dora is True: DoRA"),
    "modules_to_save": (dict(modules_to_save=["lm_head"]), r"modules_to_save is ['lm_head']"),
    "lora_bias": (dict(lora_bias=True), "lora_bias is True"),
    "bias": (dict(bias="lora_only"), "bias is 'lora_only'"),
    "pissa": (dict(init_lora_weights="pissa"), "path_initial_model_for_weight_conversion"),
    "pissa_niter": (dict(init_lora_weights="pissa_niter_16"), "init_lora_weights is 'pissa_niter_16'"),
    "olora": (dict(init_lora_weights="olora"), "init_lora_weights is 'olora'"),
    "corda": (dict(init_lora_weights="corda"), "init_lora_weights is 'corda'"),
    "loftq": (dict(init_lora_weights="loftq"), "init_lora_weights is 'loftq'"),
    "lora_ga": (dict(init_lora_weights="lora_ga"), "init_lora_weights is 'lora_ga'"),
    "unknown init": (dict(init_lora_weights="brand_new"), "init_lora_weights is 'brand_new'"),
    "tokens": (dict(trainable_token_indices=[3]), "trainable_token_indices is [3]"),
    "replication": (dict(layer_replication=[[0, 1]]), "layer_replication"),
    "qalora": (dict(use_qalora=True), "use_qalora"),
    "alora": (dict(alora_invocation_tokens=[1, 2]), "alora_invocation_tokens"),
    "arrow": (dict(arrow_config={"top_k": 1}), "arrow_config"),
    "bdlora": (dict(use_bdlora={"nblocks": 2}), "use_bdlora"),
    "kasa": (dict(kasa_config={"beta": 1}), "kasa_config"),
    "unknown field": (dict(from_the_future={"on": True}), "from_the_future is {'on': True}"),
    "unknown number": (dict(a_new_limit=0), "a_new_limit is 0"),
    "kind": (dict(peft_type="IA3"), "peft_type is 'IA3'; expected LORA"),
    "rank zero": (dict(r=0), "r is 0"),
    "rank text": (dict(r="8"), "r is '8'"),
    "rank flag": (dict(r=True), "r is True"),
    "alpha": (dict(lora_alpha=float("nan")), "lora_alpha is nan"),
    "huge alpha": (dict(lora_alpha=10**400), "lora_alpha is 1000"),
    "rank pattern": (dict(rank_pattern={"q_proj": -1}), "rank_pattern is {'q_proj': -1}"),
    "alpha pattern": (dict(alpha_pattern={"q_proj": "8"}), "alpha_pattern"),
    "pattern list": (dict(rank_pattern=[8]), "rank_pattern is [8]"),
    "bad regex": (dict(rank_pattern={"(q_proj": 8}), "is not a regex"),
    "slow regex": (dict(target_modules=r"(\w+\.?)+x"), "exponential time"),
    "slow key": (dict(alpha_pattern={r"(a|a)*(b?)": 8}), "exponential time"),
    "targets": (dict(target_modules={"q_proj": 1}), "target_modules is {'q_proj': 1}"),
    "layers": (dict(layers_to_transform=["0"]), "layers_to_transform is ['0']"),
    "version": (dict(peft_version="newest"), "peft_version is 'newest'"),
}


@pytest.mark.parametrize(("settings", "message"), FIELDS.values(), ids=FIELDS)
def test_fields(settings, message, tmp_path):
    assert message in refusal(kit.write(tmp_path, kit.factors("q_proj", "v_proj"), **settings))


def test_all_problems_are_told_at_once(tmp_path):
    text = refusal(kit.write(tmp_path, kit.factors("q_proj"), use_dora=True, r=-3, lora_bias=True))
    assert all(field in text for field in ("use_dora", "r is -3", "lora_bias"))


@pytest.mark.parametrize(
    "settings",
    [
        dict(modules_to_save=[], trainable_token_indices=[], exclude_modules=""),
        dict(from_the_future=None, another={}, third=False, peft_version="0.21.2"),
        dict(enable_lora=None, merge_weights=False),
        dict(init_lora_weights=False, fan_in_fan_out=True, lora_dropout=0.3, bias="none"),
        dict(init_lora_weights="gaussian", lora_alpha=8.0),
        dict(init_lora_weights="eva", eva_config={"rho": 2.0}),
        dict(auto_mapping={"base_model_class": "X", "unsloth_fixed": True}, task_type=None),
        dict(target_modules=None),
        dict(peft_version="0.18.2.dev0"),
    ],
)
def test_inactive_and_harmless_fields_are_accepted(settings, tmp_path):
    kit.write(tmp_path, kit.factors("q_proj", "v_proj"), **settings)
    assert len(kit.deltas(read_adapter(tmp_path, kit.layout()))) == 4


def test_the_oldest_config_is_accepted(tmp_path):
    kit.write(tmp_path, kit.factors("q_proj", "v_proj"))
    old = dict(peft_type="LORA", r=4, lora_alpha=16, target_modules=["q_proj", "v_proj"], bias="none", lora_dropout=0.1)
    (tmp_path / "adapter_config.json").write_text(json.dumps(old))
    assert read_adapter(tmp_path, kit.layout()).part("qkv_proj", 0, 0).scale == 4.0


def vector(*shape):
    return torch.ones(shape)


def pair(module: str, a: tuple, b: tuple, adapter: str = "") -> dict:
    """A and B of one linear module, of these shapes."""
    return {f"{module}.lora_{side}{adapter}.weight": torch.ones(shape) for side, shape in (("A", a), ("B", b))}


TENSORS = {
    "magnitude": ({f"{Q}lora_magnitude_vector": vector(24)}, "DoRA"),
    "whole head": ({"base_model.model.lm_head.weight": vector(kit.VOCAB, 16)}, "modules_to_save"),
    "base layer": ({f"{Q}base_layer.weight": vector(24, 16)}, "modules_to_save"),
    "lora bias": ({f"{Q}lora_B.bias": vector(24)}, "lora_bias"),
    "bias": ({f"{Q}bias": vector(24)}, "trained biases"),
    "tokens": ({f"{ROOT}embed_tokens.token_adapter.trainable_tokens_delta": vector(3, 16)}, "trainable_token_indices"),
    "adalora": ({f"{Q}lora_E": vector(4, 1)}, "AdaLoRA"),
    "unknown": ({f"{Q}lora_C.weight": vector(4, 4)}, "not the name of a LoRA factor"),
    "odd name": ({"a b\n": vector(1)}, "not one PEFT writes"),
    "misspelt": (
        pair(f"{ROOT}layers.0.self_attn.q_prj", (4, 16), (24, 4)),
        "self_attn.q_prj fits no module of package small",
    ),
    "prefix": (
        pair("base_model.model.vision.layers.0.self_attn.q_proj", (4, 4), (4, 4)),
        "no layer of the model by its prefix",
    ),
    "experts": (pair(f"{ROOT}layers.0.mlp.experts.0.up_proj", (4, 4), (4, 4)), "mlp.experts.*.up_proj fits no module"),
    "half": ({f"{ROOT}layers.0.self_attn.o_proj.lora_A.weight": vector(4, 24)}, "lora_A without its lora_B"),
    "layer": (
        pair(f"{ROOT}layers.2.self_attn.q_proj", (4, 16), (24, 4)),
        "layer 2 has no qkv_proj in package small, a model of 2 layers",
    ),
    "twice": (
        pair("model.layers.0.self_attn.q_proj", (4, 16), (24, 4)),
        "two tensors for lora_A of model.layers.0.self_attn.q_proj",
    ),
    "two prefixes": (
        pair("layers.0.self_attn.q_proj", (4, 16), (24, 4)),
        "for the same slice as model.layers.0.self_attn.q_proj",
    ),
    "fused too": (
        pair(f"{ROOT}layers.0.self_attn.qkv_proj", (4, 16), (48, 4)),
        "for the same slice as model.layers.0.self_attn.q_proj",
    ),
    "embedding as linear": (
        pair(f"{ROOT}embed_tokens", (4, 37), (16, 4)),
        "expected lora_embedding_A and lora_embedding_B",
    ),
}


@pytest.mark.parametrize(("extra", "message"), TENSORS.values(), ids=TENSORS)
def test_tensors(extra, message, tmp_path):
    """One tensor too many among good ones is enough."""
    text = refusal(kit.write(tmp_path, kit.factors("q_proj", "v_proj") | extra, target_modules=None))
    assert message in text
    if "\n" not in next(iter(extra)):
        assert any(name in text for name in extra)


def test_a_file_of_two_adapters(tmp_path):
    second = pair(f"{ROOT}layers.0.self_attn.k_proj", (4, 16), (12, 4), ".other")
    text = refusal(kit.write(tmp_path, kit.factors("q_proj", "v_proj") | second, target_modules=None))
    assert "several adapters (unnamed, other)" in text


SHAPES = {  # every one of these would broadcast or slice without complaint
    "one row of B": (f"{Q}lora_B.weight", (1, 4), "[1, 4] where its config and the model ask for [24, 4]"),
    "one column of A": (f"{Q}lora_A.weight", (4, 1), "[4, 1] where"),
    "scalar": (f"{Q}lora_A.weight", (), "[] where"),
    "flat": (f"{Q}lora_A.weight", (64,), "[64] where"),
    "transposed": (f"{Q}lora_A.weight", (16, 4), "[16, 4] where"),
    "extra dimension": (f"{Q}lora_B.weight", (1, 24, 4), "[1, 24, 4] where"),
    "too many rows": (f"{Q}lora_B.weight", (25, 4), "[25, 4] where"),
    "smaller rank": (f"{Q}lora_B.weight", (24, 2), "[24, 2] where"),
    "empty": (f"{Q}lora_A.weight", (0, 16), "[0, 16] where"),
}


@pytest.mark.parametrize(("name", "shape", "message"), SHAPES.values(), ids=SHAPES)
def test_shapes_are_never_broadcast(name, shape, message, tmp_path):
    text = refusal(kit.write(tmp_path, kit.factors("q_proj", "v_proj") | {name: vector(*shape)}))
    assert message in text and name in text


def test_rank_above_the_package_names_both(tmp_path):
    text = refusal(kit.write(tmp_path, kit.factors("q_proj", "v_proj", rank=32), r=32), kit.layout(max_rank=16))
    assert "rank 32 of self_attn.q_proj is above max_rank 16 of package small" in text


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_values_must_be_finite(value, tmp_path):
    tensors = kit.factors("q_proj", "v_proj")
    tensors[f"{Q}lora_B.weight"][3, 2] = value
    text = refusal(kit.write(tmp_path, tensors))
    assert "NaN or infinite values" in text and f"{Q}lora_B.weight" in text


def test_values_must_fit_the_dtype_of_the_package(tmp_path):
    tensors = kit.factors("q_proj", "v_proj")
    tensors[f"{Q}lora_A.weight"][0, 0] = 1e6
    kit.write(tmp_path, tensors)
    assert "beyond the range of the package's torch.float16" in refusal(tmp_path, kit.layout(dtype="float16"))
    read_adapter(tmp_path, kit.layout(dtype="bfloat16"))


@pytest.mark.parametrize(("value", "dtype"), [(1e39, "float32"), (-1e39, "bfloat16"), (7e4, "float16")])
def test_doubles_beyond_the_range_are_not_called_infinite(value, dtype, tmp_path):
    tensors = kit.factors("q_proj", "v_proj")
    tensors[f"{Q}lora_A.weight"] = torch.full((4, 16), value, dtype=torch.float64)
    text = refusal(kit.write(tmp_path, tensors), kit.layout(dtype=dtype))
    assert f"beyond the range of the package's torch.{dtype}" in text and "infinite" not in text


@pytest.mark.parametrize("tiny", ["one factor", "all"])
def test_values_that_would_all_become_zero_are_no_untrained_adapter(tiny, tmp_path):
    tensors = kit.factors("q_proj", "v_proj")
    small = [name for name in tensors if tiny == "all" or name == f"{Q}lora_B.weight"]
    kit.write(tmp_path, tensors | {name: tensors[name] * 1e-9 for name in small})
    text = refusal(tmp_path, kit.layout(dtype="float16"))
    assert "too small for the package's torch.float16" in text and small[0] in text and "untrained" not in text
    assert len(kit.deltas(read_adapter(tmp_path, kit.layout(dtype="bfloat16")))) == 4


def test_integers_are_no_weights(tmp_path):
    tensors = kit.factors("q_proj", "v_proj") | {f"{Q}lora_A.weight": torch.ones(4, 16, dtype=torch.int32)}
    assert "dtype I32" in refusal(kit.write(tmp_path, tensors))


def test_a_file_of_a_smaller_model_is_refused_unless_it_says_so(tmp_path):
    tensors, layout = kit.factors("q_proj", "v_proj"), kit.layout(layers=5)
    lost = "no tensors for layers 2-4 of 5"
    text = refusal(kit.write(tmp_path, tensors), layout)
    assert lost in text and "(self_attn.q_proj, self_attn.v_proj)" in text
    assert lost in refusal(kit.write(tmp_path, tensors, target_modules=r".*\.[qv]_proj"), layout)
    lost = "no tensors for layers 2 of 5"
    assert lost in refusal(kit.write(tmp_path, tensors, layers_to_transform=[0, 1, 2]), layout)
    for allowed in (dict(layers_to_transform=[0, 1]), dict(exclude_modules=r".*layers\.[2-4]\..*")):
        read_adapter(kit.write(tmp_path, tensors, **allowed), layout)


def lacking(tensors: dict, *parts: str) -> dict:
    """The tensors without those whose name has one of the parts."""
    return {name: value for name, value in tensors.items() if not any(part in name for part in parts)}


INCOMPLETE = {  # what is lost: the config's settings, and what the error says
    ("layers.0.self_attn.q_proj",): ({}, "no tensors for modules of layers 0 that", "(self_attn.q_proj)"),
    ("v_proj",): ({}, "no tensors for modules of layers 0-4 that", "(self_attn.v_proj)"),
    ("layers.1.self_attn.v_proj", "layers.2.self_attn.v_proj"): ({}, "modules of layers 1-2 that", "v_proj)"),
    ("layers.3.mlp.up_proj", "layers.3.self_attn.k_proj"): ({}, "of layers 3 that", "(self_attn.k_proj, mlp.up_proj)"),
    ("layers.1", "layers.4.mlp.up_proj"): ({}, "no tensors for layers 1 of 5", "(mlp.up_proj)"),
    ("lm_head",): ({}, "no tensors for modules that adapter_config.json selects", "(lm_head)"),
    ("embed_tokens",): ({}, "no tensors for modules that adapter_config.json selects", "(embed_tokens)"),
    ("layers.0", "layers.2.self_attn.q_proj", "layers.3", "layers.4", "embed_tokens"): (
        {"layers_to_transform": [1, 2]}, "modules of layers 2 that", "(self_attn.q_proj)"
    ),
    ("layers.2.self_attn.q_proj", "lm_head"): (
        {"target_modules": r".*\.[kquv][a-z]*_proj|.*\.embed_tokens"}, "modules of layers 2 that", "(self_attn.q_proj)"
    ),
    ("layers.2.mlp.up_proj",): ({"target_modules": "all-linear"}, "modules of layers 2 that", "(mlp.up_proj)"),
}  # fmt: skip


@pytest.mark.parametrize("lost", INCOMPLETE, ids=str)
def test_an_incomplete_file_is_refused_alike_on_every_rank(lost, tmp_path):
    settings, *messages = INCOMPLETE[lost]
    names = ("q_proj", "k_proj", "v_proj", "up_proj")
    tensors = kit.factors(*names, layers=range(5)) | pair("base_model.model.lm_head", (4, 16), (kit.VOCAB, 4))
    tensors[f"{ROOT}embed_tokens.lora_embedding_A"] = torch.randn(4, kit.VOCAB)
    tensors[f"{ROOT}embed_tokens.lora_embedding_B"] = torch.randn(kit.HIDDEN, 4)
    settings = {"target_modules": [*names, "lm_head", "embed_tokens"], **settings}
    kit.write(tmp_path, lacking(tensors, *lost), **settings)
    text = refusal(tmp_path, kit.layout(layers=5))
    assert all(message in text for message in (*messages, "the file is incomplete", "save it again in full"))
    report = inspect_adapter(tmp_path, kit.layout(layers=5))
    assert report.refusals == (text,)
    for rank in range(2):
        with pytest.raises(AdapterError) as caught:
            read_adapter(tmp_path, kit.layout(layers=5, tp=2), tp_rank=rank)
        assert str(caught.value) == text


@pytest.mark.parametrize(
    ("targets", "names"),
    [
        (["gate_proj", "up_proj", "down_proj"], ("gate_proj", "up_proj", "down_proj")),
        (["w1", "w2", "w3", "gate_up_proj"], ("w1", "w3", "w2")),
        (r".*\.experts\..*", ("gate_proj", "up_proj", "down_proj")),
    ],
    ids=str,
)
def test_every_expert_has_what_the_config_promises(targets, names, tmp_path):
    """Of expert modules, as older models had them: a file without one pair is refused, on ranks without it too."""
    tensors = {}
    for layer, expert, name in itertools.product(range(2), range(4), names):
        inside, out = (kit.INTER, kit.HIDDEN) if name == names[2] else (kit.HIDDEN, kit.INTER)
        tensors |= pair(f"{ROOT}layers.{layer}.mlp.experts.{expert}.{name}", (4, inside), (out, 4))
    kit.write(tmp_path, tensors, target_modules=targets)
    read_adapter(tmp_path, kit.layout(kit.MOE))
    for lost in (f"layers.1.mlp.experts.2.{names[0]}", f"layers.0.mlp.experts.0.{names[2]}"):
        layer, _, path = lost.removeprefix("layers.").partition(".")
        kit.write(tmp_path, lacking(tensors, lost), target_modules=targets)
        for rank in range(2):
            with pytest.raises(AdapterError) as caught:
                read_adapter(tmp_path, kit.layout(kit.MOE, local=2), ep_rank=rank)
            assert f"modules of layers {layer} that" in str(caught.value) and f"({path})" in str(caught.value)
    kit.write(tmp_path, lacking(tensors, names[1]), target_modules=targets)
    assert "of layers 0-1 that" in refusal(tmp_path, kit.layout(kit.MOE))


@pytest.mark.parametrize(
    "settings",
    [
        dict(target_modules=["q_proj", "v_proj", "qkv_proj", "down_proj_of_another_model", "c_attn"]),
        dict(target_modules=["q_proj", "v_proj", "lm_head"], task_type="SEQ_CLS"),
        dict(target_modules=r"language_model\.layers.*\.k_proj|model\..*\.[qv]_proj"),
        dict(target_modules=["q_proj", "v_proj", "k_proj"], exclude_modules=["k_proj"]),
        dict(target_modules=None),
        dict(target_modules="all-linear"),
    ],
    ids=str,
)
def test_what_the_trained_model_may_not_have_had_is_no_promise(settings, tmp_path):
    kit.write(tmp_path, kit.factors("q_proj", "v_proj"), **settings)
    assert len(kit.deltas(read_adapter(tmp_path, kit.layout()))) == 4
    experts = dict(target_modules=["q_proj", "v_proj", "gate_proj", "w1"])
    kit.write(tmp_path, kit.factors("q_proj", "v_proj"), **experts)
    layout = dataclasses.replace(kit.layout(kit.MOE), paths=("self_attn.q_proj", "self_attn.v_proj", "mlp.experts"))
    assert len(kit.deltas(read_adapter(tmp_path, layout))) == 4


@pytest.mark.parametrize("targets", [["q_proj"], r".*\.q_proj", ["layers.0.self_attn.v_proj", "q_proj"]])
def test_tensors_the_config_does_not_target_are_refused(targets, tmp_path):
    text = refusal(kit.write(tmp_path, kit.factors("q_proj", "v_proj"), target_modules=targets))
    assert "do not select it" in text and "v_proj" in text


@pytest.mark.parametrize("version", ["0.18.1", None])
@pytest.mark.parametrize("targets", [["q_proj"], None])
def test_linear_weights_as_parameters_were_transposed_before_0_19(targets, version, tmp_path):
    tensors = kit.factors("q_proj", "o_proj")
    settings = dict(target_modules=targets, target_parameters=["self_attn.o_proj.weight"])
    text = refusal(kit.write(tmp_path, tensors, peft_version=version, **settings))
    assert "PEFT before 0.19 wrote the factors of the transposed weight" in text and "o_proj" in text
    assert (
        len(kit.deltas(read_adapter(kit.write(tmp_path, tensors, peft_version="0.19.1", **settings), kit.layout())))
        == 4
    )


def test_the_router_is_no_module_to_add(tmp_path):
    tensors = kit.factors("q_proj") | pair(f"{ROOT}layers.0.mlp.gate", (4, 16), (4, 4))
    kit.write(
        tmp_path, tensors, target_modules=["q_proj"], target_parameters=["mlp.gate.weight"], peft_version="0.21.2"
    )
    text = refusal(tmp_path, kit.layout(kit.MOE))
    assert "mlp.gate is the router of the experts" in text and "add it to" not in text


HINTS = {  # path of a module, targets of the package, its model's own layers where they are others: the hint
    "not served": ("mlp.up_proj", ["o_proj"], {}, "add it to adapters.targets"),
    "fused in the file": ("self_attn.qkv_proj", ["o_proj"], {}, "add it to adapters.targets"),
    "fused in the model": ("mlp.up_proj", ["o_proj"], {"paths": ("mlp.gate_up_proj",)}, "add it to adapters.targets"),
    "no such layer": ("mlp.fc1", ["o_proj"], {}, "its model has no such layer"),
    "a model without a dense mlp": ("mlp.up_proj", ["o_proj"], {"paths": ("mlp.experts",)}, "no such layer"),
    "experts not served": ("mlp.experts.3.w1", ["o_proj"], {"paths": ("mlp.experts",)}, "add it to adapters.targets"),
    "a model without experts": ("mlp.experts.3.up_proj", ["o_proj"], {}, "its model has no such layer"),
    "experts of other names": ("mlp.experts.3.fc1", kit.MOE, {}, "mlp.experts.*.down_proj: its model has no such"),
    "more experts": ("mlp.experts.4.up_proj", kit.MOE, {}, "its layers have 4 experts, numbered from 0"),
    "experts of other shapes": ("mlp.experts", kit.MOE, {}, "no rank gives factors of [4, 4] and [4, 4]"),
}


@pytest.mark.parametrize(("path", "targets", "model", "hint"), HINTS.values(), ids=HINTS)
def test_what_helps_depends_on_what_the_model_has(path, targets, model, hint, tmp_path):
    tensors = pair(f"{ROOT}layers.0.{path}", (4, 4), (4, 4))
    kit.write(tmp_path, tensors, target_modules=None, target_parameters=["mlp.experts.down_proj"])
    text = refusal(tmp_path, dataclasses.replace(kit.layout(targets), **model))
    assert hint in text and f"layers.0.{path}.lora_A.weight" in text
    hints = ("add it to", "its model has no such layer", "numbered from 0", "no rank gives")
    assert sum(text.count(other) for other in hints) == 1


def test_nothing_effective_is_an_error(tmp_path):
    assert "holds no LoRA tensors" in refusal(kit.write(tmp_path / "empty", {}))
    text = refusal(
        kit.write(tmp_path / "down", kit.factors("down_proj"), target_modules=["down_proj"]), kit.layout(["qkv_proj"])
    )
    assert "mlp.down_proj fits no module of package small, which serves q_proj, k_proj, v_proj: add it to" in text
    assert "untrained" in refusal(kit.write(tmp_path / "zero", kit.factors("q_proj", "v_proj", fill=0.0)))
    assert "untrained" in refusal(kit.write(tmp_path / "alpha", kit.factors("q_proj", "v_proj"), lora_alpha=0))


def test_experts_of_one_projection_share_a_scale(tmp_path):
    tensors = {}
    for expert, rank in enumerate((2, 4, 2, 2)):
        key = f"{ROOT}layers.0.mlp.experts.{expert}.up_proj.lora_"
        tensors |= {f"{key}A.weight": torch.randn(rank, 16), f"{key}B.weight": torch.randn(kit.INTER, rank)}
    settings = dict(r=2, target_modules=["up_proj"], layers_to_transform=[0], rank_pattern={r"experts\.1\..*": 4})
    assert "differ in scale" in refusal(kit.write(tmp_path, tensors, **settings), kit.layout(kit.MOE))
    kit.write(tmp_path, tensors, **settings, alpha_pattern={r"experts\.1\..*": 16})
    assert read_adapter(tmp_path, kit.layout(kit.MOE)).part("experts_gate_up", 0, 1, 1).scale == 4.0


@pytest.mark.parametrize("parts", ["embed_tokens", "lm_head", "both"])
def test_tied_adapters_need_both_halves(parts, tmp_path):
    tensors = {}
    if parts != "lm_head":
        tensors[f"{ROOT}embed_tokens.lora_embedding_A"] = torch.randn(4, kit.VOCAB)
        tensors[f"{ROOT}embed_tokens.lora_embedding_B"] = torch.randn(kit.HIDDEN, 4)
    if parts != "embed_tokens":
        tensors["base_model.model.lm_head.lora_A.weight"] = torch.randn(4, kit.HIDDEN)
        tensors["base_model.model.lm_head.lora_B.weight"] = torch.randn(kit.VOCAB, 4)
    kit.write(tmp_path, tensors, target_modules=["embed_tokens", "lm_head"], ensure_weight_tying=True)
    if parts == "embed_tokens":
        assert "ensure_weight_tying" in refusal(tmp_path, kit.layout(tied=True))
    elif parts == "lm_head":
        assert "(embed_tokens)" in refusal(tmp_path, kit.layout(tied=True))
    else:
        read_adapter(tmp_path, kit.layout(tied=True))


def test_hundreds_of_alike_problems_are_one_line(tmp_path):
    tensors = kit.factors("q_proj", "v_proj", layers=range(200))
    text = refusal(kit.write(tmp_path, tensors, r=2))
    assert len(text) < 8000 and "more" in text


def test_a_long_rank_pattern_does_not_take_long(tmp_path):
    names = [f"model.layers.{layer}.mlp.experts.{expert}.up_proj" for layer in range(40) for expert in range(128)]
    kit.write(
        tmp_path, kit.factors("q_proj"), rank_pattern=dict.fromkeys(names, 4), alpha_pattern=dict.fromkeys(names, 3)
    )
    config = read_config(tmp_path, Problems(tmp_path))
    assert {config.scale_of(name) for name in names} == {0.75}
