"""Ahead of time: every launch configuration of a package compiled for GPUs that are not there.

Triton needs a GPU to run a kernel, not to compile one. So a build machine finds out that a kernel spills registers, or
asks for more shared memory than a target has, before a server does.
"""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from lorac.errors import BuildError
from lorac.tables import table

# -c, not -m: lorac must be found where it is not installed too, and only after the standard library
_WORKER = "import sys; sys.path.append(sys.argv.pop()); from lorac.aot.worker import main; main()"
_BLOCKS = "declare smaller blocks in the backend's tiles, or in the table under tuned/ that `lorac tune` writes"


@dataclass(frozen=True)
class Row:
    """One configuration compiled for one target. Registers and stack bytes are per thread, shared bytes per program."""

    backend: str  # "step" for the kernel that routes rows
    kernel: str
    target: str
    launch: str  # its constants and options
    registers: int
    stack: int  # a thread's own memory: where registers are spilled to
    shared: int
    error: str  # the compiler's last words where it failed


class Served(NamedTuple):
    """A batch that a backend launches its kernels for; rank and adapters are 0 where it has none."""

    backend: str
    rows: int
    rank: int
    adapters: int


def compile_package(
    folder: Path, targets: tuple[str, ...], workers: int | None = None, batches: list[Served] | None = None
) -> list[Row]:
    """Compile every configuration, or those that some batches need, once for each target, over all cores.

    What is compiled for the present GPU is found in Triton's cache when it is launched. Raises BuildError where the
    package does not load.

    That is done in other processes, for in this one Triton may be its interpreter already, which cannot compile.
    """
    workers = workers or os.cpu_count() or 1
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    root, wanted = str(Path(__file__).parents[2]), json.dumps(batches)
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", _WORKER, str(folder), ",".join(targets), wanted, str(share), str(workers), root],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for share in range(workers)
    ]
    finished = [(*process.communicate(), process.returncode) for process in processes]
    for _, errors, status in finished:
        if status:
            raise BuildError(f"{folder}: its kernels could not be compiled:\n{errors.strip()}")
    rows = [Row(**json.loads(line)) for output, _, _ in finished for line in output.splitlines()]
    return sorted(rows, key=lambda row: (row.backend, row.kernel, targets.index(row.target), row.launch))


def present_target() -> str:
    """The present GPU as specs name it."""
    import torch

    device = torch.cuda.get_device_properties(0)
    return device.gcnArchName.partition(":")[0] if torch.version.hip else f"sm_{device.major}{device.minor}"


def report(rows: list[Row]) -> str:
    """A table: the largest figures of each kernel on each target."""
    lines = []
    for name, group in groupby(rows, key=lambda row: (row.backend, row.kernel, row.target)):
        of = list(group)
        largest = (max(getattr(row, field) for row in of) for field in ("registers", "stack", "shared"))
        lines.append((*name, len(of), *largest))
    heads = ("backend", "kernel", "target", "configurations", "registers", "spilled bytes", "shared bytes")
    return table(heads, lines)


def failures_of(rows: list[Row]) -> list[str]:
    """A sentence for every configuration that does not compile, spills, or asks for too much shared memory."""
    from lorac.plan.kernels import SHARED_LIMIT

    failures = []
    for row in rows:
        where = f"{row.backend}.{row.kernel} on {row.target} ({row.launch})"
        if row.error:
            failures.append(f"{where} does not compile: {row.error}")
        if row.stack:
            failures.append(f"{where} spills {row.stack} bytes per thread: {_BLOCKS}")
        if row.shared > SHARED_LIMIT[row.target]:
            limit = SHARED_LIMIT[row.target]
            failures.append(f"{where} needs {row.shared} bytes of shared memory, of {limit}: {_BLOCKS}")
    return failures
