"""Each kernel's time where it runs, in a graph of whole layers, against the least its bytes and flops can take."""

from dataclasses import dataclass
from functools import partial
from statistics import median

import torch

from lorac.bench.rates import Rates
from lorac.bench.timing import capture
from lorac.bench.workload import Workload
from lorac.runtime.launch import Kernel
from lorac.runtime.layout import Module
from lorac.runtime.step import Step

_REPLAYS = 10


@dataclass(frozen=True)
class Timed:
    """One kernel at one batch: µs of a launch (the median), and its floor by bytes and by flops."""

    backend: str
    kernel: str
    rows: int
    adapters: int
    us: float
    bytes_us: float
    flops_us: float

    @property
    def floor_us(self) -> float:
        """The larger floor."""
        return max(self.bytes_us, self.flops_us)


def timed_kernels(workload: Workload, backend: str, rows: int, adapters: int, rates: Rates) -> list[Timed]:
    """Every kernel of a backend that a batch launches, in the order of the package's modules.

    A kernel that starts early (programmatic dependent launch) is timed with its wait.
    """
    step = workload.step(backend, rows, adapters)
    graph = capture(lambda: workload.in_layers(partial(workload.run, step)))
    times = _times(graph)
    found = []
    for kernel in step.backend.KERNELS:
        module = next((workload.modules[name] for name in workload.per_layer if kernel.name.endswith(f"_{name}")), None)
        if module and kernel.name in times:
            size, flops = work(kernel, module, step, adapters)
            floors = size / rates.bandwidth * 1e6, flops / rates.matrix * 1e6
            found.append(Timed(backend, kernel.name, rows, adapters, median(times[kernel.name]), *floors))
    return found


def work(kernel: Kernel, module: Module, step: Step, adapters: int) -> tuple[int, int]:
    """(bytes, flops) a kernel cannot do without, from the names of what it is passed: every tensor crosses memory once.

    x, a and h: a shrink; h, b and y: an expand, which reads y too unless it computes the base; weight: the base.
    """
    rows, rank, slices = step.batch.rows, step.batch.rank, len(module.slices)
    takes = kernel.arguments
    columns = slices * rank
    base = "weight" in takes
    elements = {
        "x": rows * module.in_features,
        "a": adapters * columns * module.in_features,
        "h": rows * columns,
        "b": adapters * module.out_features * rank,
        "weight": module.out_features * module.in_features,
        "y": (1 if base else 2) * rows * module.out_features,
    }
    products = {
        "a": rows * columns * module.in_features,
        "b": rows * module.out_features * rank,
        "weight": rows * module.out_features * module.in_features,
    }
    item = step.slots.dtype.itemsize
    size = item * sum(count for name, count in elements.items() if name in takes)
    return size, 2 * sum(count for name, count in products.items() if name in takes)


def _times(graph: torch.cuda.CUDAGraph) -> dict[str, list[float]]:
    """µs of every launch, by kernel name, over some replays."""
    graph.replay()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(_REPLAYS):
            graph.replay()
        torch.cuda.synchronize()
    times: dict[str, list[float]] = {}
    for event in profile.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            times.setdefault(event.name, []).append(event.device_time)
    return times
