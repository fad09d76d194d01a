"""Show what a PEFT adapter folder holds; with --spec, whether that spec's package can serve it, and where it goes.

Exit status 2: the adapter is unreadable, or cannot be served exactly as it was trained.
"""

import argparse
from pathlib import Path

EXAMPLE = "lorac inspect adapters/sql --spec specs/llama31_8b.yaml"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What `lorac inspect` takes."""
    parser.add_argument("adapter", type=Path, metavar="ADAPTER", help="a folder that PEFT saved")
    parser.add_argument("--spec", type=Path, metavar="SPEC", help="the spec of a package that shall serve it")


def run(args: argparse.Namespace) -> int:
    """Print the adapter's settings and tensors."""
    from lorac.inspect import inspect_adapter

    report = inspect_adapter(args.adapter, _layout(args.spec) if args.spec else None)
    print(report.text())
    return 0 if report.served else 2


def _layout(spec: Path):
    """The layout of a spec's package, which need not have been built: it is lorac's own text that is run."""
    from lorac.compile import compile_spec

    names: dict = {}
    exec(compile_spec(spec).files["layout.py"], names)
    return names["LAYOUT"]
