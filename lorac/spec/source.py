"""Reads a YAML spec into plain data and remembers where every key and value stands.

YAML is read by 1.2 rules. What the language allows but a spec must not contain (duplicate keys, tags, merge keys,
anchors that multiply, ambiguous numbers) becomes a problem with its place, and reading goes on, so that one run
reports everything.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from lorac.errors import Problem, SpecError

from .composer import MAX_DEPTH, MAX_NODES, Composer, Position, Stop, position_of
from .scalars import Scalar, ScalarError, plain_scalar

MAX_BYTES = 1 << 20
_MAX_SHOWN = 160  # columns of a source line that a message repeats

Path_ = tuple[str | int, ...]

_YAML_HINTS = {
    "\\t": "indent with spaces: YAML allows no tabs there",
    "mapping values are not allowed": "a text that contains ': ' needs quotes, and every key of a block starts in "
    "the same column",
    "expected <block end>": "every key of a block starts in the same column",
    "could not find expected ':'": "write key: value, with a space after the colon",
    "undefined alias": "an alias (*name) needs an anchor (&name) before it",
}


@dataclass(frozen=True)
class Source:
    """One spec file: its data and the position of each key path. `file` is the path as the user wrote it."""

    file: str
    lines: tuple[str, ...]
    data: dict[str, Any]
    keys: dict[Path_, Position]
    values: dict[Path_, Position]  # scalars only: a mapping or list is found by its key
    problems: tuple[Problem, ...] = ()

    def place(self, problem: Problem) -> Problem:
        """The problem at the deepest part of its path that the file has."""
        path = problem.path
        if not problem.at_key and path in self.values:
            return self.at(problem, self.values[path])
        while path and path not in self.keys:
            path = path[:-1]
        return self.at(problem, self.keys.get(path, (1, 1)))

    def at(self, problem: Problem, position: Position) -> Problem:
        """The problem at that position, with the source line where it fits on a screen."""
        line, column = position
        text = self.lines[line - 1] if line <= len(self.lines) else ""
        shown = "".join(char if char.isprintable() else " " for char in text[:_MAX_SHOWN])
        return problem.at(self.file, line, column, shown if column <= _MAX_SHOWN else "")


def place(problems: list[Problem], source: Source) -> list[Problem]:
    """Gives every problem that has no place yet its place in `source`."""
    return [problem if problem.file else source.place(problem) for problem in problems]


def read_source(path: str | Path) -> Source:
    """Reads the file. Raises SpecError where nothing can be read from it; lesser faults are in `problems`."""
    file = str(path)
    text = _read_text(file)
    blank = Source(file, tuple(text.splitlines()), {}, {}, {})
    loader = None
    try:
        loader = Composer(text)
        node = loader.get_single_node()
    except yaml.reader.ReaderError as error:
        start = text[: error.position]
        position = (start.count("\n") + 1, error.position - start.rfind("\n"))
        message = f"the file contains the control character U+{ord(text[error.position]):04X}"
        raise SpecError([blank.at(Problem(message, expected="YAML in UTF-8"), position)]) from None
    except yaml.MarkedYAMLError as error:
        raise SpecError([_yaml_problem(error, blank)]) from None
    except Stop as stop:
        raise SpecError([blank.at(stop.problem, stop.position)]) from None
    except (ValueError, OverflowError):
        # an escape such as "\UFFFFFFFF", or a %YAML directive of thousands of digits
        mark = loader.get_mark() if loader else None
        position = (mark.line + 1, mark.column + 1) if mark else (1, 1)
        raise SpecError([blank.at(Problem("not valid YAML: a number out of range"), position)]) from None
    if not isinstance(node, yaml.MappingNode):
        found = "the file is empty" if node is None else "the file is not a mapping of keys to values"
        problem = Problem(found, expected="keys and their values; a spec begins with `lorac: 1`")
        raise SpecError([blank.at(problem, (1, 1))])
    reader = _Reader(blank, loader.problems)
    try:
        data = reader.read(node, ())
    except Stop as stop:
        raise SpecError([blank.at(stop.problem, stop.position)]) from None
    return replace(blank, data=data, keys=reader.keys, values=reader.values, problems=tuple(reader.problems))


def _read_text(file: str) -> str:
    try:
        with open(file, "rb") as stream:
            data = stream.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:  # ValueError: a NUL inside the path
        reason = getattr(error, "strerror", None) or str(error)
        raise SpecError([Problem(f"cannot be read: {reason}", file=file)]) from None
    if len(data) > MAX_BYTES:
        problem = Problem("the file is larger than 1 MiB", file=file, expected="a spec, a few kilobytes of YAML")
        raise SpecError([problem])
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        before = data[: error.start].decode("utf-8", "replace")
        position = (before.count("\n") + 1, len(before) - before.rfind("\n"))
        blank = Source(file, tuple(data.decode("utf-8", "replace").splitlines()), {}, {}, {})
        message = f"byte 0x{data[error.start]:02X} is not UTF-8"
        raise SpecError([blank.at(Problem(message, expected="YAML in UTF-8"), position)]) from None


def _yaml_problem(error: yaml.MarkedYAMLError, blank: Source) -> Problem:
    what = error.problem or error.context or "unreadable"
    if what.startswith("but found another document"):
        what = "the file holds more than one document (---)"
    if what == "second occurrence":
        what = error.context.split(";")[0]
    hint = next((hint for part, hint in _YAML_HINTS.items() if part in what), "")
    mark = error.problem_mark or error.context_mark
    position = (mark.line + 1, mark.column + 1) if mark else (1, 1)
    return blank.at(Problem(f"not valid YAML: {what}", hint=hint), position)


class _Reader:
    """Turns nodes into plain data, noting positions and problems. Nodes shared by aliases are expanded, counted."""

    def __init__(self, blank: Source, problems: list[tuple[Problem, Position]]):
        self.blank = blank
        self.keys: dict[Path_, Position] = {}
        self.values: dict[Path_, Position] = {}
        self.problems = [blank.at(problem, position) for problem, position in problems]
        self.nodes = 0
        self.open: set[int] = set()  # ids of the collections being read: meeting one again is a cycle

    def read(self, node: yaml.Node, path: Path_) -> Any:
        self.nodes += 1
        if self.nodes > MAX_NODES:
            raise Stop(f"aliases expand to more than {MAX_NODES} values", self.keys[path[:1]])
        if isinstance(node, yaml.ScalarNode):
            self.values[path] = position_of(node)
            return self.scalar(node)
        if id(node) in self.open:
            raise Stop("an alias refers to the value that contains it", position_of(node))
        if len(path) >= MAX_DEPTH:
            raise Stop(f"aliases nest values more than {MAX_DEPTH} deep", self.keys[path[:1]])
        self.open.add(id(node))
        try:
            return self.mapping(node, path) if isinstance(node, yaml.MappingNode) else self.sequence(node, path)
        finally:
            self.open.remove(id(node))

    def sequence(self, node: yaml.SequenceNode, path: Path_) -> list[Any]:
        items = []
        for index, child in enumerate(node.value):
            self.keys[*path, index] = position_of(child)
            items.append(self.read(child, (*path, index)))
        return items

    def mapping(self, node: yaml.MappingNode, path: Path_) -> dict[Any, Any]:
        data: dict[Any, Any] = {}
        if not path:
            self.keys[()] = position_of(node)
        for key_node, child in node.value:
            key = self.key(key_node)
            if key is None:
                continue
            here = (*path, key)
            if key in data:
                line, column = self.keys[here]
                message = f"the key {_shown(key)} stands twice; first at {line}:{column}"
                self.note(key_node, message, "keep one of them")
                continue
            self.keys[here] = position_of(key_node)
            data[key] = self.read(child, here)
        return data

    def key(self, node: yaml.Node) -> str | int | None:
        """The key, a text or a whole number (tables such as {1: 16}); None with a problem for anything else."""
        if not isinstance(node, yaml.ScalarNode):
            self.note(node, "a list or mapping cannot be a key", "keys are names or whole numbers")
            return None
        if node.style is None and node.value == "<<":
            self.note(node, "merge keys (<<) are not supported", "write the keys out, or alias a whole value")
            return None
        key = self.scalar(node)
        if isinstance(key, str) or type(key) is int:
            return key
        self.note(node, f"the key {node.value or '(empty)'} is not a text", f'quote it: "{node.value}"')
        return None

    def scalar(self, node: yaml.ScalarNode) -> Scalar:
        if any("\ud800" <= char <= "\udfff" for char in node.value):
            self.note(node, "the text contains half of a surrogate pair", "write the character itself")
            return ""
        if node.style is not None:
            return node.value
        try:
            return plain_scalar(node.value)
        except ScalarError as error:
            self.note(node, str(error), error.hint)
            return 1  # stands in for the number, so that nothing further is said of it

    def note(self, node: yaml.Node, message: str, hint: str) -> None:
        self.problems.append(self.blank.at(Problem(message, hint=hint), position_of(node)))


def _shown(key: str | int) -> str:
    return repr(key) if isinstance(key, str) else str(key)
