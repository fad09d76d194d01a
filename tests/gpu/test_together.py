"""Eager launches of one module are one launch to the driver, wherever its tensors are, and compute the same bits."""

import ctypes

import pytest
import torch

from lorac.runtime import together

pytestmark = pytest.mark.gpu


LAYER = 0
PLACES = 3
PREFERRED_CARVEOUT = 9  # CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    """As in a process without other threads, which libraries may have begun."""
    monkeypatch.setattr(together.threading, "active_count", lambda: 1)


# 256 rows of down are summed by programs that share a tile, those of gate and up stored by descriptor
@pytest.fixture(params=[("down_proj", 16), ("down_proj", 256), ("gate_up_proj", 256)], ids=str)
def calls(request, package, step):
    """Calls on the same values in other places: (what they return, what they wrote to)."""
    module, rows = request.param
    step.prepare([str(row % package.LAYOUT.slots) if row % 3 else None for row in range(rows)])
    of = package.LAYOUT.by_name[module]
    owned = module in getattr(step.backend, "LINEAR", {})
    device, dtype = step.device, step.slots.dtype
    x, weight, y = (
        torch.randn(shape, device=device, dtype=dtype)
        for shape in ((rows, of.in_features), (of.out_features, of.in_features), (rows, of.out_features))
    )
    places = [(x.clone(), weight.clone()) for _ in range(PLACES)]

    def call(place: int) -> torch.Tensor:
        x, weight = places[place]
        if owned:
            return package.linear(module, LAYER, x, weight, step)
        return package.add(module, LAYER, x, y.clone(), step)

    call.module = module
    return call


def test_same_bits_from_one_launch(calls, step, monkeypatch):
    """Before and after a graph is made, at addresses it was and was not made for; two kernels, one launch."""
    monkeypatch.setattr(together, "OFTEN", 2)
    step.scratch.forget()
    with step.launching():
        expected = calls(0)
        step.scratch.forget()
        made = together._alive
        kept = [torch.full_like(expected, float("nan")) for _ in range(4 * PLACES)]
        for place in (0, 0, 1, 2, 0, 2, 2):
            kept.pop()  # where a result goes next, there is poison
            got = calls(place)
            assert torch.equal(got, expected), f"place {place}"
            kept.append(got)
        assert together._alive == made + 1
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            calls(1)
            torch.cuda.synchronize()
    names = [event.name for event in profile.events()]
    assert not [name for name in names if "LaunchKernel" in name], names
    assert len([name for name in names if name.endswith(calls.module)]) == 2, names
    step.scratch.forget()


def test_kernels_leave_room_for_the_launch_after(calls, step):
    """Whatever shared memory a kernel needs itself: else the next one cannot begin beside it."""
    calls(0)
    cuda, percent = ctypes.CDLL("libcuda.so.1"), ctypes.c_int()
    compiled = [of for kernel in step.backend.KERNELS for of in kernel._compiled.values()]
    assert compiled
    for of in compiled:
        function = ctypes.c_void_p(of.compiled.function)
        assert not cuda.cuFuncGetAttribute(ctypes.byref(percent), PREFERRED_CARVEOUT, function)
        assert percent.value == 100


def test_captured_as_kernels(calls, step, monkeypatch):
    """A capture takes the module's own kernels though a graph of them is at hand."""
    monkeypatch.setattr(together, "OFTEN", 1)
    step.scratch.forget()
    with step.launching():
        expected = calls(0)
        calls(0)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            got = calls(0)
    got.fill_(float("nan"))
    graph.replay()
    assert torch.equal(got, expected)
    step.scratch.forget()
