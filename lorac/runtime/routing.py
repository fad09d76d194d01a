"""From the packed description of a batch to the per-row and per-segment tensors kernels read.

`launcher` is for the generated `route` kernel; `on_host` does the same in Python, for a CPU without the interpreter.
"""

from collections.abc import Callable

import torch

from lorac.runtime.launch import Kernel, cdiv
from lorac.runtime.metadata import Metadata
from lorac.runtime.room import MAPS, SPAN, UNIT


def launcher(route: Kernel, metadata: Metadata, by_request: bool) -> Callable[[], None]:
    """One launch over every row the metadata has room for, so that whatever lies past the batch is neutralised."""
    maps = metadata.tensors
    grid = (cdiv(metadata.rows, UNIT), MAPS)
    return route.bind(
        route.launches[int(by_request)],
        grid,
        packed=metadata.packed,
        maps=maps,
        map_stride=maps.stride(0),
        rows_room=metadata.rows,
        requests_room=metadata.requests,
        segments_room=metadata.segments,
    )


def on_host(metadata: Metadata, batches: list[tuple[list[int], list[int], int, int]], by_request: bool) -> None:
    """The same from the Python lists `metadata.write` took."""
    for m in range(MAPS):
        slots, starts, rows, chunk = batches[m] if m < len(batches) else ([], [0], 0, 1)
        row_map = metadata.maps[m]
        row_slot = [slot for slot, a, b in zip(slots, starts, starts[1:], strict=False) for _ in range(b - a)][:rows]
        by_slot = {slot: [] for slot in sorted(set(slots) - {-1})}
        for row, slot in enumerate(row_slot):
            if slot >= 0:
                by_slot[slot].append(row)
        order = [row for members in by_slot.values() for row in members]
        if by_request:
            order = list(range(rows))
            segments = list(zip(slots, starts, starts[1:], strict=False))
        else:
            segments = _chunks(by_slot, chunk)
        _fill(row_map.row_slot, row_slot)
        _fill(row_map.order, order)
        units = range(0, metadata.rows, UNIT)
        for spans, width in zip(row_map.spans, metadata.widths, strict=True):
            _fill(spans, [_spans(row_slot[at : at + UNIT], width) for at in units])
        _fill(row_map.seg_slot, [slot for slot, _, _ in segments])
        _fill(row_map.seg_start, [start for _, start, _ in segments], 0)
        _fill(row_map.seg_end, [end for _, _, end in segments], 0)
        _fill(row_map.active, [slot for slot, members in by_slot.items() if members])


def _spans(slots: list[int], width: int) -> int:
    """The spans that hold columns of those slots, as the bits of an int32."""
    columns = {slot * width + column for slot in set(slots) - {-1} for column in range(width)}
    bits = sum({1 << (column // SPAN) for column in columns}) % 2**32
    return bits - 2**32 if bits >= 2**31 else bits


def _chunks(by_slot: dict[int, list[int]], chunk: int) -> list[tuple[int, int, int]]:
    segments, first = [], 0
    for slot, members in by_slot.items():
        for start in range(0, len(members), chunk):
            segments.append((slot, first + start, first + min(start + chunk, len(members))))
        first += len(members)
    return segments


def _fill(tensor: torch.Tensor, values: list[int], rest: int = -1) -> None:
    """Write the values and neutralise the rest. Values past the room belong to a rule that never reads them."""
    values = values[: tensor.numel()]
    tensor.fill_(rest)
    if values:
        tensor[: len(values)] = torch.tensor(values, dtype=torch.int32)
