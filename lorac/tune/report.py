"""What a search found, as a table a person reads."""

import re
from collections import defaultdict

from lorac.tables import table
from lorac.tune.run import Outcome
from lorac.tune.search import Search
from lorac.tune.space import Site


def report(outcome: Outcome) -> str:
    """Per module and batch what layers take with its tiles chosen; what could not serve; where the table lies."""
    lines = [
        "time of some layers, base and LoRA, with a module's tiles as chosen, over that with them as declared, in µs;",
        "by rows of the batch; empty: tiles as declared",
        _calls(outcome),
        *_failures(outcome.searches),
        f"{sum(len(search.tried) for search in outcome.searches.values())} configurations tried",
        f"{outcome.ended}; wrote {outcome.table}",
    ]
    return "\n".join(lines)


def _calls(outcome: Outcome) -> str:
    ratios: dict[tuple, dict[int, str]] = defaultdict(dict)
    for site, compared in outcome.compared.items():
        for (adapters, rank), (before, after) in compared.items():
            batch = f"{adapters} of rank {rank}" if adapters else "none"
            ratios[site.backend, site.module, batch][site.rows] = f"{after / before:.3f} of {before:.0f} µs"
    sizes = sorted({site.rows for site in outcome.searches})
    rows = [(*key, *(of.get(size, "") for size in sizes)) for key, of in sorted(ratios.items())]
    return table(("backend", "module", "adapters", *map(str, sizes)), rows)


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
