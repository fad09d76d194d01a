"""One step of a model: which rows belong to which adapter, told to the device once; and a ticket for replaying it."""

import functools
import itertools
import weakref
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import NamedTuple

import torch

from lorac.runtime import routing
from lorac.runtime.agree import Agreement, Question
from lorac.runtime.buffers import Instance
from lorac.runtime.capture import Engine, engine_for
from lorac.runtime.errors import CaptureError, PackageError, ShapeError, SlotError, TicketError
from lorac.runtime.launch import interpreted
from lorac.runtime.launching import Launching
from lorac.runtime.layout import Layout
from lorac.runtime.metadata import UNCUT, Metadata
from lorac.runtime.scratch import Scratch
from lorac.runtime.segments import Grid, decode_grid, prefill_grid, segment_slots
from lorac.runtime.ticket import PHASES, Admission, Batch, PackageTables, Ticket

_REMEMBERED = 64  # batches
_AS_IT_IS = nullcontext()
_numbers = itertools.count()
_steps: "weakref.WeakValueDictionary[int, Step]" = weakref.WeakValueDictionary()


def step_of(number: int) -> "Step":
    """The step of that number: a trace of torch.compile names steps so."""
    return _steps[number]


def starts_of(rows: Iterable[int]) -> array:
    """Where each request's rows begin, and the end of the last."""
    return array("i", (0, *itertools.accumulate(rows)))


@functools.lru_cache(maxsize=1024)
def even_starts(requests: int, rows: int) -> array:
    """`starts_of` requests of so many rows each."""
    return array("i", range(0, requests * rows + 1, rows))


def whole_rows(rows: int) -> int:
    """Rows per request, as an int. Raises ShapeError unless requests of a decode batch can have so many each."""
    if not hasattr(rows, "__index__") or rows < 1:
        raise ShapeError(f"rows_per_request is {rows!r}; expected a whole number, at least 1")
    return int(rows)


def _check_list(what: str, given: list, each: str) -> None:
    """Raise ShapeError unless `given` lists something for each request."""
    if isinstance(given, str) or not isinstance(given, Sequence):
        raise ShapeError(f"{what} is of type {type(given).__name__}; expected a list of {each} for each request")


def _whole(what: str, numbers: list[int]) -> array:
    """Numbers as the metadata holds them. Raises ShapeError for any that is not whole."""
    try:
        return array("i", list(numbers))
    except (TypeError, OverflowError) as error:
        raise ShapeError(f"{what} is {numbers!r}; expected a list of whole numbers ({error})") from None


def _check_rows(what: str, rows: array) -> None:
    """Raise ShapeError unless every request has rows."""
    if min(rows, default=1) < 1:
        raise ShapeError(f"{what} is {rows.tolist()}; every request needs at least one: leave finished requests out")


def _starts_of_logits(logits: list[int], rows: array) -> array:
    """`starts_of` the rows that reach lm_head. Raises ShapeError unless each request can have as many."""
    logits = _whole("logits", logits)
    if len(logits) != len(rows):
        raise ShapeError(f"logits lists {len(logits)} counts for {len(rows)} requests")
    for number, (count, of) in enumerate(zip(logits, rows, strict=True)):
        if not 0 <= count <= of:
            raise ShapeError(f"logits has {count} rows for request {number}, which has {of} tokens")
    return starts_of(logits)


class _Found(NamedTuple):
    """Where the adapters of a batch are, as long as no slot changes."""

    slots: array  # of each request, -1 for base rows
    held: tuple[int, ...]  # those among them, ascending
    rank: int  # the largest of theirs
    generations: tuple[int, ...]  # of the held slots


# a batch as a `prepare` was given it: phase, adapters, starts, starts of the rows that reach lm_head (None: all do),
# rows per request. No class: that takes longer to make than all checks of a decode batch.
_Described = tuple[str, _Found, array, array | None, int]


class Step:
    """The metadata of one stream of steps. Device tensors are allocated here, once, and refreshed in place."""

    def __init__(self, tables: PackageTables, slots, backend_name: str, backend, *, stream: int = 0, group=None):
        """`backend` is the generated module of that name; `slots` the package's Slots.

        `stream` numbers the streams of steps that run at once, from 0; each needs a Step of its own. `group` is the
        process group of the ranks that must agree, all of them unless stated. Raises PackageError for what the package
        was not built for, slots of another package among it.
        """
        tables.LAYOUT.check_fits(slots.layout, "the Slots object")
        if not 0 <= stream < tables.STREAMS:
            raise PackageError(
                f"package {tables.LAYOUT.name} is built for {tables.STREAMS} streams; there is no stream {stream}"
            )
        if interpreted() and backend.KERNELS and tables.LAYOUT.dtype == "bfloat16":
            raise PackageError(
                f"package {tables.LAYOUT.name} is of bfloat16, which Triton's interpreter (TRITON_INTERPRET=1) "
                f"computes wrongly in the kernels of backend {backend_name!r}: "
                "build it in float32 or float16, or run on a GPU"
            )
        self.tables, self.slots, self.backend_name, self.backend = tables, slots, backend_name, backend
        self.stream = stream
        self.number = next(_numbers)
        _steps[self.number] = self
        self.agreement = Agreement(group) if tables.AGREE else None
        self.layout: Layout = tables.LAYOUT
        self.segments = tables.SEGMENTS[backend_name]
        self.device = slots.device
        self._alone = self.device.type != "cuda" or torch.cuda.device_count() == 1
        self.metadata = self._metadata(tables.MAX_ROWS, tables.MAX_REQUESTS)
        self.ticket: Ticket | None = None
        self.batch: Batch | None = None
        self.logits: Batch | None = None
        self._overflow: Metadata | None = None
        self._admission = functools.lru_cache(maxsize=1024)(tables.admit)
        self._found: dict[tuple, _Found] = {}
        self._found_at = -1
        self._prepared_at = -1  # the slots' generation when the ticket was made
        self.scratch = Scratch(self.device)
        self.sites: dict[tuple[str, str, int], tuple] = {}  # of `apply`
        self.owned = frozenset(getattr(backend, "LINEAR", ()))  # modules whose base layer the backend runs too
        self._serials = itertools.count(1)
        self._in_use: list[int] = []
        weakref.finalize(self, slots.abandon, self._in_use)
        self.inside = False  # of `launching`
        self._engine: Engine | None = None

    def prepare(self, rows: list, *, rows_per_request: int = 1) -> Ticket:
        """Describe a decode batch: one adapter name, or None, per request, each with `rows_per_request` rows in turn.

        One asynchronous copy and at most one kernel launch; the host never waits for the device. Raises SlotError
        for an adapter that is in no slot, ShapeError for what describes no batch. Whatever any `prepare` raises, there
        is no batch then, as after `finish`: that of before is not launched again by mistake.
        """
        return self._prepare(self._decode, rows, rows_per_request)

    def prepare_prefill(self, requests: list[tuple[str | None, int]], logits: list[int] | None = None) -> Ticket:
        """Describe a prefill batch: (adapter name or None, tokens) per request, in the order of the rows.

        `logits` counts the rows of each request that reach lm_head, one each unless stated. Raises as `prepare`.
        """
        return self._prepare(self._requests, "prefill", requests, logits)

    def prepare_mixed(self, requests: list[tuple[str | None, int]], logits: list[int] | None = None) -> Ticket:
        """Describe a batch of prefill and decode requests together; it always runs eagerly. Raises as `prepare`."""
        return self._prepare(self._requests, "mixed", requests, logits)

    def prepare_slots(self, phase: str, slots: list[int], rows: list[int], logits: list[int] | None = None) -> Ticket:
        """As the other `prepare` methods, with requests named by slot number (-1: base) and their rows.

        A decode batch has equally many rows for each request. Every row reaches lm_head unless `logits` counts them.
        Raises SlotError for a slot that is empty or that there is not, ShapeError as `prepare`.
        """
        return self._prepare(self._numbered, phase, slots, rows, logits)

    def finish(self) -> None:
        """Withdraw the ticket: its batch is over, and its adapters may make room for the next one's.

        A step that nothing refers to any more is finished too.
        """
        with self.slots.lock:
            self.ticket, self.batch, self.logits = None, None, None
            self.slots.release(self._in_use)
            self._in_use.clear()

    def launching(self) -> "Launching":
        """Launches of the prepared batch go inside, on the current stream: until it ends no slot changes.

        `add` and `linear` enter it for themselves. Around a whole forward it makes that cheaper, and spares it the
        TicketError of an adapter replaced halfway. Raises TicketError as `check`.
        """
        return Launching(self)

    def enter(self, module: str, layer: int) -> tuple[Batch, Instance]:
        """The current batch and the slot tensors (a, b, rank, scale) of one instance of a module; inside `launching`.

        Raises TicketError where no batch was prepared.
        """
        return self.batch_of(module), self.slots.instance(module, layer)

    def batch_of(self, module: str) -> Batch:
        """The current batch as a module sees it. Raises as `enter`."""
        if self.batch is None:
            raise TicketError("no batch was prepared: call step.prepare(...) before the forward pass")
        batch = self.logits if module == "lm_head" else self.batch
        if batch is None:
            raise CaptureError("lm_head does not belong in a prefill graph: call it on the rows the graph returned")
        return batch

    def check(self, ticket: Ticket) -> None:
        """Raise TicketError unless `ticket` is the latest and its slots hold what they held when it was prepared."""
        if ticket is not self.ticket or ticket is None:
            if not isinstance(ticket, Ticket):
                raise TicketError(f"the ticket is {ticket!r}; expected what step.prepare(...) returned")
            latest = self.ticket.serial if self.ticket else "none"
            raise TicketError(f"ticket {ticket.serial} is not the latest ({latest}): prepare the batch again")
        if self._prepared_at == self.slots.generation:
            return  # no slot changed at all
        generations = self.slots.slot_generation
        for slot, generation in zip(ticket.slots, ticket.generations, strict=True):
            if generations[slot] != generation:
                raise TicketError(
                    f"slot {slot} changed after ticket {ticket.serial} was prepared: prepare the batch again"
                )

    def scratch_tensors(self) -> list[torch.Tensor]:
        """The scratch tensors in use."""
        return self.scratch.tensors()

    def describe(self, phase: str, bucket: int, variant: str, rows_per_request: int = 1) -> Batch:
        """The fullest batch of a graph key, for warm-up and capture: every row, adapter and request. See `using`.

        Slots are named by number, so nothing need be loaded; the device tensors are overwritten, the ticket is
        withdrawn.
        """
        grid = self.tables.GRIDS[self.backend_name][phase][bucket]
        adapters, rank = self.tables.VARIANTS[variant]
        requests = bucket // rows_per_request if phase == "decode" else grid.requests
        count = min(adapters, requests)
        slots = array("i", (i % count if count else -1 for i in range(requests)))
        starts = array("i", (i * bucket // requests for i in range(requests + 1)))
        self.ticket, self.batch, self.logits = None, None, None
        tokens = (slots, starts, bucket, grid.chunk or UNCUT)
        self._route(phase, self.metadata, [tokens, tokens])
        every = tuple(range(self.layout.slots)) if count else ()
        return Batch(phase, grid, count, rank, every, self.metadata.maps[0], bucket, bucket)

    @contextmanager
    def using(self, batch: Batch) -> Iterator[None]:
        """Launch for a batch as a graph fixes it, whatever was prepared since."""
        before = self.ticket, self.batch, self.logits
        # logits have another row map after a prefill graph, with a number of rows no graph could fix
        self.ticket, self.batch, self.logits = None, batch, batch if batch.phase == "decode" else None
        try:
            yield
        finally:
            self.ticket, self.batch, self.logits = before

    @property
    def engine(self) -> Engine:
        """What captures the graphs of this stream of steps: all of them share its memory pool."""
        if self._engine is None:
            self._engine = engine_for(self.device)
        return self._engine

    def on_device(self):
        """The model's device need not be the current one; to look costs a microsecond, so with one there is no look."""
        if self._alone or torch.cuda.current_device() == self.device.index:
            return _AS_IT_IS
        return torch.cuda.device(self.device)

    def _prepare(self, describe: Callable[..., _Described], *given) -> Ticket:
        with self.slots.lock:  # no slot changes between finding the adapters and counting this batch as their user
            try:
                try:
                    described = describe(*given)
                    self._use(described[1].held)
                except Exception:
                    if self.agreement is not None:
                        self.agreement.withdraw()  # the other ranks wait for this one's answer
                    raise
                return self._admit(*described)
            except BaseException:
                self.finish()
                raise

    def _decode(self, names: list, rows_per_request: int) -> _Described:
        rows_per_request = whole_rows(rows_per_request)
        if type(names) is not list:
            _check_list("rows", names, "an adapter's name, or None,")
        starts = even_starts(len(names), rows_per_request)
        return "decode", self._find(names), starts, None, rows_per_request

    def _requests(self, phase: str, requests: list[tuple[str | None, int]], logits: list[int] | None) -> _Described:
        _check_list("requests", requests, "(adapter's name or None, tokens)")
        for request in requests:
            if not isinstance(request, tuple | list) or len(request) != 2:
                raise ShapeError(f"requests has {request!r}; expected (adapter's name or None, tokens)")
        tokens = _whole("tokens", [count for _, count in requests])
        _check_rows("tokens", tokens)
        logit_starts = even_starts(len(tokens), 1) if logits is None else _starts_of_logits(logits, tokens)
        return phase, self._find([name for name, _ in requests]), starts_of(tokens), logit_starts, 1

    def _numbered(self, phase: str, slots: list[int], rows: list[int], logits: list[int] | None) -> _Described:
        if phase not in PHASES:
            raise ShapeError(f"phase is {phase!r}; expected one of {', '.join(PHASES)}")
        slots, rows = _whole("slots", slots), _whole("rows", rows)
        if len(slots) != len(rows):
            raise ShapeError(f"rows lists {len(rows)} counts for {len(slots)} requests")
        _check_rows("rows", rows)
        for slot in set(slots):
            if not -1 <= slot < self.layout.slots:
                raise SlotError(f"there is no slot {slot}; expected 0 to {self.layout.slots - 1}, or -1 for base rows")
        if phase == "decode" and len(set(rows)) > 1:
            raise ShapeError(f"rows of a decode batch are {rows.tolist()}; expected as many for each request")
        each = rows[0] if phase == "decode" and rows else 1
        logit_starts = None if logits is None else _starts_of_logits(logits, rows)
        return phase, self._held(slots), starts_of(rows), logit_starts, each

    def _use(self, held: tuple[int, ...]) -> None:
        """Count the batch as a user of its slots, in place of the one before. Raises SlotError for an empty slot."""
        self.slots.use(held)
        self.slots.release(self._in_use)
        self._in_use[:] = held

    def _find(self, names: list) -> _Found:
        """Where a batch's adapters are. Decode repeats its batch step after step: answers are kept while they hold."""
        if self._found_at != self.slots.generation or len(self._found) == _REMEMBERED:
            self._found, self._found_at = {}, self.slots.generation
        batch = tuple(names)
        found = self._found.get(batch)  # once: each look compares every name
        if found is None:
            found = self._found[batch] = self._held(self.slots.lookup(names))
        return found

    def _held(self, slots: array) -> _Found:
        if not slots and self.agreement is None:
            raise ShapeError("a batch needs at least one request")
        held = tuple(sorted(set(slots) - {-1}))
        rank = max(map(self.slots.slot_rank, held), default=0)
        return _Found(slots, held, rank, tuple(map(self.slots.slot_generation.__getitem__, held)))

    def _admit(
        self, phase: str, found: _Found, starts: array, logit_starts: array | None, rows_per_request: int
    ) -> Ticket:
        slots, held, rank, generations = found
        rows, requests = starts[-1], len(slots)
        if self.agreement is None:
            admission = self._admission(self.backend_name, phase, rows, requests, len(held), rank)
        else:
            asked = self.agreement.settle(Question(phase, rows, requests, len(held), rank, rows_per_request))
            phase, rows_per_request = asked.phase, asked.rows_per_request
            admission = self._admission(
                self.backend_name, phase, asked.rows, asked.requests, asked.adapters, asked.rank
            )
            if asked.refused:
                admission = Admission(0, admission.variant, asked.refused, asked.refused)
        self._install(phase, slots, starts, logit_starts, admission, held)
        self.ticket = Ticket(
            next(self._serials), phase, rows, requests, len(held), rank, admission.variant, admission.bucket,
            admission.reason, held, generations, rows_per_request, admission.cause,
        )  # fmt: skip
        self._prepared_at = self.slots.generation
        return self.ticket

    def _install(self, phase: str, slots, starts, logit_starts, admission: Admission, held: tuple[int, ...]) -> None:
        """Send the batch to the device and keep what launches need on the host."""
        rows, requests = starts[-1], len(slots)
        metadata = self._room(max(rows, admission.bucket), requests)
        grid = self._grid(phase, rows, requests, len(held), admission.bucket)
        maps = [(slots, starts, rows, grid.chunk or UNCUT)]
        adapters, rank = self.tables.VARIANTS[admission.variant]
        adapters = min(adapters, len(held)) if not admission.bucket else min(adapters, admission.bucket)
        padded = admission.bucket or rows
        self.batch = Batch(phase, grid, adapters, rank if adapters else 0, held, metadata.maps[0], rows, padded)
        self.logits = self.batch
        if logit_starts is not None:
            count = logit_starts[-1]
            eager = self._grid("prefill", max(1, count), requests, len(held), 0)
            maps.append((slots, logit_starts, count, eager.chunk or UNCUT))
            # lm_head runs eagerly after a prefill graph, so it pays for the adapters it has
            rank = rank if held else 0
            self.logits = Batch(phase, eager, len(held), rank, held, metadata.maps[1], count, count)
        self._route(phase, metadata, maps)

    def _grid(self, phase: str, rows: int, requests: int, adapters: int, bucket: int) -> Grid:
        if bucket:
            return self.tables.GRIDS[self.backend_name][phase][bucket]
        rows = max(1, rows)  # a rank without requests, where ranks agree
        if phase == "decode":
            return decode_grid(self.segments, rows, adapters or 1)
        return prefill_grid(self.segments, rows, adapters or 1, requests)

    def _route(self, phase: str, metadata: Metadata, maps: list) -> None:
        with self.on_device():
            metadata.write(maps)
            self._derive(phase, metadata, maps)

    def _derive(self, phase: str, metadata: Metadata, maps: list) -> None:
        # a decode batch has one request per row: by request, its rows are merged by adapter instead
        by_request = self.segments.by == "request" and phase != "decode"
        if self.device.type == "cuda" or interpreted():
            if by_request not in metadata.routes:
                metadata.routes[by_request] = routing.launcher(self.tables.ROUTE, metadata, by_request)
            metadata.routes[by_request]()
        else:
            routing.on_host(metadata, maps, by_request)

    def _room(self, rows: int, requests: int) -> Metadata:
        """The static metadata, or for a batch past its size (always eager) one that grows."""
        if rows <= self.metadata.rows and requests <= self.metadata.requests:
            return self.metadata
        held = self._overflow
        if held is None or rows > held.rows or requests > held.requests:
            self._overflow = self._metadata(
                max(rows, held.rows if held else 0), max(requests, held.requests if held else 0)
            )
        return self._overflow

    def _metadata(self, rows: int, requests: int) -> Metadata:
        entries = segment_slots(self.segments, rows, self.layout.slots, requests)
        return Metadata(rows, requests, entries, self.layout.slots, self.layout.widths, self.device)
