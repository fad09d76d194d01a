"""Ranks that must take the same way through a step: they settle on one question, and so on one answer of the admission.

Ranks with different batches (data-parallel attention) share collectives inside the model. If one replayed a graph while
another ran eagerly, or a larger bucket, those would not match. So every rank asks about the largest batch of all.
"""

from typing import NamedTuple

import torch
import torch.distributed as dist

from lorac.runtime.errors import PackageError, TicketError
from lorac.runtime.ticket import PHASES

_MOST = 1 << 30  # rows per request are sent twice, counted from both ends, to see whether they differ


class Question(NamedTuple):
    """What the admission is asked; `refused` says why no graph may serve the ranks whatever it answers."""

    phase: str
    rows: int
    requests: int
    adapters: int
    rank: int
    rows_per_request: int
    refused: str = ""


class Agreement:
    """One all-reduce per step over a group of ranks, on the host: the device is not waited for."""

    def __init__(self, group=None):
        """All ranks make theirs at the same point, for without a group one is made of all of them.

        Raises PackageError where torch.distributed is not initialised.
        """
        if not dist.is_initialized():
            raise PackageError(
                "a package with `agree: true` needs its ranks: call torch.distributed.init_process_group before Step"
            )
        # gloo reduces host memory; numbers on a GPU would have to be waited for
        self.group = dist.new_group(backend="gloo") if group is None else group

    def settle(self, own: Question) -> Question:
        """The question of all ranks together. A rank without rows takes part and follows the others.

        Raises TicketError where another rank could not prepare its batch.
        """
        active = int(own.rows > 0)
        phases = [int(active and own.phase == phase) for phase in PHASES]
        each = own.rows_per_request
        rows, requests, adapters, rank, most, least, failed, *phases = self._largest(
            own.rows, own.requests, own.adapters, own.rank, active * each, active * (_MOST - each), 0, *phases
        )
        if failed:
            raise TicketError("another rank could not prepare its batch: see its error")
        found = [phase for phase, present in zip(PHASES, phases, strict=True) if present]
        refused = ""
        if not found:
            refused, found = "no rank has a request", [own.phase]
        elif len(found) > 1:
            refused = f"ranks are in different phases: {' and '.join(found)}"
        elif most + least != _MOST:
            refused = "ranks have different numbers of rows per request"
        phase = found[0] if len(found) == 1 else own.phase
        return Question(phase, max(1, rows), max(1, requests), adapters, rank, most or each, refused)

    def withdraw(self) -> None:
        """Take part in the step's all-reduce without a batch, so that the other ranks raise rather than wait."""
        self._largest(0, 0, 0, 0, 0, 0, 1, *(0 for _ in PHASES))

    def _largest(self, *numbers: int) -> list[int]:
        tensor = torch.tensor(numbers)
        dist.all_reduce(tensor, dist.ReduceOp.MAX, group=self.group)
        return tensor.tolist()
