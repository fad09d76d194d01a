"""Adapters chosen per row in a Hugging Face model.

    handle = attach(model, pkg, slots, step)
    handle.generate(input_ids, adapters=["sql", None, "poet"], max_new_tokens=32)
    with handle.rows(["sql", None, "poet"]):
        logits = model(input_ids).logits
    handle.detach()

The model keeps its weights and its code: the forwards of target layers are replaced, and each forward of the whole
model prepares one step. Base rows come out bit-equal to the untouched model's; where experts have LoRA, bit-equal to
those of a batch without adapters, and to the model's within rounding.
"""

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import ModuleType

import torch
from transformers import PreTrainedModel

from lorac.integrations.layers import forwards
from lorac.integrations.sites import find_sites
from lorac.integrations.static_cache import StaticDecode
from lorac.runtime.errors import PackageError, ShapeError, TicketError
from lorac.runtime.slots import Slots
from lorac.runtime.step import Step
from lorac.runtime.ticket import Ticket


def attach(model: PreTrainedModel, package: ModuleType, slots: Slots, step: Step) -> "Handle":
    """Serve `model` with the adapters of `slots`, until `detach`.

    `model` is a causal language model of the package's dtype on the slots' device; `step` is for it alone. Raises
    ShapeError where package and model do not fit, with what differs, and PackageError for parts of different packages.
    """
    return Handle(model, package, slots, step)


class Handle:
    """A model served with adapters. Not thread-safe, as the Step is not; adapters may be loaded by other threads."""

    def __init__(self, model: PreTrainedModel, package: ModuleType, slots: Slots, step: Step):
        package.LAYOUT.check_fits(slots.layout, "the Slots object")
        package.LAYOUT.check_fits(step.layout, "the Step")
        if step.slots is not slots:
            raise PackageError("the Step given was made for other Slots; expected one made for those given")
        if isinstance(getattr(model.forward, "handle", None), Handle):
            raise PackageError("the model is attached already; call detach() of its handle first")
        self.model, self.package, self.slots, self.step = model, package, slots, step
        self.static: StaticDecode | None = None
        self._rows: list[str | None] | None = None
        self._replaced: list[tuple[torch.nn.Module, Callable | None]] = []
        self._forward = model.forward
        self._signature = inspect.signature(model.forward)
        self._cache = "cache" if "cache" in self._signature.parameters else "past_key_values"
        sites = find_sites(model, package.LAYOUT, slots.device)
        for site in sites:
            for part, forward in zip(site.parts, forwards(site, package, step), strict=True):
                self._replace(part, forward)

        @functools.wraps(model.forward)  # generate reads its signature
        def served(*args, **kwargs):
            return self._serve(args, kwargs)

        served.handle = self
        self._replace(model, served)

    @contextmanager
    def rows(self, adapters: Iterable[str | None]) -> Iterator[None]:
        """Forwards inside have these adapters, one name or None per row of the batch.

        Registered adapters that are in no slot are brought there, and all stay while this lasts. Raises SlotError for a
        name that is not known, or more adapters than slots.
        """
        if isinstance(adapters, str):
            raise ShapeError(f"adapters is the string {adapters!r}; expected one name or None for each row")
        names, before = list(adapters), self._rows
        held = self.slots.ensure(names, use=True)
        self._rows = names
        try:
            yield
        finally:
            self._rows = before
            self.step.finish()
            self.slots.release(held.values())

    def generate(self, input_ids: torch.Tensor | None = None, *, adapters: Iterable[str | None], **options):
        """`model.generate` with an adapter, or None, for each row of the batch; `options` are those of `generate`.

        Decodes with graphs once `capture` was called. Beams and returned sequences are rows of their own: name each
        adapter as many times, in turn. Errors as for `rows`.
        """
        options.setdefault("disable_compile", True)  # a trace would freeze what is prepared for each step
        with self.rows(adapters):
            if self.static is not None:
                options[self._cache] = self.static.begin(len(self._rows))
            return self.model.generate(input_ids, **options)

    def capture(self, rows: int, length: int) -> None:
        """Capture decode graphs for batches of up to `rows` rows, over a static cache of `length` tokens per row.

        From then on `generate` uses them, and takes no batch or text above those sizes. Raises CaptureError for a model
        whose forward cannot be captured, ShapeError for one without masks in its attention.
        """
        self.static = None  # the memory of an earlier one is free before the new one takes more
        self.static = StaticDecode(
            self.model, self._forward, self.package, self.step, rows, length, keyword=self._cache
        )

    def detach(self) -> None:
        """Restore the model exactly as it was; adapters stay in their slots."""
        while self._replaced:
            module, before = self._replaced.pop()
            if before is None:
                del module.forward
            else:
                module.forward = before
        self.static = None

    def _replace(self, module: torch.nn.Module, forward: Callable) -> None:
        self._replaced.append((module, vars(module).get("forward")))
        module.forward = forward

    @torch.no_grad()
    def _serve(self, args: tuple, kwargs: dict):
        """The model's forward, its batch prepared first."""
        given = self._signature.bind(*args, **kwargs).arguments
        given |= given.pop("kwargs", {})
        of = given.get("input_ids") if given.get("input_ids") is not None else given.get("inputs_embeds")
        if of is None:
            raise ShapeError("a forward needs input_ids or inputs_embeds")
        rows, tokens = of.shape[:2]
        ticket = self._prepare(rows, tokens, given.get("logits_to_keep", 0))
        static = self.static if self.static is not None and self.static.owns(given.get(self._cache)) else None
        if static is None:
            with self.step.launching():
                return self._forward(*args, **kwargs)
        static.check_room(tokens)
        if tokens == 1:
            made = static.decode(ticket, given)
        else:
            with self.step.launching():
                made = self._forward(*args, **kwargs)
        static.advance(tokens)
        return made

    def _prepare(self, rows: int, tokens: int, keep: int | torch.Tensor) -> Ticket:
        names = self._rows
        if names is None:
            raise TicketError("no adapters were named for this forward: call it inside `with handle.rows([...])`")
        if len(names) != rows:
            raise ShapeError(
                f"the forward has {rows} rows, but {len(names)} adapters were named; expected one name or None for "
                "each (each beam and each returned sequence is a row)"
            )
        if tokens == 1:
            return self.step.prepare(names)
        count = keep.numel() if isinstance(keep, torch.Tensor) else min(keep, tokens) or tokens
        return self.step.prepare_prefill([(name, tokens) for name in names], logits=[count] * rows)
