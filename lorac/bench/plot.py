"""The taxes of one run as a picture: a panel per variant, sizes along, a line per contender."""

from pathlib import Path

from lorac.bench.report import Report
from lorac.errors import BuildError


def plot(report: Report, file: Path) -> None:
    """Write a PNG. Raises BuildError without matplotlib, or without a single tax to draw."""
    try:
        import matplotlib
    except ImportError:
        raise BuildError("--plot needs matplotlib: pip install 'lorac[bench]'") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    variants = [name for name in dict.fromkeys(cell.variant for cell in report.cells) if _drawn(report, name)]
    if not variants:
        raise BuildError("there is no tax to plot")
    figure, panels = pyplot.subplots(
        1, len(variants), figsize=(6.5 * len(variants), 4.8), sharey=True, squeeze=False, layout="constrained"
    )
    for panel, variant in zip(panels[0], variants, strict=True):
        cells = _drawn(report, variant)
        names = list(dict.fromkeys(name for cell in cells for name in cell.contenders))
        for name in names:
            points = [(cell.rows, cell.contenders[name]) for cell in cells if _timed(cell, name)]
            if points:
                taxes = [100 * of.tax for _, of in points]
                doubts = [100 * of.doubt for _, of in points]
                style = "--" if name in report.peers else "-"
                panel.errorbar([at for at, _ in points], taxes, doubts, fmt="o" + style, markersize=4, label=name)
        panel.set_xscale("log", base=2)
        panel.set_yscale("symlog", linthresh=10)
        ticks = sorted({cell.rows for cell in cells})
        panel.set_xticks(ticks, [str(tick) for tick in ticks])
        panel.set_title(f"{variant}: up to {max(c.adapters for c in cells)} adapters of rank {cells[0].rank}")
        panel.set_xlabel("rows")
        panel.axhline(0, color="black", linewidth=0.8)
        panel.grid(alpha=0.3)
        panel.legend(fontsize="small")
    panels[0][0].set_ylabel("LoRA tax, % of the base's time")
    figure.suptitle(f"{report.package} on {report.gpu}")
    figure.savefig(file, dpi=150)
    pyplot.close(figure)


def _drawn(report: Report, variant: str) -> list:
    """The cells of a variant with a time in them."""
    return [c for c in report.cells if c.variant == variant and any(_timed(c, name) for name in c.contenders)]


def _timed(cell, name: str) -> bool:
    return name in cell.contenders and not cell.contenders[name].problem
