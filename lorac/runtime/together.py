"""Launches of one module, made together: the host asks the driver once, by a CUDA graph of its kernels.

A launch by Triton's launcher costs the host 5 µs and 2 more for every descriptor it encodes; replaying a graph of two
kernels costs 3, and 2 for each kernel that is told new addresses. The kernels of a graph overlap by dependent launches.
"""

import ctypes
import warnings
import weakref
from collections.abc import Callable

import torch
import triton
from triton.runtime.driver import driver

from lorac.runtime.errors import PackageError
from lorac.runtime.launch import interpreted

OFTEN = 16  # calls after which a graph is made, which takes the time of as many
MOST = 1024  # graphs of a process, 0.11 MB of device memory each; further launches are made one by one
_POINTER, _DESCRIPTOR = 8, 128  # bytes of the parameters that tell a kernel where a tensor is
_RELAXED = 2  # capture mode: what is done here belongs in no capture, and breaks none of another thread's
_INVALID_CONTEXT = 201

_alive = 0


class Together:
    """`run(*tensors)`, whose launches depend on its tensors' addresses alone; see the module."""

    def __init__(self, run: Callable[..., None]):
        self.run, self.calls, self.graph = run, 0, None
        self.capturing, self.hooks = torch.cuda.is_current_stream_capturing, triton.knobs.runtime

    def __call__(self, *tensors: torch.Tensor) -> None:
        # a capture takes the kernels themselves, to chain them to others; a profiler's hooks want to see each
        if self.graph is None or self.capturing() or self.hooks.launch_enter_hook.calls:
            self._one_by_one(tensors)
        else:
            self.graph.launch([tensor.data_ptr() for tensor in tensors]) or self.run(*tensors)

    def _one_by_one(self, tensors: tuple[torch.Tensor, ...]) -> None:
        self.run(*tensors)
        if self.calls >= OFTEN or self.capturing():
            return
        self.calls += 1
        if self.calls == OFTEN and _alive < MOST:
            try:
                self.graph = _Graph(self.run, tensors)
            except _DriverError as error:
                warnings.warn(f"kernels of a module are launched one by one: {error}", RuntimeWarning, stacklevel=2)


class _Graph:
    """An instantiated graph of the kernels that `run(*tensors)` launches."""

    def __init__(self, run: Callable[..., None], tensors: tuple[torch.Tensor, ...]):
        global _alive
        self.device, self.cuda = tensors[0].device.index, _driver()
        self.stream_of = driver.active.get_current_stream
        self.addresses = [tensor.data_ptr() for tensor in tensors]
        if len(set(self.addresses)) < len(tensors):
            raise _DriverError("tensors that share memory are not told apart")
        graph, executable = _captured(run, tensors, self.cuda)
        self.executable = executable.value
        _alive += 1
        # atexit the driver may be gone before
        weakref.finalize(self, _destroy, self.cuda, graph, executable).atexit = False
        self.nodes = [_Node(self.cuda, node, self.addresses) for node in _nodes(self.cuda, graph)]
        told = {at for node in self.nodes for at, *_ in node.places}
        if told != set(range(len(tensors))):
            raise _DriverError(f"of {len(tensors)} tensors only {sorted(told)} are found among the parameters")

    def launch(self, addresses: list[int]) -> bool:
        """Launch on the current stream for tensors at these addresses; False on a thread without a context."""
        if addresses != self.addresses:
            moved = {at for at, address in enumerate(addresses) if address != self.addresses[at]}
            for node in self.nodes:
                node.tell(self.cuda, self.executable, addresses, moved)
            self.addresses = addresses
        result = self.cuda.cuGraphLaunch(self.executable, self.stream_of(self.device))
        if result == _INVALID_CONTEXT:
            return False
        if result:
            raise PackageError(f"a graph of a module's kernels was not launched: CUDA error {result}")
        return True


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

    def __init__(self, cuda: ctypes.CDLL, node: int, addresses: list[int]):
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

    def tell(self, cuda: ctypes.CDLL, executable: int, addresses: list[int], moved: set[int]) -> None:
        """Have the next launches find the tensors that have `moved` at their new addresses."""
        places = [of for of in self.places if of[0] in moved]
        if not places:
            return
        for tensor, place, in_descriptor in places:
            if in_descriptor:
                cuda.cuTensorMapReplaceAddress(place, addresses[tensor])
            else:
                ctypes.c_uint64.from_address(place).value = addresses[tensor]
        result = cuda.cuGraphExecKernelNodeSetParams_v2(executable, self.node, ctypes.addressof(self.params))
        if result:
            raise PackageError(f"a kernel of a graph was not told its tensors' addresses: CUDA error {result}")


class _DriverError(Exception):
    """What the driver refused, or has no function for."""


def _captured(run, tensors, cuda: ctypes.CDLL) -> tuple[ctypes.c_void_p, ctypes.c_void_p]:
    """(graph, executable) of what `run` launches, from a capture on a stream of its own."""
    graph, executable = ctypes.c_void_p(), ctypes.c_void_p()
    mode = ctypes.c_int(_RELAXED)
    cuda.cuThreadExchangeStreamCaptureMode(ctypes.addressof(mode))
    try:
        with torch.cuda.stream(torch.cuda.Stream()):
            stream = torch.cuda.current_stream().cuda_stream
            _check(cuda.cuStreamBeginCapture_v2(stream, _RELAXED), "no capture begins")
            try:
                run(*tensors)
            finally:
                ended = cuda.cuStreamEndCapture(stream, ctypes.addressof(graph))
        _check(ended, "the capture failed")
        _check(cuda.cuGraphInstantiateWithFlags(ctypes.addressof(executable), graph, 0), "no graph is made")
    finally:
        cuda.cuThreadExchangeStreamCaptureMode(ctypes.addressof(mode))
    return graph, executable


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
    cuda.cuTensorMapReplaceAddress(place, address)
    after = ctypes.string_at(place, size)
    ctypes.memmove(place, before, size)
    return before == after  # put there, the address changes nothing


def _check(result: int, otherwise: str) -> None:
    if result:
        raise _DriverError(f"{otherwise}: CUDA error {result}")


def _destroy(cuda: ctypes.CDLL, graph: ctypes.c_void_p, executable: ctypes.c_void_p) -> None:
    global _alive
    _alive -= 1
    cuda.cuGraphExecDestroy(executable)
    cuda.cuGraphDestroy(graph)


def _driver() -> ctypes.CDLL:
    """The driver's API, with the functions that are called here."""
    cuda = ctypes.CDLL("libcuda.so.1")
    word, number = ctypes.c_void_p, ctypes.c_size_t
    functions = {
        "cuThreadExchangeStreamCaptureMode": (word,),
        "cuStreamBeginCapture_v2": (word, ctypes.c_int),
        "cuStreamEndCapture": (word, word),
        "cuGraphInstantiateWithFlags": (word, word, ctypes.c_ulonglong),
        "cuGraphGetNodes": (word, word, word),
        "cuGraphKernelNodeGetParams_v2": (word, word),
        "cuFuncGetParamInfo": (word, number, word, word),
        "cuTensorMapReplaceAddress": (word, word),
        "cuGraphExecKernelNodeSetParams_v2": (word, word, word),
        "cuGraphLaunch": (word, word),
        "cuGraphExecDestroy": (word,),
        "cuGraphDestroy": (word,),
    }
    for name, arguments in functions.items():
        try:
            getattr(cuda, name).argtypes = arguments
        except AttributeError:
            raise _DriverError(f"the driver has no {name}, which came with CUDA 12.4") from None
    return cuda


def together(run: Callable[..., None]) -> Callable[..., None]:
    """`run`, made cheap to call often where there is a CUDA driver: a function of tensors that launches kernels alone.

    It must launch the same kernels each time, on the current stream, with arguments of which only its tensors'
    addresses differ.
    """
    return Together(run) if torch.version.cuda and torch.cuda.is_available() and not interpreted() else run
