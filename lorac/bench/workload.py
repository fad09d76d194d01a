"""What bench and tune run: a package's modules with random weights and a full set of random adapters, on one GPU."""

from collections.abc import Callable
from types import ModuleType

import torch

from lorac import reference
from lorac.runtime.layout import Module
from lorac.runtime.step import Step
from lorac.verify.slots import numbered

# relative error of the worst row: fp32 accumulation, one rounding of h, and y rounded by the base GEMM and again
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 8e-3}
TIMED_KINDS = ("linear", "lm_head")  # the modules whose base layer is one matrix product


class Workload:
    """Weights, slots, inputs and prepared steps of one package. Every slot holds an adapter of the full rank.

    `layers` of each module are filled: enough that their weights exceed what caches hold between two uses.
    """

    def __init__(self, package: ModuleType, device: str, layers: int = 0, seed: int = 0):
        self.package, self.device = package, torch.device(device)
        self.dtype = getattr(torch, package.LAYOUT.dtype)
        self.generator = torch.Generator(device).manual_seed(seed)
        self.modules = {module.name: module for module in package.LAYOUT.modules if module.kind in TIMED_KINDS}
        self.layers = {name: self._layers(module, layers) for name, module in self.modules.items()}
        self.slots = _full_slots(package, self)
        self.weights: dict[tuple[str, int], torch.nn.Parameter] = {}
        self._steps: dict[tuple, Step] = {}
        self._mixed: dict[tuple, tuple[Step, list[int]]] = {}
        self._inputs: dict[str, torch.Tensor] = {}
        self._expected: dict[tuple, torch.Tensor] = {}

    @property
    def per_layer(self) -> list[str]:
        """The modules every decoder layer has: what a layer's time is made of."""
        return [name for name, module in self.modules.items() if module.layers]

    @property
    def common(self) -> list[int]:
        """The filled layers that all of those have."""
        found = [set(self.layers[name]) for name in self.per_layer]
        return sorted(set.intersection(*found)) if found else []

    def in_layers(self, run: Callable[[str, int], object]) -> None:
        """run(module, layer) for every module of every layer that all modules have, in a layer's order."""
        for layer in self.common:
            for module in self.per_layer:
                run(module, layer)

    def weight(self, module: str, layer: int) -> torch.Tensor:
        """The base weight [out_features, in_features] of one instance."""
        if (module, layer) not in self.weights:
            of = self.modules[module]
            scale = of.in_features**-0.5
            random = self.random((of.out_features, of.in_features)).mul_(scale)
            self.weights[module, layer] = torch.nn.Parameter(random, requires_grad=False)
        return self.weights[module, layer]

    def step(self, backend: str, rows: int, adapters: int, rank: int = 0) -> Step:
        """A step prepared for `rows` rows spread evenly over `adapters` adapters (0: none); see `requests`.

        `rank` (all of it unless stated) is what every slot's adapter has from now on, for all steps.
        """
        self.slots.set_rank(rank or self.package.LAYOUT.max_rank)
        key = (backend, rows, adapters, rank)
        if key not in self._steps:
            step = self.package.Step(self.slots, backend)
            phase, slots, counts = requests(self.package, rows, adapters)
            step.prepare_slots(phase, slots, counts)
            self._steps[key] = step
        return self._steps[key]

    def mixed_step(self, backend: str, rows: int, rank: int) -> tuple[Step, list[int]]:
        """A step as that of all slots, every other request without its adapter; and which rows have none."""
        key = (backend, rows, rank)
        if key not in self._mixed:
            self.slots.set_rank(rank)
            phase, slots, counts = requests(self.package, rows, self.package.LAYOUT.slots)
            slots = [slot if at % 2 else -1 for at, slot in enumerate(slots)]
            step = self.package.Step(self.slots, backend)
            step.prepare_slots(phase, slots, counts)
            self._mixed[key] = step, [row for row, slot in enumerate(_by_row(slots, counts)) if slot < 0]
        return self._mixed[key]

    @property
    def steps(self) -> list[Step]:
        """Every step prepared so far."""
        return [*self._steps.values(), *(step for step, _ in self._mixed.values())]

    def inputs(self, module: str, step: Step) -> torch.Tensor:
        """x [rows, in_features] for a prepared step, padded as its graph is."""
        return self.rows_in(module, step.batch.padded)

    def rows_in(self, module: str, rows: int) -> torch.Tensor:
        """x [rows, in_features]: the first rows of the same numbers whatever their count."""
        held = self._inputs.get(module)
        if held is None or held.shape[0] < rows:
            fresh = self.random((max(rows, 8), self.modules[module].in_features))
            held = fresh if held is None else torch.cat([held, fresh[held.shape[0] :]])
            self._inputs[module] = held
        return held[:rows]

    def run(self, step: Step, module: str, layer: int) -> torch.Tensor:
        """Base and LoRA of one instance, as an engine calls it: [rows, out_features]."""
        return self.package.linear(module, layer, self.inputs(module, step), self.weight(module, layer), step)

    def base(self, module: str, layer: int, rows: int) -> torch.Tensor:
        """The base layer alone, by torch."""
        return torch.nn.functional.linear(self.rows_in(module, rows), self.weight(module, layer))

    def error(self, step: Step, module: str, y: torch.Tensor) -> float:
        """The relative error of the worst live row of y, of the module's first timed layer, against float64."""
        expected = self.expected(step, module)
        live = y[: expected.shape[0]].double()
        return ((live - expected).norm(dim=1) / expected.norm(dim=1)).max().item()

    def expected(self, step: Step, module: str) -> torch.Tensor:
        """Base and LoRA in float64, of the module's first timed layer."""
        layer = self.layers[module][0]
        row_slot = row_slots(self.package, step.batch.rows, step.ticket.adapters)
        key = (module, step.batch.rows, step.batch.padded, step.ticket.adapters, self.slots.slot_rank(0))
        if key not in self._expected:
            x = self.inputs(module, step)[: step.batch.rows]
            widths = [part.width for part in self.modules[module].slices]
            delta = reference.lora(x, *self.slots.instance(module, layer), widths, row_slot)
            self._expected[key] = x.double() @ self.weight(module, layer).double().T + delta
        return self._expected[key]

    def random(self, shape: tuple[int, ...]) -> torch.Tensor:
        """Normal random numbers in the package's dtype."""
        return torch.randn(shape, device=self.device, dtype=self.dtype, generator=self.generator)

    def forget(self) -> None:
        """Free what `expected` keeps."""
        self._expected.clear()

    def _layers(self, module: Module, count: int) -> list[int]:
        have = list(module.layers or (0,))
        if count:
            return have[:count]
        size = module.in_features * module.out_features * self.dtype.itemsize
        return have[: max(2, -(-3 * cache_bytes(self.device) // size))]


def cache_bytes(device: torch.device) -> int:
    """Bytes of the device's last-level cache."""
    return torch.cuda.get_device_properties(device).L2_cache_size if device.type == "cuda" else 1 << 20


def requests(package: ModuleType, rows: int, adapters: int) -> tuple[str, list[int], list[int]]:
    """(phase, slot per request, rows per request) of a batch of `rows` rows over `adapters` slots.

    A decode batch as far as decode is captured, adapters taking turns; beyond, one prefill request per adapter.
    """
    if rows <= max(package.admission.DECODE_BUCKETS, default=256):
        return "decode", [row % adapters if adapters else -1 for row in range(rows)], [1] * rows
    count = max(adapters, 1)
    cuts = [rows * at // count for at in range(count + 1)]
    return "prefill", list(range(adapters)) or [-1], [b - a for a, b in zip(cuts, cuts[1:], strict=False)]


def row_slots(package: ModuleType, rows: int, adapters: int) -> list[int]:
    """The slot of every row of that batch."""
    _, slots, counts = requests(package, rows, adapters)
    return _by_row(slots, counts)


def _by_row(slots: list[int], counts: list[int]) -> list[int]:
    return [slot for slot, count in zip(slots, counts, strict=True) for _ in range(count)]


def _full_slots(package: ModuleType, workload: Workload):
    """The package's Slots with a random adapter of the full rank in every slot of the workload's layers."""
    ranks = [package.LAYOUT.max_rank] * package.LAYOUT.slots

    class Full(numbered(package, ranks)):
        def set_rank(self, rank: int) -> None:
            """Give every adapter this rank: kernels never look past it."""
            if rank != ranks[0]:
                ranks[:] = [rank] * len(ranks)
                for table in self.rank.values():
                    table.fill_(rank)

    slots = Full(workload.device)
    generator = workload.generator
    scales = torch.rand(package.LAYOUT.slots, 1, device=workload.device, generator=generator) + 0.5
    for name, layers in workload.layers.items():
        for layer in layers:
            a, b, rank, scale = slots.instance(name, layer)
            a.normal_(generator=generator).mul_(workload.modules[name].in_features ** -0.5)
            b.normal_(generator=generator).mul_(package.LAYOUT.max_rank**-0.5)
            rank.fill_(package.LAYOUT.max_rank)
            scale.copy_(scales.expand_as(scale))  # an adapter's is the same everywhere, as engines have it
    slots.renew_copies()
    return slots
