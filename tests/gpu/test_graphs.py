"""CUDA graphs on a GPU: what they contain, that they equal eager bit for bit and the oracle, what they cost."""

import gc
import random

import pytest
import torch
from torch.nn.functional import embedding, linear, rms_norm, silu
from torch.profiler import ProfilerActivity, profile

from lorac.bench.llama import DecodeForward, Llama, PrefillForward, filled_slots
from lorac.reference import lora
from lorac.runtime.breakable import break_here
from lorac.runtime.capture import capturing
from lorac.runtime.errors import CaptureError
from lorac.runtime.stats import GraphKey

pytestmark = pytest.mark.gpu
ROWS = 256  # the largest decode bucket of the package
BACKENDS = ["fused", "triton", "csgmv"]


@pytest.fixture(params=BACKENDS)
def step(request, package, slots):
    if request.param not in package.BACKENDS:
        pytest.skip(f"the package has no backend {request.param}")
    return package.Step(slots, request.param)


@pytest.fixture
def decode(package, model, step):
    """A captured forward and its graphs, of every decode key."""
    forward = DecodeForward(model, step, ROWS)
    graphs = package.DecodeGraphs(forward, step, forward.inputs(ROWS))
    graphs.capture()
    return forward, graphs


def batch(names: list, generator: random.Random, vocabulary: int, context: int = 128) -> dict[str, torch.Tensor]:
    tokens = [generator.randrange(vocabulary) for _ in names]
    positions = [generator.randrange(context) for _ in names]
    return {"tokens": torch.tensor(tokens).cuda(), "positions": torch.tensor(positions).cuda()}


def oracle(forward: DecodeForward, step, tokens, positions, slots: list[int]) -> torch.Tensor:
    """Logits in float64, from the cache as it is, LoRA adapter by adapter."""
    model = forward.model

    def layer_of(name: str, layer: int, x: torch.Tensor) -> torch.Tensor:
        widths = [part.width for part in step.layout.by_name[name].slices]
        return linear(x, model.weights[name, layer].double()) + lora(
            x, *step.slots.instance(name, layer), widths, slots
        )

    def norm(x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, x.shape[-1:], model.norm.double(), 1e-5)

    count, half = len(tokens), model.width // 2
    rows = torch.arange(count, device=tokens.device)
    x = embedding(tokens, model.embedding).double()
    cos, sin = model.cos[positions].double()[:, None], model.sin[positions].double()[:, None]
    for layer in range(model.layers):
        h = layer_of("qkv_proj", layer, norm(x)).view(count, -1, model.width)
        rotated, v = h.split([model.heads + model.kv_heads, model.kv_heads], 1)
        rotated = rotated * cos + rotated.roll(half, -1) * sin
        q, k = rotated.split([model.heads, model.kv_heads], 1)
        keys, values = forward.cache[:, layer, :count].double()
        keys[rows, :, positions], values[rows, :, positions] = k, v
        group = model.heads // model.kv_heads
        keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
        weights = torch.softmax((keys @ q[..., None])[..., 0] * model.width**-0.5, -1)
        seen = (weights[:, :, None] @ values)[:, :, 0]
        x = x + layer_of("o_proj", layer, seen.reshape(count, -1))
        gate, up = layer_of("gate_up_proj", layer, norm(x)).chunk(2, -1)
        x = x + layer_of("down_proj", layer, silu(gate) * up)
    return linear(norm(x), model.head.double())


def test_replays_equal_eager_bit_for_bit_and_the_oracle(package, model, slots, step, decode, seed):
    forward, graphs = decode
    generator = random.Random(seed)
    names = [None, *(str(slot) for slot in range(package.LAYOUT.slots))]
    buckets = sorted({bucket for bucket, _ in graphs.table})
    for number in range(256):
        if number % 3 == 0:
            slots.swap(generator.choice(names[1:]))
        bucket = buckets[number % len(buckets)]
        below = max((size for size in buckets if size < bucket), default=0)
        chosen = generator.sample(names, generator.randint(1, len(names)))
        rows = [generator.choice(chosen) for _ in range(generator.randint(below + 1, bucket))]
        inputs = batch(rows, generator, package.LAYOUT.vocab)
        ticket = step.prepare(rows)
        assert ticket.bucket == bucket and (ticket.variant == "nolora") == (not any(rows))
        out = graphs.run(ticket, inputs).clone()
        with torch.no_grad(), step.launching():
            eager = forward(**{name: static[:bucket] for name, static in graphs.inputs.tensors.items()})
        assert torch.equal(out, eager[: len(rows)]), f"step {number}: graph and eager differ"
        if number % 16 < 2:
            of = [-1 if name is None else int(name) for name in rows]
            expected = oracle(forward, step, **inputs, slots=of)
            error = (out.double() - expected).norm(dim=1) / expected.norm(dim=1)
            assert error.max() < 3e-2, f"step {number}: relative error {error.max():.1e}"
            base = oracle(forward, step, **inputs, slots=[-1] * len(of))
            effect = (expected.log_softmax(1) - base.log_softmax(1)).abs().amax(1)
            assert all((effect[row] >= 5e-2) == (slot >= 0) for row, slot in enumerate(of))
    assert sum(graphs.stats()["hits"].values()) == 256 and not graphs.stats()["fallbacks"]


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


def test_a_nolora_graph_contains_no_lora_kernel(package, model, step, monkeypatch, tmp_path):
    dumps = []

    class Dumped(torch.cuda.CUDAGraph):
        def capture_begin(self, *args, **kwargs):
            self.enable_debug_mode()
            super().capture_begin(*args, **kwargs)

        def capture_end(self):
            super().capture_end()
            dumps.append(tmp_path / f"{len(dumps)}.dot")
            self.debug_dump(str(dumps[-1]))

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Dumped)
    forward = DecodeForward(model, step, ROWS)
    graphs = package.DecodeGraphs(forward, step, forward.inputs(ROWS))
    graphs.capture([8])
    texts = dict(
        zip((variant for bucket, variant in graphs.table if bucket == 8), (d.read_text() for d in dumps), strict=True)
    )
    # a backend that owns the base matrix product runs it in every variant
    owned = {kernel.name for kernel in step.backend.KERNELS if kernel.name.startswith("base")}
    kernels = {kernel.name for kernel in (step.tables.ROUTE, *step.backend.KERNELS)} - owned
    found = {variant: sorted(name for name in kernels if name in text) for variant, text in texts.items()}
    assert found["nolora"] == [] and found["lora"], {variant: len(text) for variant, text in texts.items()}


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
        y = torch.zeros(len(tokens), 6144, dtype=torch.bfloat16, device="cuda")
        return package.add("qkv_proj", 0, x[: len(tokens)], y, step)

    with pytest.raises(CaptureError, match="would be compiled inside a capture"):
        package.DecodeGraphs(forward, step, torch.zeros(ROWS, dtype=torch.int64, device="cuda")).capture([8])


def test_prefill_pieces_equal_eager_and_follow_the_batch(package, model, slots, step, seed):
    generator = random.Random(seed)
    forward = PrefillForward(model, step)
    graphs = package.PrefillGraphs(forward, step, forward.inputs(512))
    sizes = [bucket for bucket in sorted({b for b, _ in graphs.table}) if bucket <= 512]
    if not sizes:
        pytest.skip("this backend has no prefill graphs")
    graphs.table = tuple(entry for entry in graphs.table if entry[0] <= 512)
    graphs.inputs._filled = dict.fromkeys(graphs.inputs.tensors, 512)
    graphs.capture(sizes)
    assert {cost.pieces for cost in graphs._stats.costs.values()} == {model.layers + 1}
    plain = PrefillForward(model, None)
    for _ in range(40):
        count = generator.randint(1, 6)
        names = [generator.choice([None, *map(str, range(8))]) for _ in range(count)]
        lengths = [generator.randint(1, 80) for _ in range(count)]
        ticket = step.prepare_prefill(list(zip(names, lengths, strict=True)))
        tokens = torch.randint(0, package.LAYOUT.vocab, (sum(lengths),), device="cuda")
        positions = torch.cat([torch.arange(length) for length in lengths]).cuda()
        forward.lengths = plain.lengths = lengths
        if not ticket.bucket:
            continue
        out = graphs.run(ticket, {"tokens": tokens, "positions": positions}).clone()
        with torch.no_grad(), step.launching():
            eager = forward(**{name: static[: ticket.bucket] for name, static in graphs.inputs.tensors.items()})
        assert torch.equal(out, eager[: len(out)])
        base = plain(tokens, positions)
        moved = (out - base).abs().amax(1)
        rows = [name for name, length in zip(names, lengths, strict=True) for _ in range(length)]
        assert all((moved[row] > 5e-2) == (name is not None) for row, name in enumerate(rows) if name is not None)
    assert sum(graphs.stats()["hits"].values()) >= 20


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
    graphs.table = tuple(entry for entry in graphs.table if entry[0] == 64)
    graphs.capture()
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
    assert one <= 1.15 * largest and both <= 1.1 * one
    assert memory(tuple(reversed(lora))) > one


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
    graphs = package.DecodeGraphs(forward, step, forward.inputs(ROWS))
    forward = DecodeForward(model, step, ROWS)
    graphs.forward = forward
    graphs.capture([8])
    inputs = {name: torch.zeros(5, dtype=torch.int64, device="cuda:1") for name in ("tokens", "positions")}
    out = graphs.run(step.prepare(["0", None, "1", "2", None]), inputs)
    assert out.device == torch.device("cuda:1") and out.isfinite().all() and torch.cuda.current_device() == 0
    assert graphs.stats()["hits"][GraphKey(8, "lora")] == 1


def test_a_traced_forward_is_captured_in_pieces(package, slots):
    step = package.Step(slots, "triton")
    weight = torch.randn(6144, 4096, device="cuda", dtype=torch.bfloat16) / 64
    between = break_here(lambda h: (h[:, :4096] * 2).contiguous(), like=lambda h: h.new_empty(len(h), 4096))

    def forward(x):
        h = package.linear("qkv_proj", 0, x, weight, step)
        y = torch.nn.functional.silu(between(h)) * 3
        return package.add("o_proj", 0, y, x.clone(), step)

    graphs = package.PrefillGraphs(
        forward, step, torch.zeros(64, 4096, device="cuda", dtype=torch.bfloat16), mode="tc_piecewise"
    )
    graphs.table = tuple(entry for entry in graphs.table if entry[0] in (32, 64))
    graphs.capture()
    assert {cost.pieces for cost in graphs._stats.costs.values()} == {2}
    x = torch.randn(50, 4096, device="cuda", dtype=torch.bfloat16)
    ticket = step.prepare_prefill([("1", 30), (None, 20)])
    out = graphs.run(ticket, x).clone()
    with step.launching():
        eager = forward(x)
    torch.testing.assert_close(out, eager, rtol=2e-2, atol=2e-2)
    assert (out - x)[:30].abs().max() > 5e-2 and torch.equal(out[30:], x[30:])
    assert sum(graphs.stats()["hits"].values()) == 1
