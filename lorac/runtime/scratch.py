"""Scratch tensors by name, and the launches that are bound to their addresses."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from lorac.runtime.capture import capturing
from lorac.runtime.errors import CaptureError
from lorac.runtime.metadata import RowMap
from lorac.runtime.ticket import Batch

_MOST_KINDS = 128  # of batches: each takes some kB for every module of every layer


class Scratch:
    """Flat tensors of one stream of steps. They grow outside captures only; graphs keep outgrown ones."""

    def __init__(self, device: torch.device):
        self.device = device
        self.replaced = 0  # tensors that another has taken the place of
        self._tensors: dict[str, torch.Tensor] = {}
        self._outgrown: list[torch.Tensor] = []
        self._zeros: set[str] = set()  # those that are zero when they are new
        # by kind of batch: what was bound, and the map, which the kind has by its id: so no other gets it
        self._bound: dict[tuple, tuple[dict[tuple, list], RowMap]] = {}
        self._batch: Batch | None = None
        self._alike: dict[tuple, list] = {}  # of `_bound`, for `_batch`

    def __call__(self, name: str, elements: int, dtype: torch.dtype, zero: bool = False) -> torch.Tensor:
        """A tensor of at least `elements`, with `zero` of zeros when it is new.

        Raises CaptureError when it would have to grow during a capture.
        """
        held = self._tensors.get(name)
        if held is not None and held.numel() >= elements and held.dtype == dtype:
            return held
        if capturing():
            raise CaptureError(f"scratch {name!r} would grow to {elements} elements during a capture: warm up first")
        if held is not None:
            self._outgrown.append(held)
            self.replaced += 1
            self.forget()
        if zero:
            self._zeros.add(name)
        self._make(name, elements, dtype)
        return self._tensors[name]

    @contextmanager
    def growing(self, release: Callable[[], None]) -> Iterator[None]:
        """Inside, batches of many sizes are warmed up, none captured; then what grew is made anew at its final size.

        So graphs captured after need none that another outgrew, and none lies among the warm-ups' own tensors, whose
        memory the allocator could not give back for it. `release` gives back what nothing holds.
        """
        held, outgrown = dict(self._tensors), list(self._outgrown)
        try:
            yield
        finally:
            # of what was held before, earlier graphs may need what is held no more; nothing else was captured
            lost = [tensor for name, tensor in held.items() if self._tensors.get(name) is not tensor]
            self._outgrown = outgrown + lost
        grown = {name: (of.numel(), of.dtype) for name, of in self._tensors.items() if held.get(name) is not of}
        for name in grown:
            del self._tensors[name]
        self.forget()
        release()
        for name, (elements, dtype) in grown.items():
            self._make(name, elements, dtype)

    def _make(self, name: str, elements: int, dtype: torch.dtype) -> None:
        make = torch.zeros if name in self._zeros else torch.empty
        self._tensors[name] = make(elements, dtype=dtype, device=self.device)

    def tensors(self) -> list[torch.Tensor]:
        """Those in use."""
        return list(self._tensors.values())

    def bound(self, batch: Batch) -> dict[tuple, list]:
        """What has been bound to these tensors for batches that are launched like this one, by keys of who binds.

        It is gone once a tensor is replaced, and when many other kinds of batches have come.
        """
        if batch is not self._batch:
            kind = batch.grid, batch.adapters, batch.rank, id(batch.map), batch.rows, batch.padded
            if kind not in self._bound:
                if len(self._bound) == _MOST_KINDS:
                    del self._bound[next(iter(self._bound))]
                self._bound[kind] = {}, batch.map
            self._batch, self._alike = batch, self._bound[kind][0]
        return self._alike

    def forget(self) -> None:
        """Drop all that was bound: also for who changes what launches are bound from."""
        self._bound.clear()
        self._batch = None
