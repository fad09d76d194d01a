"""What CUDA graphs with LoRA cost and save, on one GPU: `python -m lorac.bench.graphs PACKAGE [--out FILE]`.

A Llama of the package's shapes with random weights decodes and prefills, with lorac and without, as graphs and eagerly.
"""

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable
from types import ModuleType

import torch

from lorac.bench.given import given_package
from lorac.bench.llama import DecodeForward, Llama, PrefillForward, filled_slots
from lorac.bench.steps import serve_steps
from lorac.bench.timing import capture, interleaved
from lorac.bench.transformers_prefill import prefill_in_transformers
from lorac.bench.whole import device_ms, host_us, kernel_ms, launched, settled
from lorac.runtime.graphs import Graphs
from lorac.runtime.prefill import PrefillGraphs

DECODE_ROWS = (1, 32, 256)
PREFILL_TOKENS = 128
_REPEATS = 3  # of long prefills


class Bench:
    """One package on one GPU. Each method measures some rows of the table, of the first backend unless it takes one."""

    def __init__(self, package: ModuleType, backends: list[str], device: str = "cuda", layers: int = 0):
        self.package, self.backends = package, backends
        self.model = Llama(package, device, layers)
        self.slots = filled_slots(package, device, ranks=[16, 64, 8, 32])
        self.names = [str(slot) for slot in range(package.LAYOUT.slots)]
        self.rows: list[dict] = []

    def add(self, what: str, measured: float, unit: str, target: float | None = None, most: bool = True) -> None:
        """One row; `target` is the most it may be, or the least."""
        met = None if target is None else (measured <= target if most else measured >= target)
        self.rows.append({"what": what, "measured": measured, "unit": unit, "target": target, "most": most, "met": met})
        print(self.line(self.rows[-1]), flush=True)

    @staticmethod
    def line(row: dict) -> str:
        """A row of the table as text."""
        bound = "" if row["target"] is None else f"{'≤' if row['most'] else '≥'} {row['target']:g}"
        verdict = {True: "met", False: "MISSED", None: ""}[row["met"]]
        return f"{row['what']:<76} {row['measured']:>10.3f} {row['unit']:<6} {bound:>8} {verdict}"

    def step(self, backend: str = ""):
        """A new step, with a memory pool of its own."""
        return self.package.Step(self.slots, backend or self.backends[0])

    def decode_memory(self) -> None:
        """The memory of one variant over all buckets, and of a second."""
        most = max(bucket for bucket, _ in self.package.decode.GRAPHS[self.backends[0]])
        memory = []
        for variants in (("lora",), ("nolora", "lora")):
            step = self.step()
            forward = DecodeForward(self.model, step, most)
            graphs = self.package.DecodeGraphs(forward, step, forward.inputs(most))
            graphs.table = tuple(entry for entry in graphs.table if entry[1] in variants)
            before = settled(step)
            graphs.capture()
            memory.append(settled(step) - before)
            del graphs, forward, step
        self.add("decode: memory of one variant over all buckets", memory[0] / 1e9, "GB")
        self.add("decode: memory of both variants against one", memory[1] / memory[0], "x", 1.10)

    def decode(self, backend: str) -> None:
        """Replays without adapters and with them, against the model without lorac."""
        step, most = self.step(backend), max(DECODE_ROWS)
        forward, plain = DecodeForward(self.model, step, most), DecodeForward(self.model, None, most)
        graphs = self.package.DecodeGraphs(forward, step, forward.inputs(most))
        graphs.capture(DECODE_ROWS)
        for rows in DECODE_ROWS:
            inputs = plain.inputs(rows)
            base = capture(lambda inputs=inputs: plain(**inputs), warmups=2)
            served = [recording_of(graphs, rows, variant) for variant in ("nolora", "lora")]
            step.prepare([None] * rows)  # neutral metadata, as a batch of base rows leaves it
            base_time, nolora, _ = interleaved([base, *served], seconds=0.4)
            step.prepare([self.names[row % len(self.names)] for row in range(rows)])
            base_again, lora = interleaved([base, served[1]], seconds=0.4)
            what, ratio = f"decode {rows} rows, {backend}", nolora.us / base_time.us
            self.add(f"{what}: the model without lorac", base_time.us, "µs")
            self.add(f"{what}: nolora replay against the model without lorac", ratio, "x", 1.01)
            self.add(f"{what}: {min(rows, 8)} adapters against base", lora.us / base_again.us, "x")

    def steps(self, count: int = 256) -> None:
        """Random batches over every bucket while adapters are swapped: replays against eager."""
        seen = serve_steps(self.package, self.model, self.slots, self.step(), count)
        what = f"{count} steps over {seen.buckets} decode buckets"
        self.add(f"{what}: replays bit-equal to eager", seen.equal, "", count, False)
        self.add(f"{what}: replay against eager, log-probability", seen.difference, "", 1e-2)
        self.add(f"{what}: least effect of an adapter on log-probability", seen.effect, "", 5e-2, False)

    def prefill_speed(self) -> None:
        """One request of 128 tokens with an adapter: replay against its kernels, and against eager."""
        step = self.step()
        forward = PrefillForward(self.model, step)
        inputs = forward.inputs(PREFILL_TOKENS)
        graphs = self.package.PrefillGraphs(forward, step, inputs)
        graphs.capture([PREFILL_TOKENS])
        forward.lengths = [PREFILL_TOKENS]
        ticket = step.prepare_prefill([("1", PREFILL_TOKENS)])
        replay = device_ms(lambda: graphs.run(ticket, inputs))
        kernels = kernel_ms(lambda: graphs.run(ticket, inputs))

        def eager():
            with torch.no_grad(), step.launching():
                forward(**inputs)

        step.prepare_prefill([("1", PREFILL_TOKENS)])
        self.add("prefill 128 tokens, one adapter: replay", replay, "ms")
        self.add("prefill 128 tokens: replay against the sum of its kernels' times", replay / kernels, "x", 1.08)
        self.add("prefill 128 tokens: eager of the same model against replay", device_ms(eager) / replay, "x")

    def prefill_buckets(self, sizes: tuple[int, ...]) -> None:
        """Eager against replay at buckets the rule keeps, filled, and with as few tokens as take the bucket."""
        step = self.step()
        forward = PrefillForward(self.model, step)
        graphs = self.package.PrefillGraphs(forward, step, forward.inputs(max(sizes)))
        graphs.capture(sizes)
        buckets = sorted({bucket for bucket, _ in graphs.table})
        worst = {"filled": (9.0, 0), "least filled": (9.0, 0)}
        for size in sizes:
            below = buckets[buckets.index(size) - 1] if size != buckets[0] else 0
            for how, tokens in (("filled", size), ("least filled", below + 1)):
                inputs = forward.inputs(tokens)
                forward.lengths = [tokens]
                ticket = step.prepare_prefill([("1", tokens)])
                replay = device_ms(lambda t=ticket, i=inputs: graphs.run(t, i), _REPEATS)
                step.prepare_prefill([("1", tokens)])

                def eager(inputs=inputs):
                    with torch.no_grad(), step.launching():
                        forward(**inputs)

                worst[how] = min(worst[how], (device_ms(eager, _REPEATS) / replay, size))
        for how, (ratio, size) in worst.items():
            target = 1.0 if how == "filled" else None
            self.add(
                f"prefill, {len(sizes)} buckets {how}: least eager against replay, at {size}", ratio, "x", target, False
            )

    def prefill_memory(self, largest: int, target: float) -> None:
        """What LoRA adds to the memory of prefill graphs up to a bucket."""
        used = {}
        # once in vain: what the first capture of a process takes besides is not for LoRA
        for with_lora in (False, False, True):
            step = self.step()
            forward = PrefillForward(self.model, step if with_lora else None)
            inputs = forward.inputs(largest)
            table = self.package.prefill.GRAPHS[self.backends[0]]
            if not with_lora:
                table = tuple(entry for entry in table if entry[1] == "nolora")
            graphs = PrefillGraphs(table, "breakable", forward, step, inputs)
            buckets = [bucket for bucket in sorted({b for b, _ in table}) if bucket <= largest]
            before = settled(step)
            graphs.capture(buckets)
            used[with_lora] = settled(step) - before
            del graphs, forward, step
        what = f"prefill, {len(buckets)} buckets up to {largest}: memory that LoRA adds"
        self.add(what, (used[True] - used[False]) / 1e9, "GB", target)
        self.add(f"prefill, {len(buckets)} buckets up to {largest}: memory without LoRA", used[False] / 1e9, "GB")

    def prepare(self) -> None:
        """Host time of `prepare`, and what it gives the device to do."""
        step, count = self.step(), len(self.names)
        # batches that differ from call to call
        rows = [[self.names[(row + turn) % count] if row % 5 else None for row in range(256)] for turn in range(3)]
        requests = [[(name, 16) for name in batch[:64]] for batch in rows]
        cases = {
            "prepare of 256 decode rows": (lambda turn=0: step.prepare(rows[turn]), 30),
            "prepare of 64 prefill requests": (lambda turn=0: step.prepare_prefill(requests[turn]), 60),
        }
        # all times first: a profiler slows what runs after it
        for what, (run, target) in cases.items():
            torch.cuda.set_sync_debug_mode("error")
            try:
                times = [host_us(lambda turn=turn, run=run: run(turn % 3)) for turn in range(300)]
            finally:
                torch.cuda.set_sync_debug_mode("default")
            self.add(f"{what}: host time", statistics.median(times), "µs", target)
        for what, (run, _) in cases.items():
            kernels, copies = launched(run)
            self.add(f"{what}: kernels", kernels, "", 1)
            self.add(f"{what}: copies", copies, "", 1)

    def transformers(self) -> None:
        """The same prefill in a Llama of transformers: eager against breakable graphs."""
        eager, served = prefill_in_transformers(self.package, self.model, self.slots, self.step(), PREFILL_TOKENS)
        self.add("prefill 128 tokens in transformers: eager", eager, "ms")
        self.add("prefill 128 tokens in transformers: eager against replay", eager / served, "x", 2.0, most=False)


def recording_of(graphs: Graphs, bucket: int, variant: str):
    """The captured graph of a bucket and variant."""
    return next(found for key, found in graphs._recordings.items() if key[:2] == (bucket, variant))


def main() -> None:
    """Measure everything, print the table as it grows, and write it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("package", nargs="?", default="generated/graphs_bench")
    parser.add_argument("--backend", action="append", help="may be repeated; all rows are of the first, decode of each")
    parser.add_argument("--layers", type=int, default=0, help="fewer layers than the package has, for a quick look")
    parser.add_argument("--out", help="write the table as JSON")
    arguments = parser.parse_args()
    package = given_package(arguments.package)
    if not torch.cuda.is_available():
        parser.error("graphs are measured on a GPU, and there is none")
    backends = arguments.backend or list(package.BACKENDS)
    bench = Bench(package, backends, layers=arguments.layers)
    print(f"{torch.cuda.get_device_name()}, {package.LAYOUT.name}, {', '.join(backends)}, {bench.model.layers} layers")
    parts: dict[str, Callable[[], None]] = {
        "prepare": bench.prepare,
        **{f"decode with {backend}": lambda backend=backend: bench.decode(backend) for backend in backends},
        "decode memory": bench.decode_memory,
        "steps": bench.steps,
        "prefill": bench.prefill_speed,
        "buckets": lambda: bench.prefill_buckets((4, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)),
        "memory up to 1024": lambda: bench.prefill_memory(1024, 0.2),
        "transformers": bench.transformers,
        "memory up to 8192": lambda: bench.prefill_memory(8192, 0.8),
    }
    failed = {}
    for name, measure in parts.items():
        started = time.perf_counter()
        try:
            measure()
        except Exception as error:  # one part that fails does not take the others' figures with it
            failed[name] = f"{type(error).__name__}: {error}"
            print(f"FAILED {name}: {failed[name]}", flush=True)
        gc.collect()
        torch.cuda.empty_cache()
        print(f"  [{name}: {time.perf_counter() - started:.0f} s]", flush=True)
        if arguments.out:
            with open(arguments.out, "w") as file:
                head = {"gpu": torch.cuda.get_device_name(), "backends": backends}
                json.dump(head | {"rows": bench.rows, "failed": failed}, file, indent=1)
    raise SystemExit(bool(failed))


if __name__ == "__main__":
    main()
