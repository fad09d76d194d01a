"""A compiled kernel, called without what Triton looks up and checks at every launch."""

import ctypes
from collections.abc import Callable

import torch
import triton
from triton.runtime.driver import driver
from triton.tools.tensor_descriptor import TensorDescriptor

ALIGN = 16  # bytes on which tensors start that kernels take: they are compiled to rely on it
_CARVEOUT = 9  # CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT
_MOST = 100  # percent


class Unaligned(Exception):
    """A tensor starts on no 16 bytes, as kernels are compiled to rely on; who passed it may pass a copy."""


def aligned(run: Callable) -> Callable:
    """`run`, the library's say, for the tensors that bound kernels take; raises Unaligned for others."""

    def call(*tensors: torch.Tensor) -> object:
        if any(tensor.data_ptr() % ALIGN for tensor in tensors):
            raise Unaligned
        return run(*tensors)

    return call


class Tiles:
    """A descriptor of tensors that differ in their address alone, made once: Triton's checks take microseconds.

    It stands where Triton expects a tensor, and keeps none alive.
    """

    def __init__(self, shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype, block: list[int]):
        self.dtype, self.address = dtype, 0
        self.descriptor = TensorDescriptor(self, shape, strides, block)

    def data_ptr(self) -> int:
        """Where the tensor of the present launch is."""
        return self.address


class Compiled:
    """A compiled kernel with its constants."""

    def __init__(self, compiled, constants: tuple[int, ...], pdl: bool):
        compiled._init_handles()
        self.compiled, self.constants, self.pdl = compiled, constants, pdl
        self.handles = (compiled.function, compiled.packed_metadata, None, None, None)  # what each launch begins with

    def prefer_shared(self) -> "Compiled":
        """Have multiprocessors that run it hold as much shared memory as they can, and less of a cache; returns self.

        A multiprocessor keeps what it was set to as long as anything runs on it. Set by a kernel that needs little, it
        has no room for the launch after, which then begins when that kernel ends, not beside it. Triton prefers shared
        memory for kernels of more than 48 kB alone.
        """
        if torch.version.hip is None:
            function = ctypes.c_void_p(self.compiled.function)
            ctypes.CDLL("libcuda.so.1").cuFuncSetAttribute(function, _CARVEOUT, _MOST)
        return self

    def bound(
        self, grid: tuple[int, ...], device: int, arguments: list, moving: list[tuple[int, Tiles | None]]
    ) -> Callable[..., None]:
        """`run` with these arguments, where each call is passed a tensor for every place of `moving`.

        A call raises Unaligned for a tensor that may not be passed.
        """
        launch, (x, y, z), pdl = self.compiled.run, (*grid, 1, 1)[:3], self.pdl
        stream_of, captured = driver.active.get_current_stream, torch.cuda.is_current_stream_capturing
        hooks = triton.knobs.runtime
        values, first = [*self.handles, *arguments, *self.constants], len(self.handles)
        moving = [(first + place, tiles) for place, tiles in moving]

        def call(*tensors: torch.Tensor) -> None:
            for (place, tiles), tensor in zip(moving, tensors):  # noqa: B905, strict takes as long as all else
                address = tensor.data_ptr()
                if address % ALIGN:
                    raise Unaligned
                if tiles is None:
                    values[place] = address
                else:
                    tiles.address = address
            if hooks.launch_enter_hook.calls:
                self.run(grid, device, values[first : first + len(arguments)])
                return
            if pdl:
                launch.launch_pdl = captured()  # as `run` says
            launch(x, y, z, stream_of(device), *values)

        call.places = len(moving)  # parameters that say where a tensor is
        return call

    def run(self, grid: tuple[int, ...], device: int, arguments) -> None:
        """What `compiled[grid](*arguments)` does, less its per-call bookkeeping; hooks of profilers take that way."""
        compiled = self.compiled
        if self.pdl:
            # Dependent launches overlap in captured graphs alone: what a kernel reads before its wait (metadata, slots)
            # was written before the graph began. Between eager launches it may be the previous kernel's output.
            compiled.run.launch_pdl = torch.cuda.is_current_stream_capturing()
        if triton.knobs.runtime.launch_enter_hook.calls:
            compiled[(*grid, 1, 1)[:3]](*arguments, *self.constants)
            return
        x, y, z = (*grid, 1, 1)[:3]
        stream = driver.active.get_current_stream(device)
        compiled.run(x, y, z, stream, *self.handles, *arguments, *self.constants)
