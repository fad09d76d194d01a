"""Every backend, found by its folder, against the float64 oracle: any rank, width and mix of rows."""

import random

import kernel_kit as kit
import pytest


@pytest.fixture
def bench_of(build, generator):
    """bench_of(kind, dtype) -> a package of awkward shapes with an adapter of every rank in its slots."""
    return lambda kind, dtype, ranks=kit.RANKS: kit.Bench(
        build(kit.spec_of(kind, dtype, ranks)), kind, generator, ranks
    )


@pytest.mark.parametrize(("kind", "dtype"), kit.cases(), ids=kit.case_id)
def test_awkward_batches(bench_of, kind, dtype, seed):
    bench, rng = bench_of(kind, dtype), random.Random(seed)
    batches = kit.awkward_batches(len(kit.RANKS), rng)
    names = list(batches) if dtype == kind.dtypes[0] else rng.sample(list(batches), 4)
    for name in names:
        row_slot = bench.prepare(*batches[name])
        for module in rng.sample(bench.layout.modules, 2):
            print(name, module.name)
            bench.check(module, rng.choice(module.layers or (0,)), row_slot)


@pytest.mark.parametrize(("kind", "dtype"), kit.cases(), ids=kit.case_id)
def test_every_rank(bench_of, kind, dtype, seed):
    bench, rng = bench_of(kind, dtype, kit.ALL_RANKS), random.Random(seed)
    slots = [-1, *range(len(kit.ALL_RANKS))]
    rng.shuffle(slots)
    row_slot = bench.prepare("decode" if dtype == kind.dtypes[0] else "prefill", [(slot, 1) for slot in slots])
    for name in ("qkv_proj", "embed_tokens"):
        bench.check(bench.layout.by_name[name], 0, row_slot)
