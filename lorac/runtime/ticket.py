"""What a step is described by: the admission's answer, the ticket of a prepared batch, what launches read of it."""

from typing import NamedTuple, Protocol

from lorac.runtime.launch import Kernel
from lorac.runtime.layout import Layout
from lorac.runtime.metadata import RowMap
from lorac.runtime.segments import Grid, Segments

PHASES = ("decode", "prefill", "mixed")


class Admission(NamedTuple):
    """What the generated `admit` decided: the variant, and the bucket of the graph or, with bucket 0, why not."""

    bucket: int
    variant: str
    reason: str
    cause: str = ""  # the reason without its numbers, for counting


class Ticket(NamedTuple):
    """The right to run one prepared batch; `reason` says why it runs eagerly when it has no bucket."""

    serial: int
    phase: str  # of PHASES
    rows: int
    requests: int
    adapters: int
    rank: int
    variant: str
    bucket: int
    reason: str
    slots: tuple[int, ...]
    generations: tuple[int, ...]  # of those slots
    rows_per_request: int  # of a decode batch; above 1 in a verify step
    cause: str = ""  # the reason without its numbers, for counting


class Batch(NamedTuple):
    """What kernel launches read on the host. Tensors are in `map`; nothing here changes between replays of a graph."""

    phase: str
    grid: Grid
    adapters: int  # bound of the variant: 0 means no LoRA work at all
    rank: int  # bound of the variant; 0 where there is no LoRA work
    slots: tuple[int, ...]  # slots with rows, for backends that loop on the host
    map: RowMap
    rows: int  # live rows
    padded: int  # rows of the bucket, or the live rows


class Bounds(NamedTuple):
    """What of a batch may decide how it is launched: batches that have this in common are launched alike."""

    grid: Grid
    adapters: int
    rank: int
    map: RowMap


class PackageTables(Protocol):
    """What the generated `step.py` gives the runtime."""

    LAYOUT: Layout
    VARIANTS: dict[str, tuple[int, int]]  # name -> (adapters, rank), narrow to wide
    SEGMENTS: dict[str, Segments]
    GRIDS: dict[str, dict[str, dict[int, Grid]]]  # backend -> phase -> bucket -> grid
    MAX_ROWS: int
    MAX_REQUESTS: int
    STREAMS: int  # concurrent streams of steps, each with its own Step
    AGREE: bool  # whether ranks settle on one answer each step
    ROUTE: Kernel

    @staticmethod
    def admit(backend: str, phase: str, rows: int, requests: int, adapters: int, rank: int) -> Admission: ...
