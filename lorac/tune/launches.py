"""Rows of a launch table as the runtime's launches, without their bound on the rows: a search sets what runs."""

from lorac.runtime.launch import Kernel, Launch


def runtime_launch(kernel: Kernel, row: tuple) -> Launch:
    """A row as `lorac.render.package.launch_row` gives it, for a kernel of a loaded package."""
    _, rank, adapters, warps, stages, pdl, *constants = row
    named = dict(zip(kernel.constants, constants, strict=True))
    return Launch(0, rank, adapters, warps, stages, pdl, named)
