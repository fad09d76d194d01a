"""A small spec in a folder of its own, its search, and tools that measure nothing real."""

from pathlib import Path

import pytest

from lorac.tune.run import Tools, tune
from lorac.tune.search import Result
from lorac.tune.task import Gpu

SPEC = """\
lorac: 1
name: small
model: {hidden: 128, intermediate: 192, heads: 8, kv_heads: 8, head_dim: 16, layers: 2, vocab: 64, tied: false}
dtype: float32
adapters: {slots: 3, max_rank: 32, targets: [qkv_proj, down_proj]}
backends:
  triton: {segments: {by: request, cap: 4}}
graphs:
  decode: {buckets: [1, 8]}
  prefill: {max_tokens: 64, max_requests: 4}
targets: [sm_90]
"""


def fused(text: str) -> str:
    """A spec's text with kernels that have the base, which in float32 a GPU has not."""
    return text.replace("triton: {segments: {by: request, cap: 4}}", "fused: {}").replace("float32", "float16")


GPU = Gpu("NVIDIA H200", "sm_90")
A100 = Gpu("NVIDIA A100", "sm_80")  # copies no whole tiles: few rows have kernels of their own, by pointers


@pytest.fixture
def spec(tmp_path) -> Path:
    """The spec's file; its tables go to `tuned/` beside it."""
    path = tmp_path / "small.yaml"
    path.write_text(SPEC)
    return path


class Compiler:
    """Compiles nothing; what `bad` says of a configuration is its problem."""

    def __init__(self, bad=lambda launch: ""):
        self.bad, self.submitted, self.closed = bad, set(), False

    def submit(self, site, launch, served=False):
        self.submitted.add((site.backend, site.kernel, launch))

    def ready(self, site, launch, served=False):
        return True

    def drop(self):
        self.submitted.clear()

    def wait(self, seconds):
        raise AssertionError("all is compiled")

    def problem(self, site, launch, served=False):
        return self.bad(launch)

    def close(self):
        self.closed = True


class Measurer:
    """Times by a formula of the configuration; notes every measurement."""

    def __init__(self, time, stop_after=None):
        self.time, self.seen, self.stop_after = time, [], stop_after

    def measure(self, site, chosen, tried):
        if self.stop_after is not None and len(self.seen) >= self.stop_after:
            raise KeyboardInterrupt
        self.seen += [(site, launch) for launch in tried]
        best = (self.time(chosen[site]),)
        return [Result((self.time(launch),), best) for launch in tried]

    def compare(self, declared, chosen, around):
        calls = (around | declared, around | chosen)
        return {(1, 32): tuple(sum(self.time(launch) for launch in of.values()) for of in calls)}


class Clock:
    """Each look at it is a second later."""

    now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


def search(spec, measurer, compiler=None, budget=1e9, resume=False, rows=(1, 8, 64), gpu=GPU):
    """lorac tune with a fake GPU."""
    tools = Tools(lambda *_: measurer, lambda *_: compiler or Compiler())
    return tune(
        spec, gpu, tools, backends=None, rows=list(rows), budget=budget, resume=resume, show=print, clock=Clock()
    )  # fmt: skip


def wide_is_fast(launch) -> float:
    """A time that falls with BLOCK_K and splits, so that the winner is known."""
    tile = dict(launch.tile)
    return 1000.0 / (tile["BLOCK_K"] * tile.get("SPLIT_K", 1) * launch.warps)
