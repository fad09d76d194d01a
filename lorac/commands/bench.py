"""Measure what LoRA costs on the present GPU: the time of base and LoRA over that of the base alone, for whole layers.

Every backend, and every engine named by --against, runs the same batches in turns in one process, each as one CUDA
graph whose result was checked against float64 first. Engines need not be installed: their unpacked files below the
folder $LORAC_PEERS do. Exit status 1: something could not be timed, or the machine was too noisy to say.
"""

import argparse
import sys
from pathlib import Path

from lorac.commands.lists import names, sizes

EXAMPLE = "lorac bench generated/llama31_8b --against sglang-triton_v2,vllm --plot tax.png"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What `lorac bench` takes."""
    parser.add_argument("package", type=Path, metavar="PACKAGE", help="a generated package")
    parser.add_argument("--backend", type=names, default=[], metavar="A,B", help="default: all of the package")
    parser.add_argument("--rows", type=sizes, default=[], metavar="1,8,...", help="sizes; default: a usual set")
    parser.add_argument("--layers", type=int, default=0, metavar="N", help="distinct layers a graph runs; default: 6")
    parser.add_argument("--against", type=names, default=[], metavar="ENGINES", help=f"of {_PEERS}")
    parser.add_argument("--kernels", action="store_true", help="each kernel's time beside its floor, too")
    parser.add_argument("--host", action="store_true", help="only the host's share: preparing and launching")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything measured there")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw the taxes there")


_PEERS = "sglang-triton_v2, sglang-triton, sglang-csgmv, vllm"


def run(args: argparse.Namespace) -> int:
    """Measure, print, write."""
    from lorac.bench.run import Wanted, bench
    from lorac.commands.text import deliver
    from lorac.progress import bar

    wanted = Wanted(
        args.backend, args.rows, args.against, args.layers, not args.host, args.kernels and not args.host, args.host
    )
    show = bar()
    report = bench(args.package, wanted, show)
    show(1.0, "measured")
    print(report.text())
    sys.stdout.flush()
    if args.json:
        deliver(report.json(), args.json, overwrite=True)
    if args.plot:
        from lorac.bench.plot import plot

        plot(report, args.plot)
    return 0 if report.complete else 1
