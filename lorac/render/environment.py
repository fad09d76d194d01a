"""The one Jinja environment: sandboxed, strict about undefined names, templates from known folders only."""

from pathlib import Path

from jinja2 import BytecodeCache, ChoiceLoader, Environment, FileSystemLoader, PrefixLoader, StrictUndefined
from jinja2.sandbox import ImmutableSandboxedEnvironment

from lorac.errors import BuildError
from lorac.render.filters import FILTERS
from lorac.render.names import check_names, names_read, parse
from lorac.resources import templates_folder


class _Compiled(BytecodeCache):
    """Compiled templates, shared by all environments of this process: every backend has one of its own."""

    def __init__(self):
        self.codes = {}

    def load_bytecode(self, bucket) -> None:
        bucket.code = self.codes.get((bucket.key, bucket.checksum))

    def dump_bytecode(self, bucket) -> None:
        self.codes[bucket.key, bucket.checksum] = bucket.code


_COMPILED = _Compiled()


def environment(backend: Path | None = None) -> Environment:
    """Templates by path below `templates/`; a backend's own folder comes first, for short names of its kernels."""
    builtin = FileSystemLoader(str(templates_folder()))
    loaders = [FileSystemLoader(str(backend))] if backend else []
    env = ImmutableSandboxedEnvironment(
        loader=ChoiceLoader([*loaders, builtin, PrefixLoader({"templates": builtin})]),
        bytecode_cache=_COMPILED,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )
    env.filters.update(FILTERS)
    return env


def render_template(env: Environment, name: str, context: dict, optional: frozenset[str] = frozenset()) -> str:
    """Render one template. Raises BuildError with the template's file and line, also for names on one side only.

    Two-way: a name the template uses must be in the context, and a context entry, unless optional, must be used by the
    template or by one it includes.
    """
    check_names(env, name, set(context))
    if unused := sorted(set(context) - names_read(env, name) - optional):
        message = f"it does not use {', '.join(unused)}, which it is given: use it, or take it out of its context"
        raise BuildError(f"{parse(env, name).file}: {message}")
    try:
        return env.get_template(name).render(context)
    except Exception as error:  # an expression of a template can raise anything
        raise BuildError(f"{_place(error, name)}: {type(error).__name__}: {error}") from error


def _place(error: Exception, name: str) -> str:
    """The innermost template frame of the traceback."""
    trace, place = error.__traceback__, name
    while trace:
        if trace.tb_frame.f_code.co_filename.endswith(".jinja"):
            place = f"{trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}"
        trace = trace.tb_next
    return place
