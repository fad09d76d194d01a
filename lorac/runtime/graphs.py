"""Graphs of a forward function: captured once for every key of a table, replayed for the batches tickets admit to them.

graphs = pkg.DecodeGraphs(forward, step, inputs)
graphs.capture()
out = graphs.run(step.prepare(adapters), inputs)
"""

import time
from collections.abc import Callable, Iterable, Mapping

import torch

from lorac.runtime.capture import Recording
from lorac.runtime.errors import CaptureError, ShapeError, TicketError
from lorac.runtime.inputs import StaticInputs
from lorac.runtime.stats import Cost, GraphKey, Progress, Stats
from lorac.runtime.step import Step, whole_rows
from lorac.runtime.ticket import Ticket
from lorac.runtime.trees import map_tensors


class Graphs:
    """What decode and prefill graphs have in common. Not thread-safe, as the Step is not."""

    phase = ""
    phases: tuple[str, ...] = ()  # of tickets `run` takes
    breakable = False

    def __init__(
        self,
        table: tuple[tuple[int, str], ...],
        forward: Callable,
        step: Step,
        inputs,
        *,
        padding: Mapping[str | int, float] | None = None,
        strict: bool = False,
    ):
        """`table` lists (bucket, variant) in the order of capture.

        `forward` takes the inputs, by name if `inputs` is a dict and else in order, with the rows of a bucket first,
        and returns tensors with those rows first. `inputs` are the static tensors [at least the largest bucket, ...]
        it is captured with; `padding` gives the value, 0 unless stated, of the rows past a batch, whose results are
        dropped. With `strict`, a batch that has no graph raises TicketError rather than run eagerly.
        """
        self.forward, self.step, self.strict = forward, step, strict
        self.captured = forward  # what is captured in its place
        self.table = table
        self.inputs = StaticInputs(inputs, padding or {})
        self._stats = Stats(f"{step.layout.name} {step.backend_name} {self.phase} graphs")
        self._recordings: dict[GraphKey, Recording] = {}
        self._addresses: dict[str, int] = {}
        self._unchecked: set[GraphKey] = set()
        # a graph launches kernels by address: they must live as long as it does
        self._kernels = (step.tables.ROUTE, *step.backend.KERNELS)

    def capture(self, buckets: Iterable[int] | None = None) -> None:
        """Capture every graph of the table, or those of some buckets, after a warm-up of each at its own shape.

        Withdraws the step's ticket, and drops what was captured before, of any bucket: the memory of earlier graphs is
        free before new ones take more. Raises ShapeError, with nothing changed, for a bucket that the table has not;
        CaptureError, with the line that did it, where the forward does what a graph cannot contain.
        """
        self._capture(self._entries(buckets))

    def _entries(self, buckets: Iterable[int] | None) -> list[tuple[int, str]]:
        """Those of the table that are in some buckets."""
        if buckets is None:
            return list(self.table)
        have = {bucket for bucket, _ in self.table}
        wanted = set(buckets) if isinstance(buckets, Iterable) else {buckets}
        if not isinstance(buckets, Iterable) or wanted - have:
            listed = ", ".join(map(str, sorted(have))) or "none"
            raise ShapeError(
                f"buckets is {buckets!r}; expected a list of buckets of {self._stats.name}, which are {listed}"
            )
        return [entry for entry in self.table if entry[0] in wanted]

    def _capture(self, table: list[tuple[int, str]]) -> None:
        self._recordings, self._unchecked = {}, set()
        self._stats.costs.clear()
        self.inputs.check_room(max((bucket for bucket, _ in table), default=0))
        keys = [GraphKey(bucket, variant, self.step.stream) for bucket, variant in table]
        progress, engine = Progress(self._stats.name, 2 * len(keys)), self.step.engine
        self.inputs.clear()
        try:
            with torch.no_grad(), engine.session():
                warmed: dict[GraphKey, float] = {}
                # all before the first capture: a graph would hold scratch that a later warm-up outgrows
                with self.step.scratch.growing(engine.release):
                    for key in keys:
                        progress.step("warming up", key)
                        started = time.perf_counter()
                        engine.warm(self._run_of(key))
                        warmed[key] = time.perf_counter() - started
                for key in keys:
                    progress.step("capturing", key)
                    self._capture_one(key, warmed[key])
        finally:
            progress.close()
        self._addresses = self.inputs.addresses(self.forward)

    def run(self, ticket: Ticket, inputs):
        """The forward's outputs for the ticket's batch: live rows, as views that the next `run` of the step overwrites.

        Replays the graph the ticket admits to, or runs eagerly. `inputs` are the live rows, as the static inputs are
        named or ordered, on any device; but for their rows of the same shapes and types, whether or not a graph takes
        them. Raises TicketError for a ticket that is stale or of another phase, ShapeError for other inputs.
        """
        self.step.check(ticket)
        self._check(ticket)
        with torch.no_grad(), self.step.on_device(), self.step.launching():
            key = GraphKey(ticket.bucket, ticket.variant, self.step.stream)
            recording = self._recordings.get(key)
            if recording is None:
                return self._eager(ticket, key, inputs)
            if key in self._unchecked:
                self.inputs.check(self.forward, self._addresses)
                self._unchecked.remove(key)
            self.inputs.fill(inputs, ticket.rows, key.bucket)
            recording.replay()
            self._stats.hits[key] += 1
            return self._live(recording.outputs, key.bucket, ticket.rows)

    def stats(self) -> dict[str, dict]:
        """Hits by GraphKey and fallbacks by cause, so far."""
        return self._stats.as_dict()

    def report(self) -> str:
        """Graphs with their memory, hits per graph, fallbacks per cause."""
        return self._stats.report()

    def _check(self, ticket: Ticket) -> None:
        if ticket.phase not in self.phases:
            raise TicketError(f"ticket {ticket.serial} is of phase {ticket.phase}: these are {self.phase} graphs")

    def _describe(self, key: GraphKey):
        return self.step.describe(self.phase, key.bucket, key.variant)

    def _run_of(self, key: GraphKey) -> Callable[[], object]:
        """The forward over the static inputs, for a batch as the graph serves them."""
        batch = self._describe(key)

        def run():
            with self.step.using(batch):
                return self.inputs.call(self.captured, key.bucket)

        return run

    def _capture_one(self, key: GraphKey, warmed: float) -> None:
        engine = self.step.engine
        before, started = engine.reserved(), time.perf_counter()
        recording = engine.record(self._run_of(key), self.breakable)
        if self.breakable:
            engine.release()  # what breaks used meanwhile is not the graph's
        seconds, pieces = warmed + time.perf_counter() - started, (len(recording.items) + 1) // 2
        self._stats.costs[key] = Cost(engine.reserved() - before, seconds, pieces)
        self._recordings[key] = recording
        self._unchecked.add(key)

    def _eager(self, ticket: Ticket, key: GraphKey, inputs):
        cause, reason = self._why_eager(ticket, key)
        if self.strict:
            raise TicketError(f"ticket {ticket.serial} has no graph: {reason}")
        self._stats.fell_back(cause, reason)
        return self.inputs.apply(self.forward, self.inputs.live(inputs, ticket.rows))

    def _why_eager(self, ticket: Ticket, key: GraphKey) -> tuple[str, str]:
        """Cause and reason."""
        if ticket.bucket:
            return "not captured", f"graph {key} was not captured"
        return ticket.cause, ticket.reason

    @staticmethod
    def _live(outputs, bucket: int, rows: int):
        def live(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.dim() == 0 or tensor.shape[0] != bucket:
                raise CaptureError(
                    f"the forward returned {list(tensor.shape)}; expected the bucket's {bucket} rows first"
                )
            return tensor[:rows]

        return map_tensors(outputs, live)


class DecodeGraphs(Graphs):
    """Graphs of decode batches, or of verify steps with several rows per request."""

    phase = "decode"
    phases = ("decode",)

    def __init__(self, table, forward: Callable, step: Step, inputs, *, rows_per_request: int = 1, **options):
        """`rows_per_request` above 1 is for verify steps: buckets that hold whole requests are captured.

        Raises ShapeError where there is none.
        """
        self.rows_per_request = rows_per_request = whole_rows(rows_per_request)
        whole = tuple(entry for entry in table if entry[0] % rows_per_request == 0)
        if table and not whole:
            raise ShapeError(
                f"no decode bucket holds whole requests of {rows_per_request} rows: "
                f"add multiples of {rows_per_request} to graphs.decode.buckets of the spec"
            )
        super().__init__(whole, forward, step, inputs, **options)

    def _check(self, ticket: Ticket) -> None:
        super()._check(ticket)
        if ticket.rows_per_request != self.rows_per_request:
            raise TicketError(
                f"ticket {ticket.serial} has {ticket.rows_per_request} rows per request: "
                f"these graphs were captured for {self.rows_per_request}"
            )

    def _describe(self, key: GraphKey):
        return self.step.describe(self.phase, key.bucket, key.variant, self.rows_per_request)
