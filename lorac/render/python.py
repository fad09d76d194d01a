"""A template rendered as Python: tidy as a formatter leaves it, and valid; if not, the template's line is named."""

import re
from collections.abc import Iterator

from jinja2 import Environment
from jinja2.ext import Extension
from jinja2.lexer import Token, TokenStream

from lorac.errors import BuildError
from lorac.render.environment import render_template
from lorac.render.names import parse

_MARK = re.compile(r"  # rendered from (.+:\d+)$", re.MULTILINE)


def render_python(env: Environment, name: str, path: str, context: dict, optional: frozenset[str] = frozenset()) -> str:
    """The text of the package's file `path`. Raises BuildError as `render_template`, and for what is no Python."""
    text = _tidy(render_template(env, name, context, optional))
    try:
        compile(text, path, "exec")
    except SyntaxError as error:
        place = _place(env, name, context) or parse(env, name).file
        line = f"line {error.lineno} of {path}: {(error.text or '').strip()}"
        raise BuildError(f"{place}: the templates rendered invalid Python: {error.msg}, in {line}") from error
    return text


def _tidy(text: str) -> str:
    """Trailing blanks off, runs of blank lines as a formatter leaves them, one newline at the end."""
    lines: list[str] = []
    blank = 0
    for line in (line.rstrip() for line in text.splitlines()):
        if not line:
            blank += 1
            continue
        most = 2 if not line.startswith((" ", ")", "}", "]")) else 1
        lines += [""] * (min(blank, most) if lines else 0)
        lines.append(line)
        blank = 0
    return "\n".join(lines) + "\n"


class _Marking(Extension):
    """Ends every line of a template's own text with a comment that says where it stands."""

    def filter_stream(self, stream: TokenStream) -> Iterator[Token]:
        for token in stream:
            if token.type == "data":
                *ended, rest = token.value.split("\n")
                lines = enumerate(ended, token.lineno)
                marked = [f"{line}  # rendered from {stream.filename}:{number}" for number, line in lines]
                token = Token(token.lineno, "data", "\n".join([*marked, rest]))
            yield token


def _place(env: Environment, name: str, context: dict) -> str:
    """The file and line of the template whose text Python does not take; nothing where that cannot be told."""
    marking = env.overlay(extensions=[_Marking], bytecode_cache=None)
    text = marking.get_template(name).render(context)
    try:
        compile(text, name, "exec")
    except SyntaxError as error:
        start = sum(map(len, text.splitlines(True)[: (error.lineno or 1) - 1]))
        found = _MARK.search(text, start)
        return found[1] if found else ""
    return ""
