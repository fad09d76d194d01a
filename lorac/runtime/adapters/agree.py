"""Config and file must agree: PEFT ignores what it does not target, and expects all that it does."""

from lorac.runtime.adapters import experts
from lorac.runtime.adapters.complete import check_complete, selects
from lorac.runtime.adapters.config import AdapterConfig
from lorac.runtime.adapters.names import Pair, aliases, locate
from lorac.runtime.adapters.place import Placement
from lorac.runtime.adapters.problems import Problems
from lorac.runtime.expert_names import ExpertNames
from lorac.runtime.layout import Layout


def check_agreement(
    config: AdapterConfig, pairs: list[Pair], placed: list[Placement], layout: Layout, problems: Problems
) -> None:
    """Note tensors of modules that the config does not target, modules it targets that are absent, and untied ties."""
    ties = config.ties_embedding and layout.tied
    if ties and {item.module.kind for item in placed if not item.module.layers} == {"embedding"}:
        problems.add("ensure_weight_tying ties lm_head to the embedding's LoRA; save lm_head's tensors as well")
    names = ExpertNames(layout.modules)
    stacks = {pair.module for pair in pairs if experts.is_stack(pair.module, names)}
    parameters = {pair.module for pair in pairs if _is_parameter(config, pair.module, stacks)}
    for pair in pairs:
        if pair.module in parameters and pair.module not in stacks and (config.version or (0, 17)) < (0, 19):
            problems.add(
                "the weight of a linear layer among target_parameters, for which PEFT before 0.19 wrote the factors of "
                "the transposed weight; train it through target_modules, or with a newer PEFT",
                pair.a.name,
            )
    try:
        for pair in pairs:
            if pair.module not in parameters and not _selected(config, pair.module, ties, names):
                problems.add(
                    "target_modules, exclude_modules, layers_to_transform and target_parameters of adapter_config.json "
                    "do not select it, so PEFT would ignore it",
                    pair.a.name,
                )
        if not problems.found:
            check_complete(config, pairs, parameters, placed, layout, names, problems)
    except ValueError as error:  # a regex that takes too long
        problems.add(f"target_modules: {error}")


def _is_parameter(config: AdapterConfig, module: str, stacks: set[str]) -> bool:
    """Whether target_parameters selects a module: all experts, or the weight of a linear layer."""
    if module in stacks:
        return bool(config.parameters)
    return any(config.adapts_parameter(f"{name}.weight") for name in aliases(module))


def _selected(config: AdapterConfig, module: str, ties: bool, names: ExpertNames) -> bool:
    """Whether target_modules selects a module, under whatever prefix; true where the config does not list them."""
    targets = config.targets
    if targets is None or targets.everything:
        return True
    if any(selects(targets, name, names) for name in aliases(module)):
        return True
    # PEFT takes lm_head off the list where it ties it to the embedding
    return ties and locate(module).path == "lm_head" and _selected(config, "embed_tokens", False, names)
