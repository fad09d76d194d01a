"""Breaks: functions that run eagerly between the pieces of a captured graph, such as attention over a live batch.

    attention = break_here(attention)

During a breakable capture the graph is cut around each call. A replay runs piece, break, piece: the function is called
again, with tensors at the addresses it was captured with, and what it returns is copied to where the next piece reads
it.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch

from lorac.runtime.capture import active, current
from lorac.runtime.errors import ShapeError
from lorac.runtime.trees import map_tensors, tensors_of


class Marked(NamedTuple):
    """A function marked as a break, and what it would return as empty tensors."""

    function: Callable
    like: Callable | None


BREAKS: list[Marked] = []  # by number, for traces


def break_here(function: Callable, *, like: Callable | None = None) -> Callable:
    """Mark a function as a break. It may read the state of the step it runs in; without a capture it is called as is.

    Its tensors have the rows of the bucket, padding included, and its results the shapes they had at capture. It may
    also write into tensors it is given. Anything else it is given, or returns, is what it was at capture.

    A forward that torch.compile traces sees an operator in its place: then it takes tensors only, writes into none of
    them and returns a new one, and `like` makes an empty tensor of the result's shape from the same arguments: by
    `q.shape[0]`, for `len(q)` is a number to torch.compile, which then traces every bucket anew.
    """
    number = len(BREAKS)
    BREAKS.append(Marked(function, like))

    @functools.wraps(function)
    def cutting(*args, **kwargs):
        if not torch.compiler.is_compiling():
            return call(function, args, kwargs)
        if like is None or kwargs:
            raise TypeError("a break inside torch.compile takes tensors in order, and break_here(..., like=...)")
        return torch.ops.lorac.cut(list(args), number)

    return cutting


def call(function: Callable, args: tuple, kwargs: dict) -> object:
    """The function's result, as a break where a graph is being captured in pieces."""
    recording = current()
    if recording is None or not recording.breakable:
        return function(*args, **kwargs)
    return recording.cut(function, args, kwargs)


class Break:
    """One call between two pieces. Made while the next piece is captured, so that its results have room in the pool."""

    def __init__(self, function: Callable, args: tuple, kwargs: dict, made: object):
        """`made` is what the function returned; a tensor it was given is passed on and needs no room."""
        self.function, self.args, self.kwargs = function, args, kwargs
        given = {id(tensor) for tensor in tensors_of((args, kwargs))}
        tensors = list(tensors_of(made))
        self.shapes = [list(tensor.shape) for tensor in tensors]
        self.targets = [None if id(tensor) in given else torch.empty_like(tensor) for tensor in tensors]

    def __call__(self) -> None:
        with active(None):
            made = self.function(*self.args, **self.kwargs)
        self.place(made)

    def place(self, made: object) -> None:
        """Copy what the function returned to where the next piece reads it."""
        tensors = list(tensors_of(made))
        shapes = [list(tensor.shape) for tensor in tensors]
        if shapes != self.shapes:
            name = getattr(self.function, "__qualname__", repr(self.function))
            raise ShapeError(f"break {name} returned tensors of {shapes}, but was captured with {self.shapes}")
        for target, tensor in zip(self.targets, tensors, strict=True):
            if target is not None:
                target.copy_(tensor)

    def result(self, made: object) -> object:
        """What the next piece reads in place of `made`."""
        targets = iter(self.targets)

        def at(tensor: torch.Tensor) -> torch.Tensor:
            target = next(targets)
            return tensor if target is None else target

        return map_tensors(made, at)

    def hold(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Replace every tensor held by what `change` makes of it."""
        self.args, self.kwargs = map_tensors(self.args, change), map_tensors(self.kwargs, change)
        self.targets = [target if target is None else change(target) for target in self.targets]
