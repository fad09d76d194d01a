"""The `model:` block -> Shapes, whichever of its forms is used, and the layers adapters may target."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from lorac.errors import Problem, SpecError
from lorac.resources import presets_folder
from lorac.runtime.expert_names import KNOWN_ROLES, roles_by_name

from .geometry import shapes_from_config
from .model_schema import LONG_FORM, SHORT_FORM, ExpertsShape, LinearShape, Model
from .shapes import Experts, Linear, Shapes
from .wording import nearest

MAX_CONFIG_BYTES = 4 << 20
_WRITTEN = ("hidden", "layers", "vocab", "tied")
_FORMS = (
    "preset: NAME, config: FILE, or written out: hidden, layers, vocab, tied and either intermediate, heads or linears"
)
# Layers every model has beside those of its decoder
OUTER_TARGETS = ("lm_head", "embed_tokens")


def presets() -> list[str]:
    """The models lorac knows by name."""
    return sorted(path.stem for path in presets_folder().glob("*.json"))


def target_names(shapes: Shapes) -> list[str]:
    """Every name `adapters.targets` may hold for this model.

    The parts of a layer that the checkpoint itself stores fused are none: no adapter is trained for them.
    """
    stored = {part for name, parts in shapes.fused if name in shapes.stored_fused for part in parts}
    fused = [name for name, _ in shapes.fused]
    separate = [linear.name for linear in shapes.linears if linear.name not in stored]
    return [*fused, *separate, *OUTER_TARGETS, *(["experts"] if shapes.experts else [])]


def model_shapes(model: Model, folder: Path) -> Shapes:
    """The shapes of the model; `folder` is the spec's. Raises SpecError with paths beginning ("model",)."""
    given = model.model_fields_set
    written = [name for name in (*_WRITTEN, *SHORT_FORM, *LONG_FORM) if name in given]
    forms = [name for name in ("preset", "config") if getattr(model, name) is not None] + written[:1]
    if not forms:
        raise SpecError([Problem("model says nothing", ("model",), expected=_FORMS)])
    if len(forms) > 1:
        message = f"model has both {forms[0]} and {forms[1]}"
        raise SpecError([Problem(message, ("model", forms[1]), expected=_FORMS, hint="keep one of them")])
    if model.preset is not None:
        return preset_shapes(model.preset)
    if model.config is not None:
        return _config_shapes(model.config, folder)
    return _written_shapes(model)


def preset_shapes(name: str) -> Shapes:
    """The shapes of a model lorac knows. Raises SpecError at ("model", "preset")."""
    known = presets()
    if name not in known:
        hint = nearest(name, known) or "give its config.json: model: {config: FILE}"
        message = f"lorac knows no model {name!r:.80}"
        raise SpecError([Problem(message, ("model", "preset"), expected=f"one of {', '.join(known)}", hint=hint)])
    return shapes_from_config(json.loads((presets_folder() / f"{name}.json").read_text("utf-8")))


def inside(folder: Path, relative: str) -> Path | None:
    """The place `relative` names, or None where that is not inside `folder`."""
    try:
        target = (folder / relative).resolve()
        return target if target.is_relative_to(folder.resolve()) and not Path(relative).is_absolute() else None
    except (OSError, ValueError, RuntimeError):  # a NUL, or links in a circle
        return None


def read_config(file: Path) -> dict[str, Any]:
    """A config.json as plain data. Raises SpecError without a path where it cannot be read."""
    try:
        with open(file, "rb") as stream:
            data = stream.read(MAX_CONFIG_BYTES + 1)
        if len(data) > MAX_CONFIG_BYTES:
            raise SpecError([Problem("the config is larger than 4 MiB", expected="a Hugging Face config.json")])
        return json.loads(data)
    except OSError as error:
        raise SpecError([Problem(f"the config cannot be read: {error.strerror}")]) from None
    except json.JSONDecodeError as error:
        message = f"the config is not JSON: {error.msg} (line {error.lineno}, column {error.colno})"
        raise SpecError([Problem(message, expected="a Hugging Face config.json")]) from None
    except (ValueError, RecursionError):  # not UTF-8, a number of thousands of digits, a thousand brackets
        raise SpecError([Problem("the config is not JSON", expected="a Hugging Face config.json")]) from None


def _config_shapes(name: str, folder: Path) -> Shapes:
    path = ("model", "config")
    file = inside(folder, name)
    if file is None:
        message = f"the config {name!r:.80} is not inside the spec's folder"
        hint = "copy config.json beside the spec, so that the spec means the same on every machine"
        raise SpecError([Problem(message, path, expected="a relative path without ..", hint=hint)])
    try:
        return shapes_from_config(read_config(file))
    except SpecError as error:
        raise SpecError([replace(problem, path=path) for problem in error.problems]) from None


def _written_shapes(model: Model) -> Shapes:
    missing = [name for name in _WRITTEN if getattr(model, name) is None]
    if model.linears is None:
        missing += [name for name in ("intermediate", "heads") if getattr(model, name) is None]
    problems = [
        Problem(f"model lacks the key {name}", ("model", name), expected=_FORMS, hint=_long_form_hint(model, name))
        for name in missing
    ]
    short = [name for name in SHORT_FORM if getattr(model, name) is not None]
    if model.linears is not None and short:
        message = f"model has both linears and {short[0]}"
        problems.append(Problem(message, ("model", short[0]), expected=_FORMS, hint="keep one of them"))
    if problems:
        raise SpecError(problems)
    return _long_shapes(model) if model.linears is not None else _short_shapes(model)


def _long_form_hint(model: Model, name: str) -> str:
    without = [form for form in ("fused", "experts") if getattr(model, form) is not None]
    return f"{without[0]} needs linears" if without and name not in _WRITTEN else ""


def _short_shapes(model: Model) -> Shapes:
    extra = [name for name in ("fused", "experts") if getattr(model, name) is not None]
    if extra:
        message = f"model has {extra[0]} without linears"
        raise SpecError([Problem(message, ("model", extra[0]), hint="write linears too, or leave it out")])
    config = {
        "model_type": "llama",
        "hidden_size": model.hidden,
        "intermediate_size": model.intermediate,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.head_dim,
        "vocab_size": model.vocab,
        "tie_word_embeddings": model.tied,
    }
    try:
        return replace(shapes_from_config(config), family="custom")
    except SpecError as error:  # heads that do not divide; every size is within its limits already
        problems = [replace(problem, path=("model", "heads")) for problem in error.problems]
        raise SpecError(problems) from None


def _long_shapes(model: Model) -> Shapes:
    problems: list[Problem] = []
    linears: list[Linear] = []
    at: dict[str, str] = {}  # paths, and the linear of each
    for name, written in model.linears.items():
        path = ("model", "linears", name)
        if name in (*OUTER_TARGETS, "experts"):
            problems.append(Problem(f"{name} is no linear of a layer", path, hint="every model has it; leave it out"))
        first = at.setdefault(written.path, name)
        if first != name:
            message = f"{name} has the path of {first}, {written.path}"
            hint = "adapters name a linear by its path alone: give each its own, or leave one out"
            problems.append(Problem(message, (*path, "path"), expected="a path of its own", hint=hint))
        cut = {"column": written.out_features, "row": written.in_features}.get(written.sharding, 0)
        if written.units and cut % written.units:
            side = "out" if written.sharding == "column" else "in"
            message = f"{name}'s {side} of {cut} cannot be cut into {written.units} units"
            problems.append(Problem(message, (*path, "units"), expected=f"a divisor of {cut}, or 0 for any even cut"))
        layers = _layers(written, model.layers, path, problems)
        linears.append(
            Linear(
                name, written.path, written.in_features, written.out_features, layers, written.sharding, written.units
            )
        )
    fused = _fused(model, {linear.name: linear for linear in linears}, problems)
    experts = model.experts and _experts(model.experts, model.layers, linears, problems)
    if problems:
        raise SpecError(problems)
    return Shapes("custom", model.hidden, model.vocab, model.layers, model.tied, tuple(linears), fused, experts=experts)


def _layers(
    written: LinearShape | ExpertsShape, count: int, path: tuple[str, ...], problems: list[Problem]
) -> tuple[int, ...]:
    if written.layers is None:
        return tuple(range(count))
    before = -1
    for index, layer in enumerate(written.layers):
        if not before < layer < count:
            message = (
                f"layer {layer} comes after layer {before}" if layer < count else f"the model has no layer {layer}"
            )
            problems.append(Problem(message, (*path, "layers", index), expected=f"increasing, 0 to {count - 1}"))
        before = layer
    return tuple(written.layers)


def _experts(written: ExpertsShape, count: int, linears: list[Linear], problems: list[Problem]) -> Experts:
    path = ("model", "experts")
    if written.top_k > written.count:
        message = f"top_k is {written.top_k}, of {written.count} experts"
        problems.append(Problem(message, (*path, "top_k"), expected=f"at most {written.count}"))
    layers = _layers(written, count, path, problems)
    names = tuple(written.names)
    problems += _expert_names(names, written.path, linears)
    return Experts(
        written.count,
        written.top_k,
        written.intermediate,
        layers,
        written.path,
        names,
        written.transposed,
        written.interleaved,
    )


def _expert_names(names: tuple[str, str, str], path: str, linears: list[Linear]) -> list[Problem]:
    """Names by which adapters cannot tell gate, up and down apart, or that checkpoints give to another of them."""
    problems, meanings = [], roles_by_name(names)
    expected = "gate, up and down in this order, such as [w1, w3, w2]; gate and up may be one weight"
    for index, name in enumerate(names):
        here, roles = ("model", "experts", "names", index), meanings[name]
        known = KNOWN_ROLES.get(name, roles)
        if "down" in roles and len(roles) > 1:
            if index == 2:
                message = f"{name} is the name of {' and '.join(roles)}"
                problems.append(Problem(message, here, expected=expected))
        elif roles != known:
            message = f"{name} stands for {' and '.join(roles)} here, for {' and '.join(known)} in checkpoints"
            problems.append(Problem(message, here, expected=expected))
    taken = {linear.path: linear.name for linear in linears}
    for place in dict.fromkeys(f"{path}.{name}" for name in names):
        if place in taken:
            message = f"{place} is the path of {taken[place]}, and of a projection of the experts"
            problems.append(Problem(message, ("model", "experts", "path"), expected="a path that no linear has"))
    return problems


def _fused(
    model: Model, linears: dict[str, Linear], problems: list[Problem]
) -> tuple[tuple[str, tuple[str, ...]], ...]:
    taken: dict[str, str] = {}
    for name, parts in (model.fused or {}).items():
        path = ("model", "fused", name)
        if name in linears or name in (*OUTER_TARGETS, "experts"):
            problems.append(Problem(f"{name} is the name of another layer", path))
        if len(parts) < 2:
            problems.append(Problem(f"{name} has {len(parts)} parts", path, expected="two linears or more"))
        kinds = set()
        for index, part in enumerate(parts):
            if part not in linears:
                message = f"{part!r:.80} in {name} is no linear"
                expected = f"one of {', '.join(linears)}"
                problems.append(Problem(message, (*path, index), expected, nearest(part, list(linears))))
                continue
            if part in taken:
                problems.append(Problem(f"{part} is already a part of {taken[part]}", (*path, index)))
            taken[part] = name
            linear = linears[part]
            kinds.add((linear.path.rpartition(".")[0], linear.in_features, linear.layers, linear.sharding))
        if len(kinds) > 1:
            message = f"the parts of {name} differ in more than their output width"
            expected = "parts with the same parent path, input width, layers and sharding"
            problems.append(Problem(message, path, expected=expected))
    return tuple((name, tuple(parts)) for name, parts in (model.fused or {}).items())
