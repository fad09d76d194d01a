"""A small model with LoRA on every linear layer, its oracle in float64, and adapters to serve it with."""

import json

import torch
from safetensors.torch import save_file
from torch.nn.functional import linear

from lorac.reference import lora
from lorac.runtime.breakable import break_here

SPEC = {
    "lorac": 1,
    "name": "small",
    "model": {
        "hidden": 32, "intermediate": 48, "heads": 2, "kv_heads": 1, "head_dim": 16, "layers": 1, "vocab": 64,
        "tied": False,
    },
    "dtype": "float32",
    "adapters": {"slots": 4, "max_rank": 16, "targets": ["qkv_proj", "down_proj"]},
    "backends": {
        "triton": {"segments": {"by": "request", "cap": 4}},
        "csgmv": {"segments": {"by": "chunk", "chunk": {1: 16}, "floor": 1}},
        "torch": {},
    },
    "graphs": {
        "decode": {
            "buckets": [1, 2, 4, 8],
            "variants": {"nolora": {"adapters": 0}, "one": {"adapters": 1, "rank": 8}, "lora": {}},
        },
        "prefill": {"mode": "breakable", "max_tokens": 64, "max_requests": 4, "buckets": [16, 64]},
    },
}  # fmt: skip


def spec(**changes) -> dict:
    """SPEC with some entries replaced, by dotted path with __ for the dots."""
    data = json.loads(json.dumps(SPEC), object_hook=lambda d: {int(k) if k.isdigit() else k: v for k, v in d.items()})
    for path, value in changes.items():
        *parents, last = path.split("__")
        at = data
        for name in parents:
            at = at[name]
        at[last] = value
    return data


def save_adapter(folder, layout, rank: int, generator: torch.Generator):
    """A PEFT folder with an adapter of that rank on every layer; its deltas are of the size of the base outputs."""
    tensors = {}
    targets = []
    for module in layout.modules:
        for part in module.slices:
            targets.append(part.name)
            for layer in module.layers or (None,):
                place = part.path if layer is None else f"layers.{layer}.{part.path}"
                prefix = f"base_model.model.{'' if layer is None else 'model.'}{place}"
                a = torch.randn(rank, module.in_features, generator=generator) * module.in_features**-0.5
                tensors[f"{prefix}.lora_A.weight"] = a
                tensors[f"{prefix}.lora_B.weight"] = torch.randn(part.width, rank, generator=generator) * rank**-0.5
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": targets}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


class Model(torch.nn.Module):
    """qkv -> attention (a break; rows stay apart) -> down, with LoRA and a residual. x [rows, hidden] -> the same."""

    def __init__(self, package, step, generator: torch.Generator):
        super().__init__()
        self.package, self.step = package, step
        self.attention = break_here(self._attention, like=lambda q: q.new_empty(len(q), 48))
        qkv, down = package.LAYOUT.by_name["qkv_proj"], package.LAYOUT.by_name["down_proj"]
        for name, module in (("qkv", qkv), ("down", down)):
            weight = (
                torch.randn(module.out_features, module.in_features, generator=generator) * module.in_features**-0.5
            )
            setattr(
                self, name, torch.nn.Parameter(weight.to(getattr(torch, package.LAYOUT.dtype)), requires_grad=False)
            )
        self.broke = []  # rows of each call of the break

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.package.linear("qkv_proj", 0, x, self.qkv, self.step)
        return x + self.package.linear("down_proj", 0, self.attention(h), self.down, self.step)

    def _attention(self, h: torch.Tensor) -> torch.Tensor:
        self.broke.append(len(h))
        return torch.tanh(h[:, :48] * 0.5)

    def oracle(self, x: torch.Tensor, slots: list[int]) -> torch.Tensor:
        """The same in float64, LoRA row by row."""

        def layer(name: str, weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
            widths = [part.width for part in self.package.LAYOUT.by_name[name].slices]
            return linear(x, weight.double()) + lora(x, *self.step.slots.instance(name, 0), widths, slots)

        x = x.double()
        h = layer("qkv_proj", self.qkv, x)
        return x + layer("down_proj", self.down, torch.tanh(h[:, :48] * 0.5))
