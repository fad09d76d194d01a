"""Small models, layouts and adapter folders for the tests of this directory."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from lorac.runtime.adapters import Adapter, Part
from lorac.runtime.layout import ExpertLayout, Layout, Module, Slice

HIDDEN, INTER, VOCAB, LAYERS, HEADS, KV, HEAD_DIM = 16, 24, 37, 2, 4, 2, 6
SKELETON = {  # what PEFT 0.18.1 writes by default
    "alora_invocation_tokens": None, "alpha_pattern": {}, "arrow_config": None, "auto_mapping": None,
    "base_model_name_or_path": "base", "bias": "none", "corda_config": None, "ensure_weight_tying": False,
    "eva_config": None, "exclude_modules": None, "fan_in_fan_out": False, "inference_mode": True,
    "init_lora_weights": True, "layer_replication": None, "layers_pattern": None, "layers_to_transform": None,
    "loftq_config": {}, "lora_alpha": 8, "lora_bias": False, "lora_dropout": 0.05, "megatron_config": None,
    "megatron_core": "megatron.core", "modules_to_save": None, "peft_type": "LORA", "peft_version": "0.18.1",
    "qalora_group_size": 16, "r": 4, "rank_pattern": {}, "revision": None, "target_modules": ["q_proj", "v_proj"],
    "target_parameters": None, "task_type": "CAUSAL_LM", "trainable_token_indices": None, "use_dora": False,
    "use_qalora": False, "use_rslora": False,
}  # fmt: skip
SHAPES = {  # (in, out) of each projection of the small models
    "self_attn.q_proj": (HIDDEN, HEADS * HEAD_DIM),
    "self_attn.k_proj": (HIDDEN, KV * HEAD_DIM),
    "self_attn.v_proj": (HIDDEN, KV * HEAD_DIM),
    "self_attn.o_proj": (HEADS * HEAD_DIM, HIDDEN),
    "mlp.gate_proj": (HIDDEN, INTER),
    "mlp.up_proj": (HIDDEN, INTER),
    "mlp.down_proj": (INTER, HIDDEN),
}
FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
EVERYTHING = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj", "lm_head", "embed_tokens")
MOE = ("qkv_proj", "o_proj", "experts_gate_up", "experts_down")


def layout(targets=EVERYTHING, *, slots=3, max_rank=8, dtype="float32", tp=1, layers=LAYERS, tied=False, **experts):
    """The layout a package for the small models would have; other keywords describe its experts."""
    modules = tuple(_module(target, tp, tuple(range(layers)), experts) for target in targets)
    paths = (*SHAPES, *dict.fromkeys(module.path for module in modules if module.experts), "lm_head", "embed_tokens")
    ep = experts.get("count", 4) // experts.get("local", experts.get("count", 4))
    return Layout("small", "llama", dtype, slots, max_rank, layers, HIDDEN, VOCAB, tied, tp, ep, modules, paths)


def _module(target: str, tp: int, layers: tuple[int, ...], experts: dict) -> Module:
    if target in ("lm_head", "embed_tokens"):
        head = target == "lm_head"
        width, inside = (VOCAB, HIDDEN) if head else (HIDDEN, VOCAB)
        part = Slice(target, target, 0, -(-width // tp) if head else width, width)
        sharding = "column" if head else "replicated"
        return Module(target, "lm_head" if head else "embedding", target, inside, inside, (part,), (), sharding)
    if target.startswith("experts"):
        return _experts(target, layers, experts)
    paths = {path.rpartition(".")[2]: path for path in SHAPES}
    names = FUSED.get(target, (target,))
    row = target in ("o_proj", "down_proj")
    inside = SHAPES[paths[names[0]]][0]
    slices, start = [], 0
    for name in names:
        full, units = SHAPES[paths[name]][1], {"q_proj": HEADS, "k_proj": KV, "v_proj": KV}.get(name, 0)
        width = full if row or tp == 1 else full // min(tp, units or tp)
        slices.append(Slice(name, paths[name], start, width, full, units))
        start += width
    path = paths[names[0]].rpartition(".")[0] + "." + target
    shard = inside // tp if row else inside
    return Module(target, "linear", path, shard, inside, tuple(slices), layers, "row" if row else "column")


def _experts(target: str, layers: tuple[int, ...], given: dict) -> Module:
    gate_up = target == "experts_gate_up"
    names = ("gate_proj", "up_proj") if gate_up else ("down_proj",)
    settings = {"count": 4, "top_k": 2, "path": "mlp.experts", "names": names, **given}
    if settings.pop("shared_outer", False):
        settings["shared_a" if gate_up else "shared_b"] = True
    experts = ExpertLayout(**{"local": settings["count"], **settings})
    inside, width = (HIDDEN, INTER) if gate_up else (INTER, HIDDEN)
    slices = tuple(
        Slice(name.removesuffix("_proj"), f"mlp.experts.*.{name}", index * width, width, width)
        for index, name in enumerate(names)
    )
    return Module(target, "experts", experts.path, inside, inside, slices, layers, "replicated", experts)


def write(folder: Path, tensors: dict[str, torch.Tensor], **config) -> Path:
    """An adapter folder of these tensors; keywords change the config's skeleton."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps({**SKELETON, **config}))
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, folder / "adapter_model.safetensors")
    return folder


def factors(*names: str, rank=4, layers=range(LAYERS), prefix="base_model.model.model.", fill=None):
    """Random (or constant) A and B for projections of every layer, as PEFT names them."""
    tensors = {}
    for layer in layers:
        for name in names:
            path = next(path for path in SHAPES if path.endswith(name))
            inside, out = SHAPES[path]
            key = f"{prefix}layers.{layer}.{path}"
            tensors[f"{key}.lora_A.weight"] = torch.randn(rank, inside)
            tensors[f"{key}.lora_B.weight"] = torch.randn(out, rank) if fill is None else torch.full((out, rank), fill)
    return tensors


def delta(part: Part | None) -> torch.Tensor | None:
    """scale * B @ A of a part."""
    return None if part is None else part.scale * part.b.float() @ part.a.float()


def deltas(adapter: Adapter) -> dict[tuple, torch.Tensor]:
    """Every delta of an adapter, by (module, layer or None, slice name, expert or None)."""
    found = {}
    for block in adapter.blocks:
        module = block.module
        for instance in range(module.instances):
            for index, piece in enumerate(module.slices):
                for expert in range(module.experts.local if module.experts else 1):
                    part = adapter.part(module.name, instance, index, expert)
                    if part is not None:
                        layer = module.layers[instance] if module.layers else None
                        found[module.name, layer, piece.name, expert if module.experts else None] = delta(part)
    return found
