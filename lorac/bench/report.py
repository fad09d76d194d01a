"""What was measured, as tables a person reads and as JSON for a machine."""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field

from lorac.bench.host import HostTime
from lorac.bench.kernels import Timed
from lorac.bench.rates import Rates
from lorac.bench.tax import Cell
from lorac.tables import table


@dataclass
class Report:
    """One run of the bench. `missing` are peers that could not take part, with the reason."""

    package: str
    gpu: str
    versions: dict[str, str]
    layers: int
    rates: Rates
    cells: list[Cell] = field(default_factory=list)
    kernels: list[Timed] = field(default_factory=list)
    host: list[HostTime] = field(default_factory=list)
    missing: dict[str, str] = field(default_factory=dict)
    peers: list[str] = field(default_factory=list)

    @property
    def complete(self) -> bool:
        """Whether everything asked for was timed, on a quiet machine."""
        failed = any(of.problem for cell in self.cells for of in cell.contenders.values())
        return not (failed or self.missing or any(cell.noise for cell in self.cells))

    def text(self) -> str:
        """Every table there is something for."""
        versions = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        head = f"{self.package} on {self.gpu}, {versions}, {self.layers} layers, reaching "
        head += f"{self.rates.bandwidth / 1e12:.2f} TB/s and {self.rates.matrix / 1e12:.0f} Tflop/s"
        parts = [head, *self._taxes(), _kernel_table(self.kernels), _host_table(self.host), *self._notes()]
        return "\n\n".join(filter(None, parts))

    def json(self) -> str:
        """Everything, indented."""
        return json.dumps(asdict(self), indent=2) + "\n"

    def _taxes(self) -> list[str]:
        """A table per variant: sizes down, contenders across."""
        tables = []
        for variant in dict.fromkeys(cell.variant for cell in self.cells):
            cells = [cell for cell in self.cells if cell.variant == variant]
            names = list(dict.fromkeys(name for cell in cells for name in cell.contenders))
            rows = [
                (cell.rows, cell.adapters, cell.rank, f"{cell.base_us:.1f}", *(_tax(cell, name) for name in names))
                for cell in cells
            ]
            title = (
                f"LoRA tax in percent of the base's time, variant {variant} (µs a layer; ± where above half a point)"
            )
            tables.append(title + "\n" + table(("rows", "adapters", "rank", "base µs", *names), rows))
        return tables

    def _notes(self) -> Iterable[str]:
        noisy = [f"{cell.rows} rows, {cell.adapters} adapters: {cell.noise}" for cell in self.cells if cell.noise]
        if noisy:
            yield "\n".join(["too noisy to say (?):", *noisy])
        failed = {
            f"{name}: {of.problem}" for cell in self.cells for name, of in cell.contenders.items() if of.problem
        } | {f"{name}: {reason}" for name, reason in self.missing.items()}
        if failed:
            yield "\n".join(["could not be timed (-):", *sorted(failed)])


def _tax(cell: Cell, name: str) -> str:
    of = cell.contenders.get(name)
    if of is None or of.problem:
        return "-"
    doubt = f" ± {100 * of.doubt:.1f}" if of.doubt > 0.005 else ""
    return f"{100 * of.tax:.1f}{doubt}{' ?' if cell.noise else ''}"


def _kernel_table(kernels: list[Timed]) -> str:
    if not kernels:
        return ""
    rows = [
        (of.backend, of.kernel, of.rows, of.adapters, f"{of.us:.2f}", f"{of.bytes_us:.2f}", f"{of.flops_us:.2f}")
        + (f"{of.us / of.floor_us:.1f}",)
        for of in kernels
    ]
    heads = ("backend", "kernel", "rows", "adapters", "µs", "floor by bytes", "by flops", "times its floor")
    return "kernels, where they run\n" + table(heads, rows)


def _host_table(host: list[HostTime]) -> str:
    if not host:
        return ""
    rows = [
        (of.backend, of.call, f"{of.us:.1f}", f"{of.torch_us:.1f}", f"{of.driver_us:.1f}")
        + (f"{of.copies:g}", f"{of.kernels:g}", f"{of.synchronisations:g}")
        for of in host
    ]
    heads = ("backend", "call", "µs", "x.add_(1) of torch", "in the driver", "copies", "kernels", "synchronisations")
    return "the host's share of each call\n" + table(heads, rows)
