"""PyYAML's parser, held to what a spec may contain: few values, not deeply nested, without tags."""

from typing import Any

import yaml

from lorac.errors import Problem

MAX_NODES = 10_000  # of the file, and again after its aliases are expanded
MAX_DEPTH = 32

Position = tuple[int, int]  # line and column, both from 1


def position_of(node: yaml.Node | yaml.Event) -> Position:
    """Where a node begins."""
    return node.start_mark.line + 1, node.start_mark.column + 1


class Stop(Exception):
    """Reading cannot go on: a limit is passed."""

    def __init__(self, message: str, position: Position):
        self.problem = Problem(message)
        self.position = position


class Composer(yaml.SafeLoader):
    """PyYAML's parser with limits; tags are noted and dropped, so that none is ever acted on."""

    def __init__(self, text: str):
        super().__init__(text)
        self.depth = self.nodes = 0
        self.problems: list[tuple[Problem, Position]] = []

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node:
        event = self.peek_event()
        position = position_of(event)
        self.nodes += 1
        if self.nodes > MAX_NODES:
            raise Stop(f"the file has more than {MAX_NODES} values", position)
        if self.depth >= MAX_DEPTH:
            raise Stop(f"values are nested more than {MAX_DEPTH} deep", position)
        if getattr(event, "tag", None) is not None:
            tag = event.tag.replace("tag:yaml.org,2002:", "!!")[:60]
            problem = Problem(f"the tag {tag} is not allowed", hint="a spec needs no tags; leave it out")
            self.problems.append((problem, position))
            event.tag = None
            if isinstance(event, yaml.ScalarEvent):
                event.implicit = (True, False)
        self.depth += 1
        try:
            return super().compose_node(parent, index)
        finally:
            self.depth -= 1
