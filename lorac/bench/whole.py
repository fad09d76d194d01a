"""Measuring whole calls, host and device together: times, kernels and copies, memory once all is settled."""

import gc
import statistics
import time
from collections.abc import Callable

import torch
from torch.profiler import ProfilerActivity, profile


def settled(step) -> int:
    """Device bytes in use once everything freed has been given back."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return step.engine.reserved()


def host_us(run: Callable[[], object]) -> float:
    """Host microseconds of one call on an idle device."""
    torch.cuda.synchronize()
    started = time.perf_counter()
    run()
    return (time.perf_counter() - started) * 1e6


def device_ms(run: Callable[[], object], repeats: int = 7) -> float:
    """Milliseconds from the start of one call to the end of its work, the median of some; the device is idle before."""
    run()
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        started = time.perf_counter()
        run()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - started) * 1e3)
    return statistics.median(times)


def kernel_ms(run: Callable[[], object]) -> float:
    """The sum of the times of everything one call runs on the device."""
    return sum(event.time_range.elapsed_us() for event in _device_events(run)) / 1e3


def launched(run: Callable[[], object]) -> tuple[int, int]:
    """Kernels and copies of one call."""
    names = [event.name.lower() for event in _device_events(run)]
    copies = sum("memcpy" in name for name in names)
    return len(names) - copies, copies


def _device_events(run: Callable[[], object]) -> list:
    run()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
        run()
        torch.cuda.synchronize()
    return [event for event in profiled.events() if event.device_type == torch.autograd.DeviceType.CUDA]
