"""The generated mixture and the add form, on every backend with experts, against the float64 oracle."""

import random

import moe_kit as kit
import pytest
import torch

from lorac import reference
from lorac.runtime import pairs
from lorac.runtime.errors import PackageError, ShapeError, TicketError

BACKENDS = ["fused", "torch"]
RANKS = (3, 16, 9)


@pytest.fixture
def bench(build, generator):
    """The tiny package: 8 experts, 2 of a row, 3 slots."""
    return kit.Bench(build(kit.TINY), RANKS, generator)


def any_slots(rng: random.Random, rows: int, slots: int) -> list[int]:
    """Random slots of rows, with base rows among them and at least one adapter."""
    made = [rng.randrange(-1, slots) for _ in range(rows)]
    made[rng.randrange(rows)] = rng.randrange(slots)
    return made


# one row, few rows in a kernel of their own, found by comparison, and sorted
@pytest.mark.parametrize("rows", [1, 2, 7, 21])
@pytest.mark.parametrize("backend", BACKENDS)
def test_any_batch(bench, backend, rows, seed):
    rng = random.Random(seed)
    bench.check(backend, any_slots(rng, rows, 3), *bench.routing(rows, absent=rng.choice([0, 0.3])))


ROUTINGS = {
    "every pair on one expert": lambda rows: [[3, 3]] * rows,
    "nothing is here": lambda rows: [[-1, -1]] * rows,
    "an adapter's row is elsewhere": lambda rows: [[-1, -1], *[[1, 6]] * (rows - 1)],
    "numbers past the experts": lambda rows: [[8, 2]] * rows,
}


@pytest.mark.parametrize("rows", [1, 2, 5, 19])
@pytest.mark.parametrize("case", ROUTINGS)
def test_awkward_routing(bench, case, rows):
    ids = torch.tensor(ROUTINGS[case](rows), dtype=torch.int32)
    slots = [row % 4 - 1 for row in range(1, rows + 1)]
    weights = torch.rand(rows, 2, generator=bench.generator) + 0.1
    x = bench.random(rows, 64)
    y = bench.moe("fused", slots, x, ids, weights)
    kit.assert_close(y, bench.expected(slots, x, torch.where(ids < 8, ids, -1), weights))


@pytest.mark.parametrize("rank", [16, 12])
def test_a_row_that_chooses_one_expert_twice(build, generator, rank):
    """At rank 16 one row shrinks for itself."""
    bench = kit.Bench(build(kit.spec(max_rank=rank)), (rank, 5), generator)
    ids = torch.tensor([[3, 1, 3], [2, 2, 2]], dtype=torch.int32)
    for rows in (1, 2):
        weights = torch.rand(rows, 3, generator=generator) + 0.1
        for chosen in (ids[:rows], ids.flip(0)[:rows]):
            bench.check("fused", [1, 0][:rows], chosen, weights)


@pytest.mark.parametrize(("top_k", "rank"), [(2, 32), (4, 32), (1, 24), (2, 64), (5, 64)])
def test_few_choices_of_large_ranks(build, generator, top_k, rank):
    """As many columns of B are expanded at once as hold all of a row's experts, or some of them."""
    bench = kit.Bench(build(kit.spec(top_k=top_k, max_rank=rank)), (rank, 5), generator)
    for rows in (1, 2):
        bench.check("fused", [1, 0][:rows], *bench.routing(rows))


@pytest.mark.parametrize(("dtype", "shared"), [("float32", False), ("float16", True)], ids=["own", "shared outer"])
def test_odd_widths(build, generator, seed, dtype, shared):
    """40 inputs, 24 features inside, 5 experts of which 3 are chosen, rank 12: no block divides any of them."""
    rng, bench = random.Random(seed), kit.Bench(build(kit.spec(dtype=dtype, shared=shared)), (12, 5), generator)
    assert bench.slots.a["experts_gate_up"].shape[2] == bench.slots.b["experts_down"].shape[2] == (1 if shared else 5)
    for rows in (1, 18):
        bench.check("fused", any_slots(rng, rows, 2), *bench.routing(rows))
    bench.check("torch", any_slots(rng, rows, 2), *bench.routing(rows))


def test_one_slot_and_base_rows(build, generator):
    """Base rows make one group more than there are slots."""
    bench = kit.Bench(build(kit.spec(slots=1)), (7,), generator)
    for rows in (2, 17):
        bench.check("fused", [0, -1] * (rows // 2) + [0] * (rows % 2), *bench.routing(rows))


@pytest.mark.parametrize("backend", BACKENDS)
def test_eager_prefill_of_many_rows(bench, backend, seed):
    rows = 40
    slots = sorted(any_slots(random.Random(seed), rows, 3))
    bench.check(backend, slots, *bench.routing(rows), phase="prefill")


def test_the_narrow_variant(bench):
    """One adapter of low rank: kernels that sum fewer columns."""
    for rows in (1, 4):
        bench.check("fused", [0] * (rows - 1) + [-1] if rows > 1 else [0], *bench.routing(rows))


def test_more_tiles_than_shares_of_h(build, generator, monkeypatch, launched):
    """So wide that adding up every tile's share of h would not pay: down has a shrink of its own at any rows."""
    monkeypatch.setattr(pairs, "MOST_SHARES", 3)  # a package reads it when it is loaded
    bench = kit.Bench(build(kit.spec(width=64 * 3 + 8)), (12, 5), generator)
    for rows in (1, 2):
        launched.clear()
        bench.check("fused", [1, 0][:rows], *bench.routing(rows))
        assert "pair_shrink_experts_down" in launched


def test_gate_and_up_keep_their_own_a(bench):
    """Each half alone, by emptying the other's B."""
    ids, weights = bench.routing(5)
    for part in (0, 1):
        b = bench.slots.instance("experts_gate_up", bench.layer)[1]
        kept = b.clone()
        b[:, :, (1 - part) * 48 : (2 - part) * 48] = 0
        bench.check("fused", [0, 1, 0, 1, 1], ids, weights)
        b.copy_(kept)


def test_rows_repeat_and_do_not_depend_on_their_neighbours(bench):
    ids, weights = bench.routing(20)
    slots = [row % 4 - 1 for row in range(20)]
    x = bench.random(20, 64)
    y = bench.moe("fused", slots, x, ids, weights)
    assert torch.equal(y, bench.moe("fused", slots, x, ids, weights))
    alone = bench.moe("fused", slots[3:4], x[3:4], ids[3:4], weights[3:4])
    torch.testing.assert_close(y[3:4], alone, rtol=1e-5, atol=1e-6)


def test_expert_parallel_ranks_add_up(build, generator):
    """Two ranks with half of the experts each: local numbers, -1 for the others; their sum is the whole mixture."""
    whole = kit.Bench(build(kit.spec(count=6)), (12, 5), generator)
    half = build(kit.spec(count=6, ep=2))
    rows, slots = 9, [0, -1, 1, 1, 0, -1, 0, 1, 1]
    ids, weights = whole.routing(rows)
    x = whole.random(rows, 40)
    total = torch.zeros(rows, 40)
    for rank in range(2):
        bench = kit.Bench(half, (12, 5), generator)
        own = slice(3 * rank, 3 * rank + 3)
        for name in ("experts_gate_up", "experts_down"):
            for mine, theirs in zip(
                bench.slots.instance(name, bench.layer), whole.slots.instance(name, whole.layer), strict=True
            ):
                mine.copy_(theirs[:, own] if theirs.dim() == 4 else theirs)
        bench.w13, bench.w2 = whole.w13[own].contiguous(), whole.w2[own].contiguous()
        local = torch.where((ids >= own.start) & (ids < own.stop), ids - own.start, -1)
        total += bench.moe("fused", slots, x, local, weights)
    kit.assert_close(total, whole.expected(slots, x, ids, weights))


@pytest.mark.parametrize("rows", [1, 6, 19])
@pytest.mark.parametrize("module", ["experts_gate_up", "experts_down"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_the_delta_alone(bench, backend, module, rows, seed):
    """In the hooks of a runner: y [rows, top_k, out], changed where an adapter meets an expert of this rank only."""
    spec, rng = bench.layout.by_name[module], random.Random(seed)
    slots, (ids, weights) = any_slots(rng, rows, 3), bench.routing(rows, absent=0.3)
    first = module == "experts_gate_up"
    x = bench.random(*((rows,) if first else (rows, 2)), spec.in_features)
    base = bench.random(rows, 2, spec.out_features)
    step = bench.steps[backend]
    step.prepare_slots("decode", slots, [1] * rows)
    bench.poison(step)
    y = base.clone()
    assert bench.package.add_experts(module, bench.layer, x, y, ids, None if first else weights, step) is y
    pair_slot = [slot for slot in slots for _ in range(2)]
    pairs = (x.repeat_interleave(2, 0) if first else x).reshape(rows * 2, -1)
    tensors = bench.slots.instance(module, bench.layer)
    delta = reference.expert_lora(pairs, ids.flatten(), *tensors, [p.width for p in spec.slices], pair_slot)
    expected = base.view(rows * 2, -1).double() + (delta if first else delta * weights.reshape(-1, 1))
    kit.assert_close(y.view(rows * 2, -1), expected)
    own = torch.tensor([slot >= 0 and of >= 0 for slot, of in zip(pair_slot, ids.flatten().tolist(), strict=True)])
    changed = (y != base).view(rows * 2, -1).any(1)
    assert torch.equal(changed, own), "base rows and experts elsewhere keep their bits, all others change"


def test_ids_and_weights_of_other_types_and_layouts(bench):
    ids, weights = bench.routing(5)
    x = bench.random(5, 64)
    y = bench.moe("fused", [0, 1, -1, 2, 0], x, ids, weights)
    strided = torch.stack([ids.long(), ids.long()], 2).flatten(1)[:, ::2]
    spread = torch.cat([x, x], 1)[:, :64]
    other = bench.moe("fused", [0, 1, -1, 2, 0], spread, strided, weights.double())
    assert torch.equal(y, other)


def test_what_does_not_fit_is_refused(bench, build):
    ids, weights = bench.routing(3)
    x, step, moe = bench.random(3, 64), bench.steps["fused"], bench.package.moe
    arguments = (bench.layer, x, ids, weights, bench.w13, bench.w2, step)
    with pytest.raises(TicketError, match="no batch was prepared"):
        moe(*arguments)
    step.prepare_slots("decode", [0, -1, 1], [1] * 3)
    moe(*arguments)
    for position, value, message in (
        (0, 1, "no module 'experts_gate_up' in layer 1"),
        (1, x[:2], "x has 2 rows"),
        (1, x.double(), "torch.float64"),
        (2, ids[:, :1], r"topk_ids is \[3, 1\] on cpu, expected \[3, 2\]"),
        (2, ids.float(), "expected torch.int32 or torch.int64"),
        (3, weights[:2], "topk_weights is"),
        (3, None, r"topk_weights is None, expected \[rows, 2\]"),
        (4, bench.w2, r"w13 is \[8, 64, 48\]"),
        (5, bench.w13, "w2 is"),
        (5, bench.w2.mT.contiguous().mT, "must be contiguous"),
    ):
        with pytest.raises(ShapeError, match=message):
            moe(*arguments[:position], value, *arguments[position + 1 :])
    with pytest.raises(ShapeError, match="use add_experts, or moe"):
        bench.package.add("experts_down", bench.layer, x, x, step)
    y = bench.random(3, 2, 64)
    with pytest.raises(ShapeError, match="contiguous pairs"):
        wide = torch.cat([y, y], 2)[..., :64]
        bench.package.add_experts("experts_down", bench.layer, bench.random(3, 2, 48), wide, ids, None, step)
    pairs = bench.random(3, 2, 48)
    for given in ((pairs.to("meta"), y), (pairs, y.to("meta"))):
        with pytest.raises(ShapeError, match=r"is .* on meta.* on cpu"):
            bench.package.add_experts("experts_down", bench.layer, *given, ids, None, step)
    with pytest.raises(ShapeError, match="no module of experts 'qkv_proj': it has experts_gate_up, experts_down"):
        bench.package.add_experts("qkv_proj", bench.layer, x, y, ids, None, step)


def test_a_backend_without_experts_says_so(build):
    data = kit.spec()
    data["backends"] = {"torch": {}, "triton": {}}
    package = build(data)
    step = package.Step(package.Slots("cpu"), "triton")
    step.prepare([None])
    x, ids = torch.zeros(1, 40), torch.zeros(1, 3, dtype=torch.int32)
    w13, w2 = torch.zeros(5, 48, 40), torch.zeros(5, 40, 24)
    with pytest.raises(PackageError, match="backend triton of package odd has no kernels for experts"):
        package.moe(0, x, ids, torch.ones(1, 3), w13, w2, step)
