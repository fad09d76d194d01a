"""What a search found, as a table a person reads."""

import re
from collections import defaultdict

from lorac.plan.kernels import ANY_ADAPTERS
from lorac.tables import table
from lorac.tune.run import Outcome
from lorac.tune.search import Search
from lorac.tune.space import Site


def report(outcome: Outcome) -> str:
    """Per kernel what its tiles gained the call they belong to, and how many were tried; then where the table lies."""
    gains: dict[tuple, dict[int, float]] = defaultdict(dict)
    tried: dict[tuple, int] = defaultdict(int)
    for site, search in outcome.searches.items():
        adapters = "any" if site.adapters == ANY_ADAPTERS else f"≤ {site.adapters}"
        key = (site.backend, site.kernel, site.rank, adapters)
        gains[key][site.rows] = search.gain
        tried[key] += len(search.tried)
    sizes = sorted({site.rows for site in outcome.searches})
    rows = [
        (*key, *(f"{of[size]:.3f}" if size in of else "" for size in sizes), tried[key]) for key, of in gains.items()
    ]
    lines = [
        "time of base and LoRA with the tile chosen, over that with the one declared, by rows",
        table(("backend", "kernel", "rank", "adapters", *map(str, sizes), "tried"), rows),
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
