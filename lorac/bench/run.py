"""`lorac bench`: everything that is asked for, measured on the present GPU in one process."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
import triton

from lorac.aot import Served, compile_package, present_target
from lorac.bench.host import LAUNCHED_ROWS, host_times
from lorac.bench.kernels import timed_kernels
from lorac.bench.peer_imports import PeerError
from lorac.bench.peers import Peer, peer
from lorac.bench.rates import measured_rates
from lorac.bench.report import Report
from lorac.bench.tax import Batch, batches, measure
from lorac.bench.workload import Workload
from lorac.runtime.errors import PackageError
from lorac.runtime.load import load

ROWS = (1, 8, 16, 32, 64, 128, 256, 1024, 4096)
LAYERS = 6  # of large models more than enough to pass every cache


@dataclass(frozen=True)
class Wanted:
    """What to measure; empty lists mean all backends, the usual sizes and no peers."""

    backends: list[str]
    rows: list[int]
    against: list[str]
    layers: int = 0
    taxes: bool = True
    kernels: bool = False
    host: bool = False
    seconds: float = 0.5  # per batch and round, over all contenders


def bench(folder: Path, wanted: Wanted, show: Callable[[float, str], None] = lambda share, words: None) -> Report:
    """Measure. Raises PackageError without a GPU, or for a backend the package lacks."""
    if not torch.cuda.is_available():
        raise PackageError("lorac bench measures on a GPU, and there is none")
    package = load(folder)
    unknown = [name for name in wanted.backends if name not in package.BACKENDS]
    if unknown:
        raise PackageError(
            f"{package.LAYOUT.name} has no backend {', '.join(unknown)}: it has {', '.join(package.BACKENDS)}"
        )
    backends = wanted.backends or list(package.BACKENDS)
    rows = wanted.rows or usual_rows(package)
    todo = batches(package.step.VARIANTS, package.LAYOUT.slots, rows)
    with ThreadPoolExecutor(1) as beside:
        show(0.0, "compiling kernels")
        needed = _served(package, backends, todo, wanted)
        compiled = beside.submit(compile_package, folder, (present_target(),), batches=needed)
        workload = Workload(package, "cuda", wanted.layers or LAYERS)
        peers, missing = found_peers(wanted.against)
        compiled.result()
    versions = {"torch": torch.__version__, "triton": triton.__version__}
    rates = measured_rates("cuda", workload.dtype)
    report = Report(package.LAYOUT.name, torch.cuda.get_device_name(), versions, len(workload.common), rates)
    report.peers, report.missing = wanted.against, missing
    if wanted.taxes:
        report.cells = measure(workload, backends, peers, todo, wanted.seconds, show)
    for backend in backends:
        step = workload.step(backend, rows[0], min(1, rows[0]))
        for size in rows if wanted.kernels and step.backend.KERNELS else ():
            report.kernels += timed_kernels(workload, backend, size, min(size, package.LAYOUT.slots), rates)
        if wanted.host:
            report.host += host_times(workload, backend)
    return report


def _served(package, backends: list[str], todo: list[Batch], wanted: Wanted) -> list[Served]:
    """What will be launched, for all of it to be compiled at once rather than when it is."""
    layout = package.LAYOUT
    sizes = [(batch.rows, batch.rank, batch.adapters) for batch in todo if wanted.taxes or wanted.kernels]
    sizes += [(rows, layout.max_rank, min(rows, layout.slots)) for rows in LAUNCHED_ROWS if wanted.host]
    return [Served(name, *size) for name in backends for size in sizes]


def found_peers(names: list[str]) -> tuple[dict[str, Peer], dict[str, str]]:
    """Those that can be imported, and why each of the others cannot."""
    peers, missing = {}, {}
    for name in names:
        try:
            peers[name] = peer(name)
        except PeerError as error:
            missing[name] = str(error)
    return peers, missing


def usual_rows(package) -> list[int]:
    """The usual sizes as far as the package has graphs for them."""
    admission = package.admission
    largest = max((*admission.DECODE_BUCKETS, *admission.PREFILL_BUCKETS), default=ROWS[-1])
    return [size for size in ROWS if size <= largest]
