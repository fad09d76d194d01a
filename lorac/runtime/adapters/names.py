"""Names of tensors in adapter files, with the prefixes of the wild, and the modules they stand for."""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from lorac.runtime.adapters.problems import Problems
from lorac.runtime.adapters.shared import share_halves
from lorac.runtime.adapters.tensors import Header

# What may stand before `layers.<i>.`, `embed_tokens` and `lm_head`: the text model, alone or inside a wrapper.
# Layers below any other prefix (a vision tower, an encoder) are not the ones served.
PREFIXES = ("model.language_model.", "language_model.model.", "language_model.", "model.", "")
_WRAPPERS = frozenset(("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"))
_PARTS = frozenset(("lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B"))
_OTHER_NAMES = {"unembed_tokens": "lm_head"}
_LAYER = re.compile(r"layers\.(0|[1-9][0-9]{0,4})\.(.+)")
_NAME = re.compile(r"[\w.\-]{1,300}")
# Tensors that are not A or B, by a word in their name: what they are and what to do.
_FOREIGN = (
    (
        "lora_magnitude_vector",
        "DoRA magnitudes, which plain LoRA would drop; train without use_dora, or merge the adapter",
    ),
    ("trainable_tokens", "trained embedding rows (trainable_token_indices); merge them into a copy of the base model"),
    ("token_adapter", "trained embedding rows (trainable_token_indices); merge them into a copy of the base model"),
    ("lora_E", "AdaLoRA, which has a third factor; convert it to LoRA first"),
    ("ranknum", "AdaLoRA, which has a third factor; convert it to LoRA first"),
    ("bias", "trained biases (bias or lora_bias); train without them, or merge the adapter"),
    (
        "modules_to_save",
        "whole modules trained beside the LoRA (modules_to_save); put LoRA on them, or merge the adapter",
    ),
)


@dataclass(frozen=True)
class Place:
    """Where a module stands in the model: `layer` is None for one outside the decoder layers."""

    layer: int | None
    path: str

    @property
    def name(self) -> str:
        """The module's name behind the prefix of the text model."""
        return self.path if self.layer is None else f"layers.{self.layer}.{self.path}"


@dataclass(frozen=True)
class Pair:
    """The two factors of one module; `module` is its name as PEFT saw it, without `base_model.model.` and wrappers."""

    module: str
    embedding: (
        bool  # lora_embedding_A [r, vocab] and lora_embedding_B [hidden, r], else lora_A [r, in] and lora_B [out, r]
    )
    a: Header
    b: Header


def pair_tensors(headers: Iterable[Header], problems: Problems) -> tuple[list[Pair], list[str]]:
    """Pairs of A and B of one file, and the names of frozen copies of base weights. Anything else is a problem."""
    halves: dict[tuple[str, bool], dict[str, Header]] = {}
    others, adapters = [], set()
    for header in headers:
        if "lora_velora_embed" in header.name.split("."):
            continue  # of VeLoRA's backward pass alone
        found = _parse(header.name)
        if found is None:
            others.append(header.name)
            continue
        module, part, adapter = found
        adapters.add(adapter)
        half = halves.setdefault((module, "embedding" in part), {})
        if part[-1] in half:
            problems.add(f"two tensors for {part} of {module}; expected one", header.name)
        half[part[-1]] = header
    if len(adapters) > 1:
        names = ", ".join(name or "unnamed" for name in sorted(adapters))
        problems.add(f"the file holds several adapters ({names}); save each in a folder of its own")
    share_halves(halves, problems)
    pairs = []
    for (module, embedding), half in halves.items():
        if len(half) == 2:
            pairs.append(Pair(module, embedding, half["A"], half["B"]))
        else:
            (present, header), missing = next(iter(half.items())), {"A": "B", "B": "A"}[next(iter(half))]
            problems.add(f"lora_{present} without its lora_{missing}: the file is incomplete", header.name)
    modules = {module for module, _ in halves}
    copies = [name for name in others if _is_frozen_copy(name, modules)]
    for name in sorted(set(others) - set(copies)):
        problems.add(*_foreign(name))
    return pairs, copies


def locate(module: str) -> Place | None:
    """The place of a module by its name; None where no known prefix fits."""
    for prefix in PREFIXES:
        if not module.startswith(prefix):
            continue
        rest = module[len(prefix) :]
        if rest in ("lm_head", "embed_tokens", "unembed_tokens"):
            return Place(None, _OTHER_NAMES.get(rest, rest))
        if found := _LAYER.fullmatch(rest):
            return Place(int(found[1]), found[2])
    return None


def aliases(module: str) -> list[str]:
    """The module's name as it stands, and under every known prefix: patterns were written for one of them."""
    place = locate(module)
    if place is None:
        return [module]
    return list(dict.fromkeys([module, *(prefix + place.name for prefix in PREFIXES if prefix)]))


def _strip(name: str) -> list[str]:
    """The name's segments without wrappers and `base_model.model.`."""
    segments = _without_module([segment for segment in name.split(".") if segment not in _WRAPPERS])
    return _without_module(segments[2:]) if segments[:2] == ["base_model", "model"] else segments


def _without_module(segments: list[str]) -> list[str]:
    """What data parallelism wraps: PEFT's model, or the one inside it."""
    while segments[:1] == ["module"]:
        segments = segments[1:]
    return segments


def _parse(name: str) -> tuple[str, str, str] | None:
    """(module, part, adapter) of a LoRA tensor; adapter is "" where PEFT removed its name on saving."""
    if not _NAME.fullmatch(name):
        return None
    segments = _strip(name)
    weight = segments[-1:] == ["weight"]
    segments = segments[:-1] if weight else segments
    adapter = segments.pop() if len(segments) > 1 and segments[-1] not in _PARTS and segments[-2] in _PARTS else ""
    part = segments.pop() if segments and segments[-1] in _PARTS else ""
    if not part or not segments or weight == ("embedding" in part):
        return None
    return ".".join(segments), part, adapter


def _is_frozen_copy(name: str, modules: set[str]) -> bool:
    # PEFT saves the base weight of an embedding or head it puts LoRA on; it is frozen in training
    module = ".".join(_strip(name)).removesuffix(".base_layer.weight")
    return (
        module in modules
        and module.rpartition(".")[2] in ("embed_tokens", "lm_head")
        and module != ".".join(_strip(name))
    )


def _foreign(name: str) -> tuple[str, str]:
    if not _NAME.fullmatch(name):
        return f"a tensor's name is not one PEFT writes: {name[:120]!r}", ""
    if "lora_A.bias" in name or "lora_B.bias" in name:
        return "biases of LoRA layers (lora_bias); train without them, or merge the adapter", name
    for word, meaning in _FOREIGN:
        if word in name.split("."):
            return f"not LoRA factors but {meaning}", name
    if "lora_" not in name and name.endswith(".weight"):
        return (
            "whole weights beside the LoRA (modules_to_save, or a resized vocabulary); put LoRA on them, or merge",
            name,
        )
    return "not the name of a LoRA factor that PEFT writes", name
