"""Config and file must agree: PEFT ignores what it does not target, and expects every layer that it does."""

import re

from lorac.runtime.adapters import experts
from lorac.runtime.adapters.config import AdapterConfig
from lorac.runtime.adapters.names import Pair, aliases
from lorac.runtime.adapters.patterns import Targets
from lorac.runtime.adapters.place import Placement
from lorac.runtime.adapters.problems import Problems
from lorac.runtime.layout import Layout

_LAYER = re.compile(r"\blayers\.\d+\.")


def check_agreement(
    config: AdapterConfig, pairs: list[Pair], placed: list[Placement], layout: Layout, problems: Problems
) -> None:
    """Note tensors of modules that the config does not target, layers it targets that are absent, and untied ties."""
    outside = {item.module.kind for item in placed if not item.module.layers}
    if config.ties_embedding and layout.tied and outside == {"embedding"}:
        problems.add("ensure_weight_tying ties lm_head to the embedding's LoRA; save lm_head's tensors as well")
    targets = config.targets
    if targets is None or targets.everything:
        return
    try:
        for pair in pairs:
            parameter = config.parameters and experts.is_stack(pair.module)
            if not parameter and not _selects(targets, pair.module):
                problems.add("not among target_modules of adapter_config.json, so PEFT would ignore it", pair.a.name)
        if not problems.found:
            _check_layers(targets, placed, layout, problems)
    except ValueError as error:  # a regex that takes too long
        problems.add(f"target_modules: {error}")


def _check_layers(targets: Targets, placed: list[Placement], layout: Layout, problems: Problems) -> None:
    inside = [item for item in placed if item.module.layers]
    absent = {layer for item in inside for layer in item.module.layers}
    absent -= {item.module.layers[item.instance] for item in inside}
    templates = {_LAYER.sub("layers.{}.", item.pair.module, count=1) for item in inside}
    lost = [
        layer for layer in sorted(absent) if any(_selects(targets, template.format(layer)) for template in templates)
    ]
    if lost:
        problems.add(
            f"no tensors for layers {_ranges(lost)}, which target_modules selects in a model of {layout.layers}: "
            "the file is incomplete, or of a smaller model; list the layers in layers_to_transform if that is meant"
        )


def _selects(targets: Targets, module: str) -> bool:
    return any(targets.matches(name) for meant in experts.meant_by(module) for name in aliases(meant))


def _ranges(numbers: list[int]) -> str:
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in runs)
