"""A progress bar on a terminal; elsewhere a line now and then."""

import sys
import time
from collections.abc import Callable

_WIDTH = 30
_EVERY = 10.0  # seconds between lines where there is no terminal


def bar(stream=sys.stderr, clock: Callable[[], float] = time.monotonic) -> Callable[[float, str], None]:
    """show(share done, words): the share is from 0 to 1; 1 ends the line."""
    terminal = stream.isatty()
    last = [-_EVERY]

    def show(share: float, words: str) -> None:
        share = min(max(share, 0.0), 1.0)
        if not terminal and share < 1 and clock() - last[0] < _EVERY:
            return
        last[0] = clock()
        done = round(share * _WIDTH)
        line = f"{'#' * done}{'.' * (_WIDTH - done)} {share:4.0%}  {words}"
        stream.write(f"\r{line[:118]:<118}" if terminal else line)
        stream.write("\n" if share >= 1 or not terminal else "")
        stream.flush()

    return show
