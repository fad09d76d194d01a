"""`lorac tune`: a search at every site of a spec, for as long as it may take, and the table of what won."""

import tempfile
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from lorac.emit import emit
from lorac.errors import BuildError
from lorac.plan.model import Launch
from lorac.spec import load_spec
from lorac.spec.folders import find_folders
from lorac.tune.journal import Journal
from lorac.tune.search import Result, Search
from lorac.tune.space import Site
from lorac.tune.table import table_path, table_text
from lorac.tune.task import Gpu, Task

_AT_ONCE = 3  # candidates timed beside the best in one visit of a site


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
    task = Task(file, folders, gpu, backends, rows)
    table = table_path(spec, file.spec.name, gpu.name)
    with tempfile.TemporaryDirectory(prefix="lorac-tune-") as place:
        package = Path(place) / file.spec.name
        emit(task.files, package)
        journal = Journal(table.with_suffix(".journal"), gpu.name, task.fingerprint, resume)
        for site, launch, result in journal.past:
            if site in task.searches:
                task.searches[site].note(launch, result)
        ended = "the budget is spent"
        if clock() - begun < budget:
            compiler = tools.compiler(package, task.rows, gpu.target)
            try:
                ended = _search(
                    task.searches,
                    compiler,
                    tools.measurer(package, task.rows),
                    journal,
                    begun,
                    budget,
                    show,
                    clock,
                )
            finally:
                compiler.close()
        journal.close()
    chosen = {site: search.best for site, search in task.searches.items()}
    table.write_text(table_text(file.spec.name, gpu.name, gpu.target, chosen), encoding="utf-8")
    return Outcome(table, task.searches, ended)


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
    """Whether two sites are launched by one call, or would be for other adapters."""
    return (a.backend, a.module, a.rows) == (b.backend, b.module, b.rows)
