"""What went wrong, for the person who wrote it: a mistake in a spec is a `Problem` with its place and its remedy."""

import json
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Problem:
    """One mistake. `path` is the key path inside the spec; file, line and column (1-based) say where that stands.

    It stands at the path's value, or `at_key` at the key itself.
    """

    message: str
    path: tuple[str | int, ...] = ()
    expected: str = ""
    hint: str = ""
    file: str = ""
    line: int = 0
    column: int = 0
    source_line: str = ""
    at_key: bool = False

    def at(self, file: str, line: int, column: int, source_line: str) -> "Problem":
        """The same problem, placed."""
        return replace(self, file=file, line=line, column=column, source_line=source_line)

    def text(self) -> str:
        """`file:line:column: message`, the source line with a caret, what was expected and how to mend it."""
        place = f"{self.file}:{self.line}:{self.column}: " if self.line else f"{self.file}: " if self.file else ""
        lines = [place + self.message]
        if self.source_line:
            lines += ["    " + self.source_line, "    " + " " * (self.column - 1) + "^"]
        lines += [f"  expected: {self.expected}"] if self.expected else []
        lines += [f"  hint: {self.hint}"] if self.hint else []
        return "\n".join(lines)


class LoracError(Exception):
    """Base of every error lorac raises on purpose."""


class SpecError(LoracError):
    """A spec that cannot be built, with all its problems."""

    def __init__(self, problems: list[Problem]):
        self.problems = sorted(problems, key=lambda p: (p.file, p.line, p.column, p.message))
        super().__init__(format_problems(self.problems))


class OutputError(LoracError):
    """Standard output that takes no more."""


class BuildError(LoracError):
    """A package that cannot be rendered or written; the old one, if any, is untouched."""


def format_problems(problems: list[Problem], style: str = "text") -> str:
    """Problems as text for a person, as a JSON list, or as GitHub workflow annotations."""
    if style == "json":
        rows = [
            {
                "file": p.file,
                "line": p.line,
                "column": p.column,
                "path": list(p.path),
                "message": p.message,
                "expected": p.expected,
                "hint": p.hint,
            }
            for p in problems
        ]
        return json.dumps(rows, indent=2)
    if style == "github":
        return "\n".join(map(_annotation, problems))
    return "\n".join(p.text() for p in problems)


def _annotation(problem: Problem) -> str:
    parts = (problem.message, problem.expected and f"expected: {problem.expected}", problem.hint)
    # GitHub's own escapes: a raw newline would end the annotation
    message = "; ".join(filter(None, parts)).replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")
    file = problem.file.replace("%", "%25").replace(",", "%2C").replace(":", "%3A")
    return f"::error file={file},line={problem.line},col={problem.column}::{message}"
