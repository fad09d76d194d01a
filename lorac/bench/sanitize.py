"""The kernels of a package's fused backend under compute-sanitizer: no bad access, no hazard, nothing read unwritten.

    lorac build specs/sanitize_r16.yaml specs/sanitize_r128.yaml
    python -m lorac.bench.sanitize generated/sanitize_r16 generated/sanitize_r128

The batches of a package run by themselves, which compiles its kernels, and then under each tool. initcheck has to
follow every kernel of torch as well, and takes what is stored by descriptor, as cuBLAS's results and whole tiles are,
for unwritten: it runs those alone that have all adapters, and nothing that reads such a store. Exit status 1: a tool
reported something; 2: it could not run, because it is not installed, refuses this device or gives up.
"""

import argparse
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import torch

from lorac.bench.given import given_package
from lorac.runtime.load import load
from lorac.runtime.package import backend_module
from lorac.verify.cases import Case
from lorac.verify.check import filled_slots, inputs, prepare, random
from lorac.verify.experts import routing

TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
_SHOWN = 3000  # characters of a report's beginning, and of its end
FOUND = 97  # exit status of the sanitizer when it has reported something


def cases(package, initcheck: bool) -> Iterator[Case]:
    """A batch for every bucket, a little short of it, with all adapters; but for initcheck with one and none, too."""
    slots, admission = package.LAYOUT.slots, package.admission
    for owners in (() if initcheck else ((-1,), (0,))) + (tuple(range(-1, slots)),):
        for bucket in admission.DECODE_BUCKETS:
            rows = bucket - (bucket > 2)
            yield Case("decode", tuple((owners[row % len(owners)], 1) for row in range(rows)))
        for bucket in admission.PREFILL_BUCKETS:
            # short requests, then a long one
            yield Case("prefill", (*((slot, 7) for slot in owners[:-1]), (owners[-1], bucket - 7 * len(owners))))


def run(package, initcheck: bool) -> None:
    """Launch every kernel of the fused backend over all cases, each time with scratch that nothing has written."""
    generator = torch.Generator("cuda").manual_seed(0)
    slots = filled_slots(package, "cuda", {module.name: [0] for module in package.LAYOUT.modules}, generator)
    weights: dict[tuple[int, ...], torch.Tensor] = {}  # by shape, made once: initcheck follows that too
    for case in cases(package, initcheck):
        for module in package.LAYOUT.modules:
            for call in _calls(package, module, case.rows, generator, weights, initcheck):
                step = package.Step(slots, "fused")
                prepare(step, case)
                made = call(step)
                if not initcheck and not made.isfinite().all():
                    raise AssertionError(f"{module.name} is not finite for {case.describe()}")
    if initcheck:
        return
    # a kernel is compiled when first launched; some have no caller, as an expand where no size is left to the library
    source = _backend(package).__loader__.get_source(_backend(package).__name__)
    launched = [
        kernel
        for kernel in _backend(package).KERNELS
        if any(f"{kernel.name.upper()}.{call}(" in source for call in ("run", "bind"))
    ]
    if idle := [kernel.name for kernel in launched if not kernel._compiled]:
        raise AssertionError(f"no case launches {', '.join(idle)}")


def _calls(package, module, rows: int, generator: torch.Generator, weights: dict, initcheck: bool) -> list:
    """What can be called on a module: functions of a step. Weights are made where `weights` has none of their shape.

    For initcheck not what has LoRA added to a result of cuBLAS.
    """
    dtype, by_name = getattr(torch, package.LAYOUT.dtype), package.LAYOUT.by_name

    def made(*shape: int) -> torch.Tensor:
        return random(shape, "cuda", dtype, generator) * shape[-1] ** -0.5

    def held(*shape: int) -> torch.Tensor:
        if shape not in weights:
            weights[shape] = made(*shape)
        return weights[shape]

    if module.experts is None:
        x, y = inputs(module, rows, "cuda", dtype, generator), made(rows, module.out_features)
        calls = [lambda step: package.add(module.name, 0, x, y, step)]
        left = getattr(_backend(package), "LIBRARY", {}).get(module.name, ((), ()))[True]
        by_library = any(least <= rows <= most for least, most in left)
        if module.kind == "linear" and not (initcheck and by_library):
            weight = held(module.out_features, module.in_features)
            calls.append(lambda step: package.linear(module.name, 0, x, weight, step))
        return calls
    up, down = by_name["experts_gate_up"], by_name["experts_down"]
    ids, shares = routing(module, rows, generator)
    y = made(ids.numel(), module.out_features)
    if module is up:
        x = made(rows, module.in_features)
        w13, w2 = (held(of.experts.local, of.out_features, of.in_features) for of in (up, down))
        return [
            lambda step: package.add_experts(module.name, 0, x, y, ids, None, step),
            lambda step: package.moe(0, x, ids, shares, w13, w2, step),
        ]
    x = made(ids.numel(), module.in_features)
    return [lambda step: package.add_experts(module.name, 0, x, y, ids, shares, step)]


def _backend(package) -> ModuleType:
    return backend_module(package.__name__, package.BACKENDS, "fused")


def sanitize(folder: Path, tool: str, timeout: int) -> int:
    """Run a package's cases under one tool; prints what it reports. Returns the exit status of this program."""
    command = ["compute-sanitizer", "--tool", tool, "--target-processes", "application-only", "--print-limit", "10"]
    command += ["--error-exitcode", str(FOUND)]
    if tool != "initcheck":  # which has to see what torch's kernels write
        for kernel in _backend(load(folder)).KERNELS:
            command += ["--kernel-name", f"kne={kernel.name}"]
    plain = ["--plain", *["--initcheck"] * (tool == "initcheck")]
    # every tensor is an allocation of its own, so that the next one's memory is out of bounds
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    started = time.perf_counter()
    try:
        done = subprocess.run(
            [*command, sys.executable, "-m", "lorac.bench.sanitize", *plain, str(folder)],
            env=environment, capture_output=True, text=True, timeout=timeout,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        print(f"{folder.name} {tool}: not done after {timeout} s", flush=True)
        return 2
    said = done.stdout + done.stderr
    unable = next((words for words in ("Device not supported", "Internal Sanitizer Error") if words in said), "")
    outcome = {0: "clean", FOUND: "ERRORS"}.get(done.returncode, "failed")
    outcome = f"it gives up, {unable}" if unable else outcome  # which it counts among what it has found
    print(f"{folder.name} {tool}: {outcome}, {time.perf_counter() - started:.0f} s", flush=True)
    if outcome != "clean":
        print(said if len(said) <= 2 * _SHOWN else f"{said[:_SHOWN]}\n...\n{said[-_SHOWN:]}", flush=True)
    return {"clean": 0, "ERRORS": 1}.get(outcome, 2)


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("packages", nargs="+", type=Path, metavar="PACKAGE")
    parser.add_argument("--tool", action="append", choices=TOOLS, help="this tool alone; may be repeated")
    parser.add_argument("--timeout", type=int, default=300, help="seconds for each tool and package; default: 300")
    parser.add_argument("--initcheck", action="store_true", help=argparse.SUPPRESS)  # with --plain
    parser.add_argument("--plain", action="store_true", help="run the cases by themselves: what is run under a tool")
    args = parser.parse_args()
    for folder in args.packages:
        started = time.perf_counter()
        run(given_package(folder), args.initcheck)
        torch.cuda.synchronize()
        print(f"{folder.name} by itself: {time.perf_counter() - started:.0f} s", flush=True)
    if args.plain:
        return 0
    if not shutil.which("compute-sanitizer"):
        print("compute-sanitizer is not installed", file=sys.stderr)
        return 2
    every = [(folder, tool) for folder in args.packages for tool in args.tool or TOOLS]
    statuses = {sanitize(*of, args.timeout) for of in every}
    return 1 if 1 in statuses else max(statuses)


if __name__ == "__main__":
    sys.exit(main())
