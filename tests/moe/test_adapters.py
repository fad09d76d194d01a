"""Adapters that PEFT saved for mixtures of experts, served by the generated one: the oracle is PEFT's own model."""

import itertools
import json

import moe_kit as kit
import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from lorac.integrations.transformers import attach
from lorac.runtime.adapters import read_adapter
from lorac.runtime.errors import AdapterError

pytestmark = pytest.mark.filterwarnings("ignore")  # PEFT warns about unusual settings
SIZES = dict(
    hidden_size=32, vocab_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=16,
    num_experts_per_tok=2, pad_token_id=0, eos_token_id=None, tie_word_embeddings=False,
)  # fmt: skip
CONFIGS = {
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(
        **SIZES, num_experts=4, moe_intermediate_size=24, intermediate_size=48, norm_topk_prob=True
    ),
    "mixtral": lambda: transformers.MixtralConfig(**SIZES, num_local_experts=4, intermediate_size=24),
}
PARAMETERS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
PATHS = {"qwen3_moe": "mlp.experts", "mixtral": "block_sparse_moe.experts"}
NAMES = {"qwen3_moe": ("gate_proj", "up_proj", "down_proj"), "mixtral": ("w1", "w3", "w2")}
ROWS = ["a", None, "b", "b", "a", None, "a"]


def package_of(build, family: str, shared: bool = False):
    """A package for the small models: attention's output and the experts take adapters."""
    data = kit.spec(hidden=32, width=24, count=4, top_k=2, slots=2, max_rank=8, shared=shared)
    data["model"]["linears"] = {"o_proj": {"path": "self_attn.o_proj", "in": 32, "out": 32}}
    data["model"]["experts"] |= {"path": PATHS[family], "names": list(NAMES[family])}
    data["adapters"]["targets"] = ["o_proj", "experts"]
    data["graphs"] = {}
    return build(data)


def base_model(family: str, seed: int = 0):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = transformers.AutoModelForCausalLM.from_config(CONFIGS[family]())
        for parameter in model.parameters():  # routers and experts of transformers begin as zeros or uninitialised
            if parameter.dim() > 1:
                torch.nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
    return model.eval()


def trained(family: str, folder, seed: int, **settings):
    """A PEFT model with random LoRA, saved to `folder`."""
    wrapped = peft.get_peft_model(base_model(family), peft.LoraConfig(task_type="CAUSAL_LM", **settings)).eval()
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in wrapped.named_parameters():
        if "lora_" in name:
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.2
    wrapped.save_pretrained(folder)
    return wrapped


def two_adapters(build, family: str, folder):
    """(models by adapter name, package, slots that hold both): one adapter has a dense module too, one lacks down."""
    models = {
        "a": trained(family, folder / "a", 1, r=4, lora_alpha=6, target_modules=["o_proj"],
                     target_parameters=PARAMETERS),
        "b": trained(family, folder / "b", 2, r=3, lora_alpha=8, use_rslora=True, target_modules=[],
                     target_parameters=PARAMETERS[:1]),
        None: base_model(family),
    }  # fmt: skip
    package = package_of(build, family)
    slots = package.Slots("cpu")
    for name in ("a", "b"):
        slots.load(folder / name, name=name)
    return models, package, slots


def routed(block, x):
    """(ids, weights) as the block's own router decides."""
    _, weights, ids = block.gate(x)
    return ids, weights


@pytest.mark.parametrize("family", CONFIGS)
def test_a_mixed_batch_equals_peft(build, family, tmp_path, generator):
    """Experts and a dense module in one adapter, two adapters and base rows in one batch."""
    models, package, slots = two_adapters(build, family, tmp_path)
    x = torch.randn(len(ROWS), 32, generator=generator)
    plain = models[None].model.layers[1]
    for backend in package.BACKENDS:
        step = package.Step(slots, backend)
        step.prepare(ROWS)
        with torch.no_grad():
            experts = plain.mlp.experts
            ids, weights = routed(plain.mlp, x)
            y = package.moe(1, x, ids, weights, experts.gate_up_proj.detach(), experts.down_proj.detach(), step)
            dense = package.linear("o_proj", 1, x, plain.self_attn.o_proj.weight.detach(), step)
            for row, name in enumerate(ROWS):
                model = models[name] if name is None else models[name].base_model.model
                layer = model.model.layers[1]
                expected = layer.mlp(x[None, row : row + 1])[0, 0]
                torch.testing.assert_close(y[row], expected, rtol=1e-4, atol=1e-5)
                torch.testing.assert_close(dense[row], layer.self_attn.o_proj(x[row]), rtol=1e-4, atol=1e-5)
                bare = plain.mlp(x[None, row : row + 1])[0, 0]
                assert (name is None) == torch.allclose(y[row], bare, rtol=1e-4, atol=1e-5), "adapters have an effect"


@pytest.mark.parametrize("backend", ["fused", "torch"])
@pytest.mark.parametrize("family", CONFIGS)
def test_an_attached_model_says_what_peft_says(build, family, backend, tmp_path, generator):
    """Logits of prompts, and what is generated after them; base rows are those of a batch without adapters."""
    models, package, slots = two_adapters(build, family, tmp_path)
    model = models[None]
    rows, prompts = ["a", None, "b"], torch.randint(64, (3, 3), generator=generator)
    with torch.no_grad():
        plain = model(prompts).logits
        wanted = [(models[name] or model)(prompts[row : row + 1]).logits[0] for row, name in enumerate(rows)]
    handle = attach(model, package, slots, package.Step(slots, backend))
    with handle.rows(rows):
        logits = model(prompts).logits
    with handle.rows([None] * 3):
        bare = model(prompts).logits
    torch.testing.assert_close(bare, plain, rtol=1e-4, atol=1e-4)
    for row, name in enumerate(rows):
        torch.testing.assert_close(logits[row], wanted[row], rtol=1e-4, atol=1e-4)
        assert torch.equal(logits[row], bare[row]) == (name is None)
    if backend == "torch":
        generated = handle.generate(prompts, adapters=rows, max_new_tokens=3, do_sample=False)
        for row, name in ((0, "a"), (2, "b")):
            alone = models[name].generate(prompts[row : row + 1], max_new_tokens=3, do_sample=False)
            assert generated[row].tolist() == alone[0].tolist()


@pytest.fixture
def one_expert_each(tmp_path):
    """write(family, **config) -> a folder with a pair for every expert and projection, each with its own A."""

    def write(family: str, rank: int, generator, **config):
        names, tensors, merged = NAMES[family], {}, {}
        for layer in range(2):
            for expert in range(4):
                for name in names:
                    inside, outside = (24, 32) if name == names[2] else (32, 24)
                    a = torch.randn(rank, inside, generator=generator) * 0.3
                    b = torch.randn(outside, rank, generator=generator) * 0.3
                    key = f"base_model.model.model.layers.{layer}.{PATHS[family]}.{expert}.{name}"
                    tensors |= {f"{key}.lora_A.weight": a, f"{key}.lora_B.weight": b}
                    merged[layer, expert, names.index(name)] = b @ a
        save_file(tensors, tmp_path / "adapter_model.safetensors")
        settings = {"peft_type": "LORA", "r": rank, "target_modules": list(names), **config}
        (tmp_path / "adapter_config.json").write_text(json.dumps(settings))
        return tmp_path, merged

    return write


@pytest.mark.parametrize("family", CONFIGS)
def test_one_pair_for_every_expert(build, family, one_expert_each, generator):
    """Gate and up with an A of their own: the mixture equals one of merged weights."""
    folder, deltas = one_expert_each(family, 3, generator, lora_alpha=9)
    package = package_of(build, family)
    slots = package.Slots("cpu")
    slots.load(folder, name="a")
    block = base_model(family).model.layers[1].mlp
    experts = block.experts
    x = torch.randn(5, 32, generator=generator)
    step = package.Step(slots, "fused")
    step.prepare(["a", None, "a", "a", None])
    with torch.no_grad():
        ids, weights = routed(block, x)
        w13, w2 = experts.gate_up_proj.detach().clone(), experts.down_proj.detach().clone()
        bare = block(x[None])[0]
        y = package.moe(1, x, ids, weights, w13.clone(), w2.clone(), step)
        for expert in range(4):
            experts.gate_up_proj[expert] += 3 * torch.cat([deltas[1, expert, 0], deltas[1, expert, 1]])
            experts.down_proj[expert] += 3 * deltas[1, expert, 2]
        served = block(x[None])[0]
    expected = torch.where(torch.tensor([True, False, True, True, False])[:, None], served, bare)
    torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(served[0], bare[0], rtol=1e-2)


OTHER_NAMES = {
    "another path": ("moe.experts", ("gate_proj", "up_proj", "down_proj")),
    "another path without a word for experts": ("ffn", ("w1", "w3", "w2")),
    "other names": ("mlp.experts", ("fc1", "fc2", "fc3")),
    "some known": ("moe", ("w1", "v1", "w2")),
}


@pytest.mark.parametrize("shared", [False, True], ids=["own factors", "one A for gate and up"])
@pytest.mark.parametrize(("path", "names"), OTHER_NAMES.values(), ids=OTHER_NAMES)
def test_names_are_those_of_the_spec(build, path, names, shared, tmp_path, generator):
    """Adapters are read by the spec's path and names, and by the usual ones only where the spec's are among them."""

    def write(path: str, names: tuple[str, ...]) -> dict:
        tensors, deltas = {}, {}
        for layer, expert, index in itertools.product(range(2), range(5), range(3)):
            inside, outside = (24, 40) if index == 2 else (40, 24)
            key = f"base_model.model.model.layers.{layer}.{path}.{expert}.{names[index]}"
            a, b = torch.randn(3, inside, generator=generator), torch.randn(outside, 3, generator=generator)
            if shared and index < 2:
                a = tensors.setdefault(f"{key.replace(f'{path}.{expert}', f'{path}.shared')}.lora_A.weight", a)
            else:
                tensors[f"{key}.lora_A.weight"] = a
            tensors[f"{key}.lora_B.weight"] = b
            deltas[layer, expert, index] = 2.0 * b @ a
        save_file(tensors, tmp_path / "adapter_model.safetensors")
        config = {"peft_type": "LORA", "r": 3, "lora_alpha": 6, "target_modules": list(names)}
        (tmp_path / "adapter_config.json").write_text(json.dumps(config))
        return deltas

    data = kit.spec()
    data["model"]["experts"] |= {"path": path, "names": list(names)}
    layout = build(data).LAYOUT
    deltas = write(path, names)
    adapter = read_adapter(tmp_path, layout)
    for (layer, expert, index), delta in deltas.items():
        module = "experts_down" if index == 2 else "experts_gate_up"
        part = adapter.part(module, layer, index % 2, expert)
        torch.testing.assert_close(part.scale * part.b @ part.a, delta)
    usual = ("gate_proj", "up_proj", "down_proj")
    assert (path, names) != ("mlp.experts", usual)
    write("mlp.experts", usual)
    with pytest.raises(AdapterError, match=r"mlp\.experts\.\*\.down_proj fits no module"):
        read_adapter(tmp_path, layout)


@pytest.mark.parametrize("backend", ["fused", "torch"])
def test_experts_that_share_their_outer_factors(build, backend, tmp_path, generator):
    """One A for gate and up and one B for down, packed as trainers of such adapters write them, in slots as small."""
    rank, tensors = 4, {}
    shapes = {"w1": ((1, rank, 32), (4, 24, rank)), "w3": ((1, rank, 32), (4, 24, rank)),
              "w2": ((4, rank, 24), (1, 32, rank))}  # fmt: skip
    for layer in range(2):
        for name, pair in shapes.items():
            for side, shape in zip("AB", pair, strict=True):
                key = f"base_model.model.model.layers.{layer}.mlp.experts.{name}.lora_{side}.weight"
                tensors[key] = torch.randn(shape, generator=generator) * 0.3
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": rank, "lora_alpha": 8, "target_modules": "all-linear"}
    (tmp_path / "adapter_config.json").write_text(json.dumps(settings))
    package = package_of(build, "qwen3_moe", shared=True)
    slots = package.Slots("cpu")
    slots.load(tmp_path, name="a")
    assert slots.a["experts_gate_up"].shape[2] == slots.b["experts_down"].shape[2] == 1
    block = base_model("qwen3_moe").model.layers[1].mlp
    x = torch.randn(3, 32, generator=generator)
    step = package.Step(slots, backend)
    step.prepare(["a", None, "a"])
    delta = {
        name: 2.0 * tensors[f"{key}.lora_B.weight"] @ tensors[f"{key}.lora_A.weight"]
        for name in shapes
        for key in [f"base_model.model.model.layers.1.mlp.experts.{name}"]
    }
    with torch.no_grad():
        ids, weights = routed(block, x)
        bare, experts = block(x[None])[0], block.experts
        y = package.moe(1, x, ids, weights, experts.gate_up_proj.clone(), experts.down_proj.clone(), step)
        experts.gate_up_proj += torch.cat([delta["w1"], delta["w3"]], 1)
        experts.down_proj += delta["w2"]
        served = block(x[None])[0]
    torch.testing.assert_close(y, torch.stack([served[0], bare[1], served[2]]), rtol=1e-4, atol=1e-5)
    assert not torch.allclose(served[0], bare[0], rtol=1e-2)


def test_both_conventions_of_target_parameters_serve_alike(build, tmp_path, generator):
    """PEFT up to 0.18 calls a parameter's first dimension its input; both files have one delta, by einsum.

    In A [experts * r, in] the expert is slowest, in B [out, r * experts] it is fastest.
    """
    experts, rank, shapes = 4, 2, {"gate_up_proj": (48, 32), "down_proj": (32, 24)}
    folders, deltas = {version: tmp_path / version for version in ("0.19.1", "0.18.1")}, {}
    tensors = {version: {} for version in folders}
    for parameter, (out, inside) in shapes.items():
        a = torch.randn(experts * rank, inside, generator=generator) * 0.3
        b = torch.randn(out, rank * experts, generator=generator) * 0.3
        by_expert = b.view(out, rank, experts), a.view(experts, rank, inside)
        deltas[parameter] = torch.einsum("ore,eri->eoi", *by_expert)
        # the older convention takes the delta of the transposed parameter's dimensions
        old_a = b.view(out, rank, experts).permute(2, 1, 0).reshape(experts * rank, out)
        old_b = a.view(experts, rank, inside).permute(2, 1, 0).reshape(inside, rank * experts)
        key = "base_model.model.model.layers.1.mlp.experts" + (".base_layer" if parameter == "gate_up_proj" else "")
        for version, pair in (("0.19.1", (a, b)), ("0.18.1", (old_a, old_b))):
            for side, of in zip("AB", pair, strict=True):
                tensors[version][f"{key}.lora_{side}.weight"] = of.contiguous()
    package = package_of(build, "qwen3_moe")
    slots = package.Slots("cpu")
    for version, folder in folders.items():
        folder.mkdir()
        save_file(tensors[version], folder / "adapter_model.safetensors")
        config = {
            "peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": [], "peft_version": version,
            "target_parameters": [f"layers.1.{parameter}" for parameter in PARAMETERS],
        }  # fmt: skip
        (folder / "adapter_config.json").write_text(json.dumps(config))
        slots.load(folder, name=version)
    assert load_file(folders["0.18.1"] / "adapter_model.safetensors").keys() == tensors["0.19.1"].keys()
    block = base_model("qwen3_moe").model.layers[1].mlp
    x = torch.randn(2, 32, generator=generator).repeat_interleave(2, 0)
    step = package.Step(slots, "fused")
    step.prepare(["0.19.1", "0.18.1"] * 2)
    with torch.no_grad():
        ids, weights = routed(block, x)
        w13, w2 = block.experts.gate_up_proj.detach(), block.experts.down_proj.detach()
        y = package.moe(1, x, ids, weights, w13.clone(), w2.clone(), step)
        block.experts.gate_up_proj += deltas["gate_up_proj"]
        block.experts.down_proj += deltas["down_proj"]
        torch.testing.assert_close(y, block(x[None])[0], rtol=1e-4, atol=1e-5)
