"""The one Jinja environment: sandboxed, strict about undefined names, templates from known folders only."""

from pathlib import Path

from jinja2 import (
    ChoiceLoader,
    Environment,
    FileSystemLoader,
    PrefixLoader,
    StrictUndefined,
    TemplateError,
    meta,
    nodes,
)
from jinja2.sandbox import ImmutableSandboxedEnvironment

from lorac.errors import BuildError
from lorac.render.filters import FILTERS
from lorac.resources import templates_folder


def environment(backend: Path | None = None) -> Environment:
    """Templates by path below `templates/`; a backend's own folder comes first, so that it names its kernels shortly."""
    builtin = FileSystemLoader(str(templates_folder()))
    loaders = [FileSystemLoader(str(backend))] if backend else []
    env = ImmutableSandboxedEnvironment(
        loader=ChoiceLoader([*loaders, builtin, PrefixLoader({"templates": builtin})]),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )
    env.filters.update(FILTERS)
    return env


def render_template(env: Environment, name: str, context: dict, optional: frozenset[str] = frozenset()) -> str:
    """Render one template. Raises BuildError with the template's file and line, and for names that stand on one side only.

    Two-way: a name the template uses must be in the context, and a context entry, unless optional, must be used by the
    template or by one it includes.
    """
    try:
        unused = sorted(set(context) - used_names(env, name) - optional)
        if unused:
            raise BuildError(f"template {name} does not use {', '.join(unused)}: use it, or take it out of its context")
        return env.get_template(name).render(context)
    except TemplateError as error:
        raise BuildError(f"{_place(error, name)}: {type(error).__name__}: {error}") from error


def uses_attribute(env: Environment, name: str, of: str) -> set[str]:
    """Attributes and keys a template, or one it includes, reads of the variable `of`."""
    found = set()
    for tree in _trees(env, name):
        for node in tree.find_all((nodes.Getattr, nodes.Getitem)):
            if isinstance(node.node, nodes.Name) and node.node.name == of:
                key = node.attr if isinstance(node, nodes.Getattr) else getattr(node.arg, "value", None)
                found.add(key)
    return found


def used_names(env: Environment, name: str) -> set[str]:
    """Names a template, or one it includes by a literal name, takes from its context."""
    return set().union(*(meta.find_undeclared_variables(tree) for tree in _trees(env, name)))


def _trees(env: Environment, name: str):
    """Syntax trees of a template and of those it includes by a literal name."""
    waiting, seen = [name], set()
    while waiting:
        current = waiting.pop()
        if current in seen:
            continue
        seen.add(current)
        tree = env.parse(env.loader.get_source(env, current)[0])
        yield tree
        waiting += [found for found in meta.find_referenced_templates(tree) if found]


def _place(error: TemplateError, name: str) -> str:
    """The innermost template frame of the traceback, or where the syntax error stands."""
    if getattr(error, "lineno", None):
        return f"{error.name or name}:{error.lineno}"
    trace, place = error.__traceback__, name
    while trace:
        if trace.tb_frame.f_code.co_filename.endswith(".jinja"):
            place = f"{trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}"
        trace = trace.tb_next
    return place
