"""Other engines' LoRA kernels, run on the same weights, adapters and rows as lorac's, in the same process.

A peer is a function peer(workload, rows, adapters) -> run(module, layer) -> y, the base included as the engine has it.
"""

from collections.abc import Callable

import torch

from lorac.bench.peer_imports import PeerError
from lorac.bench.workload import Workload, row_slots

Run = Callable[[str, int], torch.Tensor]
Peer = Callable[[Workload, int, int], Run]

PEERS = ("sglang-triton_v2", "sglang-triton", "sglang-csgmv", "vllm")


def peer(name: str) -> Peer:
    """The peer of that name, its kernels imported. Raises PeerError where it cannot run here."""
    if name not in PEERS:
        raise PeerError(f"there is no peer of that name; there are {', '.join(PEERS)}")
    if name == "vllm":
        from lorac.bench import peer_vllm

        return peer_vllm.load()
    from lorac.bench import peer_sglang

    return peer_sglang.load(name.removeprefix("sglang-"))


class Held:
    """A workload's adapters as engines hold them: A [slots, slices * rank, in], B [slots, out, rank], by instance."""

    def __init__(self, workload: Workload):
        self.slots = workload.package.LAYOUT.slots
        self.rank = workload.package.LAYOUT.max_rank
        self.a, self.b = {}, {}
        for module, layers in workload.layers.items():
            for layer in layers:
                a, b, _, scale = workload.slots.instance(module, layer)
                self.a[module, layer] = a
                self.b[module, layer] = b.transpose(0, 1).contiguous()
                self.scale = scale[:, 0].contiguous()  # an adapter's scale is the same everywhere


def offsets(workload: Workload, module: str) -> list[int]:
    """Where the slices of a module's output begin, and where the last ends."""
    slices = workload.modules[module].slices
    return [*(part.start for part in slices), slices[-1].start + slices[-1].width]


def held(workload: Workload) -> Held:
    """The workload's adapters in that form, converted once."""
    if not hasattr(workload, "held"):
        workload.held = Held(workload)
    return workload.held


def batch(workload: Workload, rows: int, adapters: int) -> list[int]:
    """The slot of every row."""
    return row_slots(workload.package, rows, adapters)


def ints(values: list[int], workload: Workload) -> torch.Tensor:
    """int32 on the workload's device."""
    return torch.tensor(values, dtype=torch.int32, device=workload.device)
