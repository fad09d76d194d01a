"""What is to be searched: the sites of a spec with their candidates, and a package whose kernels can run them all."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod

from lorac.errors import BuildError
from lorac.fingerprint import fingerprint
from lorac.plan.build import Tuned, make_plan
from lorac.plan.kernels import ANY_ADAPTERS, SPLITS, UNBOUNDED, block_of, launched
from lorac.plan.model import KernelPlan, Launch, Plan
from lorac.render.package import launch_row, render
from lorac.spec.backend import Declaration, Kernel, Tile
from lorac.spec.folders import BackendFolder
from lorac.spec.load import SpecFile
from lorac.tune.batches import Batch, Reached, reached
from lorac.tune.model import Machine, Model, live_segments, segmented
from lorac.tune.search import Search
from lorac.tune.space import (
    BARE,
    Site,
    candidates,
    declared,
    declared_anywhere,
    declared_bare,
    in_library,
    library,
    open_ended,
)

ROWS = (1, 16, 32, 64, 128, 256, 512, 1024, 4096)
KINDS = ("linear", "lm_head")


@dataclass(frozen=True)
class Gpu:
    """The present GPU: its name, its target and what the model needs of it."""

    name: str
    target: str
    machine: Machine = Machine()


class Task:
    """What is to be searched: the sites with their candidates, and a package whose kernels can run all of those."""

    def __init__(self, file: SpecFile, folders: dict[str, BackendFolder], gpu: Gpu, backends, rows):
        self.spec = file.spec.model_copy(update={"targets": [gpu.target]})
        self.declarations: dict[str, Declaration] = {name: folder.declaration for name, folder in folders.items()}
        plan = make_plan(self.spec, file.shapes, self.declarations, {})
        _known(backends, plan)
        self.searches: dict[Site, Search] = {}
        self.open_ended: set[Site] = set()  # where what is declared serves all larger batches too
        self._reached: dict[Site, Reached] = {}
        self._planned: dict[Site, KernelPlan] = {}
        forced: Tuned = {}
        rendered: dict[str, set[str]] = {}
        kernels = self._searched(plan, make_plan(self.spec, file.shapes, self.declarations, self._may_be_left()))
        for site, kernel, kernel_plan in self._sites(plan, kernels, backends, rows or _sizes(plan)):
            search = self._search(site, kernel, kernel_plan, plan, gpu)
            self.searches[site], self._planned[site] = search, kernel_plan
            if open_ended(kernel_plan, site):
                self.open_ended.add(site)
            stages = forced.setdefault(site.backend, {})
            if site.kernel not in rendered.setdefault(site.backend, set()):
                stages[site.stage] = (*stages.get(site.stage, ()), *((tile, "") for tile in _demanding(search, kernel)))
                rendered[site.backend].add(site.kernel)
        able = make_plan(self.spec, file.shapes, self.declarations, forced)
        paths = [folder.path for folder in folders.values()]
        self.fingerprint = fingerprint(plan.canonical(), paths)  # whatever sizes and backends are searched
        self.files = render(able, folders, self.fingerprint)
        self._kernels = {(b.name, kernel.name): kernel for b in able.backends for kernel in b.kernels}

    def rows(self, site: Site, launch: Launch, served: bool = False) -> list[tuple]:
        """A configuration as rows of the kernel's launch table: for the bounds that its site's batches get.

        With `served`, for every bound that the plan would launch it for. Without a bound on the rows, so that sizes
        share what is compiled; none where the library has the base.
        """
        if in_library(launch):
            return []
        kernel = self._kernels[site.backend, site.kernel]
        if site.adapters == BARE:
            bounds = [(0, BARE)]
        elif served:
            bounds = [(of.rank, of.adapters) for of in kernel.launches if _within(of, site)]
        else:
            # one with the base is launched beside the others of its call, whose batches may be of lower ranks
            ranks = {of.rank for of in self.beside(site)} if kernel.base else {site.rank}
            reached = [(rank, bound) for rank in ranks for bound in self._reached[site].bounds]
            bounds = [*[(0, BARE)] * kernel.base, *sorted(reached, key=prod)]
        of_rank = [block for block, dim in self._declared(site).dims.items() if dim == "rank"]
        found = []
        for rank, adapters in dict.fromkeys(bounds):
            tile = dict(launch.tile)
            tile |= {block: min(tile[block], block_of(max(rank, 1))) for block in of_rank}
            bounded = replace(launch, rows=UNBOUNDED, rank=rank, adapters=adapters, tile=tuple(tile.items()))
            found.append(launch_row(kernel, bounded))
        return found

    def batches(self, site: Site) -> list[Batch]:
        """The batches whose times are a site's time."""
        if site.adapters == BARE:
            return [(0, site.rank)]
        return self._reached[site].batches

    def runs(self, site: Site) -> bool:
        """Whether its kernel is launched, as far as the best of the others decides: some are by the library's side."""
        kernel = self._declared(site)
        return not kernel.in_library or any(
            of.stage == kernel.beside and in_library(self.searches[of].best) for of in self.beside(site)
        )

    def chosen(self, sites: list[Site]) -> dict[Site, Launch]:
        """What sites launch in the end; also without adapters, where that is something else."""
        return self._with_bare({site: self.searches[site].parted() for site in sites if self.runs(site)})

    def declared(self, sites: list[Site]) -> dict[Site, Launch]:
        """What the plan has them launch, in the same form."""
        searches = {site: self.searches[site] for site in sites}
        return self._with_bare({site: (of.bare or of.declared, of.declared) for site, of in searches.items()})

    def between(self, chosen: dict[Site, Launch]) -> dict[Site, Launch]:
        """What the plan launches at the sizes that are declared below each chosen one, where they were not searched.

        A tile serves every size up to its own; of those between nothing is known but what is declared.
        """
        pairs = {}
        for site in chosen:
            if site.adapters == BARE:
                continue
            plan, kernel = self._planned[site], self._declared(site)
            classes = {tile.rows for of in self.beside(site) for tile in self._declared(of).tiles if tile.rows}
            for rows in (of for of in classes if of < site.rows):
                other = replace(site, rows=rows)
                if other not in self.searches:
                    adapted = declared(plan, other)
                    pairs[other] = (declared_bare(kernel, plan, other) if kernel.base else adapted, adapted)
        return self._with_bare(pairs)

    def beside(self, site: Site) -> list[Site]:
        """The sites that one call launches, or would for other adapters or by the library; this one among them."""
        return [of for of in self.searches if _call(of) == _call(site)]

    def around(self, site: Site) -> list[Site]:
        """The sites of the other calls of its layers."""
        here = site.backend, site.rows
        return [of for of in self.searches if (of.backend, of.rows) == here and of.module != site.module]

    def _declared(self, site: Site) -> Kernel:
        return self.declarations[site.backend].kernels[site.stage]

    @staticmethod
    def _with_bare(pairs: dict[Site, tuple[Launch, Launch]]) -> dict[Site, Launch]:
        return {site: adapted for site, (_, adapted) in pairs.items()} | {
            replace(site, adapters=BARE): bare for site, (bare, adapted) in pairs.items() if bare != adapted
        }

    def _may_be_left(self) -> Tuned:
        """Tiles that have the plan hold what is launched by the library's side, where none that is declared does."""
        tile = Tile(rows=1, library=True), ""
        return {
            name: {stage: (tile,) for stage in declaration.kernels if declaration.may_leave(stage)}
            for name, declaration in self.declarations.items()
        }

    @staticmethod
    def _searched(plan: Plan, able: Plan) -> dict[str, tuple[KernelPlan, ...]]:
        """By backend, the kernels of `able`, each as it is in `plan` if it is there."""
        found = {}
        for backend, wider in zip(plan.backends, able.backends, strict=True):
            own = {kernel.name: kernel for kernel in backend.kernels}
            found[backend.name] = tuple(own.get(kernel.name, kernel) for kernel in wider.kernels)
        return found

    def _sites(self, plan: Plan, kernels, backends, rows) -> Iterator[tuple[Site, Kernel, KernelPlan]]:
        """In the order they are visited first: a search cut short has seen every module and size."""
        for size in rows:
            for backend in plan.backends:
                searched = _launchable(kernels[backend.name], size)
                for kernel in searched if not backends or backend.name in backends else ():
                    declaration = self.declarations[backend.name].kernels[kernel.stage]
                    if plan.module(kernel.module).kind in KINDS:
                        for (rank, adapters), found in reached(plan, kernel, size).items():
                            site = Site(backend.name, kernel.stage, kernel.module, rank, adapters, size)
                            self._reached[site] = found
                            yield site, declaration, kernel

    def _search(self, site: Site, kernel: Kernel, kernel_plan: KernelPlan, plan: Plan, gpu: Gpu) -> Search:
        module = plan.module(site.module)
        backend = next(backend for backend in plan.backends if backend.name == site.backend)
        counts = (1, plan.slots) if site.adapters == ANY_ADAPTERS else (site.adapters,)
        by_count = [live_segments(backend.segments, site.rows, count) for count in counts]
        batches = by_count if segmented(kernel) else [(1, site.rows)]
        slot_columns = plan.slots * plan.max_rank
        model = Model(kernel, module, site, slot_columns, batches, plan.dtype, gpu.machine)
        legal = candidates(kernel, module, site, slot_columns, plan.dtype, (gpu.target,))
        predicted = {launch: model.predict(launch) for launch in legal}
        known = declared_anywhere(kernel, module, site, slot_columns, plan.dtype, (gpu.target,))
        seeds = sorted((launch for launch in known if launch in predicted), key=predicted.__getitem__)
        if self.declarations[site.backend].may_leave(site.stage):
            seeds.insert(0, library(site))
        bare = declared_bare(kernel, kernel_plan, site) if kernel.base else None
        return Search(site, declared(kernel_plan, site), predicted, seeds, bare)


def _within(launch: Launch, site: Site) -> bool:
    """Whether a site's tile would serve a launch's bounds."""
    return launch.rank <= site.rank and (site.adapters == ANY_ADAPTERS or launch.adapters <= site.adapters)


def _call(site: Site) -> tuple[str, str, int]:
    return site.backend, site.module, site.rows


def _launchable(kernels: tuple[KernelPlan, ...], rows: int) -> list[KernelPlan]:
    """A backend's kernels that layers of so many rows launch, whichever of them leave the base to the library."""
    found = {of.name for of in launched(tuple(replace(of, library=(), in_library=False) for of in kernels), rows)}
    return [of for of in kernels if of.name in found]


def _demanding(search: Search, kernel: Kernel) -> list[Tile]:
    """Tiles that make the plan render what any candidate needs: sums split over K, masks where a block is ragged, and
    the library.

    The largest block of a dimension is ragged if any is. The tiles' bounds do not matter: a search sets launches.
    """
    demands = [*SPLITS, *(block for block, dim in kernel.dims.items() if dim in ("in", "out"))]
    tiles = [Tile(module=search.site.module, rows=1, library=True)] if any(map(in_library, search.seeds)) else []
    for name in demands:
        launch = max(search.predicted, key=lambda launch: dict(launch.tile).get(name, 1))
        options = {"warps": launch.warps, "stages": launch.stages, "pdl": launch.pdl}
        tiles.append(Tile(module=search.site.module, rows=len(tiles) + 1, **options, **dict(launch.tile)))
    return tiles


def _sizes(plan: Plan) -> list[int]:
    """The usual sizes as far as the spec has graphs for them."""
    largest = max((*plan.decode.buckets, *plan.prefill.buckets), default=ROWS[-1])
    return [size for size in ROWS if size <= largest]


def _known(backends: list[str] | None, plan: Plan) -> None:
    have = [backend.name for backend in plan.backends if backend.kernels]
    for name in backends or ():
        if name not in have:
            raise BuildError(f"{plan.name} has no backend {name!r} with kernels: it has {', '.join(have) or 'none'}")
