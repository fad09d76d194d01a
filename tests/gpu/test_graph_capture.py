"""Capturing on a GPU: what graphs contain, what is refused and how it is reported, streams, memory and devices."""

import gc

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from lorac.bench.llama import DecodeForward, Llama, filled_slots
from lorac.runtime.breakable import break_here
from lorac.runtime.capture import capturing
from lorac.runtime.errors import CaptureError
from lorac.runtime.stats import GraphKey

pytestmark = pytest.mark.gpu
ROWS = 256  # the largest decode bucket of the package


def test_every_key_is_captured_where_synchronising_is_an_error(package, model, step):
    seen = set()

    class Watched(DecodeForward):
        def __call__(self, tokens, positions):
            if capturing():
                seen.add((len(tokens), torch.cuda.get_sync_debug_mode(), torch.cuda.is_current_stream_capturing()))
            return super().__call__(tokens, positions)

    forward = Watched(model, step, ROWS)
    graphs = package.DecodeGraphs(forward, step, forward.inputs(ROWS))
    graphs.capture()
    assert seen == {(bucket, 2, True) for bucket, _ in graphs.table}
    assert torch.cuda.get_sync_debug_mode() == 0


def kernels_of(step) -> tuple[set[str], set[str]]:
    """Names of all kernels of a backend, and of those that are its base layers, in every graph."""
    every = {kernel.name for kernel in (step.tables.ROUTE, *step.backend.KERNELS)}
    own = {
        f"{stage}_{module}" for stage in ("project", "tile_project") for module in getattr(step.backend, "LINEAR", {})
    }
    return every, own & every


def test_a_replay_without_lora_runs_no_lora_kernel(package, model, step):
    forward = DecodeForward(model, step, ROWS)
    graphs = package.DecodeGraphs(forward, step, forward.inputs(ROWS))
    graphs.capture([8])
    every, base = kernels_of(step)
    for variant in ("nolora", "lora"):
        recording = graphs._recordings[GraphKey(8, variant)]
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
            recording.replay()
            torch.cuda.synchronize()
        names = {e.name for e in profiled.events() if e.device_type == torch.autograd.DeviceType.CUDA}
        own = names & every
        assert len(names) > 5 and (own == base if variant == "nolora" else own > base)


def forbidden_item(x):
    return x * x.sum().item()


def forbidden_assign(x):
    y = x.clone()
    y[0] = 3
    return y


def forbidden_make(x):
    return x + torch.tensor([1], device=x.device)


def forbidden_pageable(x):
    y = torch.empty_like(x)
    y.copy_(torch.ones(x.shape, dtype=x.dtype), non_blocking=True)
    return y


def forbidden_synchronise(x):
    torch.cuda.synchronize()
    return x


def forbidden_mask(x):
    return x.masked_fill(x > 0, 1) + x[x > 100].sum()


FORBIDDEN = [value for name, value in sorted(globals().items()) if name.startswith("forbidden_")]


@pytest.mark.parametrize("forward", FORBIDDEN)
def test_what_a_graph_cannot_contain_is_reported_and_leaves_the_device_usable(package, slots, forward):
    step = package.Step(slots, package.BACKENDS[0])
    static = torch.zeros(ROWS, dtype=torch.int64, device="cuda")
    with pytest.raises(CaptureError) as caught:
        package.DecodeGraphs(forward, step, static).capture([8])
    assert f"in {forward.__name__}" in str(caught.value) and __file__ in str(caught.value)
    graphs = package.DecodeGraphs(lambda x: x + 1, step, static)
    graphs.capture([8])
    assert graphs.run(step.prepare([None] * 5), torch.arange(5, device="cuda")).tolist() == [1, 2, 3, 4, 5]


def test_a_kernel_first_compiled_inside_a_capture_is_reported(package, model, slots):
    step = package.Step(slots, "triton")
    kernel = step.backend.KERNELS[0]
    x = torch.zeros(8, 4096, dtype=torch.bfloat16, device="cuda")

    def forward(tokens):
        kernel._compiled.clear()  # as if this launch had not been warmed up
        step.scratch.forget()
        y = torch.zeros(len(tokens), 6144, dtype=torch.bfloat16, device="cuda")
        return package.add("qkv_proj", 0, x[: len(tokens)], y, step)

    with pytest.raises(CaptureError, match="would be compiled inside a capture"):
        package.DecodeGraphs(forward, step, torch.zeros(ROWS, dtype=torch.int64, device="cuda")).capture([8])


def test_forked_streams_are_joined_before_a_break_and_forked_after_it(package, slots):
    step = package.Step(slots, "triton")
    side = torch.cuda.Stream()

    @break_here
    def outside(x):
        return x * 2

    def forward(x):
        main = torch.cuda.current_stream()
        side.wait_stream(main)
        with torch.cuda.stream(side):
            y = x + 10
            for _ in range(50):
                y = y + 0
        z = outside(x + 1)  # y is still being computed
        main.wait_stream(side)
        return z + y

    graphs = package.PrefillGraphs(forward, step, torch.zeros(64, device="cuda"))
    graphs.capture([64])
    for value in (3.0, 5.0):
        ticket = step.prepare_prefill([(None, 64)])
        out = graphs.run(ticket, torch.full((64,), value, device="cuda"))
        assert torch.equal(out, torch.full((64,), (value + 1) * 2 + value + 10, device="cuda"))


def test_a_pool_filled_from_the_largest_bucket_takes_little_more_than_that(package, model, slots):
    def memory(table) -> int:
        step = package.Step(slots, "triton")
        forward = DecodeForward(model, step, ROWS)
        graphs = package.DecodeGraphs(forward, step, forward.inputs(ROWS))
        graphs.table = table
        gc.collect()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved()
        graphs.capture()
        return torch.cuda.memory_reserved() - before

    full = package.decode.GRAPHS["triton"]
    lora = tuple(entry for entry in full if entry[1] == "lora")
    largest, one, both = memory(lora[:1]), memory(lora), memory(full)
    assert one <= 1.3 * largest and both <= 1.1 * one
    assert memory(tuple(reversed(lora))) > 1.3 * one


def test_prepare_makes_one_copy_and_one_launch_and_never_waits(package, step):
    rows = [None if row % 5 == 0 else str(row % 8) for row in range(ROWS)]
    requests = [(name, 3) for name in rows[:32]]
    for prepare in (lambda: step.prepare(rows), lambda: step.prepare_prefill(requests)):
        prepare()
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
                prepare()
                torch.cuda.set_sync_debug_mode("default")
                torch.cuda.synchronize()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        names = [e.name.lower() for e in profiled.events() if e.device_type == torch.autograd.DeviceType.CUDA]
        copies = [name for name in names if "memcpy" in name]
        assert len(copies) <= 1 and len(names) - len(copies) <= 1, names


def test_a_model_on_another_device_than_the_current_one(package):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    assert torch.cuda.current_device() == 0
    slots = filled_slots(package, "cuda:1", ranks=[16])
    model = Llama(package, "cuda:1", layers=1)
    step = package.Step(slots, "triton")
    forward = DecodeForward(model, step, 8)
    graphs = package.DecodeGraphs(forward, step, forward.inputs(8))
    graphs.capture([8])
    inputs = {name: torch.zeros(5, dtype=torch.int64, device="cuda:1") for name in ("tokens", "positions")}
    out = graphs.run(step.prepare(["0", None, "1", "2", None]), inputs)
    assert out.device == torch.device("cuda:1") and out.isfinite().all() and torch.cuda.current_device() == 0
    assert graphs.stats()["hits"][GraphKey(8, "lora")] == 1
