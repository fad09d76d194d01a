"""Prefill graphs: whole, in pieces around breaks, or in pieces of a forward that torch.compile has traced.

The forward ends before lm_head. Logits are wanted for some rows of each request only, so lm_head runs eagerly on those
rows of what `run` returned, on the row map of their own that `prepare_prefill` made.
"""

import sys
import warnings
from collections.abc import Callable

import torch

from lorac.runtime.errors import PackageError
from lorac.runtime.graphs import Graphs
from lorac.runtime.stats import GraphKey
from lorac.runtime.step import Step
from lorac.runtime.ticket import Ticket

MODES = ("breakable", "full", "tc_piecewise")


class PrefillGraphs(Graphs):
    """Graphs of prefill batches. Tickets of mixed batches are taken too, and run eagerly.

    In mode `tc_piecewise`, `capture` of a forward that cannot be traced leaves these graphs off, and warns.
    """

    phase = "prefill"
    phases = ("prefill", "mixed")

    def __init__(self, table, planned: str, forward: Callable, step: Step, inputs, mode: str | None = None, **options):
        """`mode` is the planned one unless stated; where the plan has none, every batch runs eagerly.

        Raises PackageError for an unknown mode.
        """
        self.mode = mode or planned
        if self.mode not in (*MODES, "off"):
            raise PackageError(f"prefill mode {mode!r} is none of {', '.join(MODES)}")
        self.breakable = self.mode != "full"
        self._off = ""
        super().__init__(table, forward, step, inputs, **options)

    def _capture(self, table: list[tuple[int, str]]) -> None:
        if self.mode != "tc_piecewise":
            super()._capture(table)
            return
        self.captured, self._off = _traced(self.forward), ""
        try:
            super()._capture(table)
        except torch._dynamo.exc.TorchDynamoException as error:
            self._off = f"torch.compile cannot trace the forward: {str(error).strip().splitlines()[0]}"
            warnings.warn(f"{self._stats.name} are off: {self._off}", RuntimeWarning, stacklevel=3)

    def _why_eager(self, ticket: Ticket, key: GraphKey) -> tuple[str, str]:
        return ("tc_piecewise is off", self._off) if self._off else super()._why_eager(ticket, key)


def _traced(forward: Callable) -> Callable:
    """`forward` as torch.compile traces it, for each bucket anew where its shapes ask for that, however many there are.

    It is called for warm-ups and captures only, so nothing need bound how often it is traced.
    """

    def alone(*args, **kwargs):
        return forward(*args, **kwargs)

    # torch counts retraces, and gives up, by code: this is nobody else's, whatever was compiled of the forward before
    alone.__code__ = alone.__code__.replace()
    traced = torch.compile(alone, fullgraph=True)
    unbounded = torch._dynamo.config.patch(recompile_limit=sys.maxsize, accumulated_recompile_limit=sys.maxsize)
    return unbounded(traced)
