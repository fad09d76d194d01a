"""Backends found by their folders, packages of awkward shapes, and the check every one of them must pass."""

import random
from dataclasses import dataclass
from pathlib import Path

import torch

from lorac import reference
from lorac.runtime.layout import Module
from lorac.spec.backend import Declaration
from lorac.spec.folders import read_declaration
from lorac.verify.slots import numbered

torch.set_num_threads(1)  # nothing here is large, and the interpreter itself is serial

OWN = Path(__file__).parents[2] / "templates" / "backends"
RANKS = (1, 3, 8, 12)  # of the adapters in the slots, one each
ALL_RANKS = (1, 2, 3, 4, 8, 12, 16, 24, 48, 96)
# of each row alone, against float64: fp32 sums, h and y rounded once each to the package's dtype
TOLERANCE = {"float32": 1e-5, "float16": 3e-3, "bfloat16": 2e-2}


@dataclass(frozen=True)
class Kind:
    """A backend folder, and the search path it was found in: None for lorac's own."""

    name: str
    declaration: Declaration
    templates: str | None = None

    @property
    def dtypes(self) -> tuple[str, ...]:
        """Those that run here: the interpreter computes bfloat16 wrongly."""
        return tuple(of for of in self.declaration.dtypes if of != "bfloat16" or not self.declaration.kernels)

    def max_rank(self, ranks: tuple[int, ...]) -> int:
        """The R of a package with these ranks; operators of fixed ranks also want inputs wider than three of them."""
        allowed = [rank for rank in self.declaration.ranks if rank <= 16]
        return max(allowed) if allowed else min(max(ranks), self.declaration.max_rank)

    def width(self, size: int) -> int:
        """The next width the backend takes."""
        return -(-size // self.declaration.multiple) * self.declaration.multiple


def kinds(folder: Path = OWN, templates: str | None = None) -> list[Kind]:
    """Every backend below a folder."""
    found = sorted(path.parent for path in folder.glob("*/backend.yaml"))
    return [Kind(path.name, read_declaration(path), templates) for path in found]


def cases() -> list[tuple[Kind, str]]:
    """Every backend with every dtype that runs here."""
    return [(kind, dtype) for kind in kinds() for dtype in kind.dtypes]


def case_id(value) -> str:
    return value.name if isinstance(value, Kind) else str(value)


def spec_of(kind: Kind, dtype: str, ranks: tuple[int, ...] = RANKS, **parameters) -> dict:
    """A spec of widths that no block divides; one module has three slices, another several blocks of inputs."""
    w = kind.width
    linear = lambda inputs, outputs, path: {"in": w(inputs), "out": w(outputs), "path": path}  # noqa: E731
    block = {"kind": kind.name, **parameters} | ({"templates": kind.templates} if kind.templates else {})
    return {
        "lorac": 1,
        "name": "awkward",
        "model": {
            "hidden": w(49), "layers": 2, "vocab": w(61), "tied": False,
            "linears": {
                "q_proj": linear(49, 27, "attn.q_proj"), "k_proj": linear(49, 16, "attn.k_proj"),
                "v_proj": linear(49, 11, "attn.v_proj"), "wide_proj": linear(428, 139, "mlp.wide_proj"),
            },
            "fused": {"qkv_proj": ["q_proj", "k_proj", "v_proj"]},
        },
        "dtype": dtype,
        "adapters": {"slots": len(ranks), "max_rank": kind.max_rank(ranks),
                     "targets": ["qkv_proj", "wide_proj", "lm_head", "embed_tokens"]},
        "backends": {"tested": block},
        "graphs": {
            "decode": {"buckets": [1, 2, 4, 8], "variants": {
                "nolora": {"adapters": 0}, "one": {"adapters": 1, "rank": min(ranks[-1], 8)}, "lora": {}}},
            "prefill": {"max_tokens": 32, "max_requests": 4, "buckets": [8, 32]},
        },
    }  # fmt: skip


class Bench:
    """A package with an adapter of each rank in its slots, filled by number, and a step of its backend."""

    def __init__(self, package, kind: Kind, generator: torch.Generator, ranks: tuple[int, ...] = RANKS):
        ranks = [min(rank, package.LAYOUT.max_rank) for rank in ranks]
        self.package, self.kind, self.ranks, self.generator = package, kind, ranks, generator
        self.slots = numbered(package, ranks)("cpu")
        self.dtype, self.layout = self.slots.dtype, package.LAYOUT
        # kernels that know an adapter's rank read nothing past it (of B, past a whole 16); others rely on zeros there
        self.fill(float("nan") if kind.declaration.kernels else 0.0)
        self.step = package.Step(self.slots, "tested")

    def fill(self, beyond: float):
        """New adapters, with that number wherever their ranks leave room."""
        for module in self.layout.modules:
            for layer in module.layers or (0,):
                self._fill(module, layer, beyond)
        self.slots.renew_copies()

    def _fill(self, module: Module, layer: int, beyond: float):
        a, b, ranks, scales = self.slots.instance(module.name, layer)
        limit = self.layout.max_rank
        a.fill_(beyond)
        b.fill_(beyond)
        for slot, rank in enumerate(self.ranks):
            for part, piece in enumerate(module.slices):
                # some adapters have no delta on one slice of a module
                own = 0 if len(module.slices) > 1 and (slot + part) % 5 == 4 else rank
                ranks[slot, part], scales[slot, part] = own, 0.5 + 0.25 * slot
                columns = a[slot, :, :own] if module.kind == "embedding" else a[slot, part * limit : part * limit + own]
                columns.copy_(self.random(columns.shape) * (1.0 if module.kind == "embedding" else a.shape[-1] ** -0.5))
                rows = b[piece.start : piece.start + piece.width, slot, :own]
                rows.copy_(self.random(rows.shape) * max(own, 1) ** -0.5)
                # B is summed up to a whole 16, where loading leaves zeros
                b[piece.start : piece.start + piece.width, slot, own : -(-own // 16) * 16] = 0

    def random(self, shape) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator).to(self.dtype)

    def prepare(self, phase: str, requests: list[tuple[int, int]], logits: list[int] | None = None) -> list[int]:
        """Prepare a batch of (slot, rows) requests; returns the slot of each row."""
        slots, rows = [slot for slot, _ in requests], [count for _, count in requests]
        self.step.prepare_slots(phase, slots, rows, logits=rows if logits is None and phase != "decode" else logits)
        return [slot for slot, count in requests for _ in range(count)]

    def inputs(self, module: Module, row_slot: list[int]) -> torch.Tensor:
        """x with rows of NaN, or senseless token ids, wherever no adapter may read."""
        if module.kind == "embedding":
            ids = torch.randint(module.in_features, (len(row_slot),), generator=self.generator)
            return torch.where(torch.tensor(row_slot) < 0, module.in_features + 7, ids)
        x = self.random((len(row_slot), module.in_features))
        x[[row for row, slot in enumerate(row_slot) if slot < 0]] = float("nan")
        return x

    def expected(self, module: Module, layer: int, x: torch.Tensor, row_slot: list[int]) -> torch.Tensor:
        """The delta, from the oracle."""
        tensors = self.slots.instance(module.name, layer)
        return reference.lora(x, *tensors, [piece.width for piece in module.slices], row_slot)

    def summed(self, module: Module, layer: int, x: torch.Tensor, row_slot: list[int]) -> torch.Tensor:
        """The size of the delta's terms: the sums of `expected` with every term positive. Rounding errors follow it."""
        tensors = [of.abs() for of in self.slots.instance(module.name, layer)]
        return reference.lora(x.abs(), *tensors, [piece.width for piece in module.slices], row_slot)

    def poison(self):
        """NaN in all scratch, so that whatever is read without having been written shows."""
        for tensor in self.step.scratch_tensors():
            if tensor.is_floating_point():
                tensor.fill_(float("nan"))

    def check(self, module: Module, layer: int, row_slot: list[int], padding: int = 0) -> None:
        """`add` on fresh inputs equals the oracle row by row, and touches neither base rows nor anything around y.

        `padding` adds rows past the batch to x and y.
        """
        x = self.inputs(module, row_slot + [-1] * padding)
        rows, columns = x.shape[0], module.out_features
        # y with memory around it, and small, so that rounding it hides no error of the delta
        memory = 0.1 * self.random((rows + 4, -(-(columns + 1) // 16) * 16))
        before, y = memory.clone(), memory[2 : rows + 2, :columns]
        self.poison()
        assert self.package.add(module.name, layer, x, y, self.step) is y
        served = [row for row, slot in enumerate(row_slot) if slot >= 0]
        delta = self.expected(module, layer, x[: len(row_slot)], row_slot)[served]
        want = before[2 : rows + 2, :columns][served].double() + delta
        where = f"{module.name} layer {layer}, rows {row_slot}"
        if served:
            error = (y[served].double() - want).norm(dim=1) / want.norm(dim=1)
            assert error.max() <= TOLERANCE[self.layout.dtype], f"{where}: relative errors {error.tolist()}"
            assert not torch.equal(y[served], before[2 : rows + 2, :columns][served]), f"{where}: nothing was added"
        y[served] = before[2 : rows + 2, :columns][served]
        assert torch.equal(memory, before), f"{where}: base rows, padded rows or memory around y changed"


def awkward_batches(slots: int, rng: random.Random) -> dict[str, tuple[str, list[tuple[int, int]]]]:
    """Batches by name: a phase, and (slot, rows) of each request."""
    every = [*range(slots), *range(slots), -1, -1, -1]
    rng.shuffle(every)
    last = slots - 1

    def decode(*of: int):
        return "decode", [(slot, 1) for slot in of]

    return {
        "one row": decode(rng.randrange(slots)),
        "one base row": decode(-1),
        "base rows only": decode(*[-1] * 5),
        "base row first": decode(-1, 0, last),
        "base row in the middle": decode(last, -1, last),
        "base row last": decode(1, last, -1),
        "every adapter, mixed with base rows": decode(*every),
        "one adapter in several chunks": decode(*[last] * 37),
        "the narrow variant": decode(*[1] * 6),
        "verify: several rows a request": ("decode", [(1, 2), (-1, 2), (0, 2)]),
        "prefill": ("prefill", [(last, 20), (-1, 3), (0, 7), (last, 1)]),
        "prefill of one token": ("prefill", [(2, 1)]),
        "prefill of base rows": ("prefill", [(-1, 9)]),
        "prefill beyond the cap": ("prefill", [(number % (slots + 1) - 1, 1 + number % 3) for number in range(9)]),
        "mixed": ("mixed", [(last, 18), (2, 1), (-1, 1), (last, 1)]),
    }
