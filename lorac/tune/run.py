"""`lorac tune`: a search at every site of a spec, for as long as it may take, and the table of what won."""

import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from lorac.emit import emit
from lorac.errors import BuildError
from lorac.spec import load_spec
from lorac.spec.folders import find_folders
from lorac.tune.hunt import Compared, Compiles, Hunt, Measures
from lorac.tune.journal import Journal
from lorac.tune.search import Search
from lorac.tune.space import Site
from lorac.tune.table import kept_rows, table_path, table_text
from lorac.tune.task import Gpu, Task


@dataclass(frozen=True)
class Tools:
    """What a search works with, made from the folder of the package that is measured and what is searched."""

    measurer: Callable[[Path, Task], Measures]
    compiler: Callable[[Path, Task], Compiles]


@dataclass(frozen=True)
class Outcome:
    """What a search found: the table's path, each site's search, each call's times at last, and why it ended."""

    table: Path
    searches: dict[Site, Search]
    compared: dict[Site, Compared]  # by a site of the call
    ended: str


def tune(
    spec: Path, gpu: Gpu, tools: Tools, *, backends: list[str] | None, rows: list[int] | None, budget: float,
    resume: bool, show: Callable[[float, str], None], clock: Callable[[], float] = time.monotonic,
) -> Outcome:  # fmt: skip
    """Search for `budget` seconds and write the table. An interrupted search leaves its journal, for `resume`.

    What a table has of backends that are not searched stays. Raises SpecError for the spec or that table, BuildError
    where the GPU is none of its targets or a declared tile computes nonsense.
    """
    begun = clock()
    file = load_spec(spec)
    if gpu.target not in file.spec.targets:
        named = ", ".join(file.spec.targets) or "none"
        raise BuildError(
            f"{spec}: this GPU is {gpu.target}, the spec's targets are {named}: "
            f"its table would serve nothing; add targets: [{gpu.target}]"
        )
    task = Task(file, find_folders(file), gpu, backends, rows)
    table = table_path(spec, file.spec.name, gpu.name)
    kept = kept_rows(table, {site.backend for site in task.searches})
    with tempfile.TemporaryDirectory(prefix="lorac-tune-") as place:
        package = Path(place) / file.spec.name
        emit(task.files, package)
        journal = Journal(table.with_suffix(".journal"), gpu.name, task.fingerprint, resume)
        for site, results in journal.past:
            if site in task.searches:
                task.searches[site].note(results)
        ended, compared = "the budget is spent", {}
        if clock() - begun < budget:
            compiler = tools.compiler(package, task)
            try:
                hunt = Hunt(task, compiler, tools.measurer(package, task), journal, begun, budget, show, clock)
                ended = hunt.search()
                hunt.settle()
                compared = hunt.confirm()
            finally:
                compiler.close()
        journal.close()
    chosen = task.chosen(list(task.searches))
    chosen |= task.between(chosen)
    table.write_text(table_text(file.spec.name, gpu.name, gpu.target, chosen, kept, task.open_ended), encoding="utf-8")
    return Outcome(table, task.searches, compared, ended)
