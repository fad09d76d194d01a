"""The command line. Commands are modules of `lorac.commands`, imported when they are called.

Exit status: 0 done, 1 a check failed, 2 a mistake in what the user gave.
"""

import argparse
import importlib
import os
import sys
from collections.abc import Callable
from contextlib import redirect_stdout

from lorac import __version__
from lorac.errors import LoracError, OutputError
from lorac.runtime.errors import RuntimeFault

COMMANDS = {
    "build": "write packages from specs, or check them",
    "explain": "show what a spec decides, and what it costs",
    "schema": "print the JSON schema of specs, for editors",
    "init": "write a first spec for a model's config.json",
    "inspect": "show a PEFT adapter, and whether a spec can serve it",
    "verify": "check a package against float64, on the device there is",
    "tune": "search launch configurations on this GPU",
    "bench": "measure what LoRA costs, beside other engines' kernels",
}


def main(arguments: list[str] | None = None) -> int:
    """Run one command and return its exit status. Raises SystemExit(2) for unknown commands and options."""
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = argparse.ArgumentParser(
        prog="lorac", description="Compiles a YAML spec into the LoRA layer of a deployment."
    )
    parser.add_argument("--version", action="version", version=f"lorac {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for name, summary in COMMANDS.items():
        command = commands.add_parser(name, help=summary, formatter_class=argparse.RawDescriptionHelpFormatter)
        if arguments[:1] == [name]:
            module = importlib.import_module(f"lorac.commands.{name}")
            command.description, command.epilog = module.__doc__, f"example:\n  {module.EXAMPLE}"
            module.add_arguments(command)
            command.set_defaults(run=module.run)
    parsed = parser.parse_args(arguments)
    try:
        with redirect_stdout(_Output(sys.stdout)):
            status = parsed.run(parsed)
            sys.stdout.flush()
        return status
    except BrokenPipeError:  # the reader of a pipe has seen enough
        _abandon_output()
        return 0
    except (LoracError, RuntimeFault) as error:
        if isinstance(error, OutputError):
            _abandon_output()
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


class _Output:
    """A text stream whose failures are told from those of files: a full disk raises OutputError."""

    def __init__(self, stream):
        self._stream = stream

    def __getattr__(self, name: str):
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        return self._tried(self._stream.write, text)

    def flush(self) -> None:
        self._tried(self._stream.flush)

    def _tried(self, do: Callable, *arguments):
        try:
            return do(*arguments)
        except BrokenPipeError:
            raise
        except OSError as error:
            raise OutputError(f"standard output cannot be written: {error.strerror}") from None


def _abandon_output() -> None:
    """Python would complain again at its exit, of what is still in the buffer."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
