"""Capturing a function as a CUDA graph, whole or in pieces; and what stands in for that where there is no GPU.

An engine belongs to one stream of steps: it has the side stream captures run on and the memory pool all of its graphs
share. Sharing is safe because graphs of one engine never run at once, and what one returns is read before the next is
replayed.
"""

import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from triton.runtime.driver import driver

from lorac.runtime.errors import CaptureError
from lorac.runtime.watch import HostWatch, place_of


class _Active(threading.local):
    """What the thread captures or replays."""

    recording = None


_active = _Active()


class Recording:
    """A captured function. `items` are the pieces of graph and the breaks between them, called in order to replay."""

    replaying = False  # while the stand-in runs the captured function again

    def __init__(self, breakable: bool):
        self.breakable = breakable
        self.items: list[Callable[[], None]] = []
        self.outputs: object = None

    def replay(self) -> None:
        """Run the captured work on the current stream, over the tensors it was captured with."""
        for item in self.items:
            item()

    def cut(self, function: Callable, args: tuple, kwargs: dict) -> object:
        """End the current piece, run `function` outside of it, begin the next; returns what the next piece may read."""
        raise NotImplementedError

    def finish(self, outputs: object) -> object:
        """End the last piece; returns the outputs, which each replay overwrites."""
        raise NotImplementedError

    def abort(self) -> None:
        """Leave the device fit for use after a capture that failed."""
        raise NotImplementedError


class Engine:
    """Warms up and captures functions on one device; `capture_cuda` and `capture_host` say how."""

    def __init__(self, device: torch.device):
        self.device = device

    @contextmanager
    def session(self) -> Iterator[None]:
        """Captures happen inside. Garbage is not collected meanwhile: a finaliser may call what a capture forbids."""
        gc.collect()
        enabled = gc.isenabled()
        gc.disable()
        try:
            with self._on_stream():
                yield
        finally:
            if enabled:
                gc.enable()

    def warm(self, run: Callable[[], object]) -> None:
        """Run once, uncaptured, on the stream of the capture: kernels are compiled and workspaces allocated here."""
        with HostWatch(self.device):
            run()

    def record(self, run: Callable[[], object], breakable: bool) -> Recording:
        """Capture what `run` does. Raises CaptureError, with the line that did it, for what a graph cannot contain."""
        watch = HostWatch(self.device)
        recording = self._recording(run, breakable, watch)
        try:
            with active(recording), watch:
                recording.outputs = recording.finish(run())
        except Exception as error:
            recording.abort()
            raise CaptureError(f"capture failed at {place_of(error.__traceback__)}\n  {error}") from error
        return recording

    def reserved(self) -> int:
        """Bytes of device memory in use, to be compared before and after."""
        return 0

    def release(self) -> None:
        """Give back the device memory that nothing holds."""

    def _on_stream(self):
        raise NotImplementedError

    def _recording(self, run: Callable[[], object], breakable: bool, watch: HostWatch) -> Recording:
        raise NotImplementedError


def engine_for(device: torch.device) -> Engine:
    """The engine of a device: CUDA graphs, or their stand-in."""
    if device.type == "cuda":
        from lorac.runtime.capture_cuda import CudaEngine

        return CudaEngine(device)
    from lorac.runtime.capture_host import HostEngine

    return HostEngine(device)


@contextmanager
def active(recording: Recording | None) -> Iterator[None]:
    """Make breaks cut this recording; None lets them run in line."""
    before = current()
    _active.recording = recording
    try:
        yield
    finally:
        _active.recording = before


def current() -> Recording | None:
    """The recording that this thread captures or replays, outside of its breaks."""
    return _active.recording


def capturing() -> bool:
    """Whether what this thread does now becomes part of a graph."""
    recording = current()
    if recording is not None:
        return not recording.replaying
    # the default stream is never captured; whether another is, or there is a device at all, takes longer to ask
    if not torch.cuda.is_initialized() or not driver.active.get_current_stream(torch.cuda.current_device()):
        return False
    return torch.cuda.is_current_stream_capturing()
