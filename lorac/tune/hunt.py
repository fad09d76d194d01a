"""One run of a search: visits of sites until the budget is spent, then a last look at every call."""

from collections import deque
from dataclasses import replace
from typing import Protocol

from lorac.plan.model import Launch
from lorac.tune.batches import Batch
from lorac.tune.journal import Journal
from lorac.tune.search import CLEARLY, DeviceLost, Result
from lorac.tune.space import Site
from lorac.tune.task import Task

_AT_ONCE = 3  # candidates timed beside the best in one visit of a site
_PER_CALL = 0.8  # seconds kept for compiling what a call launches in the end, and timing it beside what is declared
_LAST_SHARE = 0.2  # of the budget, at most, for all of those
_WAIT = 0.5  # seconds to wait for the compiler before the budget is looked at again
_NO_GAIN = "not clearly faster than what is declared, measured once more in whole layers"
_TOO_LATE = "not compiled for every batch in time"


Compared = dict[Batch, tuple[float, float]]  # µs of layers with a call as declared, and as chosen


class Measures(Protocol):
    """See `lorac.tune.measure.Measurer`."""

    def measure(self, site: Site, chosen: dict[Site, Launch], tried: list[Launch]) -> list[Result]: ...

    def compare(
        self, declared: dict[Site, Launch], chosen: dict[Site, Launch], around: dict[Site, Launch]
    ) -> Compared: ...


class Compiles(Protocol):
    """See `lorac.tune.compiler.Compiler`."""

    def submit(self, site: Site, launch: Launch, served: bool = False) -> None: ...

    def ready(self, site: Site, launch: Launch, served: bool = False) -> bool: ...

    def wait(self, seconds: float) -> None: ...

    def drop(self) -> None: ...

    def problem(self, site: Site, launch: Launch, served: bool = False) -> str: ...

    def close(self) -> None: ...


class Hunt:
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

    def settle(self) -> None:
        """Compile what is chosen for every batch it would serve, not only those measured; what cannot be gives way."""
        waiting = [site for site in self.task.searches if self.task.runs(site)]
        self.compiler.drop()
        for site in waiting:
            self._served(site)
        while waiting:
            late = self.left <= 0
            done = [site for site in waiting if late or self._served(site)]
            if not done:
                self.show(1 - self.left / self.budget, f"{len(waiting)} places being compiled for every batch")
                self.compiler.wait(min(_WAIT, self.left))
            for site in done:
                if self._keeps(site):
                    waiting.remove(site)

    def confirm(self) -> dict[Site, Compared]:
        """Time every call once more in whole layers, as chosen and as declared. Not clearly faster, it stays declared.

        The other calls of its layers are as they are chosen by then.
        """
        compared: dict[Site, Compared] = {}
        calls = self._calls()
        for number, sites in enumerate(calls):
            declared, chosen = self.task.declared(sites), self.task.chosen(sites)
            if chosen == {site: launch for site, launch in declared.items() if site in chosen} or self.left < 0:
                continue
            self.show(1 - max(0.0, self.left) / self.budget, f"{number} of {len(calls)} calls timed once more")
            times = self.measurer.compare(declared, chosen, self.task.chosen(self.task.around(sites[0])))
            compared[sites[0]] = times
            before, after = (sum(of) for of in zip(*times.values(), strict=True)) if times else (0.0, 0.0)
            if not after < CLEARLY * before:
                for site in sites:
                    search = self.task.searches[site]
                    undeclared = [launch for launch in search.times if launch != search.declared]
                    self._note(site, dict.fromkeys(undeclared, Result(problem=_NO_GAIN)))
        return compared

    def _served(self, site: Site) -> bool:
        """Whether what is chosen at a site has been compiled for every batch; begun to, if need be."""
        launches = self._undeclared(site)
        for launch in launches:
            self.compiler.submit(site, launch, served=True)
        return all(self.compiler.ready(site, launch, served=True) for launch in launches)

    def _keeps(self, site: Site) -> bool:
        """Whether what is chosen at a site serves every batch; what does not, or is not known to, is noted."""
        problems = {
            launch: self.compiler.problem(site, launch, served=True) if self._served(site) else _TOO_LATE
            for launch in self._undeclared(site)
        }
        self._note(site, {launch: Result(problem=problem) for launch, problem in problems.items() if problem})
        return not any(problems.values())

    def _undeclared(self, site: Site) -> list[Launch]:
        search = self.task.searches[site]
        return [launch for launch in dict.fromkeys(search.parted()) if launch not in (search.declared, search.bare)]

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
            try:
                results.update(zip(sound, self.measurer.measure(site, chosen, sound), strict=True))
            except DeviceLost as error:
                self._note(site, dict.fromkeys(sound, Result(problem=str(error))))
                raise
        before = searches[site].best
        self._note(site, results)
        best = searches[site].best
        if best != before:
            self.compiler.submit(site, best, served=True)  # likely to be wanted in the end
            for other, search in searches.items():
                if (other.stage, other.module, other.rank) == (site.stage, site.module, site.rank):
                    search.suggest(replace(best, rows=other.rows))

    def _note(self, site: Site, results: dict[Launch, Result]) -> None:
        if results:
            self.task.searches[site].note(results)
            self.journal.add(site, results)
