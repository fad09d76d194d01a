"""Launches bound once: used again for tensors anywhere, bound anew once anything they point to or depend on changed."""

import itertools

import pytest
import torch

from lorac import reference
from lorac.runtime import apply, compiled, launch, scratch
from lorac.runtime.bound import bound
from lorac.runtime.compiled import Compiled, Unaligned
from lorac.runtime.errors import PackageError, ShapeError, TicketError
from lorac.runtime.launch import Kernel, Moving
from lorac.verify.slots import numbered

IN, OUT, RANKS = 48, 80, (8, 3, 5)


def spec(dtype: str) -> dict:
    linears = {name: {"in": IN, "out": OUT, "path": f"mlp.{name}"} for name in ("up_proj", "down_proj")}
    return {
        "lorac": 1,
        "name": "bound",
        "model": {"hidden": IN, "layers": 2, "vocab": 61, "tied": False, "linears": linears},
        "dtype": dtype,
        "adapters": {"slots": len(RANKS), "max_rank": 8, "targets": ["up_proj", "down_proj"]},
        "backends": {"fused": {}, "triton": {"segments": {"by": "request", "cap": 4}}, "torch": {}},
        "graphs": {"decode": {"buckets": [1, 4, 8]}, "prefill": {"max_tokens": 64, "max_requests": 4}},
    }


class Bench:
    """A package, its filled slots, and what was bound and launched: (kernel, arguments) of each."""

    def __init__(self, package, generator: torch.Generator, launched: list):
        self.package, self.generator, self.launched = package, generator, launched
        self.slots = numbered(package, RANKS)("cpu")
        for module, layer, (slot, rank) in itertools.product(package.LAYOUT.modules, (0, 1), enumerate(RANKS)):
            a, b, ranks, scales = self.slots.instance(module.name, layer)
            ranks[slot], scales[slot] = rank, 0.5 + slot
            a[slot, :rank], b[:, slot, :rank] = self.random(rank, IN), self.random(OUT, rank)

    def random(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator)

    def prepare(self, step, slots: list[int], counts: list[int] | None = None) -> list[int]:
        step.prepare_slots("prefill" if counts else "decode", slots, counts or [1] * len(slots))
        return [slot for slot, count in zip(slots, counts or [1] * len(slots), strict=True) for _ in range(count)]

    def settle(self, step, slots: list[int], counts: list[int] | None = None) -> list[int]:
        """Prepare, and check twice: the first time scratch may grow, which forgets what was bound before."""
        rows = self.prepare(step, slots, counts)
        for _ in range(2):
            self.check(step, rows)
        return rows

    def check(self, step, rows: list[int], module: str = "up_proj", layer: int = 0, x=None) -> None:
        """`linear` and `add` of new tensors against float64, with NaN in scratch."""
        x = self.random(len(rows), IN) if x is None else x
        weight, y = self.random(OUT, IN), self.random(*x.shape[:-1], OUT)
        slot, flat = self.slots.instance(module, layer), x.reshape(-1, IN)
        delta = reference.lora(flat, *slot, [OUT], rows)
        before = y.double().view(-1, OUT)
        for tensor in step.scratch_tensors():
            if tensor.is_floating_point():
                tensor.fill_(float("nan"))
        self.package.add(module, layer, x, y, step)
        made = self.package.linear(module, layer, x, weight, step)
        assert made.shape == y.shape
        for got, want in ((y, before + delta), (made, flat.double() @ weight.double().T + delta)):
            error = (got.double().view(-1, OUT) - want).norm(dim=1) / want.norm(dim=1)
            assert error.max() < 1e-5, error.tolist()
        assert delta.norm() > 1


@pytest.fixture
def launched(monkeypatch):
    """(kernel, arguments) of every launch, in order."""
    seen, run = [], Kernel.run

    def noting(kernel, configuration, grid, **arguments):
        seen.append((kernel.name, arguments))
        run(kernel, configuration, grid, **arguments)

    monkeypatch.setattr(Kernel, "run", noting)
    return seen


@pytest.fixture
def binds(monkeypatch):
    """Names of the kernels that were bound, but for the one that routes."""
    names, bind = [], Kernel.bind

    def noting(kernel, *args, **arguments):
        names.append(kernel.name)
        return bind(kernel, *args, **arguments)

    monkeypatch.setattr(
        Kernel, "bind", lambda kernel, *a, **k: (kernel.name == "route" and bind or noting)(kernel, *a, **k)
    )
    return names


@pytest.fixture
def bench(build, generator, launched):
    return Bench(build(spec("float32")), generator, launched)


@pytest.fixture(params=["fused", "triton"])
def step(bench, request):
    return bench.package.Step(bench.slots, request.param)


def test_a_batch_like_one_before_is_launched_by_what_was_bound(bench, step, binds):
    bench.settle(step, [0, -1, 1, 0])
    assert binds
    binds.clear()
    for slots in ([2, 1, -1, 2], [0, -1, 1, 0]):  # as many adapters, in other rows; x, weight and y elsewhere
        bench.check(step, bench.prepare(step, slots))
    assert not binds
    bench.check(step, bench.prepare(step, [0, -1, 1, 0]), layer=1)
    assert binds
    binds.clear()
    bench.check(step, bench.prepare(step, [0, -1, 1, 0]), "down_proj")
    assert binds


def test_what_was_launched_before_is_neither_checked_nor_looked_up(bench, step, monkeypatch):
    rows = bench.settle(step, [0, -1, 1, 0])
    monkeypatch.setattr(apply, "_FIRST", {})
    bench.check(step, rows)
    with pytest.raises(KeyError):
        bench.check(step, rows, layer=1)


def test_what_a_launch_depends_on_binds_it_anew(bench, step, binds):
    for slots, counts in (([0, 1, 2, -1], None), ([0, 1], None), ([0] * 8, None), ([0, 2], [20, 15]), ([1], [36])):
        binds.clear()
        bench.settle(step, slots, counts)
        assert binds
        binds.clear()
        bench.check(step, bench.prepare(step, slots, counts))
        assert not binds


def test_scratch_that_grew_is_bound_anew(bench, step, binds):
    few = [0, 1, -1]
    bench.check(step, bench.prepare(step, few))
    outgrown = {of.data_ptr() for of in step.scratch_tensors() if of.is_floating_point()}
    bench.check(step, bench.prepare(step, [0, 1, 2], [30, 9, 20]))
    assert step.scratch.replaced
    binds.clear()
    bench.launched.clear()
    bench.check(step, bench.prepare(step, few))
    assert binds
    held = {of.data_ptr() for of in step.scratch_tensors()}
    used = {arguments["h"].data_ptr() for _, arguments in bench.launched if "h" in arguments}
    assert used and used <= held and not used & (outgrown - held)


def test_scratch_that_grows_while_launches_are_bound_is_the_same_for_all_of_them(bench):
    step = bench.package.Step(bench.slots, "fused")
    bench.prepare(step, [0, 1])

    @bound
    def twice(x, y, slot, batch, scratch):
        first, second = scratch("h", 10, torch.float32), scratch("h", 20, torch.float32)
        return lambda x, y: (first, second)

    batch, slot = step.enter("up_proj", 0)
    first, second = twice(bench.random(2, IN), bench.random(2, OUT), slot, batch, step.scratch)
    assert first is second

    x = bench.random(2, IN)
    kept = {key: len(made) for key, made in step.scratch.bound(batch).items()}
    assert sum(kept.values()) == 1
    twice(x, x, slot, batch, step.scratch)  # one tensor given twice is never recognised, so it is not kept
    assert {key: len(made) for key, made in step.scratch.bound(batch).items()} == kept

    @bound
    def never_done(x, y, slot, batch, scratch):
        scratch("mine", 10, torch.float32), scratch("mine", 10, torch.int32)

    with pytest.raises(PackageError, match="never_done asks for scratch of one name"):
        never_done(bench.random(2, IN), bench.random(2, OUT), slot, batch, step.scratch)


def test_metadata_that_was_outgrown_is_read_no_more(bench, step):
    for tokens in (70, 90, 70, 120, 90):
        rows = bench.prepare(step, [0, -1, 2], [tokens - 20, 5, 15])
        bench.launched.clear()
        bench.check(step, rows)
        tables = {name: arguments[name] for _, arguments in bench.launched for name in arguments if name == "seg_slot"}
        assert all(table.data_ptr() == step.batch.map.seg_slot.data_ptr() for table in tables.values())


def test_an_adapter_written_over_is_read_where_it_was(bench, step, binds):
    rows = bench.settle(step, [0, 1])
    binds.clear()
    bench.slots.instance("up_proj", 0)[1][:, 0] *= 3
    bench.check(step, rows)
    assert not binds


def test_tensors_laid_out_otherwise(bench, step, binds):
    rows = bench.settle(step, [0, 1, 2, -1])
    wide = bench.random(4, 2 * IN)
    flat = bench.random(4 * IN + 1)
    for x in (
        wide[:, :IN],
        flat[1:].view(4, IN),
        bench.random(IN, 4).T,
        bench.random(2, 2, IN),
        wide[:1, :IN].expand(4, -1),
    ):
        for _ in range(2):
            bench.check(step, rows, x=x)
    binds.clear()
    bench.check(step, rows, x=bench.random(2, 2, IN))
    assert not binds


def test_tensors_that_do_not_fit_are_refused_after_others_did(bench, step):
    rows = bench.prepare(step, [0, 1])
    bench.check(step, rows)
    add, linear = bench.package.add, bench.package.linear
    x, y, weight = bench.random(2, IN), bench.random(2, OUT), bench.random(OUT, IN)
    for bad in (x.half(), x[:1], x[:, :-1], x.to("meta")):
        with pytest.raises(ShapeError):
            add("up_proj", 0, bad, y, step)
    for bad in (y.half(), y[:1], y[:, :-1], y.to("meta")):
        with pytest.raises(ShapeError):
            add("up_proj", 0, x, bad, step)
    for bad in (y[:1].expand(2, -1), bench.random(2 * OUT).as_strided((2, OUT), (OUT // 2, 1))):
        before = bad.clone()
        with pytest.raises(ShapeError, match="y has strides .* rows that share memory"):
            add("up_proj", 0, x, bad, step)
        assert torch.equal(bad, before)
    if step.backend_name == "fused":
        with pytest.raises(ShapeError, match="weight has strides"):
            linear("up_proj", 0, x, weight.T.contiguous().T, step)
        with pytest.raises(ShapeError, match="weight is .* on meta, expected"):
            linear("up_proj", 0, x, weight.to("meta"), step)
        with pytest.raises(ShapeError, match="starts on no 16 bytes"):
            linear("up_proj", 0, x, bench.random(OUT * IN + 1)[1:].view(OUT, IN), step)
    bench.prepare(step, [0, 1, 2])
    with pytest.raises(ShapeError, match="prepared for 3"):
        add("up_proj", 0, x, y, step)


@pytest.mark.parametrize("backend", ["fused", "triton", "torch"])
def test_a_base_layer_that_does_not_fit_is_refused_whoever_runs_it(bench, backend):
    step = bench.package.Step(bench.slots, backend)
    x, weight, bias = bench.random(2, IN), bench.random(OUT, IN), bench.random(OUT)
    linear = bench.package.linear
    with pytest.raises(TicketError, match="no batch was prepared"):
        linear("up_proj", 0, x, weight[:, 1:], step)
    rows = bench.prepare(step, [0, 1])
    bench.check(step, rows)
    bad = [
        ((x, of), "up_proj: weight is") for of in (weight.half(), weight[:-1], weight[:, 1:], weight[0], weight[0, 0])
    ]
    bad += [((of, weight), "up_proj: x ") for of in (x.half(), x[:, 1:], x[:1], x[0, 0], x.to("meta"))]
    for arguments, match in bad:
        for more in ((), (bias,)):
            with pytest.raises(ShapeError, match=match):
                linear("up_proj", 0, *arguments, step, *more)
    bench.check(step, rows)
    linear("up_proj", 0, x, weight, step, bias)
    for of in (bias[:1], bias[0], bias[1:], bias.half(), bias.expand(2, -1)):
        with pytest.raises(ShapeError, match="up_proj: bias is"):
            linear("up_proj", 0, x, weight, step, of)
    with pytest.raises(ShapeError, match="no module 'qkv_proj'"):
        linear("qkv_proj", 0, x, weight, step)


@pytest.mark.parametrize("slots", [[-1], [1]], ids=["without adapters", "with one"])
def test_the_library_is_given_what_kernels_would_be(bench, slots):
    """Past the rows that have a kernel of their own, and after tensors that fit."""
    step = bench.package.Step(bench.slots, "fused")
    bench.prepare(step, slots, [200])
    x, weight = bench.random(200, IN), bench.random(OUT, IN)
    off, off_x = bench.random(OUT * IN + 1)[1:].view(OUT, IN), bench.random(200 * IN + 1)[1:].view(200, IN).copy_(x)
    for _ in range(2):
        with pytest.raises(ShapeError, match="starts on no 16 bytes"):
            bench.package.linear("up_proj", 0, x, off, step)
        made = bench.package.linear("up_proj", 0, x, weight, step)
        assert torch.equal(bench.package.linear("up_proj", 0, off_x, weight, step), made)
    if slots == [-1]:
        assert {name for name, _ in bench.launched} == {"route"}, "the library has those"


def test_one_row_is_bound_for_once_however_it_lies(bench, step):
    bench.prepare(step, [0])
    weight = bench.random(OUT, IN)
    for apart in range(2, 6):
        x, y = bench.random(1, apart, IN)[:, -1], torch.zeros(1, apart * OUT)[:, :OUT]
        bench.package.add("up_proj", 0, x, y, step)
        bench.package.linear("up_proj", 0, x, weight, step)
    assert {len(made) for made in step.scratch.bound(step.batch).values()} == {1}


def test_one_row_may_lie_as_it_likes_after_others_did_not(bench, step):
    """A tensor of one row is contiguous however far its rows would be apart."""
    bench.prepare(step, [0])
    x, weight = bench.random(1, IN), bench.random(OUT, IN)
    apart = bench.random(2, IN + 1)[:1, :IN]
    apart.copy_(x)
    assert apart.is_contiguous() and apart.stride() != x.stride()
    for call in (
        lambda x: bench.package.add("up_proj", 0, x, torch.zeros(1, OUT, dtype=x.dtype), step),
        lambda x: bench.package.linear("up_proj", 0, x, weight, step),
    ):
        assert torch.equal(call(apart), call(x)) and torch.equal(call(apart), call(x))


def test_a_batch_of_base_rows_binds_nothing_of_lora(bench, step, binds):
    bench.prepare(step, [-1, -1])
    x, y = bench.random(2, IN), bench.random(2, OUT)
    before = y.clone()
    for _ in range(2):
        bench.package.add("up_proj", 0, x, y, step)
        bench.package.linear("up_proj", 0, x, bench.random(OUT, IN), step)
    assert torch.equal(y, before)
    assert binds == (["tile_project_up_proj"] if step.backend_name == "fused" else [])


def test_few_kinds_of_batches_are_kept(bench, step, binds, monkeypatch):
    monkeypatch.setattr(scratch, "_MOST_KINDS", 2)
    bench.settle(step, [0, 1, 2])  # the scratch of all
    kinds = [0], [0, 1], [0, 1, 2]
    for slots in kinds:
        bench.check(step, bench.prepare(step, slots))
    binds.clear()
    for slots in (kinds[2], kinds[1]):
        bench.check(step, bench.prepare(step, slots))
    assert not binds
    bench.check(step, bench.prepare(step, kinds[0]))
    assert binds and len(step.scratch._bound) == 2


def test_steps_share_nothing_bound(bench, binds):
    for _ in range(2):
        step = bench.package.Step(bench.slots, "fused")
        bench.check(step, bench.prepare(step, [0, 1]))
        assert binds
        binds.clear()


class Driver:
    """Stands for Triton's driver and its launcher of one kernel: notes what each launch is passed."""

    function, packed_metadata = 4711, (4, 1, 0)

    def __init__(self):
        self.calls, self.launch_pdl, self.active, self.stream = [], None, self, 7

    @property
    def run(self):
        return self

    def _init_handles(self): ...

    def get_current_stream(self, device: int) -> int:
        return self.stream

    def __call__(self, *passed):
        self.calls.append((passed, self.launch_pdl))

    def __getitem__(self, grid):
        return lambda *passed: self.calls.append((grid, passed))


@pytest.fixture
def driver(monkeypatch):
    driver = Driver()
    monkeypatch.setattr(compiled, "driver", driver)
    monkeypatch.setattr(launch, "interpreted", lambda: False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: driver.stream == 9)
    return driver


def kernel_of(bench, name: str) -> Kernel:
    backend = bench.package.Step(bench.slots, "fused").backend
    return next(kernel for kernel in backend.KERNELS if kernel.name == name)


def bind(kernel: Kernel, driver: Driver, pdl: bool, monkeypatch, **given):
    """(what `bind` returns for a stand-in of the compiled kernel, its fixed arguments by name)"""
    of = kernel.launches[-1]
    monkeypatch.setitem(kernel._compiled, (of, 0), Compiled(driver, tuple(of.constants.values()), pdl))
    fixed = {
        name: torch.zeros(16, 64) if kind.startswith(("*", "tile")) else 100 + n
        for n, (name, kind) in enumerate(kernel.arguments.items())
    }
    return kernel.bind(of, (5, 2), **fixed | given), fixed | given


@pytest.mark.parametrize("pdl", [False, True])
def test_a_compiled_kernel_gets_the_addresses_of_each_call(bench, driver, pdl, monkeypatch):
    kernel = kernel_of(bench, "segment_shrink_up_proj")
    moving = {name: Moving((4, IN), (IN, 1)) for name in ("x", "a", "h")}
    call, arguments = bind(kernel, driver, pdl, monkeypatch, **moving)
    for stream in (7, 9, 8):
        driver.stream = stream  # 9 is being captured
        tensors = {name: torch.zeros(4, IN) for name in moving}
        call(*tensors.values())
        passed, launched_pdl = driver.calls[-1]
        want = [tensors.get(name, value) for name, value in arguments.items()]
        want = [value.data_ptr() if isinstance(value, torch.Tensor) else value for value in want]
        head = (5, 2, 1, stream, Driver.function, Driver.packed_metadata, None, None, None)
        assert passed == (*head, *want, *kernel.launches[-1].constants.values())
        assert launched_pdl == (stream == 9 if pdl else None)


def test_a_compiled_kernel_takes_no_tensor_that_starts_off_16_bytes(bench, driver, monkeypatch):
    kernel = kernel_of(bench, "segment_shrink_up_proj")
    call, _ = bind(kernel, driver, False, monkeypatch, x=Moving((4, IN), (IN, 1)))
    with pytest.raises(Unaligned):
        call(torch.zeros(4 * IN + 1)[1:].view(4, IN))
    assert not driver.calls


def test_a_descriptor_is_of_the_tensor_of_each_call(bench, driver, monkeypatch):
    kernel = kernel_of(bench, "tile_project_up_proj")
    moving = {"x": Moving((4, IN), (96, 1)), "weight": Moving((OUT, IN), (IN, 1)), "y": Moving((4, OUT), (OUT, 1))}
    call, _ = bind(kernel, driver, True, monkeypatch, **moving)
    descriptors = []
    for _ in range(2):
        x, weight, y = torch.zeros(4, 96)[:, :IN], torch.zeros(OUT, IN), torch.zeros(4, OUT)
        call(x, weight, y)
        passed = dict(zip(kernel.arguments, driver.calls[-1][0][9:], strict=False))
        of = kernel.launches[-1]
        for name, tensor, rows in (("x", x, of.BLOCK_M), ("weight", weight, of.BLOCK_N)):
            descriptor = passed[name]
            assert descriptor.base.data_ptr() == tensor.data_ptr() and descriptor.base.dtype == tensor.dtype
            assert (tuple(descriptor.shape), tuple(descriptor.strides)) == (tuple(tensor.shape), tensor.stride())
            assert descriptor.block_shape == [rows, of.BLOCK_K]
        assert passed["y"] == y.data_ptr()
        descriptors.append(passed["x"])
    assert descriptors[0] is descriptors[1]


def test_profilers_see_bound_launches(bench, driver, monkeypatch):
    kernel = kernel_of(bench, "segment_shrink_up_proj")
    call, arguments = bind(kernel, driver, False, monkeypatch, x=Moving((4, IN), (IN, 1)))
    monkeypatch.setattr(compiled.triton.knobs.runtime.launch_enter_hook, "calls", [print])
    x = torch.zeros(4, IN)
    call(x)
    grid, passed = driver.calls[-1]
    assert grid == (5, 2, 1) and passed[0] == x.data_ptr()
    assert passed[len(arguments) :] == tuple(kernel.launches[-1].constants.values())


def test_an_empty_grid_is_no_launch(bench, driver):
    kernel = kernel_of(bench, "segment_shrink_up_proj")
    kernel.bind(kernel.launches[-1], (0,), x=Moving((0, IN), (IN, 1)))(torch.zeros(0, IN))
    assert not driver.calls
