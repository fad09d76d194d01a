"""Where the modules of a package are in a Hugging Face model, and whether the two fit."""

from dataclasses import dataclass

import torch

from lorac.runtime.errors import ShapeError
from lorac.runtime.expert_names import paths_of
from lorac.runtime.layout import Layout, Module

_MOST_SHOWN = 8  # misfits of one kind repeat in every layer


@dataclass(frozen=True)
class Site:
    """One module of the package in one decoder layer (0 outside of them), and the model's layers that compute it.

    There is one such layer, or one for each slice: the model has q_proj, k_proj and v_proj, the package qkv_proj. The
    two modules of experts are one layer of the model, whose site is that of `experts_gate_up`.
    """

    module: Module
    layer: int
    parts: tuple[torch.nn.Module, ...]


def find_sites(model: torch.nn.Module, layout: Layout, device: torch.device) -> list[Site]:
    """Every module's sites. Raises ShapeError that lists where model and package do not fit."""
    problems = _whole(model, layout)
    decoder = model.get_decoder().layers
    if len(decoder) != layout.layers:
        problems.append(f"the model has {len(decoder)} layers, the package {layout.layers}")
    sites = []
    for module in layout.modules:
        if module.name == "experts_down":
            continue
        for layer in module.layers or (0,):
            if module.layers and layer >= len(decoder):
                continue  # the number of layers has been reported
            where = f"layer {layer}: " if module.layers else ""
            parts = _parts(model, decoder[layer] if module.layers else None, module)
            if parts is None:
                problems.append(f"{where}the model has no {module.path}")
                continue
            problems += [where + text for text in _misfits(module, parts, device)]
            sites.append(Site(module, layer, parts))
    if problems:
        problems = list(dict.fromkeys(problems))
        more = [f"and {len(problems) - _MOST_SHOWN} more"] if len(problems) > _MOST_SHOWN else []
        listed = "".join(f"\n  {text}" for text in problems[:_MOST_SHOWN] + more)
        raise ShapeError(
            f"package {layout.name} was not built for this {type(model).__name__}:{listed}\n"
            "build it from a spec whose model.config is this model's config.json"
        )
    return sites


def _whole(model: torch.nn.Module, layout: Layout) -> list[str]:
    """What does not fit about the model as a whole."""
    problems = []
    if model.dtype != (dtype := getattr(torch, layout.dtype)):
        problems.append(f"the model is in {model.dtype}, the package in {dtype}")
    if (layout.tp, layout.ep) != (1, 1):
        problems.append(f"the package is for tp {layout.tp} and ep {layout.ep}; a model in one process needs 1 and 1")
    if any(hasattr(module, "base_layer") for module in model.modules()):
        problems.append("PEFT has put adapters into the model, which would act twice; pass the base model alone")
    return problems


def _parts(
    model: torch.nn.Module, decoder_layer: torch.nn.Module | None, module: Module
) -> tuple[torch.nn.Module, ...] | None:
    if module.kind == "lm_head":
        found = (model.get_output_embeddings(),)
    elif module.kind == "embedding":
        found = (model.get_input_embeddings(),)
    else:
        paths = paths_of(module.path) if module.experts else (module.path,)
        blocks = (_submodule(decoder_layer, path) for path in paths)
        whole = next((block for block in blocks if block is not None), None)
        found = (whole,) if whole is not None else tuple(_submodule(decoder_layer, part.path) for part in module.slices)
    return None if None in found else found


def _submodule(parent: torch.nn.Module, path: str) -> torch.nn.Module | None:
    try:
        return parent.get_submodule(path)
    except AttributeError:
        return None


def _misfits(module: Module, parts: tuple[torch.nn.Module, ...], device: torch.device) -> list[str]:
    if module.experts is not None:
        return _expert_misfits(module, parts[0], device)
    widths = [part.width for part in module.slices] if len(parts) > 1 else [module.out_features]
    names = [part.name for part in module.slices] if len(parts) > 1 else [module.name]
    problems = []
    for name, width, layer in zip(names, widths, parts, strict=True):
        if module.kind == "embedding":
            have = (layer.num_embeddings, layer.embedding_dim)
        else:
            have = (layer.in_features, layer.out_features)
        if have != (module.in_features, width):
            problems.append(f"{name} maps {have[0]} to {have[1]}, in the package {module.in_features} to {width}")
        if layer.weight.device != device:
            problems.append(f"{name} is on {layer.weight.device}, the slots on {device}")
    return problems


def _expert_misfits(module: Module, layer: torch.nn.Module, device: torch.device) -> list[str]:
    """What keeps the generated mixture from standing in for the model's: it knows silu(gate) * up, and no biases."""
    gate_up, down = (getattr(layer, name, None) for name in ("gate_up_proj", "down_proj"))
    if not all(isinstance(weight, torch.nn.Parameter) for weight in (gate_up, down)):
        return [f"{module.path} holds no weights gate_up_proj and down_proj of all experts"]
    problems = []
    count, hidden, width = module.experts.local, module.in_features, module.slices[0].width
    for name, weight, shape in (
        ("gate_up_proj", gate_up, (count, 2 * width, hidden)), ("down_proj", down, (count, hidden, width))
    ):  # fmt: skip
        if weight.shape != shape:
            problems.append(f"{name} of {module.path} is {list(weight.shape)}, in the package {list(shape)}")
        if weight.device != device:
            problems.append(f"{name} of {module.path} is on {weight.device}, the slots on {device}")
    if not _is_silu(getattr(layer, "act_fn", None)):
        problems.append(f"the activation of {module.path} is not SiLU")
    if [name for name, _ in layer.named_parameters() if name not in ("gate_up_proj", "down_proj")]:
        problems.append(f"{module.path} has biases, which the generated mixture does not know")
    return problems


def _is_silu(activation: torch.nn.Module | None) -> bool:
    """By what it computes: transformers has classes of its own."""
    values = torch.linspace(-4, 4, 9)
    return activation is not None and torch.equal(activation(values), torch.nn.functional.silu(values))
