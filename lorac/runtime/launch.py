"""Launching generated kernels: a closed set of configurations, each compiled once per device and called cheaply.

A launch through Triton's own dispatcher costs 5 to 7 µs of host time, most of it re-deriving a specialisation that the
plan has fixed; a compiled kernel called directly costs well under one.
"""

import re
from collections.abc import Callable
from functools import lru_cache, partial
from typing import NamedTuple

import torch
import triton
from torch._C._dynamo import guards
from triton.compiler import ASTSource
from triton.runtime.driver import driver
from triton.tools.tensor_descriptor import TensorDescriptor

from lorac.runtime.compiled import ALIGN, Compiled, Tiles, aligned
from lorac.runtime.errors import CaptureError, PackageError

_ELEMENT = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "i32": torch.int32,
    "i64": torch.int64,
}
ANY = -1  # adapters of a launch that serves any number of them
# an argument read or written in whole tiles by descriptor (TMA where there is any): element, rows, columns of a tile
_TILED = re.compile(r"tile<(\w+)>\[(\w+), (\w+)\]")


def interpreted() -> bool:
    """Whether Triton runs in its interpreter, on the CPU."""
    return bool(triton.knobs.runtime.interpret)


@lru_cache
def processors(device: int) -> int:
    """Multiprocessors of a CUDA device; in the interpreter a few."""
    return 3 if interpreted() else torch.cuda.get_device_properties(device).multi_processor_count


def cdiv(a: int, b: int) -> int:
    """Ceiling division of whole numbers. Triton's own costs microseconds on the host."""
    return -(-a // b)


def empty_rows(rows: int, columns: int, dtype: torch.dtype) -> Callable[[], torch.Tensor]:
    """What makes a tensor [rows, columns] on the current device, or in the interpreter on the CPU.

    As torch's compiled code makes its own: past the dispatcher, which takes longer than the allocator.
    """
    make = guards._empty_strided_cpu if interpreted() else guards._empty_strided_cuda
    return partial(make, (rows, columns), (columns, 1), dtype)


def nothing(*tensors: torch.Tensor) -> None:
    """What stands for the launches of work there is none of."""


nothing.places = 0  # as those of `Compiled.bound`


class Moving(NamedTuple):
    """Stands in `Kernel.bind` for a tensor that each launch is given: all of it but its address is fixed.

    `lasting`: no launch of a forward writes it.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    lasting: bool = False


class Launch:
    """One configuration: up to `rows` rows (0: any number), `adapters` adapters (ANY: any number), rank `rank`.

    Block sizes are attributes: `launch.BLOCK_M`.
    """

    def __init__(
        self, rows: int, rank: int, adapters: int, warps: int, stages: int, pdl: bool, constants: dict[str, int]
    ):
        self.rows, self.rank, self.adapters, self.pdl, self.constants = rows, rank, adapters, pdl, constants
        # FP fusion is stated, for its default changes between Triton's versions
        self.options = {"num_warps": warps, "num_stages": stages, "enable_fp_fusion": True}
        self.__dict__.update(constants)

    def specialised(self, dependent: bool) -> tuple[dict[str, int], dict]:
        """(constants, options) for a device that has dependent launches, or has not."""
        pdl = self.pdl and dependent
        constants = self.constants | ({"PDL": int(pdl)} if "PDL" in self.constants else {})
        return constants, self.options | ({"launch_pdl": True} if pdl else {})

    def serves(self, rows: int, rank: int, adapters: int) -> bool:
        """Whether a batch is within this launch's bounds."""
        within = rank <= self.rank and (rows <= self.rows or not self.rows)
        return within and (adapters <= self.adapters or self.adapters == ANY)


class Kernel:
    """A generated kernel: its function, the types of its arguments in order, and a table of launch configurations."""

    def __init__(self, function, arguments: dict[str, str], constants: tuple[str, ...], launches: tuple[tuple, ...]):
        """`launches` has a row per configuration: rows, rank, adapters, warps, stages, pdl, then the constants.

        Raises PackageError where the function's parameters are not the arguments and constants, in that order.
        """
        self.function, self.arguments, self.constants = function, arguments, constants
        self.name = function.fn.__name__
        self.sealed = False
        if list(function.arg_names) != [*arguments, *constants]:
            expected = [*arguments, *constants]
            raise PackageError(f"kernel {self.name} takes {function.arg_names}, but is passed {expected}")
        self.launches = tuple(Launch(*row[:6], dict(zip(constants, row[6:], strict=True))) for row in launches)
        self._compiled: dict[tuple[Launch, int], Compiled] = {}
        matched = {name: _TILED.fullmatch(of) for name, of in arguments.items()}
        self._tiled = {name: found.groups() for name, found in matched.items() if found}

    def pick(self, rows: int, rank: int, adapters: int = 0) -> Launch:
        """The first configuration for `rows` rows and `adapters` adapters of rank up to `rank`."""
        for launch in self.launches:
            if launch.serves(rows, rank, adapters):
                return launch
        raise PackageError(
            f"kernel {self.name} has no configuration for {rows} rows, {adapters} adapters of rank {rank}"
        )

    def run(self, launch: Launch, grid: tuple[int, ...], **arguments) -> None:
        """Launch on the current stream. Arguments are named, in the order of the kernel's signature."""
        if not all(grid):
            return
        if interpreted():
            self._check(arguments)
        for name in self._tiled:
            tensor = arguments[name]
            arguments[name] = TensorDescriptor(tensor, tensor.shape, tensor.stride(), self._block(name, launch))
        if interpreted():
            self.function[grid](**arguments, **launch.specialised(False)[0])
            return
        device = torch.cuda.current_device()
        self._found(launch, device, arguments).run(grid, device, arguments.values())

    def bind(self, launch: Launch, grid: tuple[int, ...], **arguments) -> Callable[..., None]:
        """`run` with these arguments on the current device, to be called again and again: tensors stay where they are.

        Each call is passed the tensors that Moving stands for, in the order of the arguments. They must be laid out as
        it says, in the kernel's types: no call looks. It raises Unaligned where one starts on no 16 bytes. Nearly all
        that `run` costs is done here.
        """
        moving = [name for name, value in arguments.items() if isinstance(value, Moving)]
        if interpreted():
            return aligned(lambda *of: self.run(launch, grid, **arguments | dict(zip(moving, of, strict=True))))
        if not all(grid):
            return nothing
        device = torch.cuda.current_device()
        compiled = self._found(launch, device, arguments)
        values, places = [], []
        for name, value in arguments.items():
            if isinstance(value, Moving):
                tiles = self._tiles(name, value, launch)
                places.append((len(values), tiles))
                value = tiles and tiles.descriptor
            elif name in self._tiled:
                value = TensorDescriptor(value, value.shape, value.stride(), self._block(name, launch))
            elif isinstance(value, torch.Tensor):
                value = value.data_ptr()  # of a tensor, the launcher would ask the driver where it is
            values.append(value)
        return compiled.bound(grid, device, values, places)

    def _found(self, launch: Launch, device: int, arguments: dict) -> Compiled:
        compiled = self._compiled.get((launch, device))
        if compiled is not None:
            return compiled
        self._check(arguments)
        return self.compile(launch)

    def _check(self, arguments: dict) -> None:
        """Raises PackageError for other arguments than are declared, and for a tensor of other elements."""
        if list(arguments) != list(self.arguments):
            raise PackageError(f"kernel {self.name} takes {list(self.arguments)}, not {list(arguments)}")
        for name, of in self.arguments.items():
            value, element = arguments[name], _ELEMENT.get(of.removeprefix("*"))
            if of.startswith("*") and isinstance(value, torch.Tensor) and value.dtype != element:
                raise PackageError(f"kernel {self.name} takes {name} as {of}, not a tensor of {value.dtype}")

    def compile(self, launch: Launch) -> Compiled:
        """Compile one configuration for the current device without running it; later launches reuse it.

        To Triton's cache it is the same as what `build --aot` compiled for such a device. Raises CaptureError while a
        graph is captured (loading a module there is illegal) and PackageError once sealed.
        """
        device = torch.cuda.current_device()
        if torch.cuda.is_current_stream_capturing():
            raise CaptureError(
                f"{self.name} would be compiled inside a capture: run the batch once before capturing it"
            )
        if self.sealed:
            raise PackageError(f"{self.name} would be compiled after the package was sealed: call warm() before seal()")
        dependent = torch.version.hip is None and torch.cuda.get_device_capability(device) >= (9, 0)
        constants, options = launch.specialised(dependent)
        target = driver.active.get_current_target()
        compiled = triton.compile(self.source(launch, constants), target=target, options=options)
        made = Compiled(compiled, tuple(constants.values()), launch.pdl and dependent)
        self._compiled[launch, device] = made.prefer_shared()
        return made

    def source(self, launch: Launch, constants: dict[str, int]) -> ASTSource:
        """One configuration as Triton compiles it: pointers are aligned, integers have any value."""
        pointers = [index for index, of in enumerate(self.arguments.values()) if of.startswith("*")]
        return ASTSource(
            fn=self.function,
            signature={**self.signature(launch), **dict.fromkeys(constants, "constexpr")},
            constexprs=constants,
            attrs={(index,): [["tt.divisibility", ALIGN]] for index in pointers},
        )

    def signature(self, launch: Launch) -> dict[str, str]:
        """The types of the arguments of one configuration, as Triton's compiler names them."""
        tiled = {
            name: f"tensordesc<{element}[{', '.join(map(str, self._block(name, launch)))}]>"
            for name, (element, *_) in self._tiled.items()
        }
        return self.arguments | tiled

    def _tiles(self, name: str, moving: Moving, launch: Launch) -> Tiles | None:
        """The descriptor that stands for a moving tensor; None where a kernel takes its address."""
        if name not in self._tiled:
            return None
        return Tiles(moving.shape, moving.strides, _ELEMENT[self._tiled[name][0]], self._block(name, launch))

    def _block(self, name: str, launch: Launch) -> list[int]:
        """Rows and columns of the tiles of an argument: constants, or numbers as they are."""
        return [int(size) if size.isdigit() else launch.constants[size] for size in self._tiled[name][1:]]
