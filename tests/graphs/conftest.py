"""Makes `serving` importable, and gives tests a server: slots with four adapters, a step, a model, its graphs."""

import sys
import warnings
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

import serving

torch.set_num_threads(1)  # matrices here are small: more threads only wait for each other

RANKS = {"a": 8, "b": 16, "c": 4, "d": 12}


@pytest.fixture(scope="session")
def adapters(tmp_path_factory, build):
    """A PEFT folder for each name of RANKS, and others to swap in under the same names: folder(name, version)."""
    layout = build(serving.SPEC).LAYOUT
    root, made = tmp_path_factory.mktemp("adapters"), {}

    def folder(name: str, version: int = 0):
        if (name, version) not in made:
            generator = torch.Generator().manual_seed(ord(name) * 100 + version)
            made[name, version] = serving.save_adapter(root / f"{name}{version}", layout, RANKS[name], generator)
        return made[name, version]

    return folder


class Server:
    """One package served on the CPU."""

    def __init__(self, package, backend: str, adapters, generator: torch.Generator, names="abcd", **options):
        self.package, self.generator = package, generator
        self.slots = package.Slots("cpu")
        for name in names:
            self.slots.load(adapters(name), name=name)
        self.step = package.Step(self.slots, backend, **options)
        self.model = serving.Model(package, self.step, generator)

    def inputs(self, rows: int) -> torch.Tensor:
        return torch.randn(rows, 32, generator=self.generator)

    def decode(self, **options):
        return self.package.DecodeGraphs(self.model, self.step, torch.zeros(8, 32), **options)

    def prefill(self, **options):
        return self.package.PrefillGraphs(self.model, self.step, torch.zeros(64, 32), **options)

    def slots_of(self, names) -> list[int]:
        return list(self.slots.lookup(names))

    def serve(self, graphs, names, requests=None, rows_per_request: int = 1):
        """Run a batch: names per request of a decode batch, or (name, tokens) of a prefill batch. -> (ticket, outputs).

        Asserts that live rows equal the oracle, and that adapters had an effect on theirs.
        """
        if requests is None:
            ticket = self.step.prepare(names, rows_per_request=rows_per_request)
            names = [name for name in names for _ in range(rows_per_request)]
        else:
            ticket = self.step.prepare_prefill(requests)
            names = [name for name, tokens in requests for _ in range(tokens)]
        x = self.inputs(len(names))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            out = graphs.run(ticket, x)
        slots = self.slots_of(names)
        expected = self.model.oracle(x, slots)
        torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)
        base = self.model.oracle(x, [-1] * len(names))
        for row, slot in enumerate(slots):
            assert ((expected[row] - base[row]).abs().max() > 5e-2) == (slot >= 0)
        return ticket, out


@pytest.fixture
def server(build, adapters, generator, monkeypatch):
    """server(backend, spec=..., names=...) -> Server; with `route` the kernel of that name routes."""

    def make(backend: str = "csgmv", spec: dict = serving.SPEC, route: bool = False, **options) -> Server:
        if not route:  # the interpreter takes a tenth of a second for it; the host does the same in no time
            monkeypatch.setattr("lorac.runtime.step.interpreted", lambda: False)
        return Server(build(spec), backend, adapters, generator, **options)

    return make
