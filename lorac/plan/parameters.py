"""Parameters of a backend block: the spec's values against what the backend folder declares."""

import difflib

from lorac.errors import Problem
from lorac.runtime.segments import Segments
from lorac.spec.backend import Declaration, Parameter

Values = tuple[tuple[str, object], ...]
NO_SEGMENTS = Segments(by="none", cap=0, chunks=(), floor=0)


def resolve(block: str, given: dict, declaration: Declaration) -> tuple[Values, Segments, list[Problem]]:
    """Every declared parameter with its value, sorted; the segment rule; and what is wrong with the values given."""
    problems, values, segments = [], {}, NO_SEGMENTS
    for key in given:
        if key not in declaration.parameters:
            problems.append(_unknown(block, key, declaration))
    for name, parameter in sorted(declaration.parameters.items()):
        path = ("backends", block, name)
        value = given.get(name, parameter.default)
        if parameter.type == "segments":
            segments, found = parse_segments(value, path)
            problems += found
        elif message := _wrong(value, parameter):
            problems.append(Problem(f"{name} {message}", path, expected=_expected(parameter), hint=parameter.help))
        else:
            values[name] = value
    return tuple(sorted(values.items())), segments, problems


def parse_segments(value: object, path: tuple[str | int, ...]) -> tuple[Segments, list[Problem]]:
    """`{by: request, cap: n}` or `{by: chunk, chunk: n or {from rows: n}, floor: n}`."""
    fields = {"request": {"cap": 32}, "chunk": {"chunk": 16, "floor": 1}}
    by = value.get("by") if isinstance(value, dict) else None
    if not isinstance(by, str) or by not in fields:
        return NO_SEGMENTS, [
            Problem(
                "segments does not say how rows are grouped", path, expected="{by: request, ...} or {by: chunk, ...}"
            )
        ]
    problems = [
        Problem(f"segments by {by} has no {key!r}", (*path, key), expected=", ".join(["by", *fields[by]]), at_key=True)
        for key in value
        if key not in ("by", *fields[by])
    ]
    known = {key: value.get(key, default) for key, default in fields[by].items()}
    for key in ("cap", "floor"):
        if key in known and not _whole(known[key], 1, 65535):
            problems.append(
                Problem(
                    f"a segment {key} of {known[key]!r} is not possible", (*path, key), "a whole number from 1 to 65535"
                )
            )
    if by == "chunk":
        problems += _chunk_problems(known["chunk"], (*path, "chunk"))
    if problems:
        return NO_SEGMENTS, problems
    table = _chunk_table(known.get("chunk", {}))
    return Segments(by, known.get("cap", 0), tuple(sorted(table.items())), known.get("floor", 1)), []


def _chunk_table(chunk: object) -> dict:
    """One chunk for any number of rows is a table of one entry."""
    return chunk if isinstance(chunk, dict) else {1: chunk}


def _chunk_problems(given: object, path: tuple[str | int, ...]) -> list[Problem]:
    problems, table = [], _chunk_table(given)
    if 1 not in table:
        problems.append(
            Problem("the chunk table does not start at 1 row", path, "{1: 16, 64: 32, ...}: from rows to chunk")
        )
    for rows, chunk in table.items():
        if not _whole(rows, 1, 2**31 - 1):
            problems.append(Problem(f"{rows!r} is no number of rows", (*path, rows), "a whole number from 1"))
        if not _whole(chunk, 16, 256) or chunk & (chunk - 1):
            # a chunk is the rows of one tile: tl.dot wants a power of two, and below 16 rows it pads to 16 anyway
            place = (*path, rows) if table is given else path
            problems.append(Problem(f"a chunk of {chunk!r} rows is not possible", place, "one of 16, 32, 64, 128, 256"))
    return problems


def _wrong(value: object, parameter: Parameter) -> str:
    if parameter.type == "bool":
        return "" if isinstance(value, bool) else f"must be true or false, not {value!r}"
    if parameter.type == "choice":
        return "" if value in parameter.choices else f"cannot be {value!r}"
    kinds = (int,) if parameter.type == "int" else (int, float)
    if isinstance(value, bool) or not isinstance(value, kinds):
        return f"must be a {'whole ' if parameter.type == 'int' else ''}number, not {value!r}"
    low, high = parameter.minimum, parameter.maximum
    return f"is {value}" if (low is not None and value < low) or (high is not None and value > high) else ""


def _expected(parameter: Parameter) -> str:
    if parameter.type == "choice":
        return "one of " + ", ".join(parameter.choices)
    low, high = parameter.minimum, parameter.maximum
    bounds = [f"at least {low}"] * (low is not None) + [f"at most {high}"] * (high is not None)
    return " ".join([parameter.type, " and ".join(bounds)]).strip()


def _unknown(block: str, key: str, declaration: Declaration) -> Problem:
    near = difflib.get_close_matches(str(key), declaration.parameters, 1)
    return Problem(
        f"backend {block!r} has no parameter {key!r}",
        ("backends", block, key),
        expected=", ".join(sorted(declaration.parameters)) or "no parameters",
        hint=f"did you mean {near[0]!r}?" if near else "",
        at_key=True,
    )


def _whole(value: object, low: int, high: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high
