"""The host's share of a step: preparing a batch, launching its kernels eagerly, and what the driver is asked to do."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import median

import torch

from lorac.bench.workload import Workload
from lorac.runtime.step import Step

DECODE_ROWS = 256
PREFILL_REQUESTS = 64
LAUNCHED_ROWS = (16, 64)  # on both sides of where tiles are read by descriptor
_REPEATS = 200
_COUNTED = 20  # by then launches are made together
_KINDS = {
    "copies": ("cudaMemcpyAsync", "cudaMemcpy", "cuMemcpy"),
    "kernels": ("cudaLaunchKernel", "cuLaunchKernel"),
    "synchronisations": (
        "cudaStreamSynchronize",
        "cudaDeviceSynchronize",
        "cudaEventSynchronize",
        "cuStreamSynchronize",
    ),
}


@dataclass(frozen=True)
class HostTime:
    """One call, or one of many: host µs (the median), and copies, kernels and synchronisations the driver was asked
    for.

    `torch_us` is what torch's cheapest launch, `x.add_(1)`, took in turns with it: hosts differ by two, and one host
    from second to second. `driver_us` is what the driver's calls took, as the profiler saw it, which lengthens them; of
    launches of graphs it sees nothing.
    """

    backend: str
    call: str
    us: float
    torch_us: float
    driver_us: float
    copies: float
    kernels: float
    synchronisations: float


def host_times(workload: Workload, backend: str) -> list[HostTime]:
    """prepare for a decode and a prefill batch; add (and linear) of every module, launched eagerly: by itself while the
    device waits, and among all of a forward, as engines do; and of one module where no `launching` is around it.
    """
    slots = workload.package.LAYOUT.slots
    step = workload.package.Step(workload.slots, backend)
    names = [str(row % slots) for row in range(DECODE_ROWS)]
    requests = [(str(request % slots), 16) for request in range(PREFILL_REQUESTS)]
    calls: dict[str, Callable[[], object]] = {
        f"prepare, {DECODE_ROWS} decode rows": lambda: step.prepare(names),
        f"prepare, {PREFILL_REQUESTS} prefill requests": lambda: step.prepare_prefill(requests),
    }
    times = [_timed(backend, call, run) for call, run in calls.items()]
    for rows in LAUNCHED_ROWS:
        step.prepare([str(row % slots) for row in range(rows)])
        with step.launching():
            times += [_timed(backend, f"{call}, {rows} rows", run) for call, run in _launches(workload, step).items()]
            for call, run, count in _forwards(workload, step):
                times.append(_timed(backend, f"{call}, each of {count}, {rows} rows", run, count))
        name, layers = next(iter(workload.layers.items()))
        for call, run in _calls(workload, step, name, layers[0]).items():
            times.append(_timed(backend, f"{call} {name} outside of launching, {rows} rows", run))
    return times


def _launches(workload: Workload, step: Step) -> dict[str, Callable[[], object]]:
    """add of every module for the prepared batch, and linear where the backend owns the base layer."""
    return {
        f"{call} {name}": run
        for name, layers in workload.layers.items()
        for call, run in _calls(workload, step, name, layers[0]).items()
    }


def _forwards(workload: Workload, step: Step) -> list[tuple[str, Callable[[], object], int]]:
    """(call, all of a forward's, how many): of all modules in all layers that have all of them."""
    instances: list[dict[str, Callable[[], object]]] = []
    workload.in_layers(lambda name, layer: instances.append(_calls(workload, step, name, layer)))
    forwards = []
    for call in ("add", "linear"):
        if runs := [of[call] for of in instances if call in of]:
            # results live on until the forward ends, so each is where it was in the forward before
            forwards.append((call, lambda runs=runs: [run() for run in runs], len(runs)))
    return forwards


def _calls(workload: Workload, step: Step, name: str, layer: int) -> dict[str, Callable[[], object]]:
    """What can be called on one instance: add, and linear where the backend owns the base layer."""
    x, y = workload.inputs(name, step), workload.base(name, layer, step.batch.padded)
    calls: dict[str, Callable[[], object]] = {"add": partial(workload.package.add, name, layer, x, y, step)}
    if name in step.owned:
        calls["linear"] = partial(workload.package.linear, name, layer, x, workload.weight(name, layer), step)
    return calls


def _timed(backend: str, call: str, run: Callable[[], object], count: int = 1) -> HostTime:
    """`run`, or of `count` calls that it makes the average."""
    one = torch.zeros(1, device="cuda")
    timed = {run: [], lambda: one.add_(1): []}
    for each in timed:
        for _ in range(_COUNTED):
            each()
    for _ in range(_REPEATS):
        for each, samples in timed.items():
            torch.cuda.synchronize()  # so that the launch queue, which is bounded, never holds the host up
            begun = time.perf_counter()
            each()
            samples.append((time.perf_counter() - begun) * 1e6)
    us, torch_us = map(median, timed.values())
    return HostTime(backend, call, us / count, torch_us, *(value / count for value in _driver(run)))


def _driver(run: Callable[[], object]) -> tuple[float, ...]:
    """Of one call: µs in the driver, and its calls by kind. The profiler's own synchronisation comes after them."""
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        with torch.profiler.record_function("counted"):
            for _ in range(_COUNTED):
                run()
    events = list(profile.events())
    counted = next(event.time_range for event in events if event.name == "counted")
    inside = [event for event in events if counted.start <= event.time_range.start < counted.end]
    kinds = [[event for event in inside if event.name.startswith(heads)] for heads in _KINDS.values()]
    us = sum(event.time_range.elapsed_us() for kind in kinds for event in kind)
    return us / _COUNTED, *(len(kind) / _COUNTED for kind in kinds)
