"""The search at one site: which configurations to try next, and which one is the best so far.

It starts from the declared configuration, from those declared for other batches and from different ones the model
thinks best, then climbs: neighbours of the best, likeliest first. It knows nothing of GPUs; whoever measures tells it
what came out.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from lorac.errors import BuildError
from lorac.plan.model import Launch
from lorac.tune.space import Site, distance, in_library, settings

FAR = 3.0  # times the best prediction, beyond which a configuration is not tried
MOST = 2000  # configurations a site is searched among
APART = 2  # steps between the tiles of two configurations the search starts from
STARTS = 5
LEAST_STARTS = 2  # of the model's, whatever number of seeds there are
CLEARLY = 0.995  # of another's time: less is faster, more may be noise
WITHIN_REACH = 1.15  # of the library's time: tiles of our own are climbed from as far as this


class DeviceLost(BuildError):
    """A configuration broke the GPU's context: nothing more can be measured in this process."""


@dataclass(frozen=True)
class Result:
    """What became of one configuration: its times in µs, batch by batch, and the best's in the same minute.

    `bits` and `best_bits` stand for what base rows came out as; `problem` says why it cannot serve, and then the rest
    says nothing.
    """

    us: tuple[float, ...] = ()
    best_us: tuple[float, ...] = ()
    problem: str = ""
    bits: int = 0
    best_bits: int = 0


@dataclass
class Search:
    """The state at one site. `predicted` has every candidate with its predicted time; `seeds` are tried first.

    At a site of a kernel with the base the first batch is one without adapters.
    """

    site: Site
    declared: Launch
    predicted: dict[Launch, float]
    seeds: Sequence[Launch] = ()
    bare: Launch | None = None  # declared for batches without adapters, at a site of a kernel with the base
    best: Launch = field(init=False)
    tried: dict[Launch, Result] = field(init=False, default_factory=dict)
    times: dict[Launch, tuple[float, ...]] = field(init=False, default_factory=dict)  # as in the declared one's minute
    bits: dict[Launch, int] = field(init=False, default_factory=dict)

    def __post_init__(self):
        self.best = self.declared
        self._ranked = _worth_trying(self.predicted)
        self._settings = {launch: settings(launch) for launch in self._ranked}
        self._starts = self._first()

    @property
    def gain(self) -> float:
        """The best's time over the declared one's."""
        return sum(self.times[self.best]) / sum(self.times[self.declared]) if self.times else 1.0

    def next(self, count: int) -> list[Launch]:
        """Up to `count` configurations to try now; none when the search is over."""
        fresh = [launch for launch in self._starts if launch not in self.tried and launch != self.best]
        if len(fresh) < count:
            fresh += [launch for launch in self._neighbours() if launch not in fresh]
        return fresh[:count]

    def suggest(self, launch: Launch) -> None:
        """Try this one first, if it is legal here: it has won at another size, or for another backend."""
        if launch in self.predicted and launch not in self._starts:
            self._starts.insert(0, launch)

    def note(self, results: dict[Launch, Result]) -> None:
        """Take in what was measured together, beside the best. A best with a problem gives way to the next."""
        beside, least = self.best, CLEARLY
        for launch, result in results.items():
            self.tried[launch] = result
            if result.problem:
                self.times.pop(launch, None)
                continue
            before = self.times.setdefault(beside, result.best_us)
            self.times[launch] = tuple(
                us * old / best for us, best, old in zip(result.us, result.best_us, before, strict=True)
            )
            self.bits |= {launch: result.bits, beside: result.best_bits}
            share = sum(result.us) / sum(result.best_us)
            if share < least:
                self.best, least = launch, share
        if self.best in results and results[self.best].problem:
            self.best = min(self.times, key=lambda of: sum(self.times[of]), default=self.declared)

    def parted(self) -> tuple[Launch, Launch]:
        """(bare, with adapters): two tiles of a kernel with the base, where those beat one for both; else it twice.

        Base rows come out in the same bits with both, unless one of the two is the library.
        """
        found = ((self.bare if self.best == self.declared else None) or self.best, self.best)
        least = CLEARLY * sum(self.times.get(self.best, ()))
        own = [launch for launch in self.times if not in_library(launch)]
        for bits in {self.bits[launch] for launch in own} if self.bare else ():
            alike = [launch for launch in own if self.bits[launch] == bits]
            bare = min([*alike, *filter(in_library, self.times)], key=lambda launch: self.times[launch][0])
            adapted = min(alike, key=lambda launch: sum(self.times[launch][1:]))
            time = self.times[bare][0] + sum(self.times[adapted][1:])
            if time < least:
                found, least = (bare, adapted), time
        return found

    def _first(self) -> list[Launch]:
        """The seeds that are not hopeless, then the best predictions that lie apart from them and from one another."""
        found = [launch for launch in self.seeds if launch in self._settings]
        count = len(found) + max(LEAST_STARTS, STARTS - len(found))
        for launch in self._ranked:
            if all(distance(dict(launch.tile), dict(other.tile)) >= APART for other in found):
                found.append(launch)
            if len(found) == count:
                break
        return [*filter(in_library, self.seeds), *found]

    def _neighbours(self) -> list[Launch]:
        """Untried configurations one step from the best, then two, likeliest first.

        What is declared may be no candidate, as with a pipeline deeper than the loop: then from the nearest that is.
        """
        centre = self._climbing_from()
        if centre is None:
            return []
        here = settings(centre)
        apart = {launch: distance(here, self._settings[launch]) for launch in self._ranked}
        nearest = min(apart.values(), default=0)
        near: dict[int, list[Launch]] = {0: [], 1: [], 2: []}
        for launch, steps in apart.items():
            if steps - nearest in near and launch not in self.tried and launch != self.best:
                near[steps - nearest].append(launch)
        return near[0] + near[1] + near[2][: 2 * STARTS]

    def _climbing_from(self) -> Launch | None:
        """The best; where the library is that, the best of our own if it comes near."""
        if not in_library(self.best):
            return self.best
        own = [launch for launch in self.times if not in_library(launch)]
        nearest = min(own, key=lambda launch: sum(self.times[launch]), default=None)
        within = nearest and sum(self.times[nearest]) < WITHIN_REACH * sum(self.times[self.best])
        return nearest if within else None


def _worth_trying(predicted: dict[Launch, float]) -> list[Launch]:
    """Candidates by prediction, likeliest first, without the hopeless."""
    # between equals, four warps: the model knows nothing of them
    ranked = sorted(predicted, key=lambda of: (predicted[of], abs(of.warps - 4), of.tile, of.warps, of.stages, of.pdl))
    limit = FAR * predicted[ranked[0]] if ranked else 0.0
    return [launch for launch in ranked if predicted[launch] <= limit][:MOST]
