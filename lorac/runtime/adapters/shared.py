"""Halves of pairs that the experts of a layer share: one A or B in the file, and the other half of each expert's own.

Beside `mlp.experts.3.up_proj.lora_B` the shared half is called `mlp.experts.shared.up_proj.lora_A`, or
`mlp.experts.up_proj.lora_A` with a leading dimension of 1. Files whose own halves are packed as well need none of this.
"""

import re
from collections import defaultdict
from dataclasses import replace

from lorac.runtime.adapters.problems import Problems
from lorac.runtime.adapters.tensors import Header

_OWN = re.compile(r"(.+)\.[0-9]+\.(\w+)")
_SHARED = re.compile(r"(.+?)(?:\.shared)?\.(\w+)")


def share_halves(halves: dict[tuple[str, bool], dict[str, Header]], problems: Problems) -> None:
    """Put each shared half beside the own one of every expert. `halves` are A and B by (module, of an embedding)."""
    owners = defaultdict(list)
    for (module, _), half in halves.items():
        if found := _OWN.fullmatch(module):
            owners[found.groups()].append(half)
    for key, half in list(halves.items()):
        found = _SHARED.fullmatch(key[0])
        experts = owners.get(found.groups()) if found and len(half) == 1 else None
        if not experts:
            continue
        [(side, header)] = half.items()
        if len(header.shape) == 3 and header.shape[0] == 1:
            header = replace(header, shape=header.shape[1:])  # the tensor will be read in that shape
        for expert in experts:
            if side in expert:
                problems.add(
                    f"lora_{side} of one expert beside {header.name}, which all experts share; expected one of them",
                    expert[side].name,
                )
            expert[side] = header
        del halves[key]
