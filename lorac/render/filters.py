"""How plan values are written in generated Python: formatted as a formatter would, so that output needs none."""

import json
import textwrap

WIDTH = 120


def pystring(value: str) -> str:
    """A double-quoted Python literal."""
    return json.dumps(value)


def pytuple(values) -> str:
    """A tuple literal of numbers, strings or tuples of them."""
    items = [_literal(value) for value in values]
    return "(" + ", ".join(items) + ("," if len(items) == 1 else "") + ")"


def pyfilled(values, name: str, comment: str) -> str:
    """An assignment of a tuple of numbers to a name, filled over several lines where one would be too long."""
    line = f"{name} = {pytuple(values)}  # {comment}"
    if len(line) <= WIDTH:
        return line
    body = textwrap.fill(", ".join(map(str, values)) + ",", WIDTH, initial_indent=" " * 4, subsequent_indent=" " * 4)
    return f"# {comment}\n{name} = (\n{body}\n)  # fmt: skip"


def pyrange(layers: tuple[int, ...]) -> str:
    """Layer numbers: `tuple(range(...))` where they are consecutive and many."""
    if len(layers) > 4 and list(layers) == list(range(layers[0], layers[-1] + 1)):
        start = f"{layers[0]}, " if layers[0] else ""
        return f"tuple(range({start}{layers[-1] + 1}))"
    return pytuple(layers)


def _literal(value) -> str:
    if isinstance(value, (tuple, list)):
        return pytuple(value)
    return pystring(value) if isinstance(value, str) else str(value)


FILTERS = {"pystring": pystring, "pytuple": pytuple, "pyfilled": pyfilled, "pyrange": pyrange}
