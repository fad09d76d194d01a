"""Measuring candidates on the present GPU: base and LoRA of a module as one graph, checked against float64 first."""

from collections.abc import Callable
from types import ModuleType

import torch

from lorac.bench.timing import capture, interleaved
from lorac.bench.workload import TOLERANCE, Workload
from lorac.errors import BuildError
from lorac.plan.kernels import ANY_ADAPTERS
from lorac.plan.model import Launch as Planned
from lorac.runtime.launch import Kernel, Launch
from lorac.runtime.step import Step
from lorac.tune.launches import runtime_launch
from lorac.tune.search import Result
from lorac.tune.space import Site
from lorac.verify.check import poison

Call = Callable[[Step, str, int], torch.Tensor]


class Measurer:
    """Times configurations at a site beside the best so far: batches of all adapters, and of one, count alike."""

    def __init__(self, package: ModuleType, rows: Callable[[Site, Planned], list[tuple]], device: str = "cuda"):
        """`rows` gives what a configuration is launched as, one per bound on the adapters."""
        self.rows, self.workload = rows, Workload(package, device)
        self.adapters = sorted({1, package.LAYOUT.slots})
        self._launches: dict[tuple[Kernel, tuple], Launch] = {}
        self._calls: dict[tuple[str, str, int], Call] = {}

    def measure(self, site: Site, chosen: dict[Site, Planned], tried: list[Planned]) -> list[Result]:
        """Results of `tried` at a site. `chosen` has the best so far of every site of that call, this one's too."""
        wanted = self.adapters if site.adapters == ANY_ADAPTERS else [site.adapters]
        counts = sorted({min(count, site.rows) for count in wanted})
        steps = [self.workload.step(site.backend, site.rows, count, site.rank) for count in counts]
        self._install(steps, chosen)
        call = self._call(steps[0], site)
        graphs, problems, pool = [], [], torch.cuda.graph_pool_handle()
        for launch in [chosen[site], *tried]:
            self._install(steps, chosen | {site: launch})
            problem = next(filter(None, (self._wrong(step, site, call) for step in steps)), "")
            problems.append(problem)
            graphs.append(None if problem else capture(lambda: self._run(steps, site.module, call), pool))
        if graphs[0] is None:
            raise BuildError(f"{site.backend}.{site.kernel} at {site.rows} rows is wrong as declared: {problems[0]}")
        timings = iter(interleaved([graph for graph in graphs if graph]))
        best, *times = [next(timings).us if graph else 0.0 for graph in graphs]
        return [Result(us, best, problem) for us, problem in zip(times, problems[1:], strict=True)]

    def _call(self, step: Step, site: Site) -> Call:
        """`linear`, or base and `add` for a kernel that only those launch. Raises BuildError where neither does."""
        key = (site.backend, site.kernel, site.rows)
        if key not in self._calls:
            kernel = self._kernel(step, site.kernel)
            for call in (self.workload.run, self.workload.run_add):
                if _launches(kernel, lambda call=call: call(step, site.module, self.workload.layers[site.module][0])):
                    self._calls[key] = call
                    break
            else:
                raise BuildError(f"{site.backend} never launches {site.kernel} at {site.rows} rows")
        return self._calls[key]

    def _run(self, steps: list[Step], module: str, call: Call) -> None:
        for step in steps:
            for layer in self.workload.layers[module]:
                call(step, module, layer)

    def _wrong(self, step: Step, site: Site, call: Call) -> str:
        """Run eagerly, the second time on poisoned scratch; what is wrong with the result."""
        try:
            for _ in range(2):
                poison(step)
                y = call(step, site.module, self.workload.layers[site.module][0])
        except RuntimeError as error:
            return str(error).splitlines()[0]
        error = self.workload.error(step, site.module, y)
        return "" if error <= TOLERANCE[y.dtype] else f"wrong: a row's relative error is {error:.1e}"

    def _install(self, steps: list[Step], chosen: dict[Site, Planned]) -> None:
        """Make the kernels launch these configurations alone; kept, for compiled code goes with a launch."""
        tables: dict[Kernel, list[tuple]] = {}
        for site in sorted(chosen):  # a kernel's narrow bounds come first
            tables.setdefault(self._kernel(steps[0], site.kernel), []).extend(self.rows(site, chosen[site]))
        for kernel, rows in tables.items():
            for row in rows:
                if (kernel, row) not in self._launches:
                    self._launches[kernel, row] = runtime_launch(kernel, row)
            kernel.launches = tuple(self._launches[kernel, row] for row in rows)
        for step in steps:
            step.scratch.forget()  # launches bound to other configurations

    def _kernel(self, step: Step, name: str) -> Kernel:
        return next(kernel for kernel in step.backend.KERNELS if kernel.name == name)


def _launches(kernel: Kernel, run: Callable[[], object]) -> bool:
    """Whether `run`, before which nothing is bound, launches the kernel."""
    seen = []

    def noting(launch: Callable) -> Callable:
        return lambda *args, **kwargs: (seen.append(1), launch(*args, **kwargs))[1]

    kernel.run, kernel.bind = noting(kernel.run), noting(kernel.bind)
    try:
        run()
    finally:
        del kernel.run, kernel.bind
    return bool(seen)
