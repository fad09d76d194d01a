"""Replacing a folder as a whole: one builder at a time, and at every instant the old folder or the new one.

Beside the packages lies `.lorac/`, which git ignores. For each package it holds a lock, and during a build the folder
being written. Whoever holds the lock is the only builder, so it removes what it finds there: a killed one left it.
Data is not forced to disk: after a power cut a file may be empty, which its hash in the manifest tells.
"""

import ctypes
import errno
import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # <fcntl.h>, <linux/fs.h>
_NO_EXCHANGE = (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP)


def state_folder(output: Path) -> Path:
    """Where locks, stamps and folders being written lie, for all packages of `output`."""
    return output / ".lorac"


def has_leftovers(folder: Path) -> bool:
    """Whether a builder of this package is at work or was killed."""
    return any(map(os.path.lexists, _work_folders(folder)))


@contextmanager
def exclusive(folder: Path) -> Iterator[Path]:
    """Wait until no other process builds this package; gives the path, not yet there, at which to write the new folder.

    What is at that path in the end is removed: after a swap that is the old folder.
    """
    state = state_folder(folder.parent)
    state.mkdir(parents=True, exist_ok=True)
    (state / ".gitignore").write_text("*\n")
    with open(state / f"{folder.name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        staged, retired = _work_folders(folder)
        if os.path.lexists(retired) and not os.path.lexists(folder):
            os.rename(retired, folder)  # killed between the two renames of `swap`
        _remove(staged, retired)
        try:
            yield staged
        finally:
            _remove(staged, retired)


def swap(staged: Path, folder: Path) -> None:
    """Put `staged` in the place of `folder`. An old folder is then at a path that `exclusive` removes."""
    if not os.path.lexists(folder):
        os.rename(staged, folder)
    elif not _exchange(staged, folder):
        # For two system calls there is no package. The next builder puts the old one back if this one dies there.
        retired = _work_folders(folder)[1]
        os.rename(folder, retired)
        try:
            os.rename(staged, folder)
        except OSError:
            os.rename(retired, folder)
            raise


def _work_folders(folder: Path) -> tuple[Path, Path]:
    state = state_folder(folder.parent)
    return state / f"{folder.name}.new", state / f"{folder.name}.old"


def _remove(*folders: Path) -> None:
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


def _exchange(one: Path, other: Path) -> bool:
    """Exchange two paths in one step; False where the C library or the file system cannot."""
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "renameat2"):
        return False
    if not libc.renameat2(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE):
        return True
    number = ctypes.get_errno()
    if number in _NO_EXCHANGE:
        return False
    raise OSError(number, os.strerror(number), str(other))
