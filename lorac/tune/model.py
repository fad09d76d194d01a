"""How long a launch should take: a rough model of bytes, latency and rounds of programs, which orders the search.

It knows nothing of a particular kernel: a program loops over tiles of its operands, which are read through a pipeline,
and ends by reading and writing its tile of results. Only the order of its answers matters.
"""

from dataclasses import dataclass
from math import ceil, prod

from lorac.plan.kernels import ITEMSIZE, block_of, sharing
from lorac.plan.model import Launch, ModulePlan
from lorac.runtime.segments import Segments, chunk_of
from lorac.spec.backend import Kernel
from lorac.tune.space import ROWS_BLOCK, Site, extent, reduction

_LATENCY = 0.8  # µs from asking for global memory to having it, under load
_ENTRY = 1.6  # µs for a program's chain of dependent metadata loads
_MEET = 1.5  # µs for the programs of a split sum to find the last of them
_CACHE_GAIN = 2.0  # reads that other programs repeat come from L2, about that much faster


@dataclass(frozen=True)
class Machine:
    """What the model needs of a GPU: multiprocessors, bytes per µs, flops per µs, shared memory of a multiprocessor."""

    processors: int = 132
    bandwidth: float = 4.3e6
    matrix_rate: float = 7.5e8
    shared: int = 233_472


class Model:
    """Predictions at one site, over `batches`, each (live segments, rows of each), one after another.

    A kernel that takes no segments has all rows in one.
    """

    def __init__(
        self,
        kernel: Kernel,
        module: ModulePlan,
        site: Site,
        slot_columns: int,
        batches: list[tuple[int, int]],
        dtype: str,
        machine: Machine,
    ):
        self.kernel, self.module, self.site, self.batches = kernel, module, site, batches
        self.slot_columns = slot_columns
        self.item, self.machine = ITEMSIZE[dtype], machine
        self._work: dict[tuple, list[_Work]] = {}

    def predict(self, launch: Launch) -> float:
        """µs."""
        if launch.tile not in self._work:
            tile = dict(launch.tile)
            self._work[launch.tile] = [self._divide(tile, segments, rows) for segments, rows in self.batches]
        return sum(self._time(launch, work) for work in self._work[launch.tile])

    def _divide(self, tile: dict[str, int], segments: int, rows: int) -> "_Work":
        """How a tile cuts a batch into programs."""
        kernel, inner, split = self.kernel, reduction(self.kernel), sharing(tile)
        programs, results = segments * split, 1
        outer = _outer(kernel, tile, inner)
        for block, dim in outer.items():
            programs *= ceil(rows / tile[block]) if dim == "rows" else self._tiles(dim, tile[block])
            results *= min(tile[block], rows) if dim == "rows" else tile[block]
        steps, step_bytes, step_flops = 1, 0, 0
        if inner in kernel.dims:
            steps = ceil(extent(kernel, self.module, self.site, self.slot_columns, inner) / (tile[inner] * split))
        if inner:
            # rows that are not there are not read
            real = {block: min(size, rows) if outer.get(block) == "rows" else size for block, size in tile.items()}
            step_bytes = sum(real[a] * real[b] for a, b in kernel.operands) * self.item
            step_flops = 2 * tile[inner] * prod(tile[block] for block in outer)
        stage_bytes = sum(tile[a] * tile[b] for a, b in kernel.operands) * self.item
        return _Work(programs, steps, step_bytes, step_flops, stage_bytes, results, split)

    def _tiles(self, dim: str, block: int) -> int:
        if dim == "out":
            return sum(ceil(part.width / block) for part in self.module.slices)
        if dim == "rank":
            return len(self.module.slices) * ceil(self.site.rank / block)
        adapters = 1 if segmented(self.kernel) else max(1, self.site.adapters)
        return ceil(len(self.module.slices) * block_of(self.site.rank) * adapters / block)

    def _time(self, launch: Launch, work: "_Work") -> float:
        processors = self.machine.processors
        resident = max(1, min(self.machine.shared // (launch.stages * work.stage_bytes + 1024), 64 // launch.warps, 16))
        rounds = ceil(work.programs / (processors * resident))
        beside = ceil(min(work.programs, processors * resident) / processors)
        share = _CACHE_GAIN * self.machine.bandwidth / processors / beside
        in_flight = max(1, launch.stages - 1) * work.step_bytes
        reading = work.step_bytes / min(share, max(in_flight, 1) / _LATENCY)
        # small tiles keep the matrix units waiting for their operands
        rate = self.machine.matrix_rate / processors / beside * min(1.0, work.results / 8192 + 0.1)
        summing = work.step_flops / rate
        step = max(reading, summing) if launch.stages > 1 else reading + summing
        written = 2 * work.results * (self.item if work.split == 1 else 4 * work.split)
        each = _ENTRY + _LATENCY + work.steps * step + written / share + (_MEET if work.split > 1 else 0)
        return rounds * each


def segmented(kernel: Kernel) -> bool:
    """Whether its programs take segments, rather than all rows of a batch."""
    return "seg_slot" in kernel.arguments


def _outer(kernel: Kernel, tile: dict[str, int], inner: str) -> dict[str, str]:
    """The blocks of a program's tile of results, with what they cut: rows, out, rank or columns."""
    dims = {ROWS_BLOCK: "rows"} | kernel.dims
    if not inner:
        return {block: dim for block, dim in dims.items() if block in tile and dim in ("rows", "out")}
    return {block: dims.get(block, "columns") for pair in kernel.operands for block in pair if block != inner}


@dataclass(frozen=True)
class _Work:
    """What one launch over one batch amounts to; bytes and flops are those of one program and step."""

    programs: int
    steps: int
    step_bytes: int
    step_flops: int
    stage_bytes: int
    results: int
    split: int


def live_segments(segments: Segments, rows: int, adapters: int) -> tuple[int, int]:
    """(segments, rows of each) of a batch of `rows` rows spread evenly over `adapters` adapters."""
    adapters = min(adapters, rows)
    each = ceil(rows / adapters)
    chunk = chunk_of(segments, rows)
    return (adapters * ceil(each / chunk), min(each, chunk)) if chunk else (adapters, each)
