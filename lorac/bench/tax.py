"""The LoRA tax: what base and LoRA take together over what the base takes alone, less one, for whole layers."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch

from lorac.bench.noise import DOUBT_LIMIT, tax_of, too_noisy
from lorac.bench.peer_imports import PeerError
from lorac.bench.peers import Peer
from lorac.bench.timing import Timing, capture, interleaved
from lorac.bench.workload import TOLERANCE, Workload

Show = Callable[[float, str], None]

_LEAST = 15  # replays of each graph, a round
_MOST_ROUNDS = 6


@dataclass(frozen=True)
class Contender:
    """What one backend or peer made of a batch; `problem` where it could not be timed. Times are µs a layer."""

    us: float = 0.0
    tax: float = 0.0
    doubt: float = 0.0
    error: float = 0.0
    problem: str = ""


@dataclass(frozen=True)
class Cell:
    """One batch: its rows, distinct adapters and rank, the base's µs a layer, and every contender."""

    rows: int
    adapters: int
    rank: int
    variant: str
    base_us: float
    contenders: dict[str, Contender] = field(default_factory=dict)
    noise: str = ""


@dataclass(frozen=True)
class Batch:
    """A batch to be timed: a size, and a variant's bounds as far as the size reaches them."""

    rows: int
    adapters: int
    rank: int
    variant: str


def batches(variants: dict[str, tuple[int, int]], slots: int, rows: list[int]) -> list[Batch]:
    """For every size the fullest batch of every variant, narrow to wide, each once."""
    found: dict[tuple, Batch] = {}
    for name, (adapters, rank) in variants.items():
        for count in rows:
            batch = Batch(count, min(adapters, slots, count), rank if adapters else 0, name)
            found.setdefault((batch.adapters, batch.rank, batch.rows), batch)
    return list(found.values())


def measure(
    workload: Workload, backends: list[str], peers: dict[str, Peer], todo: list[Batch], seconds: float, show: Show
) -> list[Cell]:
    """A cell per batch. Peers, which hold adapters of the full rank only, take part where that is the batch's."""
    cells = []
    for number, batch in enumerate(todo):
        show(number / len(todo), f"{batch.rows} rows, {batch.adapters} adapters of rank {batch.rank}")
        cells.append(_cell(workload, backends, peers, batch, seconds))
        workload.forget()
    return cells


def _cell(workload: Workload, backends: list[str], peers: dict[str, Peer], batch: Batch, seconds: float) -> Cell:
    full = workload.package.LAYOUT.max_rank
    rank = batch.rank or full
    steps = {name: workload.step(name, batch.rows, batch.adapters, rank) for name in backends}
    first = next(iter(steps.values()))
    runs: dict[str, Callable[[str, int], torch.Tensor]] = {}
    contenders: dict[str, Contender] = {}
    for name, step in steps.items():
        runs[name] = lambda module, layer, step=step: workload.run(step, module, layer)
    for name, peer in peers.items() if batch.adapters and rank == full else ():
        try:
            runs[name] = peer(workload, batch.rows, batch.adapters)
        except Exception as error:
            contenders[name] = Contender(problem=_words(error))
    pool = torch.cuda.graph_pool_handle()
    base = partial(workload.base, rows=batch.rows)
    graphs = {"": capture(partial(workload.in_layers, base), pool)}
    errors = {}
    for name, run in runs.items():
        try:
            errors[name] = max(
                workload.error(first, module, run(module, of[0])) for module, of in workload.layers.items()
            )
            if not errors[name] <= TOLERANCE[workload.dtype]:
                raise PeerError(f"wrong: a row's relative error is {errors[name]:.1e}")
            graphs[name] = capture(partial(workload.in_layers, run), pool)
        except Exception as error:
            contenders[name] = Contender(problem=_words(error))
    timings = _timed(graphs, backends, seconds)
    return _judged(batch, timings, errors, contenders, len(workload.common))


def _timed(graphs: dict[str, torch.cuda.CUDAGraph], backends: list[str], seconds: float) -> dict[str, Timing]:
    """Times of all, of the base under ""; again and again, within bounds, while some backend's tax is in doubt."""
    samples: dict[str, tuple[float, ...]] = dict.fromkeys(graphs, ())
    for _ in range(_MOST_ROUNDS):
        more = interleaved(list(graphs.values()), seconds, _LEAST)
        samples = {name: samples[name] + timing.samples for name, timing in zip(graphs, more, strict=True)}
        doubts = [tax_of(samples[""], samples[name])[1] for name in backends if name in graphs]
        if max(doubts, default=0.0) <= DOUBT_LIMIT / 2:
            break
    return {name: Timing(of) for name, of in samples.items()}


def _judged(batch: Batch, timings: dict[str, Timing], errors, contenders: dict[str, Contender], layers: int) -> Cell:
    base = timings.pop("")
    for name, timing in timings.items():
        tax, doubt = tax_of(base.samples, timing.samples)
        contenders[name] = Contender(timing.us / layers, tax, doubt, errors[name])
    noise = too_noisy(base.samples, [contenders[name].doubt for name in timings])
    return Cell(batch.rows, batch.adapters, batch.rank, batch.variant, base.us / layers, contenders, noise)


def _words(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [""]
    return lines[0] if isinstance(error, PeerError) else f"{type(error).__name__}: {lines[0]}"
