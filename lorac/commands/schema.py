"""Print the JSON schema of specs.

An editor that knows it completes and checks specs; a spec names it in a first line such as
# yaml-language-server: $schema=schema.json
"""

import argparse
from pathlib import Path

EXAMPLE = "lorac schema -o specs/schema.json"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What `lorac schema` takes."""
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="write it there instead of printing it")


def run(args: argparse.Namespace) -> int:
    """Print or write the schema."""
    from lorac.commands.text import deliver
    from lorac.spec.schema_export import json_schema

    deliver(json_schema(), args.output, overwrite=True)
    return 0
