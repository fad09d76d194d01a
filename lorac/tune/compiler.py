"""Compiling candidates over the cores beside the one that measures, each once, and what disqualifies one of them."""

import multiprocessing
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

from lorac.plan.kernels import SHARED_LIMIT
from lorac.plan.model import Launch
from lorac.tune.space import Site

Job = tuple[str, str, tuple]  # backend, kernel, row of its launch table
Rows = Callable[[Site, Launch, bool], list[tuple]]  # what a configuration is launched as; see `Task.rows`


class Compiler:
    """Compiles for one target in `processes` processes."""

    def __init__(self, folder: Path, rows: Rows, target: str, processes: int):
        """`folder` holds the package whose kernels are compiled."""
        self.folder, self.rows, self.target, self.processes = folder, rows, target, processes
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["lorac.tune.worker"])
        self._pool = self._new_pool()
        self._jobs: dict[Job, Future] = {}

    def submit(self, site: Site, launch: Launch, served: bool = False) -> None:
        """Begin to compile a configuration: as it is measured or, with `served`, for every batch it would serve."""
        for job in self._jobs_of(site, launch, served):
            if job not in self._jobs:
                self._jobs[job] = self._start(job)

    def ready(self, site: Site, launch: Launch, served: bool = False) -> bool:
        """Whether a configuration has been compiled, or has failed to."""
        return all(self._jobs[job].done() for job in self._jobs_of(site, launch, served))

    def wait(self, seconds: float) -> None:
        """Until one more has been compiled, or so many seconds."""
        wait([job for job in self._jobs.values() if not job.done()], seconds, FIRST_COMPLETED)

    def drop(self) -> None:
        """Forget what is waiting to be compiled."""
        self._jobs = {job: future for job, future in self._jobs.items() if not future.cancel()}

    def problem(self, site: Site, launch: Launch, served: bool = False) -> str:
        """Why a configuration cannot serve (no compilation, spills, too much shared memory), or "" if it can."""
        self.submit(site, launch, served)
        return next(filter(None, map(self._problem, self._jobs_of(site, launch, served))), "")

    def close(self) -> None:
        """Stop, without waiting for what is under way."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _problem(self, job: Job) -> str:
        for last in (False, True):
            try:
                row = self._jobs[job].result()
                break
            except BrokenProcessPool:
                # one candidate took the compiler down, and with it all that were waiting: each gets another chance
                if last:
                    return "the compiler died"
                self._pool.shutdown(wait=False)
                self._pool = self._new_pool()
                waiting = [job for job, future in self._jobs.items() if future.done() and future.exception()]
                self._jobs.update({job: self._start(job) for job in [*waiting, job]})
        if row["error"]:
            return f"does not compile: {row['error']}"
        if row["stack"]:
            return f"spills {row['stack']} bytes"
        if row["shared"] > SHARED_LIMIT[self.target]:
            return f"needs {row['shared']} bytes of shared memory"
        return ""

    def _new_pool(self) -> ProcessPoolExecutor:
        return ProcessPoolExecutor(self.processes, self._context, _load, (str(self.folder),))

    def _start(self, job: Job) -> Future:
        return self._pool.submit(_compile, *job, self.target)

    def _jobs_of(self, site: Site, launch: Launch, served: bool) -> list[Job]:
        """What is compiled, without the sizes it serves: sites share it."""
        return [(site.backend, site.kernel, row) for row in self.rows(site, launch, served)]


# lorac.tune.worker takes Triton's interpreter away from the process that imports it: never from this one


def _load(folder: str) -> None:
    from lorac.tune import worker

    worker.start(folder)


def _compile(*job) -> dict[str, object]:
    from lorac.tune import worker

    return worker.compile_one(*job)
