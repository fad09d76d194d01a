"""Check a generated package against float64: every backend, module, bucket edge and awkward batch, on this device.

Without a GPU, set TRITON_INTERPRET=1 to run Triton's kernels in its interpreter (float32 and float16 only).
Exit status 1: an output was wrong; the smallest input that shows it is printed.
Exit status 2: nothing could be checked, or the package's code failed.
"""

import argparse
import os
import sys
from pathlib import Path

from lorac.commands.lists import count

EXAMPLE = "lorac verify generated/llama31_8b"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What `lorac verify` takes."""
    parser.add_argument("package", type=Path, metavar="PACKAGE", help="the folder of a generated package")
    parser.add_argument("--device", choices=("cuda", "cpu"), help="default: cuda where there is one")
    parser.add_argument("--backend", action="append", metavar="NAME", help="this backend alone; may be repeated")
    parser.add_argument(
        "--max-rows", type=count, metavar="N", help="leave larger batches out; default: none on a GPU, 16 on a CPU"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the random adapters and batches; default: 0")
    parser.add_argument("--quiet", action="store_true", help="print failures only")


def run(args: argparse.Namespace) -> int:
    """Verify and print the table."""
    # products of float32 in TF32 would fail the float64 oracle's tolerance, which is that of IEEE arithmetic
    os.environ.setdefault("NVIDIA_TF32_OVERRIDE", "0")
    from lorac.progress import bar
    from lorac.verify.run import verify

    show = bar() if sys.stderr.isatty() and not args.quiet else lambda share, words: None
    report = verify(args.package, args.device, args.backend, args.max_rows, args.seed, show)
    if report.failures or not args.quiet:
        print(report.text())
    return 1 if report.failures else 0
