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
from lorac.tune.search import CLEARLY, Result, Search
from lorac.tune.space import Site
from lorac.tune.table import kept_rows, table_path, table_text
from lorac.tune.task import Gpu, Task

_AT_ONCE = 3  # candidates timed beside the best in one visit of a site
_PER_CALL = 0.5  # seconds kept for timing a call once more, as declared and as chosen
_LAST_SHARE = 0.2  # of the budget, at most, for all of those
_WAIT = 0.5  # seconds to wait for the compiler before the budget is looked at again
_NO_GAIN = "no faster than what is declared, measured once more"


Compared = dict[tuple[int, int], tuple[float, float]]  # (adapters, rank) -> µs of a call as declared, and as chosen


class Measures(Protocol):
    """See `lorac.tune.measure.Measurer`."""

    def measure(self, site: Site, chosen: dict[Site, Launch], tried: list[Launch]) -> list[Result]: ...

    def compare(self, declared: dict[Site, Launch], chosen: dict[Site, Launch]) -> Compared: ...


class Compiles(Protocol):
    """See `lorac.tune.compiler.Compiler`."""

    def submit(self, site: Site, launch: Launch) -> None: ...

    def ready(self, site: Site, launch: Launch) -> bool: ...

    def wait(self, seconds: float) -> None: ...

    def problem(self, site: Site, launch: Launch) -> str: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class Tools:
    """What a search works with, made from the folder of the package that is measured and what is searched."""

    measurer: Callable[[Path, Task], Measures]
    compiler: Callable[[Path, Task], Compiles]


@dataclass(frozen=True)
class Outcome:
    """What a search found: the table's path, each site's search, each call's times at last, and why it ended."""

    table: Path
    searches: dict[Site, Search]
    compared: dict[Site, Compared]  # by a site of the call
    ended: str


def tune(
    spec: Path, gpu: Gpu, tools: Tools, *, backends: list[str] | None, rows: list[int] | None, budget: float,
    resume: bool, show: Callable[[float, str], None], clock: Callable[[], float] = time.monotonic,
) -> Outcome:  # fmt: skip
    """Search for `budget` seconds and write the table. An interrupted search leaves its journal, for `resume`.

    What a table has of backends that are not searched stays. Raises SpecError for the spec or that table, BuildError
    where the GPU is none of its targets or a declared tile computes nonsense.
    """
    begun = clock()
    file = load_spec(spec)
    if gpu.target not in file.spec.targets:
        named = ", ".join(file.spec.targets) or "none"
        raise BuildError(
            f"{spec}: this GPU is {gpu.target}, the spec's targets are {named}: "
            f"its table would serve nothing; add targets: [{gpu.target}]"
        )
    task = Task(file, find_folders(file), gpu, backends, rows)
    table = table_path(spec, file.spec.name, gpu.name)
    kept = kept_rows(table, {site.backend for site in task.searches})
    with tempfile.TemporaryDirectory(prefix="lorac-tune-") as place:
        package = Path(place) / file.spec.name
        emit(task.files, package)
        journal = Journal(table.with_suffix(".journal"), gpu.name, task.fingerprint, resume)
        for site, launch, result in journal.past:
            if site in task.searches:
                task.searches[site].note(launch, result)
        ended, compared = "the budget is spent", {}
        if clock() - begun < budget:
            compiler = tools.compiler(package, task)
            try:
                hunt = _Hunt(task, compiler, tools.measurer(package, task), journal, begun, budget, show, clock)
                ended = hunt.search()
                compared = hunt.confirm()
            finally:
                compiler.close()
        journal.close()
    chosen = task.chosen(list(task.searches))
    table.write_text(table_text(file.spec.name, gpu.name, gpu.target, chosen, kept, task.capped), encoding="utf-8")
    return Outcome(table, task.searches, compared, ended)


class _Hunt:
    """One run of a search: visits of sites until the budget is spent, then a last look at every call."""

    def __init__(
        self, task: Task, compiler: Compiles, measurer: Measures, journal: Journal, begun, budget, show, clock
    ):
        self.task, self.compiler, self.measurer, self.journal = task, compiler, measurer, journal
        self.begun, self.budget, self.show, self.clock = begun, budget, show, clock
        self.queue: deque[tuple[Site, list[Launch]]] = deque()

    @property
    def left(self) -> float:
        """Seconds of the budget."""
        return self.budget - (self.clock() - self.begun)

    def search(self) -> str:
        """Visit the sites in turn, those first whose candidates are compiled; returns why it ended."""
        searches = self.task.searches
        reserve = min(_LAST_SHARE * self.budget, _PER_CALL * len(self._calls()))
        self._enqueue(list(searches))
        while self.queue:
            left = self.left
            if left < reserve:
                return "the budget is spent"
            tried = sum(len(search.tried) for search in searches.values())
            words = f"{tried} configurations tried, {len(self.queue)} of {len(searches)} places open"
            self.show(1 - left / self.budget, words)
            ready = next((entry for entry in self.queue if self._ready(*entry)), None)
            if ready is None:
                self.compiler.wait(min(_WAIT, left))
                continue
            self.queue.remove(ready)
            self._visit(*ready)
            self._enqueue(self.task.beside(ready[0]))
        return "nothing is left to try"

    def confirm(self) -> dict[Site, Compared]:
        """Time every call once more as chosen beside as declared; where it is no faster, the declared tiles stay."""
        compared: dict[Site, Compared] = {}
        calls = self._calls()
        for number, sites in enumerate(calls):
            declared, chosen = self.task.declared(sites), self.task.chosen(sites)
            if chosen == {site: launch for site, launch in declared.items() if site in chosen} or self.left < 0:
                continue
            self.show(1 - max(0.0, self.left) / self.budget, f"{number} of {len(calls)} calls timed once more")
            times = self.measurer.compare(declared, chosen)
            compared[sites[0]] = times
            before, after = (sum(of) for of in zip(*times.values(), strict=True)) if times else (0.0, 0.0)
            if not after < CLEARLY * before:
                for site in sites:
                    self._note(site, self.task.searches[site].best, Result(problem=_NO_GAIN))
        return compared

    def _calls(self) -> list[list[Site]]:
        found = {tuple(self.task.beside(site)): None for site in self.task.searches}
        return [list(sites) for sites in found]

    def _ready(self, site: Site, launches: list[Launch]) -> bool:
        return all(self.compiler.ready(site, launch) for launch in launches)

    def _enqueue(self, sites: list[Site]) -> None:
        """Have the next candidates of sites compiled, of those that run and wait for nothing."""
        waiting = {site for site, _ in self.queue}
        for site in sites:
            launches = self.task.searches[site].next(_AT_ONCE) if site not in waiting and self.task.runs(site) else []
            for launch in launches:
                self.compiler.submit(site, launch)
            if launches:
                self.queue.append((site, launches))

    def _visit(self, site: Site, launches: list[Launch]) -> None:
        """Measure one site's candidates and take the results in."""
        searches = self.task.searches
        problems = {launch: self.compiler.problem(site, launch) for launch in launches}
        sound = [launch for launch, problem in problems.items() if not problem]
        results = {launch: Result(problem=problem) for launch, problem in problems.items() if problem}
        if sound:
            chosen = {other: searches[other].best for other in self.task.beside(site)}
            results.update(zip(sound, self.measurer.measure(site, chosen, sound), strict=True))
        before = searches[site].best
        for launch, result in results.items():
            self._note(site, launch, result)
        best = searches[site].best
        if best != before:
            for other, search in searches.items():
                if (other.stage, other.module, other.rank) == (site.stage, site.module, site.rank):
                    search.suggest(replace(best, rows=other.rows))

    def _note(self, site: Site, launch: Launch, result: Result) -> None:
        self.task.searches[site].note(launch, result)
        self.journal.add(site, launch, result)
