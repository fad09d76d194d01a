"""CUDA graphs on a GPU: what they contain, that they equal eager bit for bit and the oracle, what they cost."""

import random

import pytest
import torch
from torch.nn.functional import embedding, linear, rms_norm, silu

from lorac.bench.llama import DecodeForward, PrefillForward
from lorac.reference import lora
from lorac.runtime.breakable import break_here

pytestmark = pytest.mark.gpu
ROWS = 256  # the largest decode bucket of the package


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


def test_prefill_pieces_equal_eager_and_follow_the_batch(package, model, slots, step, seed):
    generator = random.Random(seed)
    forward = PrefillForward(model, step)
    graphs = package.PrefillGraphs(forward, step, forward.inputs(512))
    sizes = [bucket for bucket in sorted({b for b, _ in graphs.table}) if bucket <= 512]
    if not sizes:
        pytest.skip("this backend has no prefill graphs")
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
        assert all(moved[row] > 5e-2 for row, name in enumerate(rows) if name is not None)
    assert sum(graphs.stats()["hits"].values()) >= 20


@pytest.mark.parametrize("backend", ["fused", "triton"])
def test_a_traced_forward_is_captured_in_pieces(package, slots, backend):
    torch._dynamo.reset()  # else the other backend's traces of the same code count as recompilations of this one's
    step = package.Step(slots, backend)
    weight = torch.randn(6144, 4096, device="cuda", dtype=torch.bfloat16) / 64
    between = break_here(lambda h: (h[:, :4096] * 2).contiguous(), like=lambda h: h.new_empty(len(h), 4096))

    def forward(x):
        h = package.linear("qkv_proj", 0, x, weight, step)
        y = silu(between(h)) * 3
        return package.add("o_proj", 0, y, x.clone(), step)

    static = torch.zeros(64, 4096, device="cuda", dtype=torch.bfloat16)
    graphs = package.PrefillGraphs(forward, step, static, mode="tc_piecewise")
    graphs.capture([32, 64])
    assert {cost.pieces for cost in graphs._stats.costs.values()} == {2}
    x = torch.randn(60, 4096, device="cuda", dtype=torch.bfloat16)
    ticket = step.prepare_prefill([("1", 35), (None, 25)])
    out = graphs.run(ticket, x).clone()
    assert ticket.bucket == 64 and sum(graphs.stats()["hits"].values()) == 1
    with torch.no_grad(), step.launching():
        traced, eager = graphs.captured(static)[:60], forward(x)
    assert torch.equal(out, traced)
    # the compiler rounds less often than eager does: both are held to what bfloat16 allows
    of = [1] * 35 + [-1] * 25
    widths = [[part.width for part in step.layout.by_name[name].slices] for name in ("qkv_proj", "o_proj")]
    h = linear(x.double(), weight.double()) + lora(x.double(), *slots.instance("qkv_proj", 0), widths[0], of)
    delta = lora(silu(h[:, :4096] * 2) * 3, *slots.instance("o_proj", 0), widths[1], of)
    for found in (out, eager):
        error = (found.double() - x - delta).norm(dim=1) / (x + delta).norm(dim=1)
        assert error.max() < 1e-2
    assert delta[:35].abs().amax(1).min() > 5e-2 and torch.equal(out[35:], x[35:])
