"""Write a first spec for a model, with comments on what can be chosen. An existing file is never overwritten."""

import argparse
import re
from pathlib import Path

EXAMPLE = "lorac init --config models/my_model/config.json -o models/my_model/lora.yaml"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What `lorac init` takes."""
    parser.add_argument(
        "--config", type=Path, required=True, metavar="FILE", help="the model's Hugging Face config.json"
    )
    parser.add_argument("--name", help="of the generated package; default: from the folder of the config")
    parser.add_argument("-o", "--output", type=Path, metavar="SPEC", help="write it there instead of printing it")


def run(args: argparse.Namespace) -> int:
    """Print or write the spec; paths in it are relative to where it will lie."""
    from lorac.commands.text import deliver
    from lorac.spec.init import init_spec

    name = args.name or _name_from(args.config.resolve().parent.name)
    folder = args.output.parent if args.output else None
    deliver(init_spec(args.config, name, folder), args.output, overwrite=False)
    return 0


def _name_from(folder: str) -> str:
    """A package name from a folder's: Llama-3.1-8B becomes llama_3_1_8b."""
    name = re.sub(r"[^a-z0-9]+", "_", folder.lower()).strip("_")[:40]
    return name if name[:1].isalpha() else f"model_{name}".rstrip("_")
