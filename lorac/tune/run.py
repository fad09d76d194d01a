"""`lorac tune`: a search at every site of a spec, for as long as it may take, and the table of what won."""

import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from lorac.emit import emit
from lorac.errors import BuildError
from lorac.fingerprint import fingerprint
from lorac.plan.build import Tuned, make_plan
from lorac.plan.model import KernelPlan, Launch, Plan
from lorac.render.package import launch_row, render
from lorac.spec import load_spec
from lorac.spec.backend import Declaration, Kernel, Tile
from lorac.spec.folders import BackendFolder, find_folders
from lorac.spec.load import SpecFile
from lorac.tune.journal import Journal
from lorac.tune.model import Machine, Model, live_segments
from lorac.tune.search import Result, Search
from lorac.tune.space import Site, candidates, declared
from lorac.tune.table import table_path, table_text

ROWS = (1, 16, 64, 128, 256, 1024, 4096)
KINDS = ("linear", "lm_head")
_AT_ONCE = 3  # candidates timed beside the best in one visit of a site


@dataclass(frozen=True)
class Gpu:
    """The present GPU: its name, its target and what the model needs of it."""

    name: str
    target: str
    machine: Machine = Machine()


Rows = Callable[[Site, Launch], list[tuple]]  # what a configuration is launched as, one per bound on the adapters


class Measures(Protocol):
    """See `lorac.tune.measure.Measurer`."""

    def measure(self, site: Site, chosen: dict[Site, Launch], tried: list[Launch]) -> list[Result]: ...


class Compiles(Protocol):
    """See `lorac.tune.compiler.Compiler`."""

    def submit(self, site: Site, launch: Launch) -> None: ...

    def ready(self, site: Site, launch: Launch) -> bool: ...

    def problem(self, site: Site, launch: Launch) -> str: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class Tools:
    """What a search works with, made from the folder of the package that is measured and what its kernels launch."""

    measurer: Callable[[Path, Rows], Measures]
    compiler: Callable[[Path, Rows, str], Compiles]


@dataclass(frozen=True)
class Outcome:
    """What a search found: the table's path, each site's search, and why it ended."""

    table: Path
    searches: dict[Site, Search]
    ended: str


def tune(
    spec: Path, gpu: Gpu, tools: Tools, *, backends: list[str] | None, rows: list[int] | None, budget: float,
    resume: bool, show: Callable[[float, str], None], clock: Callable[[], float] = time.monotonic,
) -> Outcome:  # fmt: skip
    """Search for `budget` seconds and write the table. An interrupted search leaves its journal, for `resume`.

    Raises SpecError for the spec, BuildError where the GPU is none of its targets or a declared tile computes nonsense.
    """
    begun = clock()
    file = load_spec(spec)
    if gpu.target not in file.spec.targets:
        named = ", ".join(file.spec.targets) or "none"
        raise BuildError(
            f"{spec}: this GPU is {gpu.target}, the spec's targets are {named}: "
            f"its table would serve nothing; add targets: [{gpu.target}]"
        )
    folders = find_folders(file)
    problem = _Problem(file, folders, gpu, backends, rows)
    table = table_path(spec, file.spec.name, gpu.name)
    with tempfile.TemporaryDirectory(prefix="lorac-tune-") as place:
        package = Path(place) / file.spec.name
        emit(problem.files, package)
        journal = Journal(table.with_suffix(".journal"), gpu.name, problem.fingerprint, resume)
        for site, launch, result in journal.past:
            if site in problem.searches:
                problem.searches[site].note(launch, result)
        ended = "the budget is spent"
        if clock() - begun < budget:
            compiler = tools.compiler(package, problem.rows, gpu.target)
            try:
                ended = _search(
                    problem.searches,
                    compiler,
                    tools.measurer(package, problem.rows),
                    journal,
                    begun,
                    budget,
                    show,
                    clock,
                )
            finally:
                compiler.close()
        journal.close()
    chosen = {site: search.best for site, search in problem.searches.items()}
    table.write_text(table_text(file.spec.name, gpu.name, gpu.target, chosen), encoding="utf-8")
    return Outcome(table, problem.searches, ended)


def _search(searches: dict[Site, Search], compiler, measurer, journal, begun, budget, show, clock) -> str:
    """Visit the sites in turn, those first whose candidates are compiled; returns why it ended."""
    queue: deque[tuple[Site, list[Launch]]] = deque()
    for site, search in searches.items():
        _enqueue(queue, site, search, compiler)
    visits = 0
    while queue:
        spent = clock() - begun
        if spent > budget:
            return "the budget is spent"
        tried = sum(len(search.tried) for search in searches.values())
        show(spent / budget, f"{tried} configurations tried, {len(queue)} of {len(searches)} places open")
        ready = next(
            (entry for entry in queue if all(compiler.ready(entry[0], launch) for launch in entry[1])), queue[0]
        )
        queue.remove(ready)
        site, launches = ready
        _visit(site, launches, searches, compiler, measurer, journal)
        visits += 1
        _enqueue(queue, site, searches[site], compiler)
    return "nothing is left to try"


def _enqueue(queue: deque, site: Site, search: Search, compiler) -> None:
    launches = search.next(_AT_ONCE)
    for launch in launches:
        compiler.submit(site, launch)
    if launches:
        queue.append((site, launches))


def _visit(site: Site, launches: list[Launch], searches: dict[Site, Search], compiler, measurer, journal) -> None:
    """Measure one site's candidates and take the results in."""
    problems = {launch: compiler.problem(site, launch) for launch in launches}
    sound = [launch for launch, problem in problems.items() if not problem]
    results = {launch: Result(0.0, 0.0, problem) for launch, problem in problems.items() if problem}
    if sound:
        chosen = {other: search.best for other, search in searches.items() if _same_call(site, other)}
        results.update(zip(sound, measurer.measure(site, chosen, sound), strict=True))
    before = searches[site].best
    for launch, result in results.items():
        searches[site].note(launch, result)
        journal.add(site, launch, result)
    best = searches[site].best
    if best != before:
        for other, search in searches.items():
            if (other.stage, other.module, other.rank) == (site.stage, site.module, site.rank):
                search.suggest(replace(best, rows=other.rows))


def _same_call(a: Site, b: Site) -> bool:
    """Whether two sites are stages of one call."""
    return (a.backend, a.module, a.rank, a.rows) == (b.backend, b.module, b.rank, b.rows)


class _Problem:
    """What is to be searched: the sites with their candidates, and a package whose kernels can run all of those."""

    def __init__(self, file: SpecFile, folders: dict[str, BackendFolder], gpu: Gpu, backends, rows):
        self.spec = file.spec.model_copy(update={"targets": [gpu.target]})
        self.declarations: dict[str, Declaration] = {name: folder.declaration for name, folder in folders.items()}
        plan = make_plan(self.spec, file.shapes, self.declarations, {})
        _known(backends, plan)
        self.searches: dict[Site, Search] = {}
        forced: Tuned = {}
        rendered: dict[str, set[str]] = {}
        for site, kernel, kernel_plan in self._sites(plan, backends, rows or _sizes(plan)):
            search = self._search(site, kernel, kernel_plan, plan, gpu)
            self.searches[site] = search
            stages = forced.setdefault(site.backend, {})
            if site.kernel not in rendered.setdefault(site.backend, set()):
                stages[site.stage] = (*stages.get(site.stage, ()), *((tile, "") for tile in _demanding(search, kernel)))
                rendered[site.backend].add(site.kernel)
        able = make_plan(self.spec, file.shapes, self.declarations, forced)
        paths = {name: folder.path for name, folder in folders.items()}
        self.fingerprint = fingerprint(able.canonical(), paths.values())
        self.files = render(able, paths, self.fingerprint)
        self._kernels = {(b.name, kernel.name): kernel for b in able.backends for kernel in b.kernels}

    def rows(self, site: Site, launch: Launch) -> list[tuple]:
        """A configuration as rows of the kernel's launch table: one per number of adapters it is specialised for."""
        kernel = self._kernels[site.backend, site.kernel]
        bounds = dict.fromkeys(declared.adapters for declared in kernel.launches if declared.rank == launch.rank)
        return [launch_row(kernel, replace(launch, adapters=bound)) for bound in bounds]

    def _sites(self, plan: Plan, backends, rows) -> Iterator[tuple[Site, Kernel, KernelPlan]]:
        """In the order they are visited first: a search cut short has seen every module and size."""
        for size in rows:
            for backend in plan.backends:
                for kernel in backend.kernels if not backends or backend.name in backends else ():
                    if plan.module(kernel.module).kind in KINDS and size <= (kernel.max_rows or size):
                        declaration = self.declarations[backend.name].kernels[kernel.stage]
                        for rank in sorted({launch.rank for launch in kernel.launches if launch.rank}):
                            yield Site(backend.name, kernel.stage, kernel.module, rank, size), declaration, kernel

    def _search(self, site: Site, kernel: Kernel, kernel_plan: KernelPlan, plan: Plan, gpu: Gpu) -> Search:
        module = plan.module(site.module)
        backend = next(backend for backend in plan.backends if backend.name == site.backend)
        batches = [live_segments(backend.segments, site.rows, count) for count in (1, plan.slots)]
        model = Model(kernel, module, site, batches, plan.dtype, gpu.machine)
        legal = candidates(kernel, module, site, plan.dtype, (gpu.target,))
        return Search(site, declared(kernel_plan, site), {launch: model.predict(launch) for launch in legal})


def _demanding(search: Search, kernel: Kernel) -> list[Tile]:
    """Tiles that make the plan render what any candidate needs: sums split over K, masks where a block is ragged.

    The largest block of a dimension is ragged if any is. The tiles' bounds do not matter: a search sets launches.
    """
    demands = ["SPLIT_K", *(block for block, dim in kernel.dims.items() if dim in ("in", "out"))]
    tiles = []
    for name in demands:
        launch = max(search.predicted, key=lambda launch: dict(launch.tile).get(name, 1))
        options = {"warps": launch.warps, "stages": launch.stages, "pdl": launch.pdl}
        tiles.append(Tile(module=search.site.module, rows=len(tiles) + 1, **options, **dict(launch.tile)))
    return tiles


def _sizes(plan: Plan) -> list[int]:
    """The usual sizes as far as the spec has graphs for them."""
    largest = max((*plan.decode.buckets, *plan.prefill.buckets), default=ROWS[-1])
    return [size for size in ROWS if size <= largest]


def _known(backends: list[str] | None, plan: Plan) -> None:
    have = [backend.name for backend in plan.backends if backend.kernels]
    for name in backends or ():
        if name not in have:
            raise BuildError(f"{plan.name} has no backend {name!r} with kernels: it has {', '.join(have) or 'none'}")
