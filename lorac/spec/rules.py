"""The rules of a spec that need more than one field. Each returns the problems it finds, in the order of the file."""

import keyword
import sys
from pathlib import Path
from typing import Any

from lorac.errors import Problem

from .model import inside, target_names
from .schema import Adapters, Backend, Decode, Prefill
from .shapes import Shapes
from .wording import nearest

# A generated package of one of these names would hide the module its own kernels import.
_TAKEN = {"lorac", "torch", "triton", "safetensors", "numpy"} | sys.stdlib_module_names

Trail = tuple[str | int, ...]


def name_rules(name: str, path: Trail) -> list[Problem]:
    """Names that are words of Python, or would hide a module, can be no module's name."""
    if keyword.iskeyword(name):
        return [Problem(f"{name} is a keyword of Python", path, expected="a name Python can import")]
    if name in _TAKEN:
        message = f"a package called {name} would hide Python's module of that name"
        return [Problem(message, path, hint=f"call it {name}_lora")]
    return []


def backend_rules(backends: dict[str, Backend], folder: Path) -> list[Problem]:
    """Block names become modules; `kind` and `templates` name folders, which must stay where they belong."""
    problems = []
    for name, backend in backends.items():
        path = ("backends", name)
        if keyword.iskeyword(name):
            problems.append(Problem(f"{name} is a keyword of Python", path, expected="a name Python can import"))
        if backend.kind is not None and not backend.kind.isidentifier():
            message = f"kind {backend.kind!r:.80} is no folder name"
            problems.append(Problem(message, (*path, "kind"), expected="a folder of templates, an identifier"))
        if backend.templates is not None:
            target = inside(folder, backend.templates)
            if target is None:
                message = f"the folder {backend.templates!r:.80} is not inside the spec's folder"
                expected = "a relative path without .."
                problems.append(Problem(message, (*path, "templates"), expected=expected))
            elif not target.is_dir():
                message = f"there is no folder {backend.templates!r:.80} beside the spec"
                problems.append(Problem(message, (*path, "templates"), expected="a folder of template folders"))
    return problems


def adapter_rules(adapters: Adapters, shapes: Shapes | None) -> list[Problem]:
    """Targets are layers of the model, each once, and no layer is targeted both whole and in part."""
    path = ("adapters", "targets")
    problems = []
    fused = dict(shapes.fused) if shapes else {}
    legal = target_names(shapes) if shapes else []
    for index, target in enumerate(adapters.targets):
        here = (*path, index)
        if target in adapters.targets[:index]:
            problems.append(Problem(f"the target {target!r:.60} stands twice", here, hint="keep one of them"))
        elif shapes and target not in legal:
            problems.append(_unknown_target(target, here, legal, shapes))
        for whole in adapters.targets:
            if target in fused.get(whole, ()):
                message = f"{target} is a part of {whole}, which is a target too"
                problems.append(Problem(message, here, hint=f"keep {whole}, or list its parts instead"))
    return problems


def _unknown_target(target: str, path: Trail, legal: list[str], shapes: Shapes) -> Problem:
    expected = f"one of {', '.join(legal)}"
    hint = nearest(target, legal)
    for whole, parts in shapes.fused:
        if target in parts:  # legal elsewhere: this checkpoint stores the layer fused
            hint = f"this model's checkpoint has it inside {whole}: target that"
    if target == "experts":
        hint = "this model has no experts"
    return Problem(f"the model has no layer {target!r:.60}", path, expected=expected, hint=hint)


def decode_rules(decode: Decode, adapters: Adapters | None) -> list[Problem]:
    """Decode has a largest batch, increasing buckets below it, and a variant every batch falls into."""
    path: Trail = ("graphs", "decode")
    problems = []
    if decode.buckets is None and decode.max_rows is None:
        message = "decode says nothing of its sizes"
        problems.append(Problem(message, path, expected="buckets, max_rows, or both"))
    problems += _bucket_rules(decode.buckets or [], decode.max_rows, "max_rows", path)
    if all(v.adapters is not None or v.rank is not None for v in decode.variants.values()):
        message = "no variant of decode takes every batch"
        expected = "one variant without bounds, such as lora: {}"
        problems.append(Problem(message, (*path, "variants"), expected=expected))
    alike: dict[tuple[int, int], str] = {}  # bounds of any batch that can be, and the variant of each
    for name, variant in decode.variants.items():
        here = (*path, "variants", name)
        if adapters:
            most = adapters.slots if variant.adapters is None else variant.adapters
            rank = (variant.rank or adapters.max_rank) if most else 0
            first = alike.setdefault((most, rank), name)
            if first != name:
                message = f"variant {name} has the bounds of variant {first}, so that no graph would be captured for it"
                hint = "leave one of the two out, or bound it by fewer adapters or a lower rank"
                problems.append(Problem(message, here, expected="bounds of its own", hint=hint))
        if keyword.iskeyword(name):
            problems.append(Problem(f"{name} is a keyword of Python", here, expected="another name"))
        if adapters and variant.adapters is not None and variant.adapters > adapters.slots:
            message = f"variant {name} allows {variant.adapters} adapters, but there are {adapters.slots} slots"
            problems.append(Problem(message, (*here, "adapters"), expected=f"at most {adapters.slots}"))
        if adapters and variant.rank is not None and variant.rank > adapters.max_rank:
            message = f"variant {name} allows rank {variant.rank}, but max_rank is {adapters.max_rank}"
            problems.append(Problem(message, (*here, "rank"), expected=f"at most {adapters.max_rank}"))
    return problems


def prefill_rules(prefill: Prefill) -> list[Problem]:
    """Prefill's buckets increase and none is above its largest batch."""
    return _bucket_rules(prefill.buckets or [], prefill.max_tokens, "max_tokens", ("graphs", "prefill"))


def target_rules(targets: list[Any]) -> list[Problem]:
    """A GPU is compiled for once."""
    return [
        Problem(f"the target {target} stands twice", ("targets", index), hint="keep one of them")
        for index, target in enumerate(targets)
        if isinstance(target, str) and target in targets[:index]
    ]


def _bucket_rules(buckets: list[int], most: int | None, key: str, path: Trail) -> list[Problem]:
    problems = []
    for index, bucket in enumerate(buckets):
        here = (*path, "buckets", index)
        if most is not None and bucket > most:
            problems.append(Problem(f"bucket {bucket} is above {key}, which is {most}", here, f"at most {most}"))
        if index and bucket <= buckets[index - 1]:
            message = f"bucket {bucket} comes after {buckets[index - 1]}"
            problems.append(Problem(message, here, expected="buckets in increasing order, each once"))
    return problems
