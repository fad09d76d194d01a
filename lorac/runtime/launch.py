"""Launching generated kernels: a closed set of configurations, each compiled once per device, called with little ceremony.

A launch through Triton's own dispatcher costs 5 to 7 µs of host time, most of it re-deriving a specialisation that the
plan has fixed; a compiled kernel called directly costs about 1 µs.
"""

import torch
import triton

from lorac.runtime.errors import CaptureError, PackageError

_ELEMENT = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "i32": torch.int32,
    "i64": torch.int64,
}
_SCALAR = {"i32": 7, "i64": 7}  # any value: integers are never specialised on


def interpreted() -> bool:
    """Whether Triton runs in its interpreter, on the CPU."""
    return bool(triton.knobs.runtime.interpret)


class Launch:
    """One configuration: serves up to `rows` rows (0: any number) and adapters of up to `rank`.

    Block sizes are attributes: `launch.BLOCK_M`.
    """

    def __init__(self, rows: int, rank: int, warps: int, stages: int, pdl: bool, constants: dict[str, int]):
        self.rows, self.rank, self.constants = rows, rank, constants
        # FP fusion is stated, for its default changes between Triton's versions
        self.options = {"num_warps": warps, "num_stages": stages, "enable_fp_fusion": True}
        if pdl:
            self.options["launch_pdl"] = True
        self.__dict__.update(constants)


class Kernel:
    """A generated kernel: its function, the types of its arguments in order, and a table of launch configurations."""

    def __init__(self, function, arguments: dict[str, str], constants: tuple[str, ...], launches: tuple[tuple, ...]):
        """`launches` has a row per configuration: rows, rank, warps, stages, pdl, then the constants in order.

        Raises PackageError where the function's parameters are not the arguments and constants, in that order.
        """
        self.function, self.arguments = function, arguments
        self.name = function.fn.__name__
        self.sealed = False
        if list(function.arg_names) != [*arguments, *constants]:
            raise PackageError(
                f"kernel {self.name} takes {function.arg_names}, but is passed {[*arguments, *constants]}"
            )
        self.launches = tuple(Launch(*row[:5], dict(zip(constants, row[5:], strict=True))) for row in launches)
        self._compiled: dict[tuple[int, int], object] = {}

    def pick(self, rows: int, rank: int) -> Launch:
        """The configuration for a batch of `rows` rows whose adapters have at most rank `rank`."""
        for launch in self.launches:
            if rank <= launch.rank and (rows <= launch.rows or not launch.rows):
                return launch
        raise PackageError(f"kernel {self.name} has no configuration for rank {rank}")

    def run(self, launch: Launch, grid: tuple[int, ...], **arguments) -> None:
        """Launch on the current stream. Arguments are named, in the order of the kernel's signature."""
        if not all(grid):
            return
        if interpreted():
            self.function[grid](**arguments, **launch.constants)
            return
        device = torch.cuda.current_device()
        compiled = self._compiled.get((id(launch), device))
        if compiled is None:
            if list(arguments) != list(self.arguments):
                raise PackageError(f"kernel {self.name} takes {list(self.arguments)}, not {list(arguments)}")
            compiled = self.compile(launch)
        compiled[(*grid, 1, 1)[:3]](*arguments.values(), *launch.constants.values())

    def compile(self, launch: Launch) -> object:
        """Compile one configuration for the current device without running it; later launches reuse it.

        Raises CaptureError while a graph is captured (loading a module there is illegal) and PackageError once sealed.
        """
        device = torch.cuda.current_device()
        if torch.cuda.is_current_stream_capturing():
            raise CaptureError(
                f"{self.name} would be compiled inside a capture: run the batch once before capturing it"
            )
        if self.sealed:
            raise PackageError(f"{self.name} would be compiled after the package was sealed: call warm() before seal()")
        values = [_ELEMENT[of[1:]] if of.startswith("*") else _SCALAR[of] for of in self.arguments.values()]
        compiled = self.function.warmup(*values, grid=(1,), **launch.constants, **launch.options)
        self._compiled[id(launch), device] = compiled
        return compiled
