"""A file must hold all that its config promises: PEFT saves a pair for every module it targets, so others were lost.

A promise is a name that the config selects by PEFT's own rules, of a module that the trained model must have had: one
at a path of the package's model, or one that the file itself has in another layer or for another expert. The latter
settles what only the file can tell: whether experts were modules or parameters, and projections fused. Nothing is
concluded from names alone that the model may not have had, for PEFT ignores those.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from lorac.runtime.adapters import experts
from lorac.runtime.adapters.config import AdapterConfig
from lorac.runtime.adapters.files import CONFIG
from lorac.runtime.adapters.names import PREFIXES, Pair, Place, locate
from lorac.runtime.adapters.patterns import Targets
from lorac.runtime.adapters.place import Placement, sites_of
from lorac.runtime.adapters.problems import Problems
from lorac.runtime.expert_names import ExpertNames, roles_of
from lorac.runtime.layout import Layout, Module

# lm_head by the prefix of the layers; below other prefixes they are those of a model without one
_HEADS = {"model.": "lm_head", "model.language_model.": "lm_head", "language_model.model.": "language_model.lm_head"}
_WITH_HEAD = (None, "CAUSAL_LM")  # task_type: models for other tasks have no lm_head


@dataclass(frozen=True)
class _Expected(Place):
    """A module that the trained model had."""

    parameter: bool  # whether it takes LoRA by target_parameters

    def below(self, prefix: str) -> str | None:
        """The module's name below the prefix of the file's layers, if it can be there."""
        return _HEADS.get(prefix) if self.path == "lm_head" else prefix + self.name


def check_complete(
    config: AdapterConfig,
    pairs: list[Pair],
    parameters: set[str],
    placed: list[Placement],
    layout: Layout,
    names: ExpertNames,
    problems: Problems,
) -> None:
    """Note modules that the config promises and the file lacks; `parameters` are those of target_parameters.

    All of `pairs` are placed, and selected by the config. Raises ValueError for a regex that takes too long.
    """
    prefix = _prefix(config.targets, pairs, parameters, names)
    lost: dict[int | None, list[str]] = defaultdict(list)
    for expected in _lacking(pairs, placed, layout, names, bool(config.targets and config.targets.everything)):
        name = None if prefix is None else expected.below(prefix)
        if name and _promised(config, expected, name, names):
            lost[expected.layer].append(expected.path)
    _report(lost, {item.layer for item in placed}, layout, problems)


def _prefix(targets: Targets | None, pairs: list[Pair], parameters: set[str], names: ExpertNames) -> str | None:
    """What stands before `layers.` in the model of the config: as in the file, or as the targets have it."""
    places = {pair.module: locate(pair.module) for pair in pairs}
    inner = {module: place.name for module, place in places.items() if place.path != "lm_head"}
    own = dict.fromkeys(module.removesuffix(rest) for module, rest in inner.items())
    if targets is None or not inner:
        return next(iter(own), "model.")
    modules = [rest for module, rest in inner.items() if module not in parameters]
    prefixes = dict.fromkeys((*own, *PREFIXES))
    return next(
        (prefix for prefix in prefixes if all(selects(targets, prefix + rest, names) for rest in modules)), None
    )


def selects(targets: Targets, name: str, names: ExpertNames) -> bool:
    """Whether the targets select the module of that name, or an expert's that it stands for."""
    return any(targets.matches(meant) for meant in experts.meant_by(name, names))


def _promised(config: AdapterConfig, expected: _Expected, name: str, names: ExpertNames) -> bool:
    if expected.parameter:
        return config.adapts_parameter(name)
    if config.targets is None or (expected.path == "lm_head" and config.raw.get("task_type") not in _WITH_HEAD):
        return False
    return selects(config.targets, name, names)


def _lacking(
    pairs: list[Pair], placed: list[Placement], layout: Layout, names: ExpertNames, everything: bool
) -> Iterator[_Expected]:
    """Modules that the trained model had and the file has no pair for, in part or at all.

    With `everything` (all-linear), which names none, those of projections that the file has somewhere.
    """
    present = {(item.module.name, item.layer, item.slice, item.expert) for item in placed}
    used = {(place.layer is None, place.path) for place in (locate(pair.module) for pair in pairs)}
    inside = [path for outside, path in used if not outside]
    for (outside, path), sites in sites_of(layout).items():
        if (outside, path) not in used and (everything or path not in layout.paths):
            continue
        for layer in sites[0][0].layers or (None,):
            if layer is not None and not all(layer in module.layers for module, _ in sites):
                continue
            if any((module.name, layer, index, None) not in present for module, index in sites):
                yield _Expected(layer, path, False)
                yield _Expected(layer, f"{path}.weight", True)
    for block, by_expert, name in _expert_projections(inside, names, everything):
        for module in names.modules:
            own = [index for index, part in enumerate(module.slices) if part.name in names.roles[name]]
            for expert in range(module.experts.count) if by_expert else (None,):
                for layer in _layers_without(module, own, expert, present):
                    yield _Expected(layer, f"{block}{'' if expert is None else f'.{expert}'}.{name}", False)
    for block in {path.removesuffix(".base_layer") for path in inside if names.is_stack(path)}:
        for module in names.modules:
            if name := names.parameter(roles_of(module)):
                for layer in _layers_without(module, range(len(module.slices)), None, present):
                    yield _Expected(layer, f"{block}.{name}", True)


def _expert_projections(paths: list[str], names: ExpertNames, everything: bool) -> Iterator[tuple[str, bool, str]]:
    """(path of the block, whether there is one for each expert, name) of the projections that the model's experts had.

    The naming of the model is the first one that has all names in the file.
    """
    forms: dict[tuple[str, bool], set[str]] = defaultdict(set)
    for path in paths:
        if found := names.projection(path):
            expert, name = found
            block = path.removesuffix(f".{name}").removesuffix("" if expert is None else f".{expert}")
            forms[block, expert is not None].add(name)
    for form, written in forms.items():
        if not everything:
            written = next((set(naming) for naming in names.namings if written <= set(naming)), written)
        yield from ((*form, name) for name in written)


def _layers_without(module: Module, indices: Iterable[int], expert: int | None, present: set[tuple]) -> Iterator[int]:
    """The layers that lack a slice of one expert, or of any where `expert` is None."""
    wanted = range(module.experts.count) if expert is None else (expert,)
    for layer in module.layers:
        for site in ((module.name, layer, index) for index in indices):
            if (*site, None) not in present and not all((*site, number) in present for number in wanted):
                yield layer
                break


def _report(lost: dict[int | None, list[str]], held: set[int], layout: Layout, problems: Problems) -> None:
    whole = sorted(layer for layer in lost if layer is not None and layer not in held)
    for path in dict.fromkeys(path for layer in whole for path in lost[layer]):
        problems.add(
            f"no tensors for layers {_ranges(whole)} of {layout.layers}, though {CONFIG} selects modules of them: the "
            "file is incomplete, or of a smaller model; save it again in full with save_pretrained, or name the layers "
            "it has in layers_to_transform (or in target_parameters) if that is meant",
            path,
        )
    by_path: dict[str, list[int | None]] = defaultdict(list)
    for layer, paths in lost.items():
        for path in paths if layer in held or layer is None else ():
            by_path[path].append(layer)
    for path, where in by_path.items():
        place = "" if None in where else f"of layers {_ranges(sorted(where))} "
        problems.add(
            f"no tensors for modules {place}that {CONFIG} selects: the file is incomplete; save it again in full with "
            "save_pretrained, or take them out of the config if they were not trained",
            path,
        )


def _ranges(numbers: list[int]) -> str:
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in runs)
