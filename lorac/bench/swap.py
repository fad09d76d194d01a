"""Swapping an adapter while decode graphs replay: how long the swap takes, and what the replays notice of it.

    python -m lorac.bench.swap PACKAGE [--rows 64] [--rank 16]

Two adapters take turns in the last slot, brought from the host's cache by a second thread, while the first thread
decodes a batch over the adapters of all other slots.
"""

import argparse
import json
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from types import ModuleType

import torch

from lorac.bench.adapters import write_adapter
from lorac.bench.given import given_package
from lorac.bench.llama import DecodeForward, Llama

SWAP_MS, REPLAY_RATIO = 3.0, 1.1  # what is to be reached
_AHEAD = 1  # steps the host may run ahead of the device
_USUAL = 5  # replays before the first swap: on a slow machine, none may be without one later
_PAUSE = 0.03  # seconds between swaps: most replays then meet none


class Marks:
    """Moments on a device's stream, in ms since the first; on the CPU, of the host."""

    def __init__(self, device: torch.device):
        self.cuda = device.type == "cuda"
        self.first = self.mark()
        self.wait(self.first)
        self.host = time.perf_counter()  # the same moment by the host's clock

    def mark(self):
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def wait(self, mark) -> None:
        if self.cuda:
            mark.synchronize()

    def ms(self, mark) -> float:
        return self.first.elapsed_time(mark) if self.cuda else (mark - self.first) * 1e3

    def host_ms(self, moment: float) -> float:
        return (moment - self.host) * 1e3


@dataclass(frozen=True)
class Swap:
    """Moments of one swap, in host ms: asked for, returned (the next step may use it), and done on the device."""

    asked: float
    returned: float
    done: float


class Decoder:
    """A model whose batch has the adapters of all slots but the last, in which `turns` take turns; one decode graph."""

    def __init__(self, package: ModuleType, backend: str, device: str, rows: int, rank: int, layers: int, root: Path):
        self.slots = package.Slots(device)
        self.device, self.step = self.slots.device, package.Step(self.slots, backend)
        # one for all swaps: a commit waits for every stream that was ever said to read slots
        self.reader = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        generator = torch.Generator().manual_seed(0)
        folders = [write_adapter(root / str(i), package.LAYOUT, rank, generator) for i in range(3)]
        pinned = [f"resident{i}" for i in range(package.LAYOUT.slots - 1)]
        for name in pinned:
            self.slots.load(folders[0], name=name)
            self.slots.pin(name)
        self.turns = ["this", "that"]
        for name, folder in zip(self.turns, folders[1:], strict=True):
            self.slots.register(name, folder)
            self.slots.ensure([name])  # read now, so that the host has both in its cache
        buckets = [bucket for bucket, _ in package.decode.GRAPHS[backend]]
        bucket = min(bucket for bucket in buckets if bucket >= rows)
        forward = DecodeForward(Llama(package, device, layers), self.step, bucket)
        self.graphs = package.DecodeGraphs(forward, self.step, forward.inputs(max(buckets)), strict=True)
        self.graphs.capture([bucket])
        self.rows = [pinned[row % len(pinned)] for row in range(rows)]
        self.inputs = {
            "tokens": torch.arange(rows, device=device),
            "positions": torch.full((rows,), 100, device=device),
        }

    def decode(self) -> torch.Tensor:
        """One step of the batch: the same token at the same place, so that every step has the same logits."""
        return self.graphs.run(self.step.prepare(self.rows), self.inputs)

    def swap(self, name: str, marks: Marks) -> Swap:
        """Bring one of the two to the last slot, which evicts the other."""
        asked = time.perf_counter()
        self.slots.ensure([name])
        returned = time.perf_counter()
        if self.reader is not None:
            with self.slots.reading(self.reader):
                pass  # what the next step would wait for
            self.reader.synchronize()
        return Swap(*map(marks.host_ms, (asked, returned, time.perf_counter())))


def measure(decoder: Decoder, swaps: int) -> dict:
    """Times in ms: of swaps alone, of swaps during replays, of replays with and without one, and of whole steps."""
    for _ in range(10):
        first = decoder.decode().clone()
    marks = Marks(decoder.device)
    alone = [decoder.swap(decoder.turns[i % 2], marks) for i in range(1, 11)]
    begun, done, during = threading.Event(), threading.Event(), []

    def swapper():
        begun.wait()
        for turn in range(swaps):
            time.sleep(_PAUSE)
            during.append(decoder.swap(decoder.turns[(turn + 1) % 2], marks))
        time.sleep(_PAUSE)
        done.set()

    thread = threading.Thread(target=swapper)
    thread.start()
    replays = []
    while not done.is_set():
        ticket = decoder.step.prepare(decoder.rows)
        start = marks.mark()
        out = decoder.graphs.run(ticket, decoder.inputs)
        replays.append((start, marks.mark()))
        if len(replays) == _USUAL:
            begun.set()
        if len(replays) > _AHEAD:
            marks.wait(replays[-1 - _AHEAD][1])
    thread.join()
    marks.wait(replays[-1][1])
    spans = [(marks.ms(start), marks.ms(end)) for start, end in replays]
    met = [any(start < swap.done and swap.asked < end for swap in during) for start, end in spans]
    took = [end - start for start, end in spans]
    between = [0.0] + [after[1] - before[1] for before, after in zip(spans, spans[1:], strict=False)]

    def of(values: list[float], with_swap: bool) -> list[float]:
        return [value for value, swapped in list(zip(values, met, strict=True))[1:] if swapped == with_swap]

    usual, at_swap = of(took, False), of(took, True)
    return {
        "adapter_mb": decoder.slots.adapters()[-1].bytes / 1e6,
        "replays": len(spans),
        "swap_alone_ms": spread([swap.done - swap.asked for swap in alone]),
        "swap_ms": spread([swap.returned - swap.asked for swap in during]),
        "swap_until_on_device_ms": spread([swap.done - swap.asked for swap in during]),
        "replay_usual_ms": spread(usual),
        "replay_at_swap_ms": spread(at_swap),
        "replay_ratio": median(at_swap) / median(usual),
        "step_usual_ms": spread(of(between, False)),
        "step_at_swap_ms": spread(of(between, True)),
        "outputs_unchanged": torch.equal(out, first),
    }


def spread(values: list[float]) -> dict[str, float]:
    """Median, 95th percentile and largest."""
    ordered = sorted(values)
    return {"median": median(ordered), "p95": ordered[int(0.95 * (len(ordered) - 1))], "max": ordered[-1]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("package")
    parser.add_argument("--backend", help="the package's first unless given")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--layers", type=int, default=0, help="fewer than the model has")
    parser.add_argument("--swaps", type=int, default=50)
    arguments = parser.parse_args()
    package = given_package(arguments.package)
    backend = arguments.backend or package.BACKENDS[0]
    with tempfile.TemporaryDirectory() as root:
        decoder = Decoder(
            package, backend, arguments.device, arguments.rows, arguments.rank, arguments.layers, Path(root)
        )
        found = measure(decoder, arguments.swaps)
    swap, ratio = found["swap_ms"]["median"], found["replay_ratio"]
    print(json.dumps({"package": package.LAYOUT.name, "backend": backend, **vars(arguments), **found}, indent=1))
    print(f"swap {swap:.2f} ms (wanted <= {SWAP_MS}), replay at a swap {ratio:.3f} x usual (wanted <= {REPLAY_RATIO})")


if __name__ == "__main__":
    main()
