"""The generated `route` kernel against the same in plain Python, and both against a description in a few lines."""

from array import array

import kernel_kit as kit
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lorac.runtime import routing
from lorac.runtime.errors import PackageError
from lorac.runtime.metadata import UNCUT, Metadata
from lorac.runtime.segments import chunk_cap

SLOTS, WIDTHS = 5, (48, 16)  # of B and its copy: a slot's columns begin and end within spans of 64
ROOM = 100  # rows: more than one program of `route`
SPEC = {
    "lorac": 1,
    "name": "routed",
    "model": {"hidden": 64, "layers": 1, "vocab": 61, "tied": False,
              "linears": {"o_proj": {"in": 64, "out": 64, "path": "attn.o_proj"}}},
    "dtype": "float32",
    "adapters": {"slots": SLOTS, "max_rank": 48, "targets": ["o_proj"]},
    "backends": {"fused": {}},
    "graphs": {"decode": {"buckets": [4], "variants": {"narrow": {"adapters": SLOTS, "rank": 9}, "lora": {}}}},
}  # fmt: skip


@pytest.fixture(scope="module")
def tables(build):
    """The step tables of a package with five slots."""
    package = build(SPEC)
    assert package.LAYOUT.widths == WIDTHS
    return package.step


@st.composite
def batches(draw):
    """(slots, starts, rows, chunk) of one map: any owners, some requests without rows, adapters uncut or in chunks."""
    counts = draw(st.lists(st.one_of(st.integers(0, 3), st.integers(0, 40)), max_size=16))
    while sum(counts) > ROOM:
        counts.pop()
    slots = [draw(st.integers(-1, SLOTS - 1)) for _ in counts]
    starts = [sum(counts[:index]) for index in range(len(counts) + 1)]
    return array("i", slots), array("i", starts), starts[-1], draw(st.sampled_from([UNCUT, 1, 3, 16, 64]))


def _reaches(slots: list[int], span: int, width: int) -> bool:
    """Whether a column of one of the slots lies within the span."""
    columns = (column for slot in slots if slot >= 0 for column in range(slot * width, slot * width + width))
    return any(column // 64 == span for column in columns)


def described(batch, by_request: bool) -> dict[str, list[int]]:
    """What kernels read for a batch, without the neutral tails."""
    slots, starts, rows, chunk = batch
    row_slot = [slot for slot, a, b in zip(slots, starts, starts[1:], strict=False) for _ in range(b - a)]
    order, segments = list(range(rows)), list(zip(slots, starts, starts[1:], strict=False))
    if not by_request:
        order = sorted((row for row in range(rows) if row_slot[row] >= 0), key=lambda row: row_slot[row])
        owners = [row_slot[row] for row in order]
        segments = []
        for slot in sorted(set(owners)):
            first, end = owners.index(slot), len(owners) - owners[::-1].index(slot)
            segments += [(slot, at, min(at + chunk, end)) for at in range(first, end, chunk)]
    return {
        "row_slot": row_slot,
        "order": order,
        "seg_slot": [slot for slot, _, _ in segments],
        "seg_start": [start for _, start, _ in segments],
        "seg_end": [end for _, _, end in segments],
        "active": sorted(set(row_slot) - {-1}),
        "spans": [
            [
                sum(
                    1 << span
                    for span in range(SLOTS * width // 64 + 1)
                    if _reaches(row_slot[at : at + 64], span, width)
                )
                for at in range(0, ROOM, 64)
            ]
            for width in WIDTHS
        ],
    }


def check(row_map, batch, by_request: bool):
    for name, values in described(batch, by_request).items():
        neutral = 0 if name in ("seg_start", "seg_end") else -1
        parts = (
            zip(values, getattr(row_map, name), strict=True) if name == "spans" else [(values, getattr(row_map, name))]
        )
        for expected, tensor in parts:
            assert tensor.tolist() == expected + [neutral] * (tensor.numel() - len(expected)), name


@settings(max_examples=15)
@given(batches(), batches(), batches(), st.booleans())
def test_routes_agree(tables, larger, first, second, by_request):
    # exactly the room the rules give; with every request a segment, as many as there are requests
    room = max(max(chunk_cap(b[2], SLOTS, b[3]) if b[2] else 0, len(b[0])) for b in (larger, first, second)) or 1
    by_kernel, by_host = (Metadata(ROOM, 16, room, SLOTS, WIDTHS, torch.device("cpu")) for _ in range(2))
    # the tails must be neutral after another batch, and after garbage
    for row_map in by_kernel.maps:
        for name in described(first, by_request):
            getattr(row_map, name)[..., : {"active": SLOTS, "spans": 2}.get(name)].fill_(77)
    for maps in ([larger, larger], [first, second], [second]):
        by_kernel.write(maps)
        routing.launcher(tables.ROUTE, by_kernel, by_request)()
        routing.on_host(by_host, maps, by_request)
        empty = (array("i"), array("i", [0]), 0, UNCUT)
        for row_map, batch in zip(by_kernel.maps, [*maps, empty], strict=False):
            check(row_map, batch, by_request)
        assert torch.equal(by_kernel.tensors, by_host.tensors)


def test_bfloat16_is_refused_where_the_interpreter_would_be_wrong(build, generator):
    """Kernels only: the plain backend computes it rightly, and is served."""
    for kind in kit.kinds():
        if "bfloat16" not in kind.declaration.dtypes:
            continue
        package = build(kit.spec_of(kind, "bfloat16"))
        if kind.declaration.kernels:
            with pytest.raises(PackageError, match="bfloat16") as caught:
                package.Step(package.Slots("cpu"), "tested")
            assert "TRITON_INTERPRET" in str(caught.value) and "float32" in str(caught.value)
        else:
            package.Step(package.Slots("cpu"), "tested")
