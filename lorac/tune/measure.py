"""Measuring candidates on the present GPU: whole calls of a module as graphs, checked against float64 first."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from types import ModuleType

import torch

from lorac.bench.timing import capture, interleaved
from lorac.bench.workload import TOLERANCE, Workload
from lorac.errors import BuildError
from lorac.plan.kernels import UNLIMITED
from lorac.plan.model import Launch as Planned
from lorac.runtime.launch import Kernel, Launch
from lorac.runtime.package import backend_module
from lorac.runtime.step import Step
from lorac.tune.batches import Batch
from lorac.tune.launches import runtime_launch
from lorac.tune.search import DeviceLost, Result
from lorac.tune.space import BARE, Site, in_library
from lorac.verify.check import poison

Chosen = dict[Site, Planned]  # what the sites of one call launch
_LONGER = 0.2, 15  # seconds, and replays of each graph at least, of what decides in the end
_BITS_ROWS = 256  # rows whose bits are compared: a tile sums all of them alike


@dataclass(frozen=True)
class Timed:
    """What became of a call: µs of each batch, what stands for its base rows' bits, and why it cannot serve."""

    us: tuple[float, ...] = ()
    bits: int = 0
    problem: str = ""


class Measurer:
    """Times configurations at a site beside the best so far, over batches that count alike.

    Where the kernel has the base, one of those is without adapters, and base rows must have the same bits in all, but
    where the library has them alone.
    """

    def __init__(
        self,
        package: ModuleType,
        rows: Callable[[Site, Planned], list[tuple]],
        batches: Callable[[Site], list[Batch]],
        device: str = "cuda",
    ):
        """`rows` gives what a configuration is launched as at a site, `batches` those whose times are the site's."""
        self.rows, self.batches, self.workload = rows, batches, Workload(package, device)
        self._kernels: dict[str, dict[str, Kernel]] = {}
        self._launches: dict[tuple[Kernel, tuple], Launch] = {}

    def measure(self, site: Site, chosen: Chosen, tried: list[Planned]) -> list[Result]:
        """Results of `tried` at a site. `chosen` has the best so far of every site of that call, this one's too."""
        best, *others = self._timed(site, self.batches(site), [chosen, *(chosen | {site: launch} for launch in tried)])
        if best.problem:
            raise BuildError(f"{site.backend}.{site.kernel} at {site.rows} rows is wrong as declared: {best.problem}")
        return [Result(of.us, best.us, of.problem, of.bits, best.bits) for of in others]

    def compare(self, declared: Chosen, chosen: Chosen, around: Chosen) -> dict[Batch, tuple[float, float]]:
        """µs with one call as declared and as chosen, by batch; empty where one of them computes something wrong.

        Of whole layers, whose other calls are as `around` has them: what wins alone may lose there, where other
        modules' launches are its neighbours. Of the call alone for a module that layers have not.
        """
        whole = bool(self.workload.common) and min(chosen).module in self.workload.per_layer
        batches = sorted({batch for site in chosen for batch in self.batches(site)}, key=lambda batch: batch[::-1])
        times: dict[Batch, tuple[float, float]] = {}
        for _, group in groupby(batches, key=lambda batch: batch[1]):  # all slots have the rank that was asked for last
            of_rank = list(group)
            calls = [around | declared, around | chosen]
            before, after = self._timed(min(chosen), of_rank, calls, *_LONGER, whole=whole)
            if before.problem or after.problem:
                return {}
            times |= dict(zip(of_rank, zip(before.us, after.us, strict=True), strict=True))
        return times

    def _timed(
        self, site: Site, batches: list[Batch], calls: list[Chosen], *replays, whole: bool = False
    ) -> list[Timed]:
        """Every call over every batch, all of one rank, their graphs replayed in turns; alone, or in `whole` layers."""
        steps = [self.workload.step(site.backend, site.rows, count, rank) for count, rank in batches]
        _make_room()
        pool = torch.cuda.graph_pool_handle()
        found, graphs = [], []
        for chosen in calls:
            self._install(steps[0], chosen)
            try:
                bits, problem = self._checked(site, steps, batches[0][1], chosen)
                if not problem:
                    graphs += [capture(partial(self._run, step, site.module, whole), pool) for step in steps]
            except RuntimeError as error:
                bits, problem = 0, self._words(site, error)
            found.append(Timed((), bits, problem))
        times = iter(interleaved(graphs, *replays) if graphs else [])
        return [of if of.problem else Timed(tuple(next(times).us for _ in steps), of.bits) for of in found]

    def _run(self, step: Step, module: str, whole: bool) -> None:
        run = partial(self.workload.run, step)
        if whole:
            self.workload.in_layers(run)
            return
        for layer in self.workload.layers[module]:
            run(module, layer)

    def _checked(self, site: Site, steps: list[Step], rank: int, chosen: Chosen) -> tuple[int, str]:
        """(what stands for base rows' bits, what is wrong): run eagerly, the second time on poisoned scratch."""
        layer, bits = self.workload.layers[site.module][0], 0
        for step in steps:
            for _ in range(2):
                poison(step)
                y = self.workload.run(step, site.module, layer)
            error = self.workload.error(step, site.module, y)
            if not error <= TOLERANCE[y.dtype]:
                return 0, f"wrong: a row's relative error is {error:.1e}"
            if not step.ticket.adapters:
                bits = _bits(y[:_BITS_ROWS])
                changed = self._changed(site, rank, y) if site.rows > 1 and self._keeps_bits(site.module, chosen) else 0
                if changed:
                    return 0, f"wrong: {changed} base rows beside adapters have other bits than without any"
        return bits, ""

    def _keeps_bits(self, module: str, chosen: Chosen) -> bool:
        """Whether a module's base rows must have the same bits with and without adapters: one GEMM sums both."""
        of_module = {of: launch for of, launch in chosen.items() if of.module == module}
        return all(in_library(bare) == in_library(adapted) for _, bare, adapted in self._with_base(of_module))

    def _words(self, site: Site, error: RuntimeError) -> str:
        """The first line of an error. Raises DeviceLost where nothing can be launched any more."""
        words = str(error).splitlines()[0]
        try:
            self.workload.random((1,)).sum().item()
        except RuntimeError:
            message = f"{site.backend}.{site.kernel} at {site.rows} rows broke the GPU's context ({words})"
            raise DeviceLost(f"{message}: go on with --resume, which leaves it out") from None
        return words

    def _changed(self, site: Site, rank: int, bare: torch.Tensor) -> int:
        """How many base rows of a batch that has adapters too differ from `bare`, the same rows without any."""
        step, base = self.workload.mixed_step(site.backend, site.rows, rank)
        poison(step)
        y = self.workload.run(step, site.module, self.workload.layers[site.module][0])
        return int((y[base] != bare[base]).any(dim=1).sum())

    def _install(self, step: Step, chosen: Chosen) -> None:
        """Make the kernels launch these configurations alone; kept, for compiled code goes with a launch."""
        tables: dict[Kernel, list[tuple]] = {}
        for site in sorted(chosen, key=lambda site: (site.adapters != BARE, site)):  # a kernel's narrow bounds first
            tables.setdefault(self._kernel(site), []).extend(self.rows(site, chosen[site]))
        for site, *launches in self._with_base(chosen):
            if site.module in getattr(step.backend, "LIBRARY", {}):
                step.backend.LIBRARY[site.module] = tuple(
                    ((1, UNLIMITED),) if in_library(launch) else () for launch in launches
                )
        for kernel, rows in tables.items():
            for row in rows:
                if (kernel, row) not in self._launches:
                    self._launches[kernel, row] = runtime_launch(kernel, row)
            kernel.launches = tuple(self._launches[kernel, row] for row in rows)
        for held in self.workload.steps:
            held.scratch.forget()  # launches bound to other configurations

    def _with_base(self, chosen: Chosen) -> Iterator[tuple[Site, Planned, Planned]]:
        """Sites of kernels with the base, each with what batches without adapters launch there, and those with some."""
        for site, adapted in chosen.items():
            if "weight" in self._kernel(site).arguments and site.adapters != BARE:
                yield site, chosen.get(replace(site, adapters=BARE), adapted), adapted

    def _kernel(self, site: Site) -> Kernel:
        if site.backend not in self._kernels:
            package = self.workload.package
            module = backend_module(package.__name__, package.BACKENDS, site.backend)
            self._kernels[site.backend] = {kernel.name: kernel for kernel in module.KERNELS}
        return self._kernels[site.backend][site.kernel]


def _make_room() -> None:
    """Give back what graphs of before have left in their pools: inside a capture the allocator cannot."""
    free, total = torch.cuda.mem_get_info()
    if free < total // 2:
        torch.cuda.empty_cache()


def _bits(y: torch.Tensor) -> int:
    """A number that two tensors of one shape share, as good as never unless their bits are the same."""
    words = y.contiguous().view({2: torch.int16, 4: torch.int32}[y.dtype.itemsize]).flatten().long()
    weights = torch.arange(1, words.numel() + 1, device=y.device) * 0x1E3779B97F4A7C15
    return int((words * weights).sum())  # wraps around
