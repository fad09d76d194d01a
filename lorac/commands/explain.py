"""Show what a spec decides, and what it costs in bytes and graphs, before anything is generated or run."""

import argparse
from pathlib import Path

EXAMPLE = "lorac explain specs/llama31_8b.yaml"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What `lorac explain` takes."""
    parser.add_argument("spec", type=Path, metavar="SPEC", help="a YAML file")
    parser.add_argument("--json", action="store_true", help="everything, as JSON")


def run(args: argparse.Namespace) -> int:
    """Print the plan."""
    from lorac.compile import plan_spec
    from lorac.explain import explain, explain_json

    plan = plan_spec(args.spec).plan
    print(explain_json(plan) if args.json else explain(plan))
    return 0
