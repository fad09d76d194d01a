"""What a search found, as a table: the time of a call by the best configurations over that by the declared ones."""

import re
from collections import defaultdict

from lorac.tables import table
from lorac.tune.run import Outcome
from lorac.tune.search import Search
from lorac.tune.space import Site


def report(outcome: Outcome) -> str:
    """Per backend and module, what its stages gained together, and how much was tried; then where the table lies."""
    calls: dict[tuple, dict[int, float]] = defaultdict(dict)
    tried: dict[tuple, int] = defaultdict(int)
    for site, search in outcome.searches.items():
        key = (site.backend, site.module, site.rank)
        calls[key][site.rows] = calls[key].get(site.rows, 1.0) * search.gain
        tried[key] += len(search.tried)
    sizes = sorted({site.rows for site in outcome.searches})
    rows = [(*key, *(f"{gains[size]:.3f}" for size in sizes), tried[key]) for key, gains in calls.items()]
    lines = [
        "time of base and LoRA, tuned over declared, by rows",
        table(("backend", "module", "rank", *map(str, sizes), "tried"), rows),
        *_failures(outcome.searches),
        f"{outcome.ended}; wrote {outcome.table}",
    ]
    return "\n".join(lines)


def _failures(searches: dict[Site, Search]) -> list[str]:
    """How many configurations could not serve, by reason, and every one that computed something wrong."""
    counts: dict[str, int] = defaultdict(int)
    wrong = []
    for site, search in searches.items():
        for launch, result in search.tried.items():
            reason = re.sub(r"\d+", "some", result.problem.split(":")[0])
            counts[reason] += bool(reason)
            if result.problem.startswith("wrong"):
                wrong.append(f"{site.backend}.{site.kernel} at {site.rows} rows, {launch.tile}: {result.problem}")
    lines = [f"{count} configurations left out: {reason}" for reason, count in counts.items() if count]
    return lines + wrong
