"""Base GEMM and LoRA in tiles that several rows share: every family of sizes, against float64, with base rows kept."""

import itertools
import random

import pytest
import torch
from triton.runtime import interpreter

from lorac import reference
from lorac.runtime.errors import ShapeError
from lorac.runtime.package import backend_module
from lorac.verify.slots import numbered

# by the package's largest; of six slots of 96 columns, only those that a batch needs are read
RANKS = {6: (6, 1, 4), 12: (12, 5, 1), 24: (24, 5, 16), 96: (96, 5, 70, 33, 1, 96)}
TOLERANCE = {"float32": 3e-6, "float16": 2e-3}  # of a row; TF32 would be at 3e-4
# (phase, requests) by name: on both sides of every family's rows, adapters mixed, alone, and one after another
BATCHES = {
    "few rows, mixed": ("decode", [(-1, 1), (0, 1), (2, 1), (1, 1)] * 10),
    "one adapter": ("decode", [(1, 1)] * 70),
    "base rows alone": ("decode", [(-1, 1)] * 100),
    "two row tiles, mixed": ("decode", [(2, 1), (-1, 1), (0, 1)] * 60),
    "adapter by adapter": ("prefill", [(2, 130), (-1, 9), (0, 50), (1, 111), (2, 3)]),
    "programs that take several tiles": ("prefill", [(2, 270), (-1, 45), (0, 125), (1, 100), (0, 30)]),
    "one adapter in programs that take several tiles": ("prefill", [(1, 300), (-1, 130), (1, 97)]),
}


def spec(dtype: str, max_rank: int, library: bool = False) -> dict:
    """Widths that no block divides, one less than a span of columns; one module's inputs start on no 16 bytes.

    For a GPU whose multiprocessors are counted, widths so small are the library's.
    """
    linears = {
        "q_proj": {"in": 72, "out": 72, "path": "attn.q_proj"},
        "k_proj": {"in": 72, "out": 48, "path": "attn.k_proj"},
        "v_proj": {"in": 72, "out": 40, "path": "attn.v_proj"},
        "long_proj": {"in": 136, "out": 72, "path": "mlp.long_proj"},
        "narrow_proj": {"in": 24, "out": 40, "path": "mlp.narrow_proj"},
        "odd_proj": {"in": 50, "out": 24, "path": "mlp.odd_proj"},
    }
    fused = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}
    return {
        "lorac": 1,
        "name": "in_library" if library else "tiles",
        "model": {"hidden": 72, "layers": 1, "vocab": 61, "tied": False, "linears": linears, "fused": fused},
        "dtype": dtype,
        "adapters": {
            "slots": len(RANKS[max_rank]), "max_rank": max_rank,
            "targets": ["qkv_proj", "long_proj", "narrow_proj", "odd_proj"],
        },
        "backends": {"fused": {}},
        "graphs": {
            "decode": {"buckets": [1, 64, 128, 200], "variants": {
                "nolora": {"adapters": 0}, "one": {"adapters": 1, "rank": 8}, "few": {"adapters": 3, "rank": 16},
                "lora": {}}},
            "prefill": {"max_tokens": 1200, "max_requests": 8, "buckets": [320, 1200]},
        },
        "targets": ["sm_90"] if library else [],
    }  # fmt: skip


@pytest.fixture(
    params=[("float32", 24, False), ("float16", 24, False), ("float32", 96, False), ("float16", 24, True)], ids=str
)
def package(build, request):
    return build(spec(*request.param))


@pytest.fixture
def random_of(package, generator):
    return normal(package, generator)


def normal(package, generator):
    """Random tensors of a package's dtype, by their shape: rows of size one."""
    dtype = getattr(torch, package.LAYOUT.dtype)
    return lambda *shape: (torch.randn(shape, generator=generator) * shape[-1] ** -0.5).to(dtype)


@pytest.fixture
def slots(package, random_of):
    return filled(package, random_of)


def filled(package, random_of):
    """Slots with an adapter of each rank; what lies past it is zero, as loading leaves it."""
    limit = package.LAYOUT.max_rank
    slots = numbered(package, RANKS[limit])("cpu")
    for module, (slot, own) in itertools.product(package.LAYOUT.modules, enumerate(RANKS[limit])):
        a, b, rank, scale = slots.instance(module.name, 0)
        for part, piece in enumerate(module.slices):
            rank[slot, part], scale[slot, part] = own, 0.5 + 0.25 * slot
            a[slot, part * limit : part * limit + own] = random_of(own, module.in_features)
            b[piece.start : piece.start + piece.width, slot, :own] = random_of(piece.width, own)
    slots.renew_copies()
    return slots


@pytest.mark.parametrize("name", BATCHES)
def test_every_family_against_float64(package, slots, random_of, launched, name, seed):
    phase, requests = BATCHES[name]
    if package.LAYOUT.max_rank > 64 and name not in ("few rows, mixed", "adapter by adapter"):
        pytest.skip("beyond the rank only the steps over h differ")
    if package.LAYOUT.name == "in_library" and name not in ("one adapter", "adapter by adapter"):
        pytest.skip("by the library's side sizes differ only in this")
    if (package.LAYOUT.dtype, package.LAYOUT.name) == ("float16", "tiles") and name != "few rows, mixed":
        pytest.skip("in the other dtype only roundings differ")
    requests = random.Random(seed).sample(requests, len(requests))
    held, counts = zip(*requests, strict=True)
    rows = [slot for slot, count in requests for _ in range(count)]
    served, bare, others = (package.Step(slots, "fused") for _ in range(3))
    rotated = [slot if slot < 0 else (slot + 1) % package.LAYOUT.slots for slot in held]
    for step, of in ((served, held), (bare, [-1] * len(held)), (others, rotated)):
        step.prepare_slots(phase, list(of), list(counts))
    base = [row for row, slot in enumerate(rows) if slot < 0]
    several = package.LAYOUT.max_rank == 24 and package.LAYOUT.name != "in_library"
    for module in package.LAYOUT.modules if several else (package.LAYOUT.by_name["qkv_proj"],):
        x, weight = random_of(len(rows), module.in_features), random_of(module.out_features, module.in_features)
        x *= module.in_features**0.5
        for tensor in served.scratch_tensors():
            if tensor.is_floating_point():
                tensor.fill_(float("nan"))
        launched.clear()
        y = package.linear(module.name, 0, x, weight, served)
        tiled = module.name != "odd_proj"
        library = tiled and package.LAYOUT.name == "in_library"
        assert (f"tile_project_{module.name}" in launched) == (tiled and not library)
        assert (f"tile_expand_{module.name}" in launched) == library
        plain = package.linear(module.name, 0, x, weight, bare)
        widths = [piece.width for piece in module.slices]
        delta = reference.lora(x, *slots.instance(module.name, 0), widths, rows)
        want = x.double() @ weight.double().T + delta
        error = (y.double() - want).norm(dim=1) / want.norm(dim=1)
        assert error.max() < TOLERANCE[package.LAYOUT.dtype], (
            f"{module.name}: {error.max():.1e} at row {error.argmax()}"
        )
        by_library = library or tiled and len(rows) > 128
        if by_library:
            assert torch.equal(plain, torch.nn.functional.linear(x, weight)), f"{module.name}: the library has those"
        if library or not by_library:
            assert torch.equal(y[base], plain[base]), f"{module.name}: base rows beside adapters changed their bits"
        assert all(not torch.equal(y[row], plain[row]) for row, slot in enumerate(rows) if slot >= 0)
        again = package.linear(module.name, 0, x, weight, others if by_library else served)
        kept = base if by_library else slice(None)
        assert torch.equal(y[kept], again[kept]), f"{module.name}: other bits again, or beside other adapters"


@pytest.mark.parametrize(
    "phase, requests",
    [
        ("decode", [(1, 1), (-1, 1), (2, 1)] * 4),
        ("decode", [(2, 1)] * 70),
        ("prefill", [(2, 130), (-1, 9), (1, 61)]),
        ("prefill", [(1, 270), (2, 245), (-1, 3)]),
    ],
    ids=["few rows", "one adapter", "two row tiles", "programs that take several tiles"],
)
def test_adapters_of_low_rank_are_read_from_the_narrow_copy(package, slots, random_of, phase, requests):
    """They do not pay for the largest rank: B itself is poison here."""
    if (package.LAYOUT.dtype, package.LAYOUT.name) == ("float16", "tiles"):
        pytest.skip("in the other dtype only roundings differ")
    if sum(count for _, count in requests) > 500 and (package.LAYOUT.max_rank, package.LAYOUT.name) != (24, "tiles"):
        pytest.skip("how tiles follow one another does not depend on the rank, nor on the library")
    own = [1, 4] if package.LAYOUT.max_rank == 96 else [1, 2]  # whose ranks are at most 16
    held = [slot if slot < 0 else own[slot - 1] for slot, _ in requests]
    counts = [count for _, count in requests]
    rows = [slot for slot, count in zip(held, counts, strict=True) for _ in range(count)]
    step = package.Step(slots, "fused")
    step.prepare_slots(phase, held, counts)
    assert step.batch.rank <= 16 < package.LAYOUT.max_rank
    for module in (of for of in package.LAYOUT.modules if of.narrow):
        x, weight = random_of(len(rows), module.in_features), random_of(module.out_features, module.in_features)
        x *= module.in_features**0.5
        widths = [piece.width for piece in module.slices]
        want = x.double() @ weight.double().T + reference.lora(x, *slots.instance(module.name, 0), widths, rows)
        slots.b[module.name].fill_(float("nan"))
        y = package.linear(module.name, 0, x, weight, step).double()
        error = (y - want).norm(dim=1) / want.norm(dim=1)
        assert error.max() < TOLERANCE[package.LAYOUT.dtype], f"{module.name}: {error.max():.1e}"


@pytest.mark.parametrize("slot", [0, -1], ids=["first slot", "last slot"])
def test_one_adapter_does_not_pay_for_the_others(package, slots, random_of, slot):
    """Beside the first or the last slot nothing of B is read, in tiles wider than a slot's columns: it is poison."""
    if (package.LAYOUT.dtype, package.LAYOUT.name) == ("float16", "tiles"):
        pytest.skip("which columns are read does not depend on it")
    if package.LAYOUT.max_rank == 96:
        pytest.skip("of so many columns whole spans are read")
    slot %= package.LAYOUT.slots
    rows = [slot, -1] * 20
    step = package.Step(slots, "fused")
    step.prepare_slots("mixed", rows, [1] * len(rows))
    assert step.batch.adapters == 1
    for module in (of for of in package.LAYOUT.modules if of.name != "odd_proj"):
        x, weight = random_of(len(rows), module.in_features), random_of(module.out_features, module.in_features)
        x *= module.in_features**0.5
        widths = [piece.width for piece in module.slices]
        held = slots.instance(module.name, 0)
        want = x.double() @ weight.double().T + reference.lora(x, *held, widths, rows)
        others = [other for other in range(package.LAYOUT.slots) if other != slot]
        for b in (held[1], *held.narrow.values()):
            b[:, others] = float("nan")
        y = package.linear(module.name, 0, x, weight, step).double()
        error = (y - want).norm(dim=1) / want.norm(dim=1)
        assert error.max() < TOLERANCE[package.LAYOUT.dtype], f"{module.name}: {error.max():.1e}"


def test_a_weight_that_starts_anywhere_is_refused(package, slots, random_of):
    step = package.Step(slots, "fused")
    step.prepare_slots("decode", [0] * 40, [1] * 40)
    module = package.LAYOUT.by_name["long_proj"]
    weight = random_of(module.out_features * module.in_features + 1)[1:].view(module.out_features, module.in_features)
    with pytest.raises(ShapeError, match="starts on no 16 bytes.*weight.clone"):
        package.linear("long_proj", 0, random_of(40, module.in_features), weight, step)


def test_one_row_for_all(package, slots, random_of):
    step = package.Step(slots, "fused")
    step.prepare_slots("decode", [0] * 40, [1] * 40)
    module = package.LAYOUT.by_name["long_proj"]
    row, weight = random_of(1, module.in_features), random_of(module.out_features, module.in_features)
    whole = package.linear("long_proj", 0, row.expand(40, -1).contiguous(), weight, step)
    assert torch.equal(package.linear("long_proj", 0, row.expand(40, -1), weight, step), whole)


@pytest.mark.parametrize("package", [("float32", 24)], indirect=True, ids=str)
def test_base_rows_alone_where_no_variant_is_without_adapters(build, random_of, package):
    limit = package.LAYOUT.max_rank
    asked = spec(package.LAYOUT.dtype, limit) | {"name": "alone"}
    asked["graphs"] = {"prefill": asked["graphs"]["prefill"]}  # leaves one variant, for adapters
    alone = build(asked)
    step = alone.Step(filled(alone, random_of), "fused")
    step.prepare_slots("decode", [-1] * 40, [1] * 40)
    assert (step.batch.adapters, step.batch.rank) == (0, 0)
    module = alone.LAYOUT.by_name["long_proj"]
    x, weight = random_of(40, module.in_features), random_of(module.out_features, module.in_features)
    want = x.double() @ weight.double().T
    y = alone.linear("long_proj", 0, x, weight, step).double()
    assert ((y - want).norm(dim=1) / want.norm(dim=1)).max() < TOLERANCE[alone.LAYOUT.dtype]


@pytest.mark.parametrize("package", [("float32", 24)], indirect=True, ids=str)
@pytest.mark.parametrize("backwards", [False, True])
def test_base_requests_among_segments_by_request(build, slots, package, random_of, monkeypatch, backwards):
    """In whatever order programs run: those that write h share no element of it."""
    asked = spec(package.LAYOUT.dtype, package.LAYOUT.max_rank) | {"name": "requests"}
    asked["backends"] = {"fused": {"segments": {"by": "request", "cap": 8}}}
    requests = build(asked)
    step = requests.Step(slots, "fused")
    held, counts = [-1, 1, -1, 2], [30, 20, 10, 9]
    rows = [slot for slot, count in zip(held, counts, strict=True) for _ in range(count)]
    step.prepare_slots("prefill", held, counts)
    if backwards:
        builder = interpreter.interpreter_builder
        number = builder.set_grid_idx
        monkeypatch.setattr(builder, "set_grid_idx", lambda x, y, z: number(builder.grid_dim[0] - 1 - x, y, z))
    module = requests.LAYOUT.by_name["long_proj"]
    x, weight = random_of(len(rows), module.in_features), random_of(module.out_features, module.in_features)
    delta = reference.lora(x, *slots.instance("long_proj", 0), [module.out_features], rows)
    want = x.double() @ weight.double().T + delta
    y = requests.linear("long_proj", 0, x, weight, step).double()
    assert ((y - want).norm(dim=1) / want.norm(dim=1)).max() < TOLERANCE[requests.LAYOUT.dtype]


@pytest.mark.parametrize(
    "name, widths, stored", [("whole", (256, 512), 30), ("cut", (256, 128), 0), ("skew", (128, 126), 0)], ids=str
)
def test_tiles_of_many_rows_are_stored_whole(build, generator, monkeypatch, name, widths, stored):
    """In parts, by descriptor, where slices are whole tiles and rows start on 16 bytes. Nothing past the last row."""
    parts = {f"{name}_{at}": {"in": 72, "out": width, "path": f"mlp.{name}_{at}"} for at, width in enumerate(widths)}
    changed = spec("float32", 24) | {"name": f"stored_{name}"}
    changed["model"] = changed["model"] | {"linears": parts, "fused": {"proj": list(parts)}}
    changed["adapters"] = changed["adapters"] | {"targets": ["proj"]}
    package = build(changed)
    slots = filled(package, normal(package, generator))
    requests = [(0, 230), (-1, 77), (2, 222), (1, 1)]
    rows = [slot for slot, count in requests for _ in range(count)]
    step = package.Step(slots, "fused")
    step.prepare_slots("prefill", *map(list, zip(*requests, strict=True)))
    x, weight = (torch.randn(of, 72, generator=generator) for of in (len(rows), sum(widths)))
    memory = torch.full((len(rows) + 130, sum(widths)), float("nan"))
    stores, store = [], interpreter.InterpreterBuilder.create_descriptor_store
    kernels = backend_module(package.__name__, package.BACKENDS, "fused")
    wanted = (len(rows), sum(widths), torch.float32)
    monkeypatch.setattr(kernels, "empty_rows", lambda *made: lambda: memory[: made[0]] if made == wanted else None)
    monkeypatch.setattr(
        interpreter.InterpreterBuilder, "create_descriptor_store", lambda *of: (stores.append(1), store(*of))[1]
    )
    y = package.linear("proj", 0, x, weight, step)
    want = x.double() @ weight.double().T + reference.lora(x, *slots.instance("proj", 0), list(widths), rows)
    assert ((y.double() - want).norm(dim=1) / want.norm(dim=1)).max() < TOLERANCE["float32"]
    assert y.data_ptr() == memory.data_ptr() and memory[len(rows) :].isnan().all()
    assert len(stores) == stored


@pytest.fixture
def sharing(build, generator):
    """A package whose programs share their tiles' steps at 130 rows, and its slots with adapters."""
    inputs = 8264  # one more than the tiles for fewer take, and no whole number of steps
    linear = {"in": inputs, "out": 72, "path": "mlp.long_proj"}
    changed = spec("float32", 24) | {"name": "sharing"}
    changed["model"] = changed["model"] | {"linears": {"long_proj": linear}, "fused": {}}
    changed["adapters"] = changed["adapters"] | {"targets": ["long_proj"]}
    package = build(changed)
    slots = filled(package, normal(package, generator))
    kernels = backend_module(package.__name__, package.BACKENDS, "fused")
    assert all(kernels.TILE_PROJECT_LONG_PROJ.pick(130, 24, active).SHARES > 1 for active in (1, 3))
    return package, slots


def test_programs_that_share_a_sum_over_many_inputs(sharing, generator):
    """In turn, the last of them adds up the shares; whatever was left in them before."""
    package, slots = sharing
    a, b, rank, scale = slots.instance("long_proj", 0)
    inputs = a.shape[-1]
    step = package.Step(slots, "fused")
    rows = [row % 4 - 1 for row in range(130)]
    step.prepare_slots("decode", rows, [1] * len(rows))
    x, weight = (torch.randn(*shape, generator=generator) for shape in ((len(rows), inputs), (72, inputs)))
    made = []
    for _ in range(2):
        made.append(package.linear("long_proj", 0, x, weight, step))
        for tensor in step.scratch_tensors():
            if tensor.is_floating_point():
                tensor.fill_(float("nan"))
    want = x.double() @ weight.double().T + reference.lora(x, a, b, rank, scale, [72], rows)
    assert ((made[0] - want).norm(dim=1) / want.norm(dim=1)).max() < TOLERANCE["float32"]
    assert torch.equal(*made)


@pytest.mark.parametrize("slot", [0, 2])
def test_programs_that_share_a_sum_read_one_adapter_alone(sharing, generator, slot):
    """Also in the steps past the last, which all shares have: B of the slots beyond the nearer end is poison."""
    package, slots = sharing
    held = slots.instance("long_proj", 0)
    rows = [slot] * 129 + [-1]
    step = package.Step(slots, "fused")
    step.prepare_slots("mixed", rows, [1] * len(rows))
    assert step.batch.adapters == 1
    x, weight = (torch.randn(*shape, generator=generator) for shape in ((len(rows), held[0].shape[-1]), (72, 8264)))
    want = x.double() @ weight.double().T + reference.lora(x, *held, [72], rows)
    others = range(slot + 1, 3) if 2 * slot < 3 else range(slot)
    for b in (held[1], *held.narrow.values()):
        b[:, list(others)] = float("nan")
    y = package.linear("long_proj", 0, x, weight, step)
    assert ((y - want).norm(dim=1) / want.norm(dim=1)).max() < TOLERANCE["float32"]


@pytest.mark.parametrize(
    "dtype, max_rank, tiled", [("float16", 12, False), ("float32", 6, False), ("float32", 12, True)]
)
def test_slots_that_start_on_no_16_bytes_are_read_by_pointers(build, generator, dtype, max_rank, tiled):
    """No whole tile can begin at such a slot's columns."""
    package = build(spec(dtype, max_rank) | {"graphs": {"decode": {"buckets": [1, 8]}}})
    random_of = normal(package, generator)
    slots = filled(package, random_of)
    backend = backend_module(package.__name__, ("fused",), "fused")
    assert any(kernel.name.startswith("tile_") for kernel in backend.KERNELS) == tiled
    rows = [-1, 0, 2, 1, 1]
    step = package.Step(slots, "fused")
    for held in (rows, [1] * 5):  # one adapter alone is found by its slot
        step.prepare_slots("decode", held, [1] * 5)
        x, weight = random_of(5, 136) * 136**0.5, random_of(72, 136)
        y = package.linear("long_proj", 0, x, weight, step)
        want = x.double() @ weight.double().T + reference.lora(x, *slots.instance("long_proj", 0), [72], held)
        assert ((y.double() - want).norm(dim=1) / want.norm(dim=1)).max() < TOLERANCE[dtype]
