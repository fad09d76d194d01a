"""A stand-in for CUDA graphs without a GPU: a replay runs the captured function again, with all that a graph would fix.

What a graph bakes in (addresses, launch grids, host values) the caller fixes in the function it has captured; outputs
and the results of breaks are copied to where they were captured. So admission, padding, metadata and stale state show
as on a GPU.
"""

from collections.abc import Callable
from contextlib import nullcontext

import torch

from lorac.runtime.breakable import Break
from lorac.runtime.capture import Engine, Recording, active
from lorac.runtime.errors import CaptureError
from lorac.runtime.trees import map_tensors, tensors_of
from lorac.runtime.watch import HostWatch


class HostEngine(Engine):
    """The engine of the CPU."""

    def _on_stream(self):
        return nullcontext()

    def _recording(self, run: Callable[[], object], breakable: bool, watch: HostWatch) -> Recording:
        return HostRecording(run, breakable, watch)


class HostRecording(Recording):
    """One function, run again for each replay. `items` are as on a GPU, but only the breaks of them are used."""

    def __init__(self, run: Callable[[], object], breakable: bool, watch: HostWatch):
        super().__init__(breakable)
        self.run, self.watch = run, watch
        self._next = 0
        self.items.append(self._piece)
        watch.enforced = True

    def cut(self, function: Callable, args: tuple, kwargs: dict) -> object:
        if self.replaying:
            return self._cut_again(function, args, kwargs)
        self.watch.enforced = False
        with active(None):
            made = function(*args, **kwargs)
        self.watch.enforced = True
        cut = Break(function, args, kwargs, made)
        cut.place(made)
        self.items += [cut, self._piece]
        return cut.result(made)

    def finish(self, outputs: object) -> object:
        self.watch.enforced = False
        return map_tensors(outputs, torch.clone)

    def abort(self) -> None:
        self.watch.enforced = False

    def replay(self) -> None:
        self.replaying, self._next = True, 1
        try:
            with active(self):
                outputs = self.run()
        finally:
            self.replaying = False
        for static, tensor in zip(tensors_of(self.outputs), tensors_of(outputs), strict=True):
            static.copy_(tensor)

    def _cut_again(self, function: Callable, args: tuple, kwargs: dict) -> object:
        captured = self.items[self._next] if self._next < len(self.items) else None
        if not isinstance(captured, Break) or captured.function is not function:
            raise CaptureError("the forward met other breaks than when it was captured: a graph cannot follow")
        self._next += 2
        with active(None):
            made = function(*args, **kwargs)
        captured.place(made)
        return captured.result(made)

    def _piece(self) -> None:
        """Stands where a GPU has a graph."""
