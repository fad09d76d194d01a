"""Launches of generated modules, decided and bound once: all that a call has to add is where its tensors are."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch

from lorac.runtime.errors import PackageError
from lorac.runtime.launch import Moving
from lorac.runtime.scratch import Scratch
from lorac.runtime.ticket import Batch, Bounds

# launches of one module, given x and y (or x and the base layer's weight, to return y)
Launches = Callable[[torch.Tensor, torch.Tensor], torch.Tensor | None]
_Binding = Callable[[Moving, Moving, tuple, Bounds, Scratch], Launches]


def bound(bind: _Binding) -> Callable:
    """Turn a function that binds launches into one that launches, with tensors for x and y and a Batch for Bounds.

    What `bind` returned serves every call that would show it the same; it is kept with the scratch it points into.
    `bind` itself stays at hand, as an attribute.
    """

    @functools.wraps(bind)
    def launch(x: torch.Tensor, y: torch.Tensor, slot: tuple, batch: Batch, scratch: Scratch) -> torch.Tensor | None:
        launches = bound_before(launch, x, y, slot, batch, scratch)
        if launches is None:
            launches = _bind(bind, x, y, slot, batch, scratch)
            made = _Bound(
                x.shape, y.shape, _strides(x), _strides(y), x.dtype, y.dtype, x.device, y.device, launches, slot
            )
            scratch.bound(batch).setdefault((launch, id(slot)), []).append(made)
        return launches(x, y)

    launch.bind = bind
    return launch


def bound_before(
    function: Callable, x: torch.Tensor, y: torch.Tensor, slot: tuple, batch: Batch, scratch: Scratch
) -> Launches | None:
    """What `function` bound for tensors that differ from x and y in their address alone, and for such a batch."""
    for of in scratch.bound(batch).get((function, id(slot)), ()):
        # one by one, and the cheapest way: to make a key of them all and look it up takes a microsecond more
        if (
            x.size() == of.x_shape
            and y.size() == of.y_shape
            and (x.is_contiguous() if of.x_strides is None else x.stride() == of.x_strides)
            and (y.is_contiguous() if of.y_strides is None else y.stride() == of.y_strides)
            and x.dtype is of.x_dtype
            and y.dtype is of.y_dtype
            and x.device == of.x_device
            and y.device == of.y_device
        ):
            return of.launches
    return None


def _strides(tensor: torch.Tensor) -> tuple[int, ...] | None:
    """None stands for those of a contiguous tensor, told faster; but one row is contiguous however it lies."""
    return None if tensor.is_contiguous() and tensor.shape[0] > 1 else tensor.stride()


class _Bound(NamedTuple):
    """What was bound, for which tensors; with the slot tensors, which keys have by their id: so no others get it."""

    x_shape: torch.Size
    y_shape: torch.Size
    x_strides: tuple[int, ...] | None
    y_strides: tuple[int, ...] | None
    x_dtype: torch.dtype
    y_dtype: torch.dtype
    x_device: torch.device
    y_device: torch.device
    launches: Launches
    slot: tuple


def _bind(bind: _Binding, x: torch.Tensor, y: torch.Tensor, slot: tuple, batch: Batch, scratch: Scratch) -> Launches:
    bounds = Bounds(batch.grid, batch.adapters, batch.rank, batch.map)
    for _ in range(2):
        replaced = scratch.replaced
        launches = bind(Moving(x.shape, x.stride()), Moving(y.shape, y.stride()), slot, bounds, scratch)
        if scratch.replaced == replaced:  # else a launch may be bound to what another outgrew
            return launches
    raise PackageError(f"{bind.__name__} asks for scratch of one name in different types")
