"""A Llama of a package's shapes with random weights, in plain torch: what graphs are tested and measured on.

Its layers call the package where it is given a step, and torch alone where it is not: the same model with and without
lorac.
"""

from types import ModuleType

import torch
from torch.nn.functional import embedding, linear, rms_norm, scaled_dot_product_attention, silu

from lorac.runtime.breakable import break_here
from lorac.runtime.step import Step
from lorac.verify.slots import numbered

_EPSILON = 1e-5
_BASE = 500_000.0  # of the rotary embedding


class Llama:
    """`layers` decoder layers (all of the package's unless stated) on `device`; weights keep activations near 1."""

    def __init__(
        self, package: ModuleType, device: str | torch.device, layers: int = 0, context: int = 8192, seed: int = 0
    ):
        layout = package.LAYOUT
        self.package, self.device, self.dtype = package, torch.device(device), getattr(torch, layout.dtype)
        self.layers = layers or layout.layers
        self._generator = torch.Generator(device).manual_seed(seed)
        query, key, _ = layout.by_name["qkv_proj"].slices
        self.heads, self.kv_heads, self.width = query.units, key.units, query.width // query.units
        self.weights = {
            (module.name, layer): torch.nn.Parameter(self._random(module.out_features, module.in_features), False)
            for module in layout.modules
            if module.kind == "linear"
            for layer in range(self.layers)
        }
        self.norm = torch.ones(layout.hidden, dtype=self.dtype, device=device)
        self.embedding = self._random(layout.vocab, layout.hidden) * layout.hidden**0.5
        self.head = self._random(layout.vocab, layout.hidden)
        angles = torch.arange(context, device=device)[:, None] / _BASE ** (
            torch.arange(0, self.width, 2, device=device) / self.width
        )
        # the sine carries the sign of the half it multiplies, so that rotating is one roll and two products
        self.cos = torch.cat([angles.cos(), angles.cos()], 1).to(self.dtype)
        self.sin = torch.cat([-angles.sin(), angles.sin()], 1).to(self.dtype)

    def body(self, tokens, positions, attention, step: Step | None) -> torch.Tensor:
        """Hidden states [rows, hidden] before lm_head; tokens and positions [rows]; attention(layer, q, k, v, out)."""
        x = embedding(tokens, self.embedding)
        cos, sin = self.cos[positions][:, None], self.sin[positions][:, None]
        for layer in range(self.layers):
            h = self._linear("qkv_proj", layer, self._norm(x), step).view(len(x), -1, self.width)
            rotated, v = h.split([self.heads + self.kv_heads, self.kv_heads], 1)
            rotated = torch.addcmul(rotated * cos, rotated.roll(self.width // 2, -1), sin)
            q, k = rotated.split([self.heads, self.kv_heads], 1)
            out = torch.empty_like(q)
            attention(layer, q, k, v, out)
            x = x + self._linear("o_proj", layer, out.view(len(x), -1), step)
            gate, up = self._linear("gate_up_proj", layer, self._norm(x), step).chunk(2, -1)
            x = x + self._linear("down_proj", layer, silu(gate) * up, step)
        return self._norm(x)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[rows, vocab], without LoRA."""
        return linear(hidden, self.head)

    def _linear(self, name: str, layer: int, x: torch.Tensor, step: Step | None) -> torch.Tensor:
        weight = self.weights[name, layer]
        return linear(x, weight) if step is None else self.package.linear(name, layer, x, weight, step)

    def _norm(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, self.norm.shape, self.norm, _EPSILON)

    def _random(self, *shape: int) -> torch.Tensor:
        scale = shape[-1] ** -0.5
        return torch.randn(shape, dtype=self.dtype, device=self.device, generator=self._generator).mul_(scale)


class DecodeForward:
    """One token of every row: logits [rows, vocab] over a static cache of `context` tokens a row, attention inside."""

    def __init__(self, model: Llama, step: Step | None, rows: int, context: int = 128):
        self.model, self.step = model, step
        shape = (2, model.layers, rows, model.kv_heads, context, model.width)
        self.cache = torch.zeros(shape, dtype=model.dtype, device=model.device)
        self.index = torch.arange(rows, device=model.device)

    def inputs(self, rows: int) -> dict[str, torch.Tensor]:
        """Static inputs for up to `rows` rows."""
        return {
            name: torch.zeros(rows, dtype=torch.int64, device=self.model.device) for name in ("tokens", "positions")
        }

    def __call__(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        rows = self.index[: len(tokens)]

        def attention(layer, q, k, v, out):
            keys, values = self.cache[:, layer, : len(rows)]
            keys[rows, :, positions] = k
            values[rows, :, positions] = v
            seen = scaled_dot_product_attention(q[:, :, None], keys, values, enable_gqa=True)
            out.copy_(seen[:, :, 0])

        return self.model.logits(self.model.body(tokens, positions, attention, self.step))


class PrefillForward:
    """Hidden states of a prefill batch; attention is a break, causal within each of the `lengths` of the batch."""

    def __init__(self, model: Llama, step: Step | None):
        self.model, self.step = model, step
        self.lengths: list[int] = []
        self._attention = break_here(self._attend)

    def inputs(self, tokens: int) -> dict[str, torch.Tensor]:
        """Static inputs for up to `tokens` tokens."""
        return {
            name: torch.zeros(tokens, dtype=torch.int64, device=self.model.device) for name in ("tokens", "positions")
        }

    def __call__(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return self.model.body(tokens, positions, self._attention, self.step)

    def _attend(self, layer, q, k, v, out) -> None:
        start, padding = 0, len(q) - sum(self.lengths)
        for length in [*self.lengths, padding] if padding else self.lengths:
            q1, k1, v1 = (x[start : start + length].transpose(0, 1)[None] for x in (q, k, v))
            seen = scaled_dot_product_attention(q1, k1, v1, is_causal=True, enable_gqa=True)
            out[start : start + length] = seen[0].transpose(0, 1)
            start += length


def filled_slots(package: ModuleType, device: str | torch.device, ranks: list[int], seed: int = 0):
    """The package's Slots with a random adapter in each slot, of these ranks in turn, named "0", "1", ...

    `swap(name)` puts another adapter into a slot, as a load would.
    """
    ranks = [ranks[slot % len(ranks)] for slot in range(package.LAYOUT.slots)]

    class Filled(numbered(package, ranks)):
        def ensure(self, names, *, use: bool = False) -> dict[str, int]:
            return {name: int(name) for name in names if name is not None}

        def swap(self, name: str) -> None:
            self.fill(int(name))
            self._changed(int(name))

        def fill(self, slot: int) -> None:
            rank, limit = self.slot_rank(slot), self.layout.max_rank
            for module in (m for m in self.layout.modules if m.kind == "linear"):
                a, b, ranks_of, scale = (t[module.name] for t in (self.a, self.b, self.rank, self.scale))
                for part in range(len(module.slices)):
                    a[:, slot, part * limit : part * limit + rank].normal_(generator=generator).mul_(
                        module.in_features**-0.5
                    )
                b[:, :, slot, :rank].normal_(generator=generator).mul_(rank**-0.5)
                ranks_of[:, slot], scale[:, slot] = rank, 1.0
            self.renew_copies()

    slots = Filled(device)
    generator = torch.Generator(slots.device).manual_seed(seed)
    for slot in range(package.LAYOUT.slots):
        slots.fill(slot)
    return slots
