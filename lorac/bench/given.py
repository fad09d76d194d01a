"""What a benchmark is given: a package by its folder, on a command line."""

import sys
from pathlib import Path
from types import ModuleType

from lorac.runtime.errors import PackageError
from lorac.runtime.load import load


def given_package(folder: str | Path) -> ModuleType:
    """The package in a folder. Ends the program where it holds none, as commands of lorac end: a line and status 2."""
    try:
        return load(folder)
    except PackageError as error:
        print(error, file=sys.stderr)
        raise SystemExit(2) from None
