"""Dependent launches overlap and never race: a kernel that stores long after its dependents began changes no bit.

Each kernel in turn, then several at once, linger when they have let the next launch start; whatever reads their output
without having waited for it reads what the batch before, or poison, left there. A copy of the package whose waits are
taken out shows that this is seen.
"""

import random
from pathlib import Path

import pytest
import torch
from delays import Delays, dependent_kernels, load_lingering

import lorac
from lorac.runtime import together
from lorac.runtime.launch import Kernel
from lorac.verify.check import filled_slots

pytestmark = pytest.mark.gpu
GENERATED = Path(__file__).parents[2] / "generated"
TRIES = 3  # another process may have the GPU just while a program is late
LATE = 2_000_000  # nanoseconds: more than each of the chains takes
# chain of launches, phase, rows, variant
OVERLAPPING = [
    *[("linear", "decode", rows, "lora") for rows in (8, 64, 256)],
    ("linear", "decode", 8, "nolora"),
    ("shared", "decode", 256, "lora"),
    ("linear", "prefill", 1024, "lora"),
    *[("moe", "decode", rows, "lora") for rows in (1, 2, 8, 64)],
    ("moe", "decode", 64, "nolora"),
    *[("hooks", "decode", rows, "lora") for rows in (8, 64)],
]
# one of the two projections without adapters has stored at 64 rows when it lets the next launch start; and of programs
# that take one tile after another only the last is late
CHAINS = [
    *OVERLAPPING,
    ("alone", "decode", 64, "nolora"),
    ("linear", "decode", 64, "nolora"),
    ("linear", "prefill", 2048, "lora"),
]


class Linear:
    """o_proj and qkv_proj in turn, on Llama's shapes: y of one is x of the next, with no other kernel in between."""

    package = "llama31_8b"
    layers = (0, 1, 2)
    modules = ("o_proj", "qkv_proj")

    def __init__(self, layout, normal):
        of = [layout.by_name[name] for name in self.modules]
        weights = {module.name: normal(module.out_features, module.in_features) for module in of}
        self.weights = {name: torch.nn.Parameter(weight, requires_grad=False) for name, weight in weights.items()}
        self.widths = {module.name: module.in_features for module in of}

    def inputs(self, rows: int, normal) -> dict[str, torch.Tensor]:
        width = self.widths[self.modules[0]]
        return {"x": normal(rows, width) * width**0.5}

    def forward(self, package, step, x: torch.Tensor) -> torch.Tensor:
        first, second = self.modules
        for layer in self.layers[:2]:
            x = self.one(package, step, first, layer, x)
            x = self.one(package, step, second, layer, x)
        return self.one(package, step, first, self.layers[2], x)

    def one(self, package, step, module: str, layer: int, x: torch.Tensor) -> torch.Tensor:
        return package.linear(module, layer, x[:, : self.widths[module]], self.weights[module], step)


class Shared(Linear):
    """down_proj, whose programs share their tiles' sums at 256 rows, and gate_up_proj in turn."""

    modules = ("down_proj", "gate_up_proj")


class SharedAlone(Linear):
    """On Qwen3's shapes: without adapters programs of o_proj share their tiles' sums at 64 rows, and let go early."""

    package = "qwen3_30b_a3b"
    layers = (0, 0, 0)


class Experts:
    """Two mixtures, one reading what the other wrote, on Qwen3's shapes."""

    package = "qwen3_30b_a3b"
    layers = (0,)

    def __init__(self, layout, normal):
        self.up, self.down = (layout.by_name[name] for name in ("experts_gate_up", "experts_down"))
        self.count, self.top_k = self.up.experts.local, self.up.experts.top_k
        self.w13, self.w2 = (normal(self.count, of.out_features, of.in_features) for of in (self.up, self.down))

    def inputs(self, rows: int, normal) -> dict[str, torch.Tensor]:
        scores = normal(rows, self.count).float()
        weights, ids = torch.softmax(scores * self.count**0.5, 1).topk(self.top_k, 1)
        x = normal(rows, self.up.in_features) * self.up.in_features**0.5 * 8
        return {"x": x, "ids": ids.to(torch.int32), "weights": weights}

    def forward(self, package, step, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            x = package.moe(0, x, ids, weights, self.w13, self.w2, step)
        return x


class Hooks(Experts):
    """LoRA alone, of gate_up and down in turn: what one adds to is, as memory, the next one's x."""

    def forward(self, package, step, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        pairs = ids.numel()
        made = [x.new_zeros(pairs, of.out_features) for of in (self.up, self.down) * 2]
        for y, of in zip(made, (self.up, self.down) * 2, strict=True):
            package.add_experts(of.name, 0, x, y, ids, None if of is self.up else weights, step)
            x = y.view(-1, self.down.in_features)[:pairs] if of is self.up else y[: len(ids)]
        return x


CHAIN_CLASSES = {"linear": Linear, "shared": Shared, "alone": SharedAlone, "moe": Experts, "hooks": Hooks}


@pytest.fixture(autouse=True)
def one_by_one(monkeypatch):
    """Eager launches that never overlap, not even those of one module."""
    monkeypatch.setattr(together, "MOST", 0)


@pytest.fixture(scope="module")
def lingering(tmp_path_factory):
    """lingering(package, waits) -> (loaded copy, its delays, the original's filled slots); made once."""
    slots, copies = {}, {}

    def get(name: str, layers: tuple[int, ...], waits: bool):
        if name not in slots:
            original = lorac.load(GENERATED / name)
            filled = {
                module.name: layers if module.experts or name == Linear.package else ()
                for module in original.LAYOUT.modules
            }
            slots[name] = filled_slots(original, "cuda:0", filled, torch.Generator("cuda:0").manual_seed(0))
            copies[name] = Delays(dependent_kernels(original))
        if (name, waits) not in copies:
            target = tmp_path_factory.mktemp("lingering") / name
            copies[name, waits] = load_lingering(GENERATED / name, target, copies[name], waits)
        return copies[name, waits], copies[name], slots[name]

    return get


class Captured:
    """One graph of a chain, and the same launches one by one, where none overlap."""

    def __init__(self, lingering, seed: int, chain: str, phase: str, rows: int, variant: str, waits: bool):
        self.generator, self.rng = torch.Generator("cuda").manual_seed(seed), random.Random(seed)
        self.phase, self.rows, self.variant = phase, rows, variant
        of = CHAIN_CLASSES[chain]
        package, self.delays, slots = lingering(of.package, of.layers, waits)
        self.chain = of(package.LAYOUT, self.normal)
        self.step = package.Step(slots, "fused")
        self.delays.set({})
        graphs = package.DecodeGraphs if phase == "decode" else package.PrefillGraphs
        self.graphs = graphs(self.forward, self.step, self.chain.inputs(rows, self.normal))
        self.graphs.table = [(rows, variant)]
        self.package = package
        self.graphs.capture()

    def normal(self, *shape: int) -> torch.Tensor:
        made = torch.randn(shape, device="cuda", generator=self.generator) * shape[-1] ** -0.5
        return made.to(torch.bfloat16)

    def forward(self, **inputs) -> torch.Tensor:
        return self.chain.forward(self.package, self.step, **inputs)

    def replay(
        self, delays: dict[str, int], every: int = 1, tables: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor, float]:
        """A fresh batch through the graph with kernels lingering, the same launched one by one; nanoseconds.

        With `tables`, those that say which pairs meet which expert already hold this batch's.
        """
        lora = self.variant == "lora"
        count = self.rows if self.phase == "decode" else 4
        slots = [self.rng.randrange(-1, 8) if lora and request else 3 * lora - 1 for request in range(count)]
        inputs = self.chain.inputs(self.rows, self.normal)
        ticket = self.step.prepare_slots(self.phase, slots, [self.rows // count] * count)
        assert (ticket.bucket, ticket.variant) == (self.rows, self.variant)
        if tables:
            self.eager(inputs)
        self.poison(tables=not tables)
        self.delays.set(delays, every)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        out = self.graphs.run(ticket, inputs)
        end.record()
        out = out.clone()
        torch.cuda.synchronize()  # without waits, a launch may end before the one before it
        self.delays.set({})
        self.poison()
        return out, self.eager(inputs), begin.elapsed_time(end) * 1e6

    def eager(self, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        """What the forward returns when its kernels are launched one by one."""
        with torch.no_grad(), self.step.launching():
            return self.forward(**inputs)

    def poison(self, tables: bool = True) -> None:
        """NaN, and in tables zeros: they name no row, and are where tickets rest."""
        for tensor in self.step.scratch_tensors():
            if tensor.is_floating_point():
                tensor.fill_(float("nan"))
            elif tables:
                tensor.zero_()

    def launched(self, monkeypatch, tables: bool = False) -> list[str]:
        """The names of the kernels, in order, whether they are bound (each layer's once) or run."""
        names = []

        def noting(method):
            return lambda kernel, *args, **kwargs: (names.append(kernel.name), method(kernel, *args, **kwargs))[1]

        with monkeypatch.context() as patched:
            for method in ("run", "bind"):
                patched.setattr(Kernel, method, noting(getattr(Kernel, method)))
            self.step.scratch.forget()
            self.replay({}, tables=tables)
        assert sum(self.graphs.stats()["hits"].values()) == 1 and len(names) > len(set(names))
        return names


@pytest.mark.parametrize("chain", CHAINS, ids=lambda chain: "-".join(map(str, chain)))
def test_a_kernel_that_stores_late_changes_no_bit(lingering, chain, seed, monkeypatch):
    captured = Captured(lingering, seed, *chain, waits=True)
    launched = captured.launched(monkeypatch)
    assert min(captured.replay({})[2] for _ in range(5)) < LATE
    kernels, choose = sorted(set(launched)), captured.rng.choice
    several = [{name: choose((0, LATE // 50, LATE // 4, LATE)) for name in kernels} for _ in range(4)]
    before = None
    for delays in [*({name: LATE} for name in kernels), dict.fromkeys(kernels, LATE), *several]:
        for every in (1, 4):
            out, expected, took = captured.replay(delays, every)
            assert torch.equal(out, expected), f"with {delays} {(out != expected).any(1).sum()} rows differ"
            assert expected.isfinite().all() and (before is None or not torch.equal(expected, before))
            assert took >= max(time * launched.count(name) for name, time in delays.items())
            before = expected


@pytest.mark.parametrize("chain", OVERLAPPING, ids=lambda chain: "-".join(map(str, chain)))
def test_without_waits_a_kernel_that_stores_late_is_seen(lingering, chain, seed, monkeypatch):
    captured = Captured(lingering, seed, *chain, waits=False)
    # Tables that change while a program reads them may send home some of its warps alone, and a product of matrices
    # without them is an illegal instruction. So they stay as they are, or come late as a whole.
    for name in sorted(set(captured.launched(monkeypatch, tables=True)[:-1])):
        late = name.startswith("align")
        for _ in range(TRIES):
            # every fourth program: the others leave room for the next launch on each multiprocessor
            out, expected, _ = captured.replay({name: LATE}, every=1 if late else 4, tables=not late)
            assert expected.isfinite().all()
            if not torch.equal(out, expected):
                break
        else:
            pytest.fail(f"a late {name} is not seen")
