"""Config and file must agree: PEFT ignores what it does not target, and expects every layer that it does."""

import re

from lorac.runtime.adapters import experts
from lorac.runtime.adapters.config import AdapterConfig
from lorac.runtime.adapters.names import Pair, aliases
from lorac.runtime.adapters.patterns import Targets
from lorac.runtime.adapters.place import Placement
from lorac.runtime.adapters.problems import Problems
from lorac.runtime.expert_names import ExpertNames
from lorac.runtime.layout import Layout

_LAYER = re.compile(r"\blayers\.\d+\.")


def check_agreement(
    config: AdapterConfig, pairs: list[Pair], placed: list[Placement], layout: Layout, problems: Problems
) -> None:
    """Note tensors of modules that the config does not target, layers it targets that are absent, and untied ties."""
    outside = {item.module.kind for item in placed if not item.module.layers}
    if config.ties_embedding and layout.tied and outside == {"embedding"}:
        problems.add("ensure_weight_tying ties lm_head to the embedding's LoRA; save lm_head's tensors as well")
    names = ExpertNames(layout.modules)
    stacks = {pair.module for pair in pairs if experts.is_stack(pair.module, names)}
    parameters = {pair.module for pair in pairs if _is_parameter(config, pair.module, stacks)}
    targets = config.targets
    for pair in pairs:
        if pair.module in parameters and pair.module not in stacks and (config.version or (0, 17)) < (0, 19):
            problems.add(
                "the weight of a linear layer among target_parameters, for which PEFT before 0.19 wrote the factors of "
                "the transposed weight; train it through target_modules, or with a newer PEFT",
                pair.a.name,
            )
    if targets is None or targets.everything:
        return
    try:
        for pair in pairs:
            if pair.module not in parameters and not _selects(targets, pair.module, names):
                problems.add(
                    "target_modules, exclude_modules, layers_to_transform and target_parameters of adapter_config.json "
                    "do not select it, so PEFT would ignore it",
                    pair.a.name,
                )
        if not problems.found:
            _check_layers(targets, placed, layout, names, problems)
    except ValueError as error:  # a regex that takes too long
        problems.add(f"target_modules: {error}")


def _check_layers(
    targets: Targets, placed: list[Placement], layout: Layout, names: ExpertNames, problems: Problems
) -> None:
    inside = [item for item in placed if item.module.layers]
    absent = {layer for item in inside for layer in item.module.layers}
    absent -= {item.module.layers[item.instance] for item in inside}
    templates = {_LAYER.sub("layers.{}.", item.pair.module, count=1) for item in inside}
    lost = [
        layer
        for layer in sorted(absent)
        if any(_selects(targets, template.format(layer), names) for template in templates)
    ]
    if lost:
        problems.add(
            f"no tensors for layers {_ranges(lost)}, which target_modules selects in a model of {layout.layers}: "
            "the file is incomplete, or of a smaller model; list the layers in layers_to_transform if that is meant"
        )


def _is_parameter(config: AdapterConfig, module: str, stacks: set[str]) -> bool:
    """Whether target_parameters selects a module: all experts, or the weight of a linear layer."""
    if module in stacks:
        return bool(config.parameters)
    weights = [f".{name}.weight" for name in aliases(module)]
    return any(weight.endswith(f".{parameter}") for weight in weights for parameter in config.parameters)


def _selects(targets: Targets, module: str, names: ExpertNames) -> bool:
    return any(targets.matches(name) for meant in experts.meant_by(module, names) for name in aliases(meant))


def _ranges(numbers: list[int]) -> str:
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in runs)
