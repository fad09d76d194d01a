"""Adapters of mixtures of experts: one pair per expert and projection, or one pair for all experts of a layer.

A pair for all experts is *packed* where its factors have three dimensions, A [experts, r, in] and B [experts, out, r];
the first is 1 in a factor that the experts share. PEFT itself writes no such files: its `target_parameters` flattens
all experts, in A [experts * r, in] the expert is slowest, in B [out, r * experts] it is fastest. Of a parameter
[experts, dim1, dim2], PEFT 0.17 and 0.18 call dim1 the input, dim2 the output; since 0.19 that is so only where the
module says `is_transposed` (gpt-oss), and elsewhere dim2 is the input. So files of 0.17 and 0.18 are *swapped* for
parameters stored [experts, out, in]: their A holds the output's side.
"""

import re
from dataclasses import dataclass

import torch

from lorac.runtime.adapters.config import AdapterConfig
from lorac.runtime.adapters.names import Pair, Place, locate
from lorac.runtime.adapters.problems import Problems
from lorac.runtime.layout import Layout, Module

_GATE, _UP, _DOWN = ("gate",), ("up",), ("down",)
_ROLES = {
    "gate_proj": _GATE, "w1": _GATE, "up_proj": _UP, "w3": _UP, "down_proj": _DOWN, "w2": _DOWN,
    "gate_up_proj": _GATE + _UP,
}  # fmt: skip
_PARENTS = r"(?:mlp|block_sparse_moe|feed_forward)"  # the same block under the names checkpoints have given it
_PROJECTION = re.compile(_PARENTS + r"\.experts(?:\.(0|[1-9][0-9]{0,4}))?\.(" + "|".join(_ROLES) + ")")
_STACK = re.compile(_PARENTS + r"\.experts(\.base_layer)?")
_PARAMETERS = {("gate", "up"): "gate_up_proj", ("down",): "down_proj"}


@dataclass(frozen=True)
class Stack:
    """How one pair holds all experts; see the module's docstring."""

    count: int
    swapped: bool
    packed: bool

    def by_expert(self, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """A [experts, r, in] and B [experts, out, r], as views."""
        if self.packed:
            return a.expand(self.count, -1, -1), b.expand(self.count, -1, -1)
        a = a.view(self.count, -1, a.shape[1])
        b = b.view(b.shape[0], -1, self.count).permute(2, 0, 1)
        return (b.mT, a.mT) if self.swapped else (a, b)


@dataclass(frozen=True)
class Target:
    """What a pair adapts: `roles` of one expert, or of all of them where `expert` is None."""

    module: Module
    roles: tuple[str, ...]
    expert: int | None
    packed: bool = False

    def matched_name(self, module: str) -> str:
        """The name PEFT matches rank_pattern and alpha_pattern against: a parameter's, where the pair is of one."""
        if self.expert is not None or self.packed:
            return module
        return _parameter(module, _PARAMETERS[self.roles])

    def stack(self, swapped: bool) -> Stack | None:
        """How the pair holds all experts, if it does."""
        if self.expert is not None:
            return None
        return Stack(self.module.experts.count, swapped and not self.packed, self.packed)

    def shapes(self, rank: int, swapped: bool) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The expected shapes of A and B; of a packed factor that the experts share, the first dimension is 1."""
        inside, outside = self.module.full_in_features, sum(part.full_width for _, part in self._slices())
        if self.expert is not None:
            return (rank, inside), (outside, rank)
        if self.packed:
            return (self.module.experts.count, rank, inside), (self.module.experts.count, outside, rank)
        flat = rank * self.module.experts.count
        return ((flat, outside), (inside, flat)) if swapped else ((flat, inside), (outside, flat))

    def rows(self) -> list[tuple[int, slice]]:
        """(slice index, rows of the linear-form B) of every slice the pair covers."""
        slices = self._slices()
        if len(slices) > 1 and self.module.experts.interleaved:
            total = sum(part.full_width for _, part in slices)
            return [(index, slice(at, total, len(slices))) for at, (index, _) in enumerate(slices)]
        rows, start = [], 0
        for index, part in slices:
            rows.append((index, slice(start, start + part.full_width)))
            start += part.full_width
        return rows

    def _slices(self):
        roles = _roles(self.module)
        return [(roles.index(role), self.module.slices[roles.index(role)]) for role in self.roles]


def is_expert_path(path: str) -> bool:
    """Whether a path inside a decoder layer is one of routed experts."""
    return bool(_PROJECTION.fullmatch(path) or _STACK.fullmatch(path))


def is_stack(module: str) -> bool:
    """Whether a module's name is that of all experts together, as `target_parameters` has it."""
    place = locate(module)
    return place is not None and _STACK.fullmatch(place.path) is not None


def matched_names(module: str) -> list[str]:
    """The names that rank_pattern and alpha_pattern may know a module by: two, where it is either parameter's."""
    return [_parameter(module, name) for name in _PARAMETERS.values()] if is_stack(module) else [module]


def _parameter(module: str, name: str) -> str:
    return f"{module.removesuffix('.base_layer')}.{name}"


def meant_by(module: str) -> list[str]:
    """The names that target_modules may have for a module: its own, or an expert's where PEFT writes no such tensor."""
    place = locate(module)
    found = place and _PROJECTION.fullmatch(place.path)
    if not found or (found[1] and found[2] != "gate_up_proj"):
        return [module]
    parent = module.removesuffix(found[2])
    return [parent + name for name, roles in _ROLES.items() if set(roles) & set(_ROLES[found[2]])]


def without_index(path: str) -> str:
    """The path with the expert's number left out, for messages."""
    return re.sub(r"\.experts\.\d+", ".experts.*", path)


def resolve(pair: Pair, place: Place, layout: Layout) -> Target | None:
    """What the pair adapts; None where the package has no such experts."""
    modules = [module for module in layout.modules if module.kind == "experts"]
    if found := _PROJECTION.fullmatch(place.path):
        index, roles = None if found[1] is None else int(found[1]), _ROLES[found[2]]
        fitting = (m for m in modules if set(roles) <= set(_roles(m)) and (index or 0) < m.experts.count)
        return next((Target(module, roles, index, packed=index is None) for module in fitting), None)
    for module in modules:
        target = Target(module, _roles(module), None)
        if _conventions(pair, target):
            return target
    return None


def convention(config: AdapterConfig, pairs: list[Pair], layout: Layout, problems: Problems) -> bool:
    """Whether this file's stacked pairs are swapped: by shape where that decides, else by PEFT's version."""
    possible = {False, True}
    for pair in pairs:
        place = locate(pair.module)
        if place is None or not _STACK.fullmatch(place.path) or not (target := resolve(pair, place, layout)):
            continue
        if not target.module.experts.transposed:
            possible &= _conventions(pair, target)
        else:
            possible = {False}
    if len(possible) == 1:
        return possible.pop()
    stacked = any(is_stack(pair.module) for pair in pairs)
    if stacked and not possible:
        problems.add(
            "its expert tensors follow PEFT 0.18's convention in part and 0.19's in part; expected one of them"
        )
    if stacked and possible and config.version is None:
        problems.add(
            "peft_version is absent and its expert tensors fit the convention of PEFT 0.18 and that of 0.19; "
            "add the peft_version that wrote them to adapter_config.json"
        )
    return config.version is not None and config.version < (0, 19)


def _conventions(pair: Pair, target: Target) -> set[bool]:
    """The values of `swapped` that fit the pair's shapes at some rank. No rank fits two roles in one convention."""
    rank, rest = divmod(pair.a.shape[0] if pair.a.shape else 0, target.module.experts.count)
    if rest or not rank:
        return set()
    wanted = (pair.a.shape, pair.b.shape)
    return {swapped for swapped in (False, True) if target.shapes(rank, swapped) == wanted}


def _roles(module: Module) -> tuple[str, ...]:
    return tuple(_ROLES[name][0] for name in module.experts.names)
