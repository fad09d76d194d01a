"""The tuned table of a spec on one GPU, as YAML a person can read and edit; `lorac.spec.tuned` reads it."""

import re
from pathlib import Path

from lorac.plan.kernels import ANY_ADAPTERS
from lorac.plan.model import Launch
from lorac.tune.space import Site

FORMAT = 1


def table_path(spec: Path, name: str, gpu: str) -> Path:
    """Where it lies: in the folder `tuned` beside the spec, named by the package and the GPU."""
    return spec.parent / "tuned" / f"{name}.{slug(gpu)}.yaml"


def slug(gpu: str) -> str:
    """A GPU's name as part of a file's: NVIDIA H200 becomes nvidia-h200."""
    return re.sub(r"[^a-z0-9]+", "-", gpu.lower()).strip("-")


def table_text(name: str, gpu: str, target: str, chosen: dict[Site, Launch]) -> str:
    """The file. The largest size tuned serves all larger ones too; sizes chosen alike share a line."""
    lines = [
        f"# Launch configurations of {name}, measured on one {gpu} by `lorac tune`. A tile serves batches of up",
        "# to `rows` rows and adapters of up to `rank`; the first that does is taken, the backend's own last.",
        f"lorac_tuned: {FORMAT}",
        f"gpu: {gpu}",
        f"target: {target}",
        f"spec: {name}",
        "tiles:",
    ]
    last = ("", "")
    for group in _groups(chosen):
        backend, stage = group[0].backend, group[0].stage
        if backend != last[0]:
            lines.append(f"  {backend}:")
        if (backend, stage) != last:
            lines.append(f"    {stage}:")
        last = (backend, stage)
        lines += [f"      - {_row(site, chosen[site], site == group[-1])}" for site in _merged(group, chosen)]
    return "\n".join(lines) + "\n"


def _groups(chosen: dict[Site, Launch]) -> list[list[Site]]:
    """Sites of one kernel, rank and number of adapters, by rows."""
    groups: dict[tuple, list[Site]] = {}
    for site in sorted(chosen):
        groups.setdefault((site.backend, site.stage, site.module, site.rank, site.adapters), []).append(site)
    return list(groups.values())


def _merged(group: list[Site], chosen: dict[Site, Launch]) -> list[Site]:
    """Without the sites whose next one, of more rows, launches the same."""
    kept = []
    for site, following in zip(group, [*group[1:], None], strict=True):
        if following is None or _sizes(chosen[site]) != _sizes(chosen[following]):
            kept.append(site)
    return kept


def _row(site: Site, launch: Launch, last: bool) -> str:
    bounds = {"module": site.module} | ({} if last else {"rows": site.rows}) | {"rank": site.rank}
    bounds |= {} if site.adapters == ANY_ADAPTERS else {"adapters": site.adapters}
    return "{" + ", ".join(f"{name}: {value}" for name, value in (bounds | _sizes(launch)).items()) + "}"


def _sizes(launch: Launch) -> dict[str, object]:
    options = {"warps": launch.warps, "stages": launch.stages} | ({"pdl": "true"} if launch.pdl else {})
    return dict(launch.tile) | options
