"""What a captured forward must not do: caught as Python calls it, and reported with the line of the user's code.

CUDA itself reports some of these late, as an error of another call, and lets others pass: a copy from pageable memory
is captured as a read of an address that is free again when the graph is replayed.
"""

import linecache
import sys
from pathlib import Path
from types import TracebackType

import torch
from torch.overrides import TorchFunctionMode

from lorac.runtime.errors import CaptureError

_READS = {
    torch.Tensor.item: "item()",
    torch.Tensor.tolist: "tolist()",
    torch.Tensor.cpu: "cpu()",
    torch.Tensor.numpy: "numpy()",
    torch.Tensor.__bool__: "bool()",
    torch.Tensor.__int__: "int()",
    torch.Tensor.__float__: "float()",
    torch.Tensor.__index__: "use as an index",
    torch.Tensor.nonzero: "nonzero()",
    torch.nonzero: "nonzero()",
}
_COPIES = (torch.Tensor.to, torch.Tensor.cuda, torch.Tensor.copy_)
_SKIPPED = tuple(str(Path(module.__file__).parent) for module in (torch,)) + (str(Path(__file__).parent),)


class HostWatch(TorchFunctionMode):
    """Raises CaptureError where a tensor of the captured device is read by the host or written from its memory."""

    def __init__(self, device: torch.device):
        super().__init__()
        self.device = device
        self.enforced = False  # only while a piece of a graph is being captured

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if self.enforced:
            why = self._refused(function, args, kwargs)
            if why and not _called_by_triton():
                raise CaptureError(why)
        return function(*args, **kwargs)

    def _refused(self, function, args: tuple, kwargs: dict) -> str:
        held = args[0] if args and isinstance(args[0], torch.Tensor) else None
        if function in _READS and held is not None and held.device.type == self.device.type:
            return f"{_READS[function]} waits for the device; a graph can only use values that are on it"
        if function is torch.Tensor.__setitem__ and held.device.type == self.device.type:
            if isinstance(args[2], (int, float)):
                return "assigning a Python number copies from host memory; use fill_() on a slice"
        if function is torch.tensor and kwargs.get("device") is not None:
            if torch.device(kwargs["device"]).type == self.device.type:
                return "torch.tensor(..., device=...) copies from host memory; make the tensor before the capture"
        if self.device.type != "cpu" and function in _COPIES:
            source = args[1] if function is torch.Tensor.copy_ else held
            target = held.device if function is torch.Tensor.copy_ else _target(function, args, kwargs)
            if isinstance(source, torch.Tensor) and _pageable(source) and target.type == self.device.type:
                return "a copy from pageable host memory; make it before the capture, or from a static pinned tensor"
        return ""


def _pageable(source: torch.Tensor) -> bool:
    return source.device.type == "cpu" and not source.is_pinned()


def _target(function, args: tuple, kwargs: dict) -> torch.device:
    """The device `to` or `cuda` would copy to."""
    if function is torch.Tensor.cuda:
        return torch.device("cuda")
    for value in (*args[1:], kwargs.get("device"), kwargs.get("other")):
        if isinstance(value, torch.Tensor):
            return value.device
        if isinstance(value, (torch.device, str)):
            return torch.device(value)
    return args[0].device


def _called_by_triton() -> bool:
    """Whether Triton's interpreter made the call: its launches read tensors, as the compiled kernels do not."""
    frame = sys._getframe(2)
    while frame and frame.f_code.co_filename.startswith(_SKIPPED):
        frame = frame.f_back
    return frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] == "triton"


def place_of(trace: TracebackType | None) -> str:
    """`file:line in function: source` of the innermost frame that belongs neither to torch, Triton nor this runtime."""
    found = None
    while trace:
        frame = trace.tb_frame
        outside = frame.f_globals.get("__name__", "").partition(".")[0] not in ("torch", "triton")
        if outside and not frame.f_code.co_filename.startswith(_SKIPPED):
            found = (frame, trace.tb_lineno)
        trace = trace.tb_next
    if found is None:
        return "unknown place"
    frame, line = found
    file, name = frame.f_code.co_filename, frame.f_code.co_qualname
    owner = frame.f_locals.get("self")
    module = f" of module {type(owner).__name__}" if isinstance(owner, torch.nn.Module) else ""
    return f"{file}:{line} in {name}{module}: {linecache.getline(file, line).strip()}"
