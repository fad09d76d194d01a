"""Builds edition 2 over edition 1, killed (signal 9) at its first step, then at its second, and so on to its last.

Steps are what Python announces before it touches a file. After each death the folder holds one edition in full and the
user's own file, and the next build mends everything. With the argument `rename`, the file system cannot exchange two
paths: for an instant nothing is there, and the next build brings the old package back before it goes on.
"""

import itertools
import os
import shutil
import signal
import sys
import tempfile
from pathlib import Path

from packages import edition, package, tree

from lorac import swap
from lorac.emit import emit

exchange = sys.argv[1] == "exchange"
if not exchange:
    swap._exchange = lambda one, other: False
folder = Path(tempfile.mkdtemp()) / "p"
seen = set()


def die_at(death: int) -> None:
    """From now on, kill this process at its step number `death`."""
    steps = itertools.count(1)
    sys.addaudithook(lambda *event: next(steps) == death and os.kill(os.getpid(), signal.SIGKILL))


for death in itertools.count(1):
    shutil.rmtree(folder.parent)
    emit(package(1, "stale.py"), folder)
    (folder / "mine").mkdir()
    (folder / "mine" / "notes.txt").write_text("mine")
    child = os.fork()
    if not child:
        die_at(death)
        emit(package(2), folder)
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    there = edition(folder) if folder.exists() else None
    assert there or not exchange, f"nothing is left after death {death}"
    seen.add((there, swap.has_leftovers(folder)))
    if there:
        assert (folder / "mine" / "notes.txt").read_text() == "mine", f"death {death}"
    # a build of the edition that is there, or of the one that was, leaves no trace of the killed one
    emit(package(1, "stale.py"), folder, force=there is None)
    assert edition(folder) == 1 and not swap.has_leftovers(folder)
    assert tree(folder).keys() - package(1, "stale.py").keys() == {"mine/notes.txt"}, f"death {death}"
    if not os.WIFSIGNALED(status):
        assert os.waitstatus_to_exitcode(status) == 0
        break
assert {(1, False), (1, True), (2, True), (2, False)} <= seen, seen
assert exchange or (None, True) in seen, "the instant without a package was never met"
print(f"{death} deaths")
shutil.rmtree(folder.parent)
