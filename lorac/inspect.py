"""What a PEFT adapter folder holds, and whether a package can serve it, told without a GPU."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from lorac.runtime.adapters import Adapter, read_adapter
from lorac.runtime.adapters.config import AdapterConfig, read_config
from lorac.runtime.adapters.experts import matched_names
from lorac.runtime.adapters.names import Pair, locate, pair_tensors
from lorac.runtime.adapters.problems import Problems
from lorac.runtime.adapters.tensors import Header, open_tensors
from lorac.runtime.errors import AdapterError
from lorac.runtime.expert_names import ExpertNames
from lorac.runtime.layout import Layout
from lorac.tables import size, table


@dataclass(frozen=True)
class Report:
    """An adapter, as far as it could be read. `refusals` are the errors of reading or serving it."""

    folder: Path
    config: AdapterConfig | None
    headers: tuple[Header, ...]
    pairs: tuple[Pair, ...]
    layout: Layout | None  # of the package that was asked about
    adapter: Adapter | None  # as that package would serve it
    refusals: tuple[str, ...]

    @property
    def served(self) -> bool:
        """Whether nothing speaks against serving it."""
        return not self.refusals

    def text(self) -> str:
        """The report for a person: settings, tensors by projection, and where they go or why not."""
        lines = [f"adapter     {self.folder}"]
        if self.config:
            lines += _settings(self.config)
        if self.headers:
            kinds = ", ".join(sorted({header.dtype for header in self.headers}))
            total = size(sum(header.end - header.begin for header in self.headers))
            contents = _contents(self.pairs, self.config, self.layout)
            lines += [f"tensors     {len(self.headers)}, {total}, {kinds}", "", contents]
        if self.adapter:
            lines += [
                "",
                f"package {self.layout.name} serves it: {size(self.adapter.nbytes)} in one slot",
                _places(self.adapter),
            ]
        return "\n".join([*lines, *("\n" + refusal for refusal in self.refusals)])


def inspect_adapter(folder: str | Path, layout: Layout | None = None) -> Report:
    """Read an adapter as far as possible; with `layout`, also as the package of that layout would load it."""
    folder, refusals = Path(folder), []
    config, headers, pairs, adapter = None, (), (), None
    try:
        config = read_config(folder, Problems(folder))
    except AdapterError as error:
        refusals.append(str(error))
    try:
        with open_tensors(folder) as file:
            headers = tuple(file.headers.values())
        problems = Problems(folder)
        pairs = tuple(pair_tensors(headers, problems)[0])
        problems.raise_if_any()
    except AdapterError as error:
        refusals.append(str(error))
    if layout and not refusals:
        try:
            adapter = read_adapter(folder, layout)
        except AdapterError as error:
            refusals.append(str(error))
    refusals = tuple(dict.fromkeys(refusals))  # what ails the folder is met when either of its files is opened
    return Report(folder, config, headers, pairs, layout, adapter, refusals)


def _settings(config: AdapterConfig) -> list[str]:
    version = ".".join(map(str, config.version)) if config.version else "before 0.18"
    patterns = [name for name in ("rank_pattern", "alpha_pattern") if config.raw.get(name)]
    also = ["rsLoRA"] * config.rslora + [f"{name} of {len(config.raw[name])}" for name in patterns]
    return [
        f"base model  {config.base_model or 'not recorded'}",
        f"settings    r {config.rank}, alpha {config.alpha:g}"
        + "".join(f", {item}" for item in also)
        + f", PEFT {version}",
    ]


def _contents(pairs: Iterable[Pair], config: AdapterConfig | None, layout: Layout | None) -> str:
    """One row per projection: how often it is adapted, in which shapes, and at which ranks and scales."""
    names = ExpertNames(layout.modules if layout else ())
    groups: dict[str, list[Pair]] = {}
    for pair in pairs:
        place = locate(pair.module)
        path = place.path if place else re.sub(r"\.\d+\.", ".*.", pair.module)
        groups.setdefault(re.sub(r"\.\d+\.", ".*.", path), []).append(pair)
    rows = []
    for path, members in sorted(groups.items()):
        scales = _several(f"{scale:g}" for pair in members for scale in _scales(config, pair, names)) if config else ""
        shapes = [_several(str(list(getattr(pair, side).shape)) for pair in members) for side in "ab"]
        rows.append((path, len(members), *shapes, scales))
    return table(("projection", "count", "A", "B", "scale"), rows)


def _scales(config: AdapterConfig, pair: Pair, names: ExpertNames) -> list[float]:
    """The scale of a pair; the two it may have where only a package tells which parameter of the experts it is for."""
    return [config.scale_of(name) for name in matched_names(pair.module, names)]


def _places(adapter: Adapter) -> str:
    rows = []
    for block in adapter.blocks:
        ranks = block.tables(adapter.buffer).rank
        names = [part.name for part, column in zip(block.module.slices, ranks.T, strict=True) if column.any()]
        count = int((ranks > 0).any(1).sum())
        rows.append((block.module.name, " ".join(names), f"{count} of {block.module.instances}", block.rank))
    return table(("module", "slices", "instances", "largest rank"), rows)


def _several(values: Iterable[str]) -> str:
    distinct = list(dict.fromkeys(values))
    return ", ".join(distinct[:3]) + (" …" if len(distinct) > 3 else "")
