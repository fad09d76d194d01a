"""Host buffers of the metadata: none is written again before the device has read it, and none is waited for."""

from array import array

import torch

from lorac.runtime.metadata import BANK, HEADER, MAPS, Metadata


class Event:
    """Stands for a CUDA event: reached until it is recorded, then when the test says so."""

    reached = True

    def record(self):
        self.reached = False

    def query(self) -> bool:
        return self.reached


def write(metadata: Metadata, slot: int) -> None:
    for bank in metadata._banks:
        bank.event = bank.event or Event()
    metadata.write([(array("i", [slot, -1]), array("i", [0, 1, 2]), 2, 16)])
    assert metadata.packed[MAPS * HEADER : MAPS * HEADER + 2].tolist() == [slot, -1]
    assert metadata.packed[: MAPS * HEADER].tolist() == [2, 2, 16, 0, 0, 0, 2**30, 0]


def test_a_host_that_runs_ahead_overwrites_nothing_that_is_yet_to_be_read():
    metadata = Metadata(rows=4, requests=3, segments=2, slots=4, widths=(8,), device=torch.device("cpu"))
    for slot in range(2 * BANK):
        write(metadata, slot)
    assert len(metadata._banks) == 3
    unread = [bank for bank in metadata._banks if bank.event and not bank.event.query()]
    assert len(unread) == 2
    held = {id(bank): [tensor.clone() for tensor, _ in bank.buffers] for bank in unread}
    for slot in range(2 * BANK, 5 * BANK):
        write(metadata, slot)
    for bank in unread:
        assert all(torch.equal(old, now) for old, (now, _) in zip(held[id(bank)], bank.buffers, strict=True))


def test_a_device_that_keeps_up_needs_no_more_buffers():
    metadata = Metadata(rows=4, requests=3, segments=2, slots=4, widths=(8,), device=torch.device("cpu"))
    for slot in range(5 * BANK):
        write(metadata, slot)
        if slot % BANK == BANK // 2:  # half a bank late
            for bank in metadata._banks:
                bank.event.reached = True
    assert len(metadata._banks) == 2
