"""Search launch configurations on the present GPU and write them as a table beside the spec, which builds then use.

Every candidate is compiled, checked against float64 and timed as a CUDA graph of its module's whole call, over batches
with adapters and, where the kernel has the base, without. Interrupt it when you like: --resume goes on where it was.
"""

import argparse
import os
from pathlib import Path

from lorac.commands.lists import names, sizes

EXAMPLE = "lorac tune specs/llama31_8b.yaml --backend fused --budget 200"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What `lorac tune` takes."""
    parser.add_argument("spec", type=Path, metavar="SPEC", help="a YAML file")
    parser.add_argument(
        "--backend",
        type=names,
        metavar="A,B",
        help="default: every backend that has kernels; others keep their part of the table",
    )
    parser.add_argument("--rows", type=sizes, metavar="1,8,...", help="sizes of batches; default: a usual set")
    parser.add_argument("--budget", type=float, default=300.0, metavar="SECONDS", help="default: 300")
    parser.add_argument("--resume", action="store_true", help="go on from the journal of a search before")


def run(args: argparse.Namespace) -> int:
    """Search, then say what came of it."""
    import torch

    from lorac.aot import present_target
    from lorac.bench.rates import measured_rates
    from lorac.errors import BuildError
    from lorac.progress import bar
    from lorac.runtime.load import load
    from lorac.tune.compiler import Compiler
    from lorac.tune.measure import Measurer
    from lorac.tune.model import Machine
    from lorac.tune.report import report
    from lorac.tune.run import Tools, tune
    from lorac.tune.task import Gpu

    if not torch.cuda.is_available():
        raise BuildError("lorac tune measures on a GPU, and there is none")
    device = torch.cuda.get_device_properties(0)
    rates = measured_rates("cuda")
    machine = Machine(
        device.multi_processor_count, rates.bandwidth / 1e6, rates.matrix / 1e6, device.shared_memory_per_multiprocessor
    )
    gpu = Gpu(device.name, present_target(), machine)
    processes = max(1, (os.cpu_count() or 2) - 1)
    tools = Tools(
        measurer=lambda folder, task: Measurer(load(folder), task.rows, task.batches),
        compiler=lambda folder, task: Compiler(folder, task.rows, gpu.target, processes),
    )
    show = bar()
    outcome = tune(
        args.spec, gpu, tools, backends=args.backend, rows=args.rows, budget=args.budget, resume=args.resume, show=show
    )  # fmt: skip
    show(1.0, outcome.ended)
    print(report(outcome))
    return 0
