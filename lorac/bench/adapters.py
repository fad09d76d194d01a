"""Random adapter folders for a package, as PEFT would have saved them."""

import json
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from lorac.runtime.layout import Layout, Module

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def write_adapter(
    folder: Path,
    layout: Layout,
    rank: int,
    generator: torch.Generator,
    modules: list[str] | None = None,
    alpha: float | None = None,
) -> Path:
    """An adapter on every layer of the named linear modules (all unless stated), in the package's dtype.

    Its deltas are of the size of the base outputs, scaled by alpha / rank (1 unless stated).
    """
    tensors, targets, dtype = {}, [], getattr(torch, layout.dtype)
    for module in layout.modules:
        if module.kind != "linear" or (modules is not None and module.name not in modules):
            continue
        for part in module.slices:
            targets.append(part.name)
            for layer in module.layers:
                a = torch.randn(rank, module.full_in_features, generator=generator) * module.full_in_features**-0.5
                b = torch.randn(part.full_width, rank, generator=generator) * rank**-0.5
                tensors[factor(layer, part.path, "A")], tensors[factor(layer, part.path, "B")] = (
                    a.to(dtype),
                    b.to(dtype),
                )
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / WEIGHTS)
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank if alpha is None else alpha, "target_modules": targets}
    (folder / CONFIG).write_text(json.dumps(config))
    return folder


def factor(layer: int, path: str, side: str) -> str:
    """The name of one tensor: side A or B of a projection of one decoder layer."""
    return f"base_model.model.model.layers.{layer}.{path}.lora_{side}.weight"


def delta(folder: Path, module: Module, layer: int, x: torch.Tensor) -> torch.Tensor:
    """What the adapter adds for x [rows, in], in float64, by its files alone: the oracle of what was loaded."""
    config = json.loads((folder / CONFIG).read_text())
    parts = []
    with safe_open(folder / WEIGHTS, "pt", device=str(x.device)) as file:
        for part in module.slices:
            if part.name not in config["target_modules"]:
                parts.append(x.new_zeros(x.shape[0], part.width, dtype=torch.float64))
                continue
            a, b = (file.get_tensor(factor(layer, part.path, side)).double() for side in "AB")
            parts.append(config["lora_alpha"] / config["r"] * (x.double() @ a.T @ b.T))
    return torch.cat(parts, 1)
