"""Timing CUDA graphs: replays of all candidates take turns in one process, so that a slow moment slows them alike."""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch

_LEAST, _MOST = 5, 60  # replays of each graph


@dataclass(frozen=True)
class Timing:
    """Times of one graph, in microseconds, replay by replay."""

    samples: tuple[float, ...]

    @property
    def us(self) -> float:
        """The median."""
        return median(self.samples)


def capture(run: Callable[[], object], pool: tuple[int, int] | None = None, warmups: int = 1) -> torch.cuda.CUDAGraph:
    """A graph of everything `run` launches. It runs eagerly first, so that whatever compiles or grows does so there.

    Graphs that share a `pool` (torch.cuda.graph_pool_handle) share the memory of what `run` allocates.
    """
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(warmups):
            run()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    # not torch.cuda.graph: it empties the allocator's cache every time, which takes longer than a measurement
    with torch.cuda.stream(side):
        graph.capture_begin(pool=pool)
        try:
            run()
        except BaseException:
            with contextlib.suppress(RuntimeError):  # CUDA repeats the error that is being raised
                graph.capture_end()
            raise
        graph.capture_end()
    return graph


def interleaved(graphs: list[torch.cuda.CUDAGraph], seconds: float = 0.05, least: int = _LEAST) -> list[Timing]:
    """Replay the graphs in turns for about `seconds`, at least `least` times each.

    The host runs ahead of the device: only the device's own time lies between two events.
    """
    for graph in graphs:
        graph.replay()
    turn = _turn(graphs)
    turns = [turn]
    torch.cuda.synchronize()
    once = sum(start.elapsed_time(end) for start, end in turn) / 1e3
    count = max(least, min(_MOST, int(seconds / max(once, 1e-6))))
    turns = [_turn(graphs) for _ in range(count)]
    torch.cuda.synchronize()
    return [Timing(tuple(turn[i][0].elapsed_time(turn[i][1]) * 1e3 for turn in turns)) for i in range(len(graphs))]


def _turn(graphs) -> list[tuple[torch.cuda.Event, torch.cuda.Event]]:
    pairs = []
    for graph in graphs:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        pairs.append((start, end))
    return pairs
