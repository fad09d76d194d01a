"""Writes a first spec for a model given by its config.json, commented so that it can be edited without the manual."""

import json
import re
from os.path import relpath
from pathlib import Path
from textwrap import fill

from lorac.errors import Problem, SpecError

from .geometry import shapes_from_config
from .model import OUTER_TARGETS, inside, read_config, target_names
from .rules import name_rules
from .schema import IDENTIFIER
from .shapes import Shapes

_SPEC = """\
# yaml-language-server: $schema=schema.json
# With that schema beside this file an editor completes and checks it: lorac schema -o schema.json
# {family}: {layers} layers of width {hidden}, a vocabulary of {vocab}.
lorac: 1
name: {name}  # the generated package
model: {{config: {config}}}  # relative to this file{place}
dtype: bfloat16  # or float16, float32
adapters:
  slots: 8  # adapters resident at once
  max_rank: 64  # the largest rank an adapter may have
{legal}
{whole}
  targets: [{targets}]
{experts}backends:  # the first is the default
  fused: {{}}
  triton: {{segments: {{by: request, cap: 32}}}}
  csgmv: {{segments: {{by: chunk, chunk: {{1: 16, 64: 32, 256: 128}}, floor: 16}}}}
  torch: {{}}
graphs:
  decode:
    max_rows: 256  # the largest decode batch; or list buckets: [1, 2, 4, ...]
    variants: {{nolora: {{adapters: 0}}, lora: {{}}}}  # a variant may be bounded: one: {{adapters: 1, rank: 16}}
  prefill:
    mode: breakable  # breakable | full | tc_piecewise | off
    max_tokens: 8192
    max_padding: 2.0  # a bucket more than this many times the tokens runs eager
parallel: {{tp: 1, ep: 1, dp_attention: false}}
targets: [sm_90]  # GPUs that `lorac build --aot` compiles for
"""
_EXPERTS = """\
  # The model has {count} experts in {layers} of its layers. To adapt them, add experts to the targets and uncomment:
  # shared_outer_experts: false  # true: an adapter's experts share A of gate and up, and B of down
"""


def init_spec(config_path: str | Path, name: str, folder: str | Path | None = None) -> str:
    """The text of a spec for this config.json, to be saved in `folder` (if left out the config's own, which it names).

    Raises SpecError where the config is of no known family, the name is no package name, or the config is not inside
    the folder, from where no spec could refer to it.
    """
    config_path = Path(config_path)
    # a name may hold line breaks, so it is quoted
    place = f"; save it in {json.dumps(str(config_path.parent))}" if folder is None else ""
    folder = config_path.parent if folder is None else Path(folder)
    problems = name_rules(name, ("name",))
    if not re.fullmatch(IDENTIFIER, name):
        expected = "a name of lower-case letters, digits and _, beginning with a letter"
        problems.append(Problem(f"a package cannot be called {name!r:.80}", ("name",), expected=expected))
    try:
        config = Path(relpath(config_path, folder)).as_posix()
    except ValueError:  # another drive
        config = ".."
    if inside(folder, config) is None:
        message = f"{config_path} is not inside {folder}, where the spec will be"
        problems.append(Problem(message, hint="copy config.json beside the spec"))
    if problems:
        raise SpecError(problems)
    return _text(shapes_from_config(read_config(config_path)), name, config, place)


def _text(shapes: Shapes, name: str, config: str, place: str) -> str:
    parts = {part for _, inner in shapes.fused for part in inner}
    whole = [target for target in target_names(shapes) if target not in parts]
    targets = [target for target in whole if target not in (*OUTER_TARGETS, "experts")]
    experts = shapes.experts
    return _SPEC.format(
        family=shapes.family,
        layers=shapes.layers,
        hidden=shapes.hidden,
        vocab=shapes.vocab,
        name=name,
        config=json.dumps(config, ensure_ascii=False),
        legal=_comment(f"The layers adapters may change: {', '.join(target_names(shapes))}."),
        place=place,
        whole="\n".join(_comment(text) for text in _on_fused(shapes)),
        targets=", ".join(targets),
        experts=_EXPERTS.format(count=experts.count, layers=len(experts.layers)) if experts else "",
    )


def _on_fused(shapes: Shapes) -> list[str]:
    """What fused targets stand for: parts that may be targets themselves, unless the checkpoint stores them fused."""
    stored = ", ".join(whole for whole, _ in shapes.fused if whole in shapes.stored_fused)
    stacked = ", ".join(whole for whole, _ in shapes.fused if whole not in shapes.stored_fused)
    lines = {
        f"A fused layer ({stacked}) stands for its parts; list them instead if the engine does not fuse.": stacked,
        f"The checkpoint itself stores {stored} fused, so adapters change them whole.": stored,
    }
    return [line for line, names in lines.items() if names]


def _comment(text: str) -> str:
    return fill(text, 110, initial_indent="  # ", subsequent_indent="  # ")
