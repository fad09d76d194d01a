"""The names templates use, found without rendering: what a template reads and what it is given must be the same."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache

from jinja2 import Environment, TemplateNotFound, TemplateSyntaxError, meta, nodes

from lorac.errors import BuildError
from lorac.render.filters import FILTERS


@dataclass(frozen=True, eq=False)
class Syntax:
    """One template: where it lies, and its syntax tree."""

    file: str
    tree: nodes.Template

    @cached_property
    def reads(self) -> set[str]:
        """Names it takes from its context. Raises BuildError for a filter or a test there is none of."""
        try:
            return meta.find_undeclared_variables(self.tree)
        except TemplateSyntaxError as error:
            raise BuildError(f"{self.file}:{error.lineno}: {error.message}") from None

    @cached_property
    def sets(self) -> set[str]:
        """Names it sets itself, loops over included."""
        return {node.name for node in self.tree.find_all(nodes.Name) if node.ctx in ("store", "param")}

    @cached_property
    def includes(self) -> list[str]:
        """Templates it includes by a literal name."""
        return [name for name in meta.find_referenced_templates(self.tree) if name]

    def line_including(self, name: str) -> int:
        """The first line that includes a template by its literal name."""
        kinds = (nodes.Include, nodes.Import, nodes.FromImport, nodes.Extends)
        named = ((node, [node.template, *node.template.find_all(nodes.Const)]) for node in self.tree.find_all(kinds))
        return next(node.lineno for node, of in named if any(getattr(one, "value", None) == name for one in of))

    def line_of(self, names: set[str]) -> tuple[str, int]:
        """The first of these names in the text, and its line."""
        return next((node.name, node.lineno) for node in self.tree.find_all(nodes.Name) if node.name in names)


def check_names(env: Environment, name: str, given: set[str]) -> None:
    """Raises BuildError where a template, or one it includes, uses a name it is not given.

    What is included also sees the names that its includers set.
    """
    for including in _included(env, name):
        *outer, template = (parse(env, one) for one in including)
        visible = given.union(*(one.sets for one in outer))
        if unknown := template.reads - visible:
            word, line = template.line_of(unknown)
            known = ", ".join(sorted(visible))
            message = f"the template uses {word}, which it is not given; it may use {known}"
            raise BuildError(f"{template.file}:{line}: {message}")


def names_read(env: Environment, name: str) -> set[str]:
    """Names a template, or one it includes, takes from its context."""
    return set().union(*(parse(env, including[-1]).reads for including in _included(env, name)))


def attributes_read(env: Environment, name: str, of: str) -> set[str]:
    """Attributes and keys a template, or one it includes, reads of the variable `of`."""
    found = set()
    for including in _included(env, name):
        for node in parse(env, including[-1]).tree.find_all((nodes.Getattr, nodes.Getitem)):
            if isinstance(node.node, nodes.Name) and node.node.name == of:
                found.add(node.attr if isinstance(node, nodes.Getattr) else getattr(node.arg, "value", None))
    return found


def exists(env: Environment, name: str) -> bool:
    """Whether there is a template of that name."""
    try:
        env.loader.get_source(env, name)
    except TemplateNotFound:
        return False
    return True


def parse(env: Environment, name: str) -> Syntax:
    """One template, which exists. Raises BuildError where it is no template."""
    source, file, _ = env.loader.get_source(env, name)
    try:
        return _parse(source, name, file)
    except TemplateSyntaxError as error:
        raise BuildError(f"{error.filename}:{error.lineno}: {error.message}") from None


@lru_cache(maxsize=256)
def _parse(source: str, name: str, file: str) -> Syntax:
    env = Environment()
    env.filters.update(FILTERS)
    return Syntax(file, env.parse(source, name, file))


def _included(env: Environment, name: str) -> Iterator[tuple[str, ...]]:
    """A template and those it includes by literal names, each once, as the names that lead to it."""
    waiting, seen = [(name,)], set()
    while waiting:
        including = waiting.pop()
        if including[-1] not in seen:
            seen.add(including[-1])
            yield including
            template = parse(env, including[-1])
            for found in template.includes:
                if not exists(env, found):
                    line = template.line_including(found)
                    raise BuildError(f"{template.file}:{line}: there is no template {found} to include")
                waiting.append((*including, found))
