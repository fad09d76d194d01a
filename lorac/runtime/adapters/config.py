"""adapter_config.json of PEFT 0.4 to 0.21: what a LoRA's config says, and what it says that cannot be served."""

import math
from dataclasses import dataclass, field
from pathlib import Path

from lorac.runtime.adapters.files import CONFIG, read_json
from lorac.runtime.adapters.patterns import PatternTable, Targets
from lorac.runtime.adapters.problems import Problems

# Fields that say nothing about what the trained tensors mean, whatever their value.
_NEUTRAL = frozenset(
    "base_model_name_or_path revision task_type auto_mapping inference_mode lora_dropout megatron_core runtime_config "
    "fan_in_fan_out qalora_group_size loftq_config eva_config corda_config lora_ga_config velora_config merge_weights "
    "peft_type peft_version init_lora_weights r lora_alpha use_rslora rank_pattern alpha_pattern target_modules "
    "target_parameters exclude_modules layers_to_transform layers_pattern bias ensure_weight_tying "
    # how experts' tensors are laid out, which their names and shapes tell as well
    "moe_parameterization moe_hybrid_shared_lora _sglang_lora_format".split()
)
_RETRAIN = "train without it, or merge the adapter into a copy of the base model"
# Fields that change what is computed: the reason and the remedy where one of them is active.
_REFUSED = {
    "use_dora": f"DoRA rescales the base weight by a trained magnitude; {_RETRAIN}",
    "modules_to_save": "whole modules were trained beside the LoRA; put LoRA on them with target_modules, or merge",
    "lora_bias": f"LoRA layers have a bias; {_RETRAIN}",
    "trainable_token_indices": f"rows of the embedding were trained; {_RETRAIN}",
    "layer_replication": "the base model was expanded by repeating layers; build a package for the expanded model",
    "use_qalora": f"QALoRA pools the input by groups; {_RETRAIN}",
    "alora_invocation_tokens": "aLoRA acts only behind its invocation tokens, which this runtime does not look for",
    "arrow_config": "Arrow routes between adapters inside the model; serve the adapters one by one",
    "use_bdlora": f"block-diagonal LoRA; {_RETRAIN}",
    "monteclora_config": f"MonteCLoRA samples its weights; {_RETRAIN}",
    "kasa_config": f"KaSA changes the base weights and adds a diagonal; {_RETRAIN}",
    "megatron_config": "sharded by Megatron; export the adapter in PEFT's own form first",
    "enable_lora": "a fused layer with LoRA on some parts, from before PEFT 0.3; save it again with a newer PEFT",
}
# Initialisations that subtract the adapter's start from the base weight: such an adapter is wrong on the plain model.
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
_INITS = ("gaussian", "eva", "orthogonal", "mica", "true", "false", "none")


@dataclass(frozen=True)
class AdapterConfig:
    """A LoRA's settings, valid. Module names are those of the model it was trained on, as PEFT sees them."""

    rank: int
    alpha: float
    rslora: bool
    ranks: PatternTable
    alphas: PatternTable
    targets: Targets | None  # None: not recorded
    parameters: tuple[str, ...]  # target_parameters
    version: tuple[int, int] | None  # of PEFT, recorded since 0.18
    ties_embedding: bool
    base_model: str
    raw: dict = field(repr=False)

    def rank_of(self, module: str) -> int:
        """The rank of one module."""
        return int(self.ranks.lookup(module) or self.rank)

    def adapts_parameter(self, name: str) -> bool:
        """Whether target_parameters lists a parameter: by its name, or by the end of it."""
        return any(f".{name}".endswith(f".{parameter}") for parameter in self.parameters)

    def scale_of(self, module: str) -> float:
        """What one module's B·A is multiplied by: alpha/r, or alpha/√r under rsLoRA."""
        alpha, rank = self.alphas.lookup(module), self.rank_of(module)
        return float(self.alpha if alpha is None else alpha) / (math.sqrt(rank) if self.rslora else rank)


def read_config(folder: Path, problems: Problems) -> AdapterConfig:
    """Reads and checks the config. Raises AdapterError with all its problems."""
    raw = read_json(folder)
    _refuse_active(raw, problems)
    ranks = _pattern(raw, "rank_pattern", _is_rank, "a positive integer", problems)
    alphas = _pattern(raw, "alpha_pattern", _is_alpha, "a finite number", problems)
    targets = _targets(raw, problems)
    for name, valid, expected in (
        ("r", _is_rank, "a positive integer"),
        ("lora_alpha", _is_alpha, "a finite number"),
        ("use_rslora", _is_flag, "true or false"),
        ("target_parameters", _is_names, "a list of names, or null"),
        ("peft_version", _is_version, "a version such as 0.18.1"),
        ("base_model_name_or_path", _is_text, "a string, or null"),
    ):
        if not valid(raw.get(name, 8 if name in ("r", "lora_alpha") else None)):
            problems.add(f"{name} is {_short(raw[name])} in {CONFIG}; expected {expected}")
    problems.raise_if_any()
    return AdapterConfig(
        rank=raw.get("r", 8),
        alpha=raw.get("lora_alpha", 8),
        rslora=bool(raw.get("use_rslora")),
        ranks=ranks,
        alphas=alphas,
        targets=targets,
        parameters=tuple(raw.get("target_parameters") or ()),
        version=_version(raw.get("peft_version")),
        ties_embedding=bool(raw.get("ensure_weight_tying")),
        base_model=raw.get("base_model_name_or_path") or "",
        raw=raw,
    )


def _refuse_active(raw: dict, problems: Problems) -> None:
    if raw.get("peft_type") != "LORA":
        problems.add(f"peft_type is {_short(raw.get('peft_type'))}; expected LORA, the only kind of adapter served")
    if raw.get("bias") not in (None, "none"):
        problems.add(f"bias is {_short(raw['bias'])}: biases of the base model were trained; {_RETRAIN}")
    init = str(raw.get("init_lora_weights", True)).lower()
    if init.startswith(_CHANGES_BASE):
        problems.add(
            f"init_lora_weights is {_short(raw['init_lora_weights'])}: trained against changed base weights; save it "
            "again with save_pretrained(..., path_initial_model_for_weight_conversion=...), which makes it plain LoRA"
        )
    elif init not in _INITS:
        problems.add(
            f"init_lora_weights is {_short(raw['init_lora_weights'])}, an initialisation this reader does not know"
        )
    for name, value in raw.items():
        if name in _NEUTRAL or value is None or value is False or value in ({}, [], ""):
            continue
        reason = _REFUSED.get(name, "this reader does not know what it changes; expected it absent, null or false")
        problems.add(f"{name[:100]} is {_short(value)}: {reason}")


def _targets(raw: dict, problems: Problems) -> Targets | None:
    modules, layers = raw.get("target_modules"), raw.get("layers_to_transform")
    exclude, pattern = raw.get("exclude_modules") or (), raw.get("layers_pattern") or ()
    layers = [layers] if type(layers) is int else layers
    pattern = [pattern] if isinstance(pattern, str) else pattern
    for name, value in (("target_modules", modules), ("exclude_modules", exclude)):
        if not (isinstance(value, str) or _is_names(value)):
            problems.add(f"{name} is {_short(raw[name])}; expected a list of names, or a regex")
            return None
    if not (layers is None or (isinstance(layers, list) and all(type(layer) is int for layer in layers))):
        problems.add(f"layers_to_transform is {_short(layers)}; expected a layer index or a list of them")
        return None
    if not _is_names(pattern):
        problems.add(f"layers_pattern is {_short(pattern)}; expected a name or a list of names")
        return None
    if modules is None:
        return None
    try:
        return Targets(modules, exclude, layers, pattern)
    except ValueError as error:
        problems.add(f"target_modules, exclude_modules or layers_pattern: {error}")
        return None


def _pattern(raw: dict, name: str, valid, expected: str, problems: Problems) -> PatternTable:
    values = raw.get(name) or {}
    if not isinstance(values, dict) or not all(map(valid, values.values())):
        problems.add(f"{name} is {_short(values)}; expected an object whose values are each {expected}")
        return PatternTable({})
    try:
        return PatternTable(values)
    except ValueError as error:
        problems.add(f"{name}: {error}")
        return PatternTable({})


def _is_rank(value: object) -> bool:
    return type(value) is int and 0 < value < 1 << 20


def _is_alpha(value: object) -> bool:
    return type(value) in (int, float) and abs(value) < 1e30  # false for NaN as well


def _is_flag(value: object) -> bool:
    return value is None or isinstance(value, bool)


def _is_text(value: object) -> bool:
    return value is None or isinstance(value, str)


def _is_names(value: object) -> bool:
    return value is None or (isinstance(value, (list, tuple)) and all(isinstance(name, str) for name in value))


def _is_version(value: object) -> bool:
    return value is None or _version(value) is not None


def _version(value: object) -> tuple[int, int] | None:
    parts = value.split(".")[:2] if isinstance(value, str) else ()
    digits = len(parts) == 2 and all(part.isascii() and part.isdigit() and len(part) < 6 for part in parts)
    return (int(parts[0]), int(parts[1])) if digits else None


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 120 else text[:117] + "..."
