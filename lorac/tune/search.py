"""The search at one site: which configurations to try next, and which one is the best so far.

It starts from the declared configuration and from different ones the model thinks best, then climbs: neighbours of the
best, likeliest first. It knows nothing of GPUs; whoever measures tells it what came out.
"""

from dataclasses import dataclass, field

from lorac.plan.model import Launch
from lorac.tune.space import Site, distance, settings

FAR = 3.0  # times the best prediction, beyond which a configuration is not tried
MOST = 500  # configurations a site is searched among
APART = 2  # steps between the tiles of two configurations the search starts from
STARTS = 5
CLEARLY = 0.995  # of the best's time: less is a new best, more may be noise


@dataclass(frozen=True)
class Result:
    """What became of one configuration: its time, and the best's in the same minute; `problem` when it cannot serve."""

    us: float
    best_us: float
    problem: str = ""


@dataclass
class Search:
    """The state at one site. `predicted` has every candidate with its predicted time."""

    site: Site
    declared: Launch
    predicted: dict[Launch, float]
    best: Launch = field(init=False)
    gain: float = field(init=False, default=1.0)  # the best's time over the declared one's
    tried: dict[Launch, Result] = field(init=False, default_factory=dict)

    def __post_init__(self):
        self.best = self.declared
        self._ranked = _worth_trying(self.predicted)
        self._settings = {launch: settings(launch) for launch in self._ranked}
        self._starts = self._first()

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

    def note(self, launch: Launch, result: Result) -> None:
        """Take a result in."""
        self.tried[launch] = result
        if not result.problem and result.us < CLEARLY * result.best_us:
            self.best, self.gain = launch, self.gain * result.us / result.best_us

    def _first(self) -> list[Launch]:
        """The best predictions that lie apart from one another."""
        chosen: list[Launch] = []
        for launch in self._ranked:
            if all(distance(dict(launch.tile), dict(other.tile)) >= APART for other in chosen):
                chosen.append(launch)
            if len(chosen) == STARTS:
                break
        return chosen

    def _neighbours(self) -> list[Launch]:
        """Untried configurations one step from the best, then two, likeliest first."""
        here = settings(self.best)
        near: dict[int, list[Launch]] = {1: [], 2: []}
        for launch in self._ranked:
            apart = distance(here, self._settings[launch])
            if apart in near and launch not in self.tried:
                near[apart].append(launch)
        return near[1] + near[2][: 2 * STARTS]


def _worth_trying(predicted: dict[Launch, float]) -> list[Launch]:
    """Candidates by prediction, likeliest first, without the hopeless."""
    # between equals, four warps: the model knows nothing of them
    ranked = sorted(predicted, key=lambda of: (predicted[of], abs(of.warps - 4), of.tile, of.warps, of.stages, of.pdl))
    limit = FAR * predicted[ranked[0]] if ranked else 0.0
    return [launch for launch in ranked if predicted[launch] <= limit][:MOST]
