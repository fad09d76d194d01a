"""What adapters may call a package's experts: what its spec does, and whatever else the same model is known to use."""

import re
from collections.abc import Sequence

from lorac.runtime.layout import Module

ROLES = ("gate", "up", "down")
# One block under the names that checkpoints, and transformers since version 5, have given it.
_BLOCKS = ("mlp.experts", "block_sparse_moe.experts", "feed_forward.experts")
# Gate, up and down of such blocks, in whatever block; transformers since version 5 has the last form.
_NAMINGS = (
    ("gate_proj", "up_proj", "down_proj"),
    ("w1", "w3", "w2"),
    ("gate_up_proj", "gate_up_proj", "down_proj"),
)


def roles_by_name(names: Sequence[str], roles: Sequence[str] = ROLES) -> dict[str, tuple[str, ...]]:
    """What each name stands for, of names in the order of `roles`: a weight of two roles is named twice."""
    return {name: tuple(role for other, role in zip(names, roles, strict=True) if other == name) for name in names}


def roles_of(module: Module) -> tuple[str, ...]:
    """What the slices of a module of experts are."""
    return tuple(part.name for part in module.slices)


KNOWN_ROLES = {name: roles for naming in _NAMINGS for name, roles in roles_by_name(naming).items()}


def paths_of(path: str) -> tuple[str, ...]:
    """The paths at which a decoder layer may have the block of experts that a spec has at `path`, that one first."""
    return tuple(dict.fromkeys((path, *_BLOCKS))) if path in _BLOCKS else (path,)


class ExpertNames:
    """Names of experts as the modules of kind `experts` have them; those that are known, where there are no such."""

    def __init__(self, modules: Sequence[Module] = ()):
        self.modules = tuple(module for module in modules if module.kind == "experts")
        self.paths = tuple(dict.fromkeys(path for module in self.modules for path in paths_of(module.path))) or _BLOCKS
        own: dict[str, tuple[str, ...]] = {}
        for module in self.modules:
            own |= roles_by_name(module.experts.names, roles_of(module))
        known = set(own) <= set(KNOWN_ROLES)
        self.roles = {**KNOWN_ROLES, **own} if known else own
        self.namings = (tuple(own), *(_NAMINGS if known else ()))  # the spec's first
        block = "|".join(map(re.escape, self.paths))
        self._projection = re.compile(rf"(?:{block})(?:\.(0|[1-9][0-9]{{0,4}}))?\.({'|'.join(self.roles)})")
        self._stack = re.compile(rf"(?:{block})(?:\.base_layer)?")

    def projection(self, path: str) -> tuple[int | None, str] | None:
        """(expert, name) of a path inside a decoder layer; expert is None for a projection of all experts."""
        found = self._projection.fullmatch(path)
        return found and (None if found[1] is None else int(found[1]), found[2])

    def is_stack(self, path: str) -> bool:
        """Whether a path inside a decoder layer is that of all experts together, as `target_parameters` has it."""
        return self._stack.fullmatch(path) is not None

    def with_role_of(self, name: str) -> list[str]:
        """The names of what has a role in common with the projection of that name."""
        return [other for other, roles in self.roles.items() if set(roles) & set(self.roles[name])]

    def parameter(self, roles: tuple[str, ...]) -> str | None:
        """The name of the one parameter of all experts that has these roles, or None where the model has several."""
        return next((name for name, of in self.roles.items() if of == roles), None)
