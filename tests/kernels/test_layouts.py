"""Tensors as engines have them: strided, three-dimensional, padded, larger than every bucket, past 2**31 elements."""

import random

import kernel_kit as kit
import pytest
import torch

from lorac.runtime.errors import ShapeError

FIRST = [(kind, kind.dtypes[0]) for kind in kit.kinds()]
pytestmark = pytest.mark.parametrize(("kind", "dtype"), FIRST, ids=kit.case_id)


@pytest.fixture
def bench(build, generator, kind, dtype):
    return kit.Bench(build(kit.spec_of(kind, dtype)), kind, generator)


def strided(x: torch.Tensor) -> dict[str, torch.Tensor]:
    """The same values of x [rows, in] in other places of memory."""
    rows, columns = x.shape
    wide = torch.full((rows, columns + 32), float("nan")).to(x.dtype)
    wide[:, 16 : columns + 16] = x
    sparse = torch.full((rows, 3, columns), float("nan")).to(x.dtype)
    sparse[:, 1] = x
    return {
        "columns of a wider tensor": wide[:, 16 : columns + 16],
        "every third row": sparse[:, 1],
        "transposed": x.T.contiguous().T,
        "one element off": torch.cat([x.new_zeros(1), x.flatten()])[1:].view(rows, columns),
        "backwards": x.flip(0).contiguous().flip(0),
    }


def test_strided_x(bench):
    row_slot = bench.prepare("decode", [(3, 1), (-1, 1), (0, 1)])
    module = bench.layout.by_name["qkv_proj"]
    x = bench.random((len(row_slot), module.in_features))
    base = bench.random((3, module.out_features))
    want = bench.package.add("qkv_proj", 1, x, base.clone(), bench.step)
    for name, other in strided(x).items():
        assert torch.equal(other, x)
        got = bench.package.add("qkv_proj", 1, other, base.clone(), bench.step)
        assert torch.equal(got, want), name
    lines = bench.random((6, module.out_features))
    before = lines.clone()
    lines[::2] = base
    bench.package.add("qkv_proj", 1, x, lines[::2], bench.step)
    assert torch.equal(lines[::2], want) and torch.equal(lines[1::2], before[1::2]), "every other row of y"


def test_more_dimensions(bench):
    row_slot = bench.prepare("prefill", [(2, 4), (-1, 2)])
    for module in bench.layout.modules:
        x = bench.inputs(module, row_slot)
        base = bench.random((6, module.out_features))
        flat = bench.package.add(module.name, 0, x, base.clone(), bench.step)
        shape = (2, 3) if module.kind == "embedding" else (2, 3, module.in_features)
        y = base.clone().view(2, 3, module.out_features)
        assert bench.package.add(module.name, 0, x.view(shape), y, bench.step) is y
        assert torch.equal(y.view_as(flat), flat), module.name


def test_linear_is_add_on_the_base_gemm(bench):
    bench.fill(0.0)  # a backend that owns the base GEMM may read all slots at once, which loading leaves finite
    row_slot = bench.prepare("decode", [(1, 1), (3, 1), (-1, 1)])
    module = bench.layout.by_name["wide_proj"]
    x = bench.random((3, module.in_features))
    weight = bench.random((module.out_features, module.in_features)) * module.in_features**-0.5
    bias = bench.random(module.out_features)
    delta = bench.expected(module, 0, x, row_slot)
    for extra in (None, bias):
        y = bench.package.linear("wide_proj", 0, x, weight, bench.step, bias=extra)
        want = x.double() @ weight.double().T + delta + (0 if extra is None else extra.double())
        assert ((y.double() - want).norm(dim=1) / want.norm(dim=1)).max() < 2 * kit.TOLERANCE[bench.layout.dtype]
    alone = bench.package.linear("wide_proj", 0, x, weight, bench.step)
    bench.prepare("decode", [(-1, 1)] * 3)
    assert torch.equal(alone[2], bench.package.linear("wide_proj", 0, x, weight, bench.step)[2])


def test_rows_padded_to_the_bucket(bench):
    """An engine hands over the bucket's rows; those past the batch are neither read nor written."""
    for phase, requests in (("decode", [(0, 1), (3, 1), (-1, 1)]), ("prefill", [(2, 5), (-1, 1)])):
        row_slot = bench.prepare(phase, requests)
        padding = bench.step.batch.padded - len(row_slot)
        assert padding > 0 or bench.kind.declaration.operators or not bench.package.admission.PREFILL_REQUESTS
        for module in bench.layout.modules:
            if module.kind != "lm_head":
                bench.check(module, 0, row_slot, padding)


def test_ids_outside_the_vocabulary(bench):
    """Added tokens have ids the adapter knows nothing of: no delta, and no other adapter's rows are read."""
    bench.prepare("decode", [(1, 1)] * 6)
    module = bench.layout.by_name["embed_tokens"]
    ids = torch.tensor([0, module.in_features - 1, module.in_features, -1, module.in_features + 9, 5])
    base = bench.random((6, module.out_features))
    y = bench.package.add("embed_tokens", 0, ids, base.clone(), bench.step)
    known = [0, 1, 5]
    want = base[known].double() + bench.expected(module, 0, ids[known], [1, 1, 1])
    assert torch.equal(y[2:5], base[2:5])
    assert ((y[known].double() - want).norm(dim=1) / want.norm(dim=1)).max() < kit.TOLERANCE[bench.layout.dtype]
    off = torch.empty(7, dtype=torch.int64)[1:].copy_(ids)
    assert off.data_ptr() % 16 == 8
    for _ in range(2):  # as the first time and as what was bound before
        assert torch.equal(bench.package.add("embed_tokens", 0, off, base.clone(), bench.step), y)


def test_what_an_embedding_is_not_given(bench):
    bench.prepare("decode", [(1, 1)] * 3)
    module = bench.layout.by_name["embed_tokens"]
    ids, y = torch.tensor([1, 0, 5]), bench.random((3, module.out_features))
    served = [
        bench.package.add("embed_tokens", 0, ids.to(of), y.clone(), bench.step) for of in (torch.int64, torch.uint8)
    ]
    assert torch.equal(*served)
    before = y.clone()
    for of in (torch.float32, torch.float16, torch.bool):
        with pytest.raises(ShapeError, match=f"embed_tokens: x is {of} on cpu, expected token ids, of an integer type"):
            bench.package.add("embed_tokens", 0, ids.to(of), y, bench.step)
    assert torch.equal(y, before)
    table = bench.random((module.in_features, module.out_features))
    with pytest.raises(ShapeError, match="embed_tokens is an embedding, which linear does not serve"):
        bench.package.linear("embed_tokens", 0, ids, table, bench.step)


def test_the_same_bits_again_and_the_same_row_in_any_company(bench, seed):
    rng = random.Random(seed)
    module = bench.layout.by_name["wide_proj"]
    slots = [rng.randrange(-1, len(kit.RANKS)) for _ in range(24)]
    bench.prepare("decode", [(slot, 1) for slot in slots])
    x = bench.random((24, module.in_features))
    zero = torch.zeros(24, module.out_features, dtype=bench.dtype)
    together = bench.package.add("wide_proj", 0, x, zero.clone(), bench.step)
    bench.poison()
    assert torch.equal(bench.package.add("wide_proj", 0, x, zero.clone(), bench.step), together)
    # of what is summed, not of the sum, which may cancel
    within = 2 * torch.finfo(bench.dtype).eps * bench.summed(module, 0, x, slots).norm(dim=1)
    for row in rng.sample([row for row, slot in enumerate(slots) if slot >= 0], 4):
        bench.prepare("decode", [(slots[row], 1)])
        alone = bench.package.add("wide_proj", 0, x[row : row + 1], zero[:1].clone(), bench.step)
        assert (alone[0] - together[row]).double().norm() < within[row]


def test_nothing_past_an_adapters_rank_is_read(bench):
    """A holds NaN there, so that the intermediate would too."""
    if not bench.kind.declaration.kernels:
        pytest.skip("no kernels that know ranks")
    row_slot = bench.prepare("prefill", [(slot, 2) for slot in range(-1, len(kit.RANKS))])
    for module in bench.layout.modules:
        x, y = bench.inputs(module, row_slot), bench.random((len(row_slot), module.out_features))
        for _ in range(2):  # the first run sizes the scratch
            scratch = [tensor for tensor in bench.step.scratch_tensors() if tensor.is_floating_point()]
            for tensor in scratch:
                tensor.fill_(7.0)
            bench.package.add(module.name, 0, x, y, bench.step)
        assert scratch and not any(tensor.isnan().any() for tensor in scratch), module.name


def test_more_rows_than_every_bucket(bench, seed):
    rng = random.Random(seed)
    module = bench.layout.by_name["embed_tokens"]
    row_slot = bench.prepare("decode", [(rng.randrange(-1, len(kit.RANKS)), 1) for _ in range(90)])
    assert bench.step.ticket.bucket == 0 and bench.step.ticket.reason
    bench.check(module, 0, row_slot)
    # and the next small batch is served from the static metadata again
    bench.check(module, 0, bench.prepare("decode", [(0, 1), (-1, 1)]))


def test_a_hundred_thousand_tokens(bench, monkeypatch, seed):
    """Where Triton has no interpreter to run: rows are routed on the host, and the plain backend serves them."""
    if bench.kind.declaration.kernels or bench.kind.declaration.operators:
        pytest.skip("the interpreter, or the stand-in for an NPU, would take minutes")
    monkeypatch.setattr("lorac.runtime.step.interpreted", lambda: False)
    rng = random.Random(seed)
    cuts = sorted(rng.sample(range(1, 100_000), 7))
    counts = [b - a for a, b in zip([0, *cuts], [*cuts, 100_000], strict=True)]
    requests = [(number % (len(kit.RANKS) + 1) - 1, count) for number, count in enumerate(counts)]
    row_slot = bench.prepare("prefill", requests, logits=[1] * 8)
    bench.check(bench.layout.by_name["qkv_proj"], 1, row_slot)


def test_offsets_past_int32(bench):
    """Forty rows so far apart that the last lie more than 2**31 elements on; untouched memory costs nothing."""
    if bench.kind.declaration.operators:
        pytest.skip("operators take contiguous tensors, so gigabytes would be copied")
    rows, apart = 40, 2**31 // 32
    module = bench.layout.by_name["wide_proj"]
    bench.prepare("decode", [(-1, 1)] * (rows - 3) + [(3, 1), (1, 1), (-1, 1)])
    x_apart = apart + module.in_features % 16  # as the kernels ask of the rows of x
    far_x = torch.empty((rows - 1) * x_apart + module.in_features, dtype=bench.dtype).as_strided(
        (rows, module.in_features), (x_apart, 1)
    )
    far_y = torch.empty((rows - 1) * apart + module.out_features, dtype=bench.dtype).as_strided(
        (rows, module.out_features), (apart, 1)
    )
    x, base = bench.random((rows, module.in_features)), bench.random((rows, module.out_features))
    far_x.copy_(x)
    far_y.copy_(base)
    near = bench.package.add("wide_proj", 0, x, base.clone(), bench.step)
    bench.package.add("wide_proj", 0, far_x, far_y, bench.step)
    assert torch.equal(far_y[-3:], near[-3:]) and not torch.equal(near[-3:-1], base[-3:-1])
