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
from lorac.runtime.expert_names import ExpertNames, roles_of
from lorac.runtime.layout import Module


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
    parameter: str = ""  # the name of the parameter that PEFT adapts, where it is of all experts

    def matched_name(self, module: str) -> str:
        """The name PEFT matches rank_pattern and alpha_pattern against: a parameter's, where the pair is of one."""
        return _parameter(module, self.parameter) if self.parameter else module

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
        roles = roles_of(self.module)
        return [(roles.index(role), self.module.slices[roles.index(role)]) for role in self.roles]


def is_stack(module: str, names: ExpertNames) -> bool:
    """Whether a module's name is that of all experts together, as `target_parameters` has it."""
    place = locate(module)
    return place is not None and names.is_stack(place.path)


def matched_names(module: str, names: ExpertNames) -> list[str]:
    """The names that rank_pattern and alpha_pattern may know a module by: two, where it is either parameter's."""
    if not is_stack(module, names):
        return [module]
    return [_parameter(module, name) for name in map(names.parameter, (("gate", "up"), ("down",))) if name]


def _parameter(module: str, name: str) -> str:
    return f"{module.removesuffix('.base_layer')}.{name}"


def meant_by(module: str, names: ExpertNames) -> list[str]:
    """The names that target_modules may have for a module: its own, or an expert's where PEFT writes no such tensor."""
    place = locate(module)
    found = place and names.projection(place.path)
    if not found:
        return [module]
    expert, name = found
    if expert is not None and len(names.roles[name]) == 1:
        return [module]
    return [module.removesuffix(name) + other for other in names.with_role_of(name)]


def without_index(path: str) -> str:
    """The path with the expert's number left out, for messages."""
    return re.sub(r"\.[0-9]+(?=\.)", ".*", path)


def resolve(pair: Pair, place: Place, names: ExpertNames) -> Target | None:
    """What the pair adapts; None where the package has no such experts."""
    if found := names.projection(place.path):
        index, roles = found[0], names.roles[found[1]]
        fitting = (m for m in names.modules if set(roles) <= set(roles_of(m)) and (index or 0) < m.experts.count)
        return next((Target(module, roles, index, packed=index is None) for module in fitting), None)
    for module in names.modules if names.is_stack(place.path) else ():
        if parameter := names.parameter(roles_of(module)):
            target = Target(module, roles_of(module), None, parameter=parameter)
            if _conventions(pair, target):
                return target
    return None


def convention(config: AdapterConfig, pairs: list[Pair], names: ExpertNames, problems: Problems) -> bool:
    """Whether this file's stacked pairs are swapped: by shape where that decides, else by PEFT's version."""
    possible = {False, True}
    for pair in pairs:
        place = locate(pair.module)
        if place is None or not names.is_stack(place.path) or not (target := resolve(pair, place, names)):
            continue
        if not target.module.experts.transposed:
            possible &= _conventions(pair, target)
        else:
            possible = {False}
    if len(possible) == 1:
        return possible.pop()
    stacked = any(is_stack(pair.module, names) for pair in pairs)
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
