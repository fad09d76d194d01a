"""Many registered adapters over few slots, asked for by Zipf's law: right outputs, and no growth of memory.

    python -m lorac.bench.zipf PACKAGE [--adapters 1000] [--steps 10000]

Each step brings its batch's adapters to slots, from the host's cache or from their files, and replays a decode graph.
Sampled steps are compared with float64 products of the factors in the adapters' files, by name.

A thousand adapters of an 8B model take 70 GB of disk, and an hour to write and read: serve two layers of its shapes,
    model: {hidden: 4096, intermediate: 14336, heads: 32, kv_heads: 8, head_dim: 128, layers: 2, vocab: 128256, ...}
"""

import argparse
import itertools
import json
import random
import resource
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import torch

from lorac.bench.adapters import delta, write_adapter
from lorac.bench.given import given_package
from lorac.bench.workload import TOLERANCE

_BASE_SHARE = 0.1  # of rows without an adapter
_CACHED_SHARE = 0.4  # of the adapters' bytes that the host may keep
_RECORDS = 10  # of memory, over the run


class Server:
    """A package served over a folder of adapters; its model is every linear module of the last layer, side by side."""

    def __init__(self, package: ModuleType, backend: str, device: str, adapters: int, root: Path, seed: int):
        self.package, self.layout, self.device = package, package.LAYOUT, torch.device(device)
        self.random = random.Random(seed)
        self.modules = [module for module in self.layout.modules if module.kind == "linear"]
        self.names = [f"adapter{number}" for number in range(adapters)]
        generator = torch.Generator().manual_seed(seed)
        self.folders = {name: self._write(root / name, generator) for name in self.names}
        size = sum(file.stat().st_size for folder in self.folders.values() for file in folder.iterdir())
        self.slots = package.Slots(device, cache_bytes=int(size * _CACHED_SHARE))
        for name, folder in self.folders.items():
            self.slots.register(name, folder)
        self.step = package.Step(self.slots, backend)
        buckets = [bucket for bucket, _ in package.decode.GRAPHS[backend]]
        self.most = max(buckets)
        dtype = getattr(torch, self.layout.dtype)
        inputs = [torch.zeros(self.most, module.in_features, device=device, dtype=dtype) for module in self.modules]
        self.graphs = package.DecodeGraphs(self._forward, self.step, inputs, strict=True)
        self.graphs.capture()
        on_device = torch.Generator(device).manual_seed(seed)
        self.x = [torch.randn(x.shape, device=device, dtype=dtype, generator=on_device) for x in inputs]
        self.asked = self._asked()

    def serve(self) -> tuple[list[str | None], tuple[torch.Tensor, ...]]:
        """One step: (adapter or None per row, the deltas of each module)."""
        rows = self._batch()
        self.step.finish()
        self.slots.ensure(rows)
        ticket = self.step.prepare(rows)
        return rows, self.graphs.run(ticket, [x[: len(rows)] for x in self.x])

    def error(self, rows: list[str | None], deltas: tuple[torch.Tensor, ...]) -> float:
        """The largest relative error of a row; infinite where a base row was changed."""
        worst = 0.0
        for module, x, made in zip(self.modules, self.x, deltas, strict=True):
            for name in set(rows):
                own = [row for row, of in enumerate(rows) if of == name]
                if name is None:
                    worst = max(worst, float("inf") if made[own].any() else 0.0)
                    continue
                expected = delta(self.folders[name], module, module.layers[-1], x[own])
                off, size = (made[own] - expected).norm(dim=1), expected.norm(dim=1)
                # where an adapter has nothing, nothing may be added
                worst = max(
                    worst, torch.where(size > 0, off / size, off * float("inf")).nan_to_num(0.0, torch.inf).max().item()
                )
        return worst

    def _forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(
            self.package.add(module.name, module.layers[-1], x, x.new_zeros(x.shape[0], module.out_features), self.step)
            for module, x in zip(self.modules, inputs, strict=True)
        )

    def _batch(self) -> list[str | None]:
        """A random number of rows with at most as many adapters as there are slots."""
        rows, present = [], set()
        for _ in range(self.random.randint(1, self.most)):
            name = None if self.random.random() < _BASE_SHARE else next(self.asked)
            if len(present | {name}) > self.layout.slots:
                name = self.random.choice(sorted(present))
            present |= {name} - {None}
            rows.append(name)
        return rows

    def _asked(self) -> Iterator[str]:
        """Names without end, the n-th as often as 1/n."""
        weights = list(itertools.accumulate(1 / (number + 1) for number in range(len(self.names))))
        while True:
            yield from self.random.choices(self.names, cum_weights=weights, k=1000)

    def _write(self, folder: Path, generator: torch.Generator) -> Path:
        """Of a random rank and scale, on some modules."""
        rank = self.random.choice([r for r in (2, 4, 8, 16, 32, 64) if r <= self.layout.max_rank])
        names = [module.name for module in self.modules]
        chosen = self.random.sample(names, self.random.randint(1, len(names)))
        return write_adapter(folder, self.layout, rank, generator, chosen, alpha=self.random.choice([rank, 2 * rank]))


def memory(server: Server) -> dict[str, int]:
    """Bytes: of the process, of the host's cache, and of the device by torch and by the driver."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    used = {"host": pages * resource.getpagesize(), "cache": server.slots.host_bytes}
    if server.device.type == "cuda":
        free, total = torch.cuda.mem_get_info(server.device)
        used |= {"allocated": torch.cuda.memory_allocated(server.device), "device": total - free}
    return used


def run(server: Server, steps: int, every: int) -> dict:
    """Serve, compare one step in `every`, and record memory along the way."""
    records, errors, started, loads = [], [], time.perf_counter(), server.slots.generation
    for number in range(1, steps + 1):
        rows, deltas = server.serve()
        if server.device.type == "cuda":
            torch.cuda.current_stream(server.device).synchronize()  # as an engine does to read the tokens
        if number % every == 0 or number == 1:
            errors.append(server.error(rows, deltas))
        if number % max(1, steps // _RECORDS) == 0:
            records.append({"step": number, **memory(server)})
    settled, last = records[len(records) // 2], records[-1]
    return {
        "steps": steps,
        "seconds": time.perf_counter() - started,
        "adapters_brought": server.slots.generation - loads,
        "compared": len(errors),
        "worst_error": max(errors),
        "graph_replays": sum(server.graphs.stats()["hits"].values()),
        "growth_of_second_half": {name: last[name] - settled[name] for name in last if name != "step"},
        "memory": records,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("package")
    parser.add_argument("--backend", help="the package's first unless given")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--adapters", type=int, default=1000)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--every", type=int, default=25, help="steps of which one is compared, beside the first")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    package = given_package(given.package)
    backend = given.backend or package.BACKENDS[0]
    with tempfile.TemporaryDirectory() as root:
        server = Server(package, backend, given.device, given.adapters, Path(root), given.seed)
        found = run(server, given.steps, given.every)
    tolerance = TOLERANCE[getattr(torch, package.LAYOUT.dtype)]
    print(json.dumps({"package": package.LAYOUT.name, "backend": backend, **vars(given), **found}, indent=1))
    print(f"worst error {found['worst_error']:.1e} (tolerance {tolerance:.0e}) of {found['compared']} steps compared")
    raise SystemExit(found["worst_error"] > tolerance)


if __name__ == "__main__":
    main()
