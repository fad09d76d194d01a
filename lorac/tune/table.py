"""The tuned table of a spec on one GPU, as YAML a person can read and edit; `lorac.spec.tuned` reads it."""

import re
from dataclasses import replace
from pathlib import Path

from lorac.plan.kernels import ANY_ADAPTERS
from lorac.plan.model import Launch
from lorac.spec.tuned import read_table
from lorac.tune.space import BARE, Site, in_library

FORMAT = 1

Row = dict[str, object]  # a tile: its bounds, sizes and options, in the order they are written
Rows = dict[str, dict[str, list[Row]]]  # backend -> stage -> tiles


def table_path(spec: Path, name: str, gpu: str) -> Path:
    """Where it lies: in the folder `tuned` beside the spec, named by the package and the GPU."""
    return spec.parent / "tuned" / f"{name}.{slug(gpu)}.yaml"


def slug(gpu: str) -> str:
    """A GPU's name as part of a file's: NVIDIA H200 becomes nvidia-h200."""
    return re.sub(r"[^a-z0-9]+", "-", gpu.lower()).strip("-")


def kept_rows(path: Path, searched: set[str]) -> Rows:
    """What a table has of backends other than those. Raises SpecError where it cannot be read."""
    tiles = read_table(path)[0].data["tiles"] if path.exists() else {}
    return {backend: stages for backend, stages in tiles.items() if backend not in searched}


def table_text(name: str, gpu: str, target: str, chosen: dict[Site, Launch], kept: Rows, open_ended: set[Site]) -> str:
    """The file. The largest size tuned serves all larger ones too where what it takes the place of does (`open_ended`);
    sizes chosen alike share a line.
    """
    lines = [
        f"# Launch configurations of {name}, measured on one {gpu} by `lorac tune`. A tile serves batches of up",
        "# to `rows` rows and adapters of up to `rank`; the first that does is taken, the backend's own last. Sizes",
        "# between those searched have the backend's own as well.",
        f"lorac_tuned: {FORMAT}",
        f"gpu: {gpu}",
        f"target: {target}",
        f"spec: {name}",
        "tiles:",
    ]
    rows = kept | _chosen_rows(chosen, open_ended)
    for backend in sorted(rows):
        lines.append(f"  {backend}:")
        for stage, tiles in sorted(rows[backend].items()):
            lines.append(f"    {stage}:")
            lines += [
                f"      - {{{', '.join(f'{key}: {_text(value)}' for key, value in row.items())}}}" for row in tiles
            ]
    return "\n".join(lines) + "\n"


def _chosen_rows(chosen: dict[Site, Launch], open_ended: set[Site]) -> Rows:
    rows: Rows = {}
    chosen = _bare_at_every_size(chosen)
    for group in _groups(chosen):
        into = rows.setdefault(group[0].backend, {}).setdefault(group[0].stage, [])
        into += [
            _row(site, chosen[site], site == group[-1] and _searched_at(site) in open_ended)
            for site in _merged(group, chosen)
        ]
    return rows


def _bare_at_every_size(chosen: dict[Site, Launch]) -> dict[Site, Launch]:
    """Of kernels with a tile of its own for batches without adapters at some size: one at every size.

    A tile serves all sizes up to its own, so the smaller ones would get that of the next larger otherwise.
    """
    parted = {_kernel(site) for site in chosen if site.adapters == BARE}
    both = {replace(site, adapters=BARE): launch for site, launch in chosen.items() if _kernel(site) in parted}
    return both | chosen


def _groups(chosen: dict[Site, Launch]) -> list[list[Site]]:
    """Sites of one kernel, rank and number of adapters, by rows; those without adapters before all."""
    groups: dict[tuple, list[Site]] = {}
    for site in sorted(chosen, key=lambda site: (*_kernel(site), site.adapters != BARE, site)):
        groups.setdefault((*_kernel(site), site.rank, site.adapters), []).append(site)
    return list(groups.values())


def _searched_at(site: Site) -> Site:
    """The site itself, but of batches without adapters the one they were searched with."""
    return replace(site, adapters=ANY_ADAPTERS) if site.adapters == BARE else site


def _kernel(site: Site) -> tuple[str, str, str]:
    return site.backend, site.stage, site.module


def _merged(group: list[Site], chosen: dict[Site, Launch]) -> list[Site]:
    """Without the sites whose next one, of more rows, launches the same."""
    kept = []
    for site, following in zip(group, [*group[1:], None], strict=True):
        if following is None or _sizes(chosen[site]) != _sizes(chosen[following]):
            kept.append(site)
    return kept


def _row(site: Site, launch: Launch, last: bool) -> Row:
    bounds: Row = {"module": site.module} | ({} if last else {"rows": site.rows}) | {"rank": site.rank}
    if site.adapters == BARE:
        bounds["bare"] = True
    elif site.adapters != ANY_ADAPTERS:
        bounds["adapters"] = site.adapters
    return bounds | _sizes(launch)


def _sizes(launch: Launch) -> Row:
    if in_library(launch):
        return {"library": True}
    return dict(launch.tile) | {"warps": launch.warps, "stages": launch.stages} | ({"pdl": True} if launch.pdl else {})


def _text(value: object) -> str:
    return "true" if value is True else "false" if value is False else str(value)
