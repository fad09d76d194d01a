"""Small random models of each family, adapters that PEFT trained for them, and packages built from their configs."""

import copy
import json
import warnings
from pathlib import Path

import torch
import transformers
import yaml
from peft import LoraConfig, PeftModel, get_peft_model

import lorac
from lorac.compile import compile_spec
from lorac.emit import emit
from lorac.integrations.transformers import attach

SIZES = dict(
    hidden_size=32, intermediate_size=48, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
    num_hidden_layers=2, vocab_size=101, max_position_embeddings=64, initializer_range=0.1,
    pad_token_id=0, bos_token_id=1, eos_token_id=None,
)  # fmt: skip
WINDOW = dict(sliding_window=4, layer_types=["sliding_attention", "full_attention"])
FAMILIES = {
    "llama": ("Llama", dict(tie_word_embeddings=False, attention_bias=True)),
    "qwen3": ("Qwen3", dict(tie_word_embeddings=True)),
    "gemma2": ("Gemma2", dict(query_pre_attn_scalar=16, **WINDOW)),
    "gemma3": ("Gemma3", dict(query_pre_attn_scalar=16, **WINDOW)),
    "phi3": ("Phi3", dict(head_dim=None, tie_word_embeddings=False, original_max_position_embeddings=64)),
    "mistral": ("Mistral", dict(sliding_window=5)),
}
ATTENTION, MLP = ["q_proj", "k_proj", "v_proj", "o_proj"], ["gate_proj", "up_proj", "down_proj"]
FUSED = {
    "q_proj": "qkv_proj",
    "k_proj": "qkv_proj",
    "v_proj": "qkv_proj",
    "gate_proj": "gate_up_proj",
    "up_proj": "gate_up_proj",
}
ADAPTERS = {  # of different ranks, scalings and targets
    "sql": dict(r=4, lora_alpha=16, target_modules=ATTENTION + MLP),
    "poet": dict(
        r=6, lora_alpha=6, use_rslora=True, target_modules=["k_proj", "v_proj", "down_proj", "lm_head", "embed_tokens"]
    ),
}
VISIBLE = 1e-2  # an adapter changes its rows' logits by more than this, which is a hundred times the tolerance


def random_model(family: str, seed: int = 0):
    """A model of the family with random weights, the same for the same seed."""
    prefix, options = FAMILIES[family]
    settings = {
        name: value for name, value in {**SIZES, **options}.items() if value is not None or name == "eos_token_id"
    }
    config_class = "Gemma3TextConfig" if prefix == "Gemma3" else f"{prefix}Config"
    torch.manual_seed(seed)
    model = getattr(transformers, f"{prefix}ForCausalLM")(getattr(transformers, config_class)(**settings))
    return model.eval()


def trained(model, name: str, folder: Path, **config) -> PeftModel:
    """An adapter after a few steps on random tokens, saved to `folder`; the base model is left alone."""
    targets = config.pop("target_modules")
    if "phi3" in model.config.model_type:
        targets = sorted({FUSED.get(target, target) for target in targets})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that embedding and head are tied
        peft = get_peft_model(copy.deepcopy(model), LoraConfig(target_modules=targets, **config))
    torch.manual_seed(len(name))
    optimizer = torch.optim.Adam([tensor for tensor in peft.parameters() if tensor.requires_grad], lr=0.1)
    for _ in range(3):
        tokens = torch.randint(1, model.config.vocab_size, (4, 12))
        peft(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    peft.save_pretrained(folder, save_embedding_layers=False)
    return peft.eval()


class Family:
    """A base model, PEFT's models by adapter name (None: the base), and the adapters' folders."""

    def __init__(self, family: str, root: Path):
        self.model = random_model(family)
        self.oracles = {name: trained(self.model, name, root / name, **config) for name, config in ADAPTERS.items()}
        self.folders = {name: root / name for name in ADAPTERS}
        self.oracles[None] = self.model


def package(config, folder: Path, **changes):
    """The package of a model: a spec that refers to its config.json, built and loaded."""
    (folder / "config.json").write_text(json.dumps(config.to_dict()))
    spec = {
        "lorac": 1,
        "name": "small",
        "model": {"config": "config.json"},
        "dtype": "float32",
        "adapters": {
            "slots": 3, "max_rank": 8,
            "targets": ["qkv_proj", "o_proj", "gate_up_proj", "down_proj", "lm_head", "embed_tokens"],
        },
        "backends": {"torch": {}, "triton": {"segments": {"by": "request", "cap": 4}}, "csgmv": {}},
        "graphs": {"decode": {"buckets": [1, 2, 4], "variants": {"nolora": {"adapters": 0}, "lora": {}}}},
        **changes,
    }  # fmt: skip
    (folder / "spec.yaml").write_text(yaml.safe_dump(spec, sort_keys=False))
    compiled = compile_spec(folder / "spec.yaml")
    emit(compiled.files, folder / "built" / "small")
    return lorac.load(folder / "built" / "small")


class Served:
    """A model of a family, attached, with the adapters in slots; `oracle` is what PEFT makes of a call."""

    def __init__(self, family: Family, package, backend: str, device: str = "cpu"):
        self.family, self.package = family, package
        self.model = copy.deepcopy(family.model).to(device)
        self.oracles = {name: copy.deepcopy(model).to(device) for name, model in family.oracles.items()}
        self.slots = package.Slots(device)
        for name, folder in family.folders.items():
            self.slots.load(folder, name=name)
        self.step = package.Step(self.slots, backend)
        self.handle = attach(self.model, package, self.slots, self.step)

    @torch.no_grad()
    def oracle(self, name: str | None, tokens: torch.Tensor, **options) -> torch.Tensor:
        """Logits of the whole batch under one adapter."""
        return self.oracles[name](input_ids=tokens, **options).logits

    def check(self, rows: list, tokens: torch.Tensor, **options) -> None:
        """Each row of a mixed batch equals PEFT's, base rows to the bit, and adapters show."""
        with self.handle.rows(rows):
            logits = self.model(input_ids=tokens, **options).logits
        base = self.oracle(None, tokens, **options)
        mask = options.get("attention_mask", torch.ones_like(tokens)).bool()[:, -logits.shape[1] :]
        for row, name in enumerate(rows):
            live, plain = logits[row][mask[row]], base[row][mask[row]]
            if name is None:
                assert torch.equal(live, plain), f"base row {row} changed"
                continue
            expected = self.oracle(name, tokens, **options)[row][mask[row]]
            torch.testing.assert_close(live, expected, rtol=1e-4, atol=1e-4)
            assert (live - plain).abs().max() > VISIBLE, f"{name} had no effect"


def prompt(rows: int, length: int, generator: torch.Generator, short: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Random tokens [rows, length] and their mask; the last row is padded on the left by `short` tokens."""
    tokens = torch.randint(1, SIZES["vocab_size"], (rows, length), generator=generator)
    mask = torch.ones_like(tokens)
    if short:
        tokens[-1, :short], mask[-1, :short] = 0, 0
    return tokens, mask
