"""Plain text tables and sizes, as people read them."""

from collections.abc import Iterable, Sequence

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def table(heads: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Aligned columns under their heads; a column whose every cell begins with a digit is aligned to the right."""
    cells = [[str(cell) for cell in row] for row in rows]
    columns = list(zip(heads, *cells, strict=True))
    widths = [max(map(len, column)) for column in columns]
    right = [all(cell[:1].isdigit() for cell in column[1:] if cell) and bool(cells) for column in columns]
    lines = []
    for row in [list(heads), *cells]:
        parts = [c.rjust(w) if r else c.ljust(w) for c, w, r in zip(row, widths, right, strict=True)]
        lines.append("  ".join(parts).rstrip())
    return "\n".join(lines)


def size(count: int) -> str:
    """Bytes in the largest unit of which there is at least one: 1536 is `1.5 KiB`."""
    value, unit = float(count), 0
    while value >= 1024 and unit + 1 < len(_UNITS):
        value, unit = value / 1024, unit + 1
    return f"{value:.1f} {_UNITS[unit]}" if unit else f"{count} B"


def compact(numbers: Sequence[int]) -> str:
    """Ascending numbers with runs of four or more equal steps shortened: `1, 2, 4, 8 … 32 by 8`."""
    parts, at = [], 0
    while at < len(numbers):
        end = at + 1
        while end + 1 < len(numbers) and numbers[end + 1] - numbers[end] == numbers[at + 1] - numbers[at]:
            end += 1
        if end - at >= 3 and end < len(numbers):
            step = numbers[at + 1] - numbers[at]
            parts.append(f"{numbers[at]} … {numbers[end]}" + (f" by {step}" if step > 1 else ""))
            at = end + 1
        else:
            parts.append(str(numbers[at]))
            at += 1
    return ", ".join(parts)
