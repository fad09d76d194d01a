"""How plan values are written in generated Python: as a formatter would, so that output needs none."""

import json
import textwrap
from collections.abc import Iterable

WIDTH = 120


def pystring(value: str, before: str = "", indent: int = 0) -> str:
    """A Python literal; where the line would be too long, pieces of it in brackets. `before` stands before it."""
    text = _quoted(value)
    if indent + len(before) + len(text) < WIDTH:
        return before + text
    pieces = textwrap.wrap(value, WIDTH - indent - 16, drop_whitespace=False, replace_whitespace=False, **_WORDS)
    inner = "".join(f"\n{' ' * (indent + 4)}{_quoted(piece)}" for piece in pieces)
    return f"{before}({inner}\n{' ' * indent})"


def pytuple(values: Iterable, before: str = "", indent: int = 0) -> str:
    """A tuple literal of numbers, strings or tuples of them; `before` (as in `NAME = `) stands before it."""
    items = [_literal(value) for value in values]
    line = before + "(" + ", ".join(items) + ("," if len(items) == 1 else "") + ")"
    if indent + len(line) < WIDTH:
        return line
    return _one_a_line(items, before + "(", ")", indent)


def pyfilled(values: Iterable[int], name: str, comment: str) -> str:
    """An assignment of a tuple of numbers to a name, filled over several lines where one would be too long."""
    line = f"{name} = {pytuple(values)}  # {comment}"
    if len(line) <= WIDTH:
        return line
    body = textwrap.fill(", ".join(map(str, values)) + ",", WIDTH, initial_indent=" " * 4, subsequent_indent=" " * 4)
    return f"# {comment}\n{name} = (\n{body}\n)  # fmt: skip"


def pyrange(layers: tuple[int, ...], before: str = "", indent: int = 0) -> str:
    """Layer numbers: `tuple(range(...))` where they are consecutive and many."""
    if len(layers) > 4 and list(layers) == list(range(layers[0], layers[-1] + 1)):
        start = f"{layers[0]}, " if layers[0] else ""
        return f"{before}tuple(range({start}{layers[-1] + 1}))"
    return pytuple(layers, before, indent)


def pycall(items: Iterable[str], before: str, after: str, indent: int = 0) -> str:
    """Arguments, already Python, between `before` (ending in a bracket) and `after` (beginning with it)."""
    items = list(items)
    inside = ", ".join(items)
    if indent + len(before + inside + after) <= WIDTH:
        return before + inside + after
    pad = " " * indent
    if indent + 4 + len(inside) <= WIDTH:
        return f"{before}\n{pad}    {inside}\n{pad}{after}"
    return _one_a_line(items, before, after, indent)


def pysum(terms: Iterable[str], before: str, indent: int = 0) -> str:
    """A sum of terms that are already Python, in brackets where it takes several lines."""
    terms = list(terms)
    line = before + " + ".join(terms)
    if indent + len(line) <= WIDTH:
        return line
    pad = " " * indent
    joint = " + " if indent + 4 + len(" + ".join(terms)) <= WIDTH else f"\n{pad}    + "
    return f"{before}(\n{pad}    " + joint.join(terms) + f"\n{pad})"


def pyformat(value: object, pattern: str) -> str:
    """The value inside a pattern of Python, for `map`."""
    return pattern % value


def pyslices(parts: Iterable[dict], indent: int = 0) -> str:
    """The slices of a module, as the layout constructs them."""
    names = ("name", "path", "start", "width", "full_width", "units")
    values = [[_literal(part[name]) for name in names] for part in parts]
    one = f"slices=(Slice({', '.join(values[0])}),)"
    if len(values) == 1 and indent + len(one) < WIDTH:
        return one
    return _one_a_line([pycall(items, "Slice(", ")", indent + 4) for items in values], "slices=(", ")", indent)


def pydoc(text: str, indent: int = 0) -> str:
    """Whole lines: the text as a docstring, each of its paragraphs filled."""
    pad = " " * indent
    escaped = text.replace("\\", "\\\\").replace('"""', '\\"\\"\\"').strip()
    escaped = escaped[:-1] + '\\"' if escaped.endswith('"') else escaped
    first, *rest = (" ".join(paragraph.split()) for paragraph in escaped.split("\n\n"))
    lines = _fill(first, pad + '"""', pad, 3)  # room for the closing quotes
    lines = "\n\n".join([lines, *(_fill(paragraph, pad, pad) for paragraph in rest)])
    return lines + (f'\n{pad}"""\n' if "\n" in lines else '"""\n')


def pycomment(text: str, indent: int = 0) -> str:
    """Whole lines: the text as comments."""
    pad = " " * indent + "# "
    return _fill(" ".join(text.split()), pad, pad) + "\n"


_WORDS = {"break_long_words": False, "break_on_hyphens": False}


def _fill(words: str, first: str, others: str, spare: int = 0) -> str:
    return textwrap.fill(words, WIDTH - spare, initial_indent=first, subsequent_indent=others, **_WORDS)


def _one_a_line(items: list[str], before: str, after: str, indent: int) -> str:
    pad = " " * indent
    return before + "".join(f"\n{pad}    {item}," for item in items) + f"\n{pad}{after}"


def _quoted(value: str) -> str:
    """In double quotes, unless single ones save escapes."""
    text = json.dumps(value, ensure_ascii=False)
    if value.count('"') <= value.count("'"):
        return text
    return "'" + text[1:-1].replace('\\"', '"').replace("'", "\\'") + "'"


def _literal(value) -> str:
    if isinstance(value, (tuple, list)):
        return pytuple(value)
    return _quoted(value) if isinstance(value, str) else str(value)


_ALL = (pystring, pytuple, pyfilled, pyrange, pycall, pysum, pyformat, pyslices, pydoc, pycomment)
FILTERS = {function.__name__: function for function in _ALL}
