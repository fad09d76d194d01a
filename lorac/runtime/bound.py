"""Launches of generated modules, decided and bound once: all that a call has to add is where its tensors are."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch._C._dynamo.guards import TensorGuards  # torch tells layouts apart in C: a fifth of what Python takes

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
        kept = scratch.bound(batch).get((launch, id(slot)), ())
        launches = next((launches for alike, launches, _ in kept if alike(x, y)), None)
        if launches is None:
            launches = _bind(bind, x, y, slot, batch, scratch)
            made = _Bound(_alike(x, y), launches, slot)
            if made.alike(x, y):  # which one tensor given twice never is
                scratch.bound(batch).setdefault((launch, id(slot)), []).append(made)
        return launches(x, y)

    launch.bind = bind
    return launch


def name_bound(function: Callable, slot: tuple, batch: Batch, scratch: Scratch, name: tuple) -> None:
    """Let what `function` has bound, and will bind, for such a batch be found by a name of the caller's too."""
    of_batch = scratch.bound(batch)
    if kept := of_batch.get((function, id(slot))):
        of_batch[name] = kept


def _alike(x: torch.Tensor, y: torch.Tensor) -> Callable[[torch.Tensor, torch.Tensor], bool]:
    """What tells whether two tensors are laid out as these: type, device, dtype, sizes and strides.

    Also whether they ask for gradients, and the modes of the thread (inference, autocast): each is bound for apart.
    """
    sizes, strides = [list(x.shape), list(y.shape)], [list(x.stride()), list(y.stride())]
    return TensorGuards(x, y, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check


class _Bound(NamedTuple):
    """What was bound, for which tensors; with the slot tensors, which keys have by their id: so no others get it."""

    alike: Callable[[torch.Tensor, torch.Tensor], bool]
    launches: Launches
    slot: tuple


def _moving(tensor: torch.Tensor) -> Moving:
    """What stands for the tensor. `alike` tells a parameter from another tensor, by its type."""
    return Moving(tensor.shape, tensor.stride(), isinstance(tensor, torch.nn.Parameter))


def _bind(bind: _Binding, x: torch.Tensor, y: torch.Tensor, slot: tuple, batch: Batch, scratch: Scratch) -> Launches:
    bounds = Bounds(batch.grid, batch.adapters, batch.rank, batch.map)
    for _ in range(2):
        replaced = scratch.replaced
        launches = bind(_moving(x), _moving(y), slot, bounds, scratch)
        if scratch.replaced == replaced:  # else a launch may be bound to what another outgrew
            return launches
    raise PackageError(f"{bind.__name__} asks for scratch of one name in different types")
