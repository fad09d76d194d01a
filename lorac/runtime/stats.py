"""What a set of graphs has done: hits per graph, fallbacks per cause, and what each graph took to capture."""

import sys
import warnings
from collections import Counter
from typing import NamedTuple


class GraphKey(NamedTuple):
    """A captured graph: its bucket (rows, or tokens in prefill), its variant and its stream of steps."""

    bucket: int
    variant: str
    stream: int = 0

    def __str__(self) -> str:
        return f"{self.bucket} {self.variant}" + (f" on stream {self.stream}" if self.stream else "")


class Cost(NamedTuple):
    """What capturing one graph took: device bytes beyond those the pool had, seconds with its warm-up, pieces."""

    bytes: int
    seconds: float
    pieces: int


class Stats:
    """Counters of one set of graphs."""

    def __init__(self, name: str):
        self.name = name
        self.costs: dict[GraphKey, Cost] = {}
        self.hits: Counter[GraphKey] = Counter()
        self.fallbacks: Counter[str] = Counter()

    def fell_back(self, cause: str, reason: str) -> None:
        """Count an eager run, and warn of the first with this cause."""
        if cause not in self.fallbacks:
            warnings.warn(f"{self.name}: eager: {reason}", RuntimeWarning, stacklevel=4)
        self.fallbacks[cause] += 1

    def as_dict(self) -> dict[str, dict]:
        """Hits by graph (those never replayed are 0) and fallbacks by cause."""
        return {"hits": {key: self.hits[key] for key in self.costs}, "fallbacks": dict(self.fallbacks)}

    def report(self) -> str:
        """The same as text, with the memory and the time of each graph."""
        total = sum(cost.bytes for cost in self.costs.values())
        seconds = sum(cost.seconds for cost in self.costs.values())
        lines = [f"{self.name}: {len(self.costs)} graphs, {total / 1e6:.1f} MB, captured in {seconds:.1f} s"]
        for key, cost in self.costs.items():
            pieces = f", {cost.pieces} pieces" if cost.pieces > 1 else ""
            lines.append(f"  {key!s:24} {cost.bytes / 1e6:9.1f} MB{pieces}, {self.hits[key]} hits")
        lines += [f"  eager {count} times: {cause}" for cause, count in self.fallbacks.most_common()]
        return "\n".join(lines)


class Progress:
    """One line on a terminal while graphs are captured; nothing elsewhere."""

    def __init__(self, name: str, total: int):
        self.name, self.total, self.done = name, total, 0
        self.shown = sys.stderr is not None and sys.stderr.isatty()

    def step(self, doing: str, key: GraphKey) -> None:
        """Show what is being done with `key`."""
        if self.shown:
            filled = 24 * self.done // self.total
            bar = "#" * filled + "." * (24 - filled)
            line = f"\r\033[K{self.name} [{bar}] {self.done}/{self.total} {doing} {key}"
            print(line, end="", file=sys.stderr, flush=True)
        self.done += 1

    def close(self) -> None:
        """Clear the line."""
        if self.shown:
            print("\r\033[K", end="", file=sys.stderr, flush=True)
