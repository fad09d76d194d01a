"""The main job, as a user runs it: build, load, read PEFT folders, serve a mixed batch; the oracle is PEFT itself."""

from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

SPEC = Path(__file__).parents[1] / "specs" / "tiny.yaml"
# two adapters of different ranks, scalings and targets
ADAPTERS = {
    "sql": dict(r=4, lora_alpha=16, target_modules=["q_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]),
    "poet": dict(r=12, lora_alpha=6, use_rslora=True, target_modules=["k_proj", "v_proj", "down_proj", "lm_head"]),
}
ROWS = ["sql", None, "poet", "sql", None, "poet", "poet"]


def base_model(seed: int) -> LlamaForCausalLM:
    """The model of specs/tiny.yaml with random weights, the same for the same seed."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        hidden_size=64, intermediate_size=96, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
        num_hidden_layers=2, vocab_size=128, tie_word_embeddings=False,
    )  # fmt: skip
    return LlamaForCausalLM(config)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """PEFT models by name, with B as training would leave it (not zero), and the folders PEFT saved them to."""
    models, folders = {}, {}
    for name, config in ADAPTERS.items():
        model = get_peft_model(base_model(0), LoraConfig(**config))
        generator = torch.Generator().manual_seed(len(name))
        for key, tensor in model.named_parameters():
            if "lora_B" in key:
                tensor.data = torch.randn(tensor.shape, generator=generator) * 0.3
        folders[name] = tmp_path_factory.mktemp(name)
        model.save_pretrained(folders[name])
        models[name] = model
    return models, folders


@pytest.mark.parametrize("backend", ["triton", "csgmv", "torch"])
@pytest.mark.parametrize("phase", ["decode", "prefill"])
def test_every_module_of_a_mixed_batch_equals_peft(build, trained, backend, phase, generator):
    models, folders = trained
    package = build(SPEC)
    slots = package.Slots("cpu")
    for name, folder in folders.items():
        slots.load(folder, name=name)
    step = package.Step(slots, backend)
    lengths = [1] * len(ROWS) if phase == "decode" else [3, 1, 2, 1, 4, 1, 2]
    if phase == "decode":
        step.prepare(ROWS)
    else:
        step.prepare_prefill(list(zip(ROWS, lengths, strict=True)), logits=lengths)
    names = [name for name, length in zip(ROWS, lengths, strict=True) for _ in range(length)]
    base = base_model(0)
    for module in package.LAYOUT.modules:
        if module.kind == "embedding":
            continue  # PEFT's embedding adapters are compared where adapters are read
        for layer in module.layers or (0,):
            prefix = "" if not module.layers else f"model.layers.{layer}."
            parts = [part.path for part in module.slices]
            x = torch.randn(len(names), module.in_features, generator=generator)
            weight = torch.cat([base.get_submodule(prefix + path).weight for path in parts]).detach()
            y = package.linear(module.name, layer, x, weight, step)
            plain = torch.nn.functional.linear(x, weight)
            for row, name in enumerate(names):
                if name is None:
                    assert torch.equal(y[row], plain[row]), (module.name, "a base row changed")
                    continue
                peft_model = models[name].get_base_model()
                with torch.no_grad():
                    expected = torch.cat([peft_model.get_submodule(prefix + path)(x[row]) for path in parts])
                assert (y[row] - expected).norm() <= 1e-5 * expected.norm(), (module.name, layer, name)
            assert not torch.equal(y, plain), f"{module.name}: no adapter had any effect"
