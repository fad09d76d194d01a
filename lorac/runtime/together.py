"""Launches of one module, made together: the host asks the driver once, by a CUDA graph of its kernels.

A launch by Triton's launcher costs the host 5 µs and 2 more for every descriptor it encodes; replaying a graph of two
kernels costs 3, and 2 for each kernel that is told new addresses. The kernels of a graph overlap by dependent launches.
"""

import ctypes
import functools
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import torch
import triton
from triton.runtime.build import compile_module_from_src
from triton.runtime.driver import driver

from lorac.runtime.compiled import ALIGN, Unaligned
from lorac.runtime.launch import interpreted

OFTEN = 16  # calls after which a graph is made, which takes the time of as many
MOST = 1024  # graphs of a process, 0.11 MB of device memory each; further launches are made one by one
_POINTER, _DESCRIPTOR = 8, 128  # bytes of the parameters that tell a kernel where a tensor is
_RELAXED = 2  # capture mode: what is done here belongs in no capture, and breaks none of another thread's
_NON_BLOCKING = 1  # a stream that does not wait for the default one

_alive = 0


class Tools(NamedTuple):
    """What graphs are made with, and launched again."""

    cuda: ctypes.CDLL
    replay: ModuleType


class Together:
    """Launches of `run(*tensors)`, which depend on its tensors' addresses alone: what `replay.c` calls; see the module.

    It reads `make`, which makes the last tensor of a call where there is one (else None); `executable`, the graph, and
    `addresses`, where the graph's kernels look for the tensors (None: nowhere); `graph_launch` and `is_capturing`, the
    driver's functions; `stream_of`, which tells the current stream of `device`; and `hooks`, which profilers set.
    """

    def __init__(self, tools: Tools, run: Callable[..., None], places: int, make: Callable[[], torch.Tensor] | None):
        """`places` counts the parameters of kernels that say where one of the tensors is."""
        cuda, self.replay = tools
        self.cuda, self.run, self.places, self.make = cuda, run, places, make
        self.calls, self.graph, self.refused = 0, None, False
        self.executable = self.addresses = None
        self.graph_launch, self.is_capturing = map(_address, (cuda.cuGraphLaunch, cuda.cuStreamIsCapturing))
        self.stream_of, self.device = driver.active.get_current_stream, torch.cuda.current_device()
        self.hooks = triton.knobs.runtime

    def otherwise(self, *tensors: torch.Tensor) -> None:
        """Launch where there is no graph, or it looks elsewhere, may not be launched or could not be.

        Raises Unaligned for a tensor that starts on no 16 bytes.
        """
        if not self.replay.may_launch(self):
            self.run(*tensors)
        elif self.graph is None:
            self.run(*tensors)
            self._count(tensors)
        elif not (self._told(tensors) and self.replay.try_launch(self)):
            self.run(*tensors)

    def _count(self, tensors: tuple[torch.Tensor, ...]) -> None:
        """Make the graph once there have been as many calls, where it may be made."""
        self.calls += 1
        if self.calls % OFTEN or self.refused or _alive >= MOST or not all(tensor.numel() for tensor in tensors):
            return
        if threading.active_count() > 1:
            return  # another thread may wait for the whole device, which fails while anything is captured on it
        try:
            graph = _Graph(self.cuda, self.run, tensors, self.places)
        except _DriverError as error:
            self.refused = True
            warnings.warn(f"kernels of a module are launched one by one: {error}", RuntimeWarning, stacklevel=3)
        else:
            self.executable, self.addresses = graph.executable, _addresses(tensors)
            self.graph = graph

    def _told(self, tensors: tuple[torch.Tensor, ...]) -> bool:
        """Whether the graph's kernels could be told where the tensors are now.

        Not where they knew: then the driver refused to launch it, on a thread without a context for one.
        """
        known, addresses = self.addresses, _addresses(tensors)
        if any(address % ALIGN for address in addresses):
            raise Unaligned
        if addresses == known:
            return False
        self.addresses = None  # unless all kernels are told, none is known
        if not self.graph.told(known, addresses):
            return False
        self.addresses = addresses
        return True


def _addresses(tensors: tuple[torch.Tensor, ...]) -> tuple[int, ...]:
    return tuple(tensor.data_ptr() for tensor in tensors)


class _Graph:
    """An instantiated graph of the kernels that `run(*tensors)` launches."""

    def __init__(self, cuda: ctypes.CDLL, run: Callable[..., None], tensors: tuple[torch.Tensor, ...], places: int):
        """Raises _DriverError where it cannot be made, or tensors not be told apart among the parameters."""
        global _alive
        addresses = _addresses(tensors)
        if len(set(addresses)) < len(tensors):
            raise _DriverError("tensors at one address are not told apart")
        graph, executable = _captured(run, tensors, cuda)
        self.cuda, self.executable = cuda, executable.value
        _alive += 1
        # atexit the driver may be gone before
        weakref.finalize(self, _destroy, cuda, graph, executable).atexit = False
        self.nodes = [_Node(cuda, node, addresses) for node in _nodes(cuda, graph)]
        found = sum(len(node.places) for node in self.nodes)
        if found != places:
            raise _DriverError(f"{found} of their parameters, not {places}, are found to say where tensors are")

    def told(self, known: tuple[int, ...] | None, addresses: tuple[int, ...]) -> bool:
        """Whether its kernels could be told that tensors are at these addresses, of which they may know some."""
        moved = {at for at, address in enumerate(addresses) if known is None or address != known[at]}
        return not any(node.tell(self.cuda, self.executable, addresses, moved) for node in self.nodes)


class _NodeParams(ctypes.Structure):
    """CUDA_KERNEL_NODE_PARAMS_v2 of the driver's API."""

    _fields_ = (
        ("function", ctypes.c_void_p),
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("values", ctypes.POINTER(ctypes.c_void_p)),
        ("extra", ctypes.c_void_p),
        ("kernel", ctypes.c_void_p),
        ("context", ctypes.c_void_p),
    )


class _Node:
    """A kernel of a graph, with a copy of its parameters to write new addresses in."""

    def __init__(self, cuda: ctypes.CDLL, node: int, addresses: tuple[int, ...]):
        self.node, self.params = node, _NodeParams()
        _check(cuda.cuGraphKernelNodeGetParams_v2(node, ctypes.addressof(self.params)), "its parameters are not told")
        extents = _extents(cuda, self.params.function)
        self.buffer = ctypes.create_string_buffer(sum(extents[-1]) + _DESCRIPTOR)
        start = -(-ctypes.addressof(self.buffer) // _DESCRIPTOR) * _DESCRIPTOR  # descriptors are aligned
        self.values = (ctypes.c_void_p * len(extents))()
        self.places: list[tuple[int, int, bool]] = []  # which tensor, where in memory, whether in a descriptor
        for at, (offset, size) in enumerate(extents):
            self.values[at] = start + offset
            ctypes.memmove(start + offset, self.params.values[at], size)
            for tensor, address in enumerate(addresses):
                if _names(cuda, start + offset, size, address):
                    self.places.append((tensor, start + offset, size == _DESCRIPTOR))
        self.params.values = ctypes.cast(self.values, ctypes.POINTER(ctypes.c_void_p))

    def tell(self, cuda: ctypes.CDLL, executable: int, addresses: tuple[int, ...], moved: set[int]) -> int:
        """Have the next launches find the tensors that have `moved`; returns the driver's error, 0 for none."""
        places = [of for of in self.places if of[0] in moved]
        for tensor, place, in_descriptor in places:
            if in_descriptor:
                error = cuda.cuTensorMapReplaceAddress(place, addresses[tensor])
                if error:
                    return error
            else:
                ctypes.c_uint64.from_address(place).value = addresses[tensor]
        if not places:
            return 0
        return cuda.cuGraphExecKernelNodeSetParams_v2(executable, self.node, ctypes.addressof(self.params))


class _DriverError(Exception):
    """What the driver refused, or has no function for."""


def _captured(run, tensors, cuda: ctypes.CDLL) -> tuple[ctypes.c_void_p, ctypes.c_void_p]:
    """(graph, executable) of what `run` launches, from a capture on a stream of its own."""
    # not of torch's, of which there are few: another thread may be copying on each
    stream, graph, executable = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
    with _relaxed(cuda):
        _check(cuda.cuStreamCreate(ctypes.addressof(stream), _NON_BLOCKING), "there is no stream")
        try:
            _check(cuda.cuStreamBeginCapture_v2(stream, _RELAXED), "no capture begins")
            try:
                with torch.cuda.stream(torch.cuda.ExternalStream(stream.value)):
                    run(*tensors)
            finally:
                ended = cuda.cuStreamEndCapture(stream, ctypes.addressof(graph))
            _check(ended, "the capture failed")
            _check(cuda.cuGraphInstantiateWithFlags(ctypes.addressof(executable), graph, 0), "no graph is made")
        except Exception as error:
            raise _DriverError(f"they cannot be captured: {error}") from error
        finally:
            cuda.cuStreamDestroy_v2(stream)
            if graph.value and not executable.value:
                cuda.cuGraphDestroy(graph)
    return graph, executable


@contextmanager
def _relaxed(cuda: ctypes.CDLL) -> Iterator[None]:
    """What is done inside breaks no capture, neither of this thread nor of another."""
    mode = ctypes.c_int(_RELAXED)
    cuda.cuThreadExchangeStreamCaptureMode(ctypes.addressof(mode))
    try:
        yield
    finally:
        cuda.cuThreadExchangeStreamCaptureMode(ctypes.addressof(mode))


def _nodes(cuda: ctypes.CDLL, graph: ctypes.c_void_p) -> list[int]:
    count = ctypes.c_size_t()
    _check(cuda.cuGraphGetNodes(graph, None, ctypes.addressof(count)), "its kernels are not told")
    nodes = (ctypes.c_void_p * count.value)()
    _check(cuda.cuGraphGetNodes(graph, ctypes.addressof(nodes), ctypes.addressof(count)), "its kernels are not told")
    return list(nodes)


def _extents(cuda: ctypes.CDLL, function: int) -> list[tuple[int, int]]:
    """(offset, size) of each of a kernel's parameters."""
    offset, size = ctypes.c_size_t(), ctypes.c_size_t()
    extents: list[tuple[int, int]] = []
    while not cuda.cuFuncGetParamInfo(function, len(extents), ctypes.addressof(offset), ctypes.addressof(size)):
        extents.append((offset.value, size.value))
    if not extents:
        raise _DriverError("the sizes of its parameters are not told")
    return extents


def _names(cuda: ctypes.CDLL, place: int, size: int, address: int) -> bool:
    """Whether a parameter says that a tensor is at `address`: as it is, or in a descriptor, whose form is secret."""
    if size == _POINTER:
        return ctypes.c_uint64.from_address(place).value == address
    if size != _DESCRIPTOR:
        return False
    before = ctypes.string_at(place, size)
    _check(cuda.cuTensorMapReplaceAddress(place, address), "descriptors take no other address")
    after = ctypes.string_at(place, size)
    ctypes.memmove(place, before, size)
    return before == after  # put there, the address changes nothing


def _check(result: int, otherwise: str) -> None:
    if result:
        raise _DriverError(f"{otherwise}: CUDA error {result}")


def _destroy(cuda: ctypes.CDLL, graph: ctypes.c_void_p, executable: ctypes.c_void_p) -> None:
    global _alive
    _alive -= 1
    with _relaxed(cuda):
        cuda.cuGraphExecDestroy(executable)
        cuda.cuGraphDestroy(graph)


def _driver() -> ctypes.CDLL:
    """The driver's API, with the functions that are called here. Raises _DriverError where it lacks one."""
    cuda = ctypes.CDLL("libcuda.so.1")
    word, number = ctypes.c_void_p, ctypes.c_size_t
    functions = {
        "cuThreadExchangeStreamCaptureMode": (word,),
        "cuStreamCreate": (word, ctypes.c_uint),
        "cuStreamDestroy_v2": (word,),
        "cuStreamBeginCapture_v2": (word, ctypes.c_int),
        "cuStreamEndCapture": (word, word),
        "cuGraphInstantiateWithFlags": (word, word, ctypes.c_ulonglong),
        "cuGraphGetNodes": (word, word, word),
        "cuGraphKernelNodeGetParams_v2": (word, word),
        "cuFuncGetParamInfo": (word, number, word, word),
        "cuTensorMapReplaceAddress": (word, word),
        "cuGraphExecKernelNodeSetParams_v2": (word, word, word),
        "cuGraphLaunch": (word, word),
        "cuStreamIsCapturing": (word, word),
        "cuGraphExecDestroy": (word,),
        "cuGraphDestroy": (word,),
    }
    for name, arguments in functions.items():
        try:
            getattr(cuda, name).argtypes = arguments
        except AttributeError:
            raise _DriverError(f"the driver has no {name}, which came with CUDA 12.4") from None
    return cuda


def _address(function) -> int:
    return ctypes.cast(function, ctypes.c_void_p).value


def tools() -> Tools | None:
    """What launches are made together with; None where kernels are launched one by one, as on a CPU."""
    return _tools() if torch.version.cuda and torch.cuda.is_available() and not interpreted() else None


@functools.cache
def _tools() -> Tools | None:
    try:
        return Tools(_driver(), _replay())
    except Exception as error:  # an old driver, no C compiler, a full disk: whatever it is, there is another way
        told = f"kernels of a module are launched one by one, which takes the host longer: {error}"
        warnings.warn(told, RuntimeWarning, stacklevel=2)
        return None


def _replay() -> ModuleType:
    """`replay.c` as a module, compiled as Triton compiles its own, and kept in its cache."""
    source = Path(__file__).with_name("replay.c").read_text(encoding="utf-8")
    return compile_module_from_src(src=source, name="lorac_replay")


def together(
    *launches: Callable, y: Callable[[], torch.Tensor] | None = None
) -> Callable[[Callable[..., None]], Callable[..., torch.Tensor | None]]:
    """Make a function of tensors that calls these bound launches alone cheap to call often, where a CUDA driver is.

    It must call the same ones each time, on the current stream, with tensors of which only the addresses differ. With
    `y` its last tensor is what that makes, for each call anew: calls pass the others, and are returned that one.
    """

    def decorate(run: Callable[..., None]) -> Callable[..., torch.Tensor | None]:
        if found := tools():
            made = Together(found, run, sum(launch.places for launch in launches), y)
            return functools.partial(found.replay.call, made)
        return run if y is None else functools.partial(_into, y, run)

    return decorate


def _into(make: Callable[[], torch.Tensor], run: Callable[..., None], *tensors: torch.Tensor) -> torch.Tensor:
    y = make()
    run(*tensors, y)
    return y
