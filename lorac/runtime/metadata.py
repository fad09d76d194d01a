"""The device tensors that describe one batch to the kernels, with fixed addresses, refreshed in place every step.

Map 0 describes the rows of the forward pass, map 1 the rows logits are computed for. The host writes `packed`; one
kernel (`route`, generated) derives everything else from it and neutralises every entry past the batch.
"""

import ctypes
from array import array
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import torch

from lorac.runtime.room import HEADER, MAPS, map_sizes, round_up, table_size

BANK = 8  # batches between two events
UNCUT = 2**30  # a chunk no batch reaches: one segment per adapter
_NO_MAPS = (0, 0, UNCUT, 0) * MAPS


class RowMap(NamedTuple):
    """One map's tensors, int32. Kernels take these; entries past the batch are -1 (slots) or empty (segments)."""

    row_slot: torch.Tensor  # [rows] slot per row, -1 for base rows and padding
    order: torch.Tensor  # [rows] rows sorted by slot, base rows left out
    # [widths of B, rows / UNIT] as bits, the spans of B's columns that UNIT rows need; of up to 32 spans
    spans: torch.Tensor
    seg_slot: torch.Tensor  # [segments] slot per segment, -1 unused
    seg_start: torch.Tensor  # [segments] first position in `order`
    seg_end: torch.Tensor  # [segments] one past the last position
    active: torch.Tensor  # [slots, rounded up] distinct slots ascending, -1 after them


class Metadata:
    """Room for `rows` rows, `requests` requests and `segments` segments, on one device.

    `widths` are the columns a slot has in B and in each of its copies.
    """

    def __init__(
        self, rows: int, requests: int, segments: int, slots: int, widths: tuple[int, ...], device: torch.device
    ):
        rows, segments = round_up(rows), round_up(segments)
        self.rows, self.requests, self.segments, self.slots = rows, requests, segments, slots
        self.widths = widths
        self.device = device
        sizes = map_sizes(rows, segments, slots, len(widths))
        self.tensors = torch.full((MAPS, sum(sizes)), -1, dtype=torch.int32, device=device)
        flat = (RowMap(*self.tensors[m].split(sizes)) for m in range(MAPS))
        self.maps = tuple(of._replace(spans=of.spans.view(len(widths), -1)) for of in flat)
        self.table = table_size(requests)
        self.packed = torch.zeros(MAPS * (HEADER + self.table), dtype=torch.int32, device=device)
        self.routes: dict[bool, Callable[[], None]] = {}  # launches that derive `tensors`: rows by request, or not
        self._banks = deque((_Bank(self.packed), _Bank(self.packed)))  # the first is being filled

    def write(self, maps: list[tuple[array, array, int, int]]) -> None:
        """Send (slot per request, start per request and end, rows, chunk) of each map: one asynchronous copy."""
        bank = self._banks[0]
        tensor, view = bank.buffers[bank.sent]
        header = array("i", _NO_MAPS)
        at = MAPS * HEADER
        for m, (slots, starts, rows, chunk) in enumerate(maps):
            requests = len(slots)
            header[m * HEADER], header[m * HEADER + 1], header[m * HEADER + 2] = requests, rows, chunk
            view[at : at + requests] = slots
            view[at + self.requests : at + self.requests + requests + 1] = starts
            at += self.table
        view[: MAPS * HEADER] = header
        self.packed.copy_(tensor, non_blocking=True)
        bank.sent += 1
        if bank.sent == len(bank.buffers):
            bank.close()
            self._next_bank()

    def _next_bank(self) -> None:
        """Fill the bank sent longest ago; a new one rather than a wait when the host runs that far ahead."""
        self._banks.rotate(-1)
        if not self._banks[0].free():
            self._banks.appendleft(_Bank(self.packed))
        self._banks[0].sent = 0


class _Bank:
    """Host copies of `packed` sent in turn, pinned when the device is a GPU, writable without an allocation.

    One event tells when the device has read them all: recording and asking costs as much as a copy. The copies may be
    on several streams, which the step orders, for all of them write `packed`.
    """

    def __init__(self, packed: torch.Tensor):
        on_gpu = packed.device.type == "cuda"
        tensors = torch.zeros(BANK, packed.numel(), dtype=torch.int32, pin_memory=on_gpu).unbind()
        self.buffers = tuple((tensor, _view(tensor)) for tensor in tensors)
        self.event = torch.cuda.Event() if on_gpu else None
        self.sent = 0

    def free(self) -> bool:
        """Whether the device has read every buffer."""
        return self.event is None or self.event.query()

    def close(self) -> None:
        """The last buffer has been sent."""
        if self.event is not None:
            self.event.record()


def _view(tensor: torch.Tensor) -> memoryview:
    """A contiguous int32 tensor's memory."""
    memory = (ctypes.c_int32 * tensor.numel()).from_address(tensor.data_ptr())
    return memoryview(memory).cast("B").cast("i")
