"""The device tensors that describe one batch to the kernels, with fixed addresses, refreshed in place every step.

Map 0 describes the rows of the forward pass, map 1 the rows logits are computed for. The host writes `packed`; one kernel
(`route`, generated) derives everything else from it and neutralises every entry past the batch.
"""

import ctypes
from array import array
from dataclasses import dataclass

import torch

HEADER = 4  # requests, rows, chunk, unused: per map
MAPS = 2
UNCUT = 2**30  # a chunk no batch reaches: one segment per adapter


def round_up(count: int) -> int:
    """The next multiple of 16."""
    return -(-count // 16) * 16


@dataclass
class RowMap:
    """One map's tensors, int32. Kernels take these; entries past the batch are -1 (slots) or empty (segments)."""

    row_slot: torch.Tensor  # [rows] slot per row, -1 for base rows and padding
    order: torch.Tensor  # [rows] rows sorted by slot, base rows left out
    seg_slot: torch.Tensor  # [segments] slot per segment, -1 unused
    seg_start: torch.Tensor  # [segments] first position in `order`
    seg_end: torch.Tensor  # [segments] one past the last position
    active: torch.Tensor  # [slots, rounded up] distinct slots ascending, -1 after them


class Metadata:
    """Room for `rows` rows, `requests` requests and `segments` segments, on one device."""

    def __init__(self, rows: int, requests: int, segments: int, slots: int, device: torch.device):
        # every tensor starts on 64 bytes: kernels are compiled for aligned pointers
        rows, segments = round_up(rows), round_up(segments)
        self.rows, self.requests, self.segments, self.slots = rows, requests, segments, slots
        self.device = device
        sizes = (rows, rows, segments, segments, segments, round_up(slots))
        self.tensors = torch.full((MAPS, sum(sizes)), -1, dtype=torch.int32, device=device)
        self.maps = tuple(RowMap(*self.tensors[m].split(sizes)) for m in range(MAPS))
        self.table = 2 * requests + 1  # slots, then starts, of one map
        self.packed = torch.zeros(MAPS * (HEADER + self.table), dtype=torch.int32, device=device)
        self._staging = [_Staging(self.packed)]

    def write(self, maps: list[tuple[array, array, int, int]]) -> None:
        """Send (slot per request, start per request and end, rows, chunk) of each map: one asynchronous copy."""
        staging = self._free_staging()
        view = staging.view
        header = array("i", (0, 0, UNCUT, 0) * MAPS)
        for m, (slots, starts, rows, chunk) in enumerate(maps):
            requests = len(slots)
            header[m * HEADER : m * HEADER + 3] = array("i", (requests, rows, chunk))
            at = MAPS * HEADER + m * self.table
            view[at : at + requests] = slots
            at += self.requests
            view[at : at + requests + 1] = starts
        view[: MAPS * HEADER] = header
        self.packed.copy_(staging.tensor, non_blocking=True)
        staging.sent()

    def _free_staging(self) -> "_Staging":
        """A host buffer the device has finished reading; a new one rather than a wait when the host runs ahead."""
        for staging in self._staging:
            if staging.free():
                return staging
        self._staging.append(_Staging(self.packed))
        return self._staging[-1]


class _Staging:
    """A host copy of `packed`, pinned when the device is a GPU, writable without an allocation."""

    def __init__(self, packed: torch.Tensor):
        on_gpu = packed.device.type == "cuda"
        self.tensor = torch.zeros(packed.shape, dtype=torch.int32, pin_memory=on_gpu)
        memory = (ctypes.c_int32 * packed.numel()).from_address(self.tensor.data_ptr())
        self.view = memoryview(memory).cast("B").cast("i")
        self.event = torch.cuda.Event() if on_gpu else None

    def free(self) -> bool:
        return self.event is None or self.event.query()

    def sent(self) -> None:
        if self.event is not None:
            self.event.record()
