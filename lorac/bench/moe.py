"""The LoRA tax on a mixture of experts: `python -m lorac.bench.moe PACKAGE`, on the present GPU.

Whole MoE layers of distinct random weights, routing uniform, adapters taking turns over the rows; each row of the table
is one batch size, each time a captured graph of all layers, replayed in turns with the others. Everything a layer
launches counts, its alignment included; only the plain mixture it is compared with has its pairs sorted beforehand.
"""

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby

import torch

from lorac import reference
from lorac.bench.given import given_package
from lorac.bench.moe_base import PlainMoe
from lorac.bench.timing import capture, interleaved
from lorac.tables import table
from lorac.verify.slots import numbered

ROWS = (1, 8, 64, 512)
PREFILL = (128, 1024)
LAYERS = 4
TOLERANCE = 1e-2  # relative error of the worst row in bfloat16, against float64
BANDWIDTH = 4.3e12  # bytes a second that an H200 reaches: the floor of a tax is by bytes

Forward = Callable[[], object]


@dataclass(frozen=True)
class Row:
    """Times of one batch size, µs a layer."""

    rows: int
    plain: float  # the plain mixture, without lorac
    hooked: float  # the same, with lorac's hooks, in a graph without adapters
    base: float  # the generated mixture without adapters
    lora: float  # and with them
    unused: float  # the graph for adapters, replayed for base rows alone
    added: float  # the plain mixture with adapters in its hooks
    floor: float  # the least the tax could be, by bytes
    error: float

    @property
    def tax(self) -> float:
        """Of the generated mixture over itself without adapters."""
        return self.lora / self.base - 1


class Workload:
    """Random weights and adapters of full rank in every slot, for the first layers of a package."""

    def __init__(self, package, device: str = "cuda", layers: int = LAYERS, seed: int = 0):
        self.package, self.device = package, torch.device(device)
        self.generator = torch.Generator(device).manual_seed(seed)
        self.up, self.down = (package.LAYOUT.by_name[name] for name in ("experts_gate_up", "experts_down"))
        self.layers = self.up.layers[:layers]
        self.experts, self.top_k = self.up.experts.local, self.up.experts.top_k
        self.hidden, self.width = self.up.in_features, self.down.in_features
        self.slots = self._slots()
        self.w13 = {layer: self.random(self.experts, 2 * self.width, self.hidden) for layer in self.layers}
        self.w2 = {layer: self.random(self.experts, self.hidden, self.width) for layer in self.layers}

    def random(self, *shape: int, scale: float = 0.0) -> torch.Tensor:
        """Normal numbers times `scale`, or so that a product with them keeps its size."""
        made = torch.randn(shape, device=self.device, dtype=self.slots.dtype, generator=self.generator)
        return made.mul_(scale or shape[-1] ** -0.5)

    def routing(self, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Distinct experts of each row, all equally likely, and their weights."""
        scores = torch.rand(rows, self.experts, device=self.device, generator=self.generator)
        weights = torch.rand(rows, self.top_k, device=self.device, generator=self.generator)
        return scores.topk(self.top_k, 1)[1].to(torch.int32), weights

    def step(self, backend: str, phase: str, slots: list[int]):
        """A step prepared for a batch of one row per entry; prefill has a request per run of equal slots."""
        step = self.package.Step(self.slots, backend)
        self.prepare(step, phase, slots)
        return step

    @staticmethod
    def prepare(step, phase: str, slots: list[int]) -> None:
        """Prepare a batch again, such as one of base rows for a graph that was captured for adapters."""
        runs = [(slot, 1) for slot in slots]
        if phase == "prefill":
            runs = [(slot, len(list(run))) for slot, run in groupby(slots)]
        step.prepare_slots(phase, [slot for slot, _ in runs], [count for _, count in runs])

    def _slots(self):
        layout = self.package.LAYOUT
        slots = numbered(self.package, [layout.max_rank] * layout.slots)(self.device)
        for module in (self.up, self.down):
            for layer in self.layers:
                a, b, rank, scale = slots.instance(module.name, layer)
                a.normal_(generator=self.generator).mul_(module.in_features**-0.5)
                b.normal_(generator=self.generator).mul_(layout.max_rank**-0.5)
                rank.fill_(layout.max_rank)
                scale.uniform_(0.5, 1.5, generator=self.generator)
        return slots


class Batch:
    """One batch size of a workload: its inputs, and every way to run its layers."""

    def __init__(self, work: Workload, rows: int, backend: str, phase: str = "decode"):
        self.work, self.rows, self.phase = work, rows, phase
        self.x = work.random(rows, work.hidden, scale=1.0)
        self.ids, self.weights = work.routing(rows)
        count = work.package.LAYOUT.slots
        self.mixed, self.bare = [row % count for row in range(rows)], [-1] * rows
        if phase == "prefill":
            self.mixed.sort()
        self.lora = work.step(backend, phase, self.mixed)
        self.base = work.step(backend, phase, self.bare)
        self.plain = PlainMoe(self.ids, self.weights, work.experts)

    def generated(self, step) -> Forward:
        """The generated mixture of every layer."""
        work = self.work
        return lambda: [
            work.package.moe(layer, self.x, self.ids, self.weights, work.w13[layer], work.w2[layer], step)
            for layer in work.layers
        ]

    def hooked(self, step=None) -> Forward:
        """The plain mixture of every layer, with lorac in its hooks where there is a step."""
        return lambda: [self._hooked(layer, step) for layer in self.work.layers]

    def _hooked(self, layer: int, step) -> torch.Tensor:
        work, add = self.work, self.work.package.add_experts
        up = down = None
        if step is not None:
            up = lambda y, x: add("experts_gate_up", layer, x, y, self.ids, None, step)  # noqa: E731
            down = lambda y, x: add("experts_down", layer, x, y, self.ids, self.weights, step)  # noqa: E731
        return self.plain(self.x, work.w13[layer], work.w2[layer], up, down)

    def error(self, step, slots: list[int], rows: int = 12) -> float:
        """Of the first rows of the first layer, against float64; the worst row's."""
        work, layer = self.work, self.work.layers[0]
        y = self.generated(step)()[0][:rows]
        tensors = [work.slots.instance(module.name, layer) for module in (work.up, work.down)]
        inputs = (self.x[:rows], self.ids[:rows], self.weights[:rows], work.w13[layer], work.w2[layer])
        expected = reference.moe(*inputs, *tensors, slots[:rows])
        return float(((y.double() - expected).norm(dim=1) / expected.norm(dim=1)).max())

    def keeps_base_rows(self) -> bool:
        """Whether every third row, without an adapter, comes out as in a batch without adapters, bit for bit."""
        mixed = [-1 if row % 3 == 0 else slot for row, slot in enumerate(self.mixed)]
        if self.rows == 1 or self.phase != "decode":
            return True
        self.work.prepare(self.lora, self.phase, mixed)
        y, plain = self.generated(self.lora)()[0], self.generated(self.base)()[0]
        self.work.prepare(self.lora, self.phase, self.mixed)
        return torch.equal(y[::3], plain[::3]) and not torch.equal(y, plain)

    def floor(self) -> float:
        """Bytes of adapters over bytes of weights that a layer's pairs touch."""
        work, rank = self.work, self.work.package.LAYOUT.max_rank
        slot = torch.tensor(self.mixed, device=work.device)[:, None]
        groups = (slot * work.experts + self.ids).unique().numel()
        adapters, weights = (
            groups * rank * (work.hidden + work.width),
            self.ids.unique().numel() * work.hidden * work.width,
        )
        return adapters / weights


def measure(work: Workload, rows: int, backend: str, seconds: float = 0.25) -> Row:
    """Every time of one decode batch. Raises RuntimeError where an output is wrong."""
    batch = Batch(work, rows, backend)
    error = max(batch.error(batch.lora, batch.mixed), batch.error(batch.base, batch.bare))
    if not error <= TOLERANCE:
        raise RuntimeError(f"{rows} rows: relative error {error:.1e}")
    if not batch.keeps_base_rows():
        raise RuntimeError(f"{rows} rows: base rows beside adapters changed their bits")
    unused = work.step(backend, "decode", batch.mixed)
    runs = (batch.hooked(), batch.hooked(batch.base), batch.generated(batch.base), batch.generated(batch.lora),
            batch.generated(unused), batch.hooked(batch.lora))  # fmt: skip
    graphs = [capture(run) for run in runs]
    work.prepare(unused, "decode", batch.bare)
    times = [timing.us / len(work.layers) for timing in interleaved(graphs, seconds)]
    return Row(rows, *times, batch.floor(), error)


def prefill(work: Workload, tokens: int, backend: str, seconds: float = 0.25) -> tuple:
    """(tokens, µs a layer replayed, of its kernels one by one, eager, without adapters) of a prefill batch."""
    batch = Batch(work, tokens, backend, "prefill")
    forward = batch.generated(batch.lora)
    graphs = [capture(forward), capture(batch.generated(batch.base))]
    replayed, base = (timing.us / len(work.layers) for timing in interleaved(graphs, seconds))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        forward()
        torch.cuda.synchronize()
    kernels = sum(e.device_time for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA)
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(10):
        forward()
    end.record()
    end.synchronize()
    eager = start.elapsed_time(end) * 100 / len(work.layers)
    return tokens, replayed, kernels / len(work.layers), eager, base


def report(rows: list[Row], prefills: list[tuple]) -> str:
    """Both tables."""
    heads = ("rows", "plain µs", "generated", "with LoRA", "tax", "its floor", "add form", "its tax", "nolora graph",
             "base rows in a lora graph", "error")  # fmt: skip
    lines = [
        (of.rows, f"{of.plain:.1f}", f"{of.base:.1f}", f"{of.lora:.1f}", f"{of.tax:.1%}", f"{of.floor:.1%}",
         f"{of.added:.1f}", f"{of.added / of.plain - 1:.0%}", f"{of.hooked / of.plain:.3f}",
         f"{of.unused / of.base:.3f}", f"{of.error:.4f}")
        for of in rows
    ]  # fmt: skip
    tables = [table(heads, lines)] if rows else []
    if prefills:
        heads = ("prefill tokens", "replayed µs", "its kernels", "ratio", "eager", "without adapters")
        lines = [
            (tokens, f"{replayed:.1f}", f"{kernels:.1f}", f"{replayed / kernels:.3f}", f"{eager:.1f}", f"{base:.1f}")
            for tokens, replayed, kernels, eager, base in prefills
        ]
        tables.append(table(heads, lines))
    return "\n\n".join(tables)


def main() -> None:
    """Print the tables of a package's first backend."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("package", metavar="PACKAGE")
    package = given_package(parser.parse_args().package)
    backend = package.BACKENDS[0]
    work = Workload(package)
    rows = [measure(work, count, backend) for count in ROWS]
    prefills = [prefill(work, tokens, backend) for tokens in PREFILL]
    layout = package.LAYOUT
    print(f"{layout.name}, {backend}, {torch.cuda.get_device_name()}, µs a layer of {len(work.layers)}:")
    print(f"{layout.slots} adapters of rank {layout.max_rank}\n\n{report(rows, prefills)}")


if __name__ == "__main__":
    main()
