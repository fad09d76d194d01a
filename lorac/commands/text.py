"""Text that a command prints, or writes where it is told to."""

import sys
from pathlib import Path

from lorac.errors import BuildError


def deliver(text: str, file: Path | None, overwrite: bool) -> None:
    """Write `text` to `file`, or print it without one. Raises BuildError where that fails, or the file exists."""
    if file is None:
        sys.stdout.write(text)
        return
    try:
        with open(file, "w" if overwrite else "x", encoding="utf-8") as stream:
            stream.write(text)
    except FileExistsError:
        raise BuildError(
            f"{file} exists and was left as it is; remove it first, or name another file with -o"
        ) from None
    except OSError as error:
        raise BuildError(f"{file} cannot be written: {error.strerror}") from None
