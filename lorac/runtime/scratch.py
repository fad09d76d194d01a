"""Scratch tensors by name, and the launches that are bound to their addresses."""

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
        make = torch.zeros if zero else torch.empty
        self._tensors[name] = make(elements, dtype=dtype, device=self.device)
        return self._tensors[name]

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
