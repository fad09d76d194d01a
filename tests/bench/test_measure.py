"""What is measured is right first: the workload's oracle, and candidates that compute something else."""

import pytest
import torch

from lorac.bench.workload import TOLERANCE, Workload, requests, row_slots
from lorac.errors import BuildError
from lorac.plan.kernels import ANY_ADAPTERS
from lorac.plan.model import Launch
from lorac.tune import measure
from lorac.tune.space import Site

DATA = {
    "lorac": 1,
    "name": "measured",
    "model": {"hidden": 64, "intermediate": 512, "heads": 4, "kv_heads": 2, "head_dim": 16, "layers": 2, "vocab": 64}
    | {"tied": False},
    "dtype": "float32",
    "adapters": {"slots": 2, "max_rank": 16, "targets": ["qkv_proj", "down_proj"]},
    "backends": {"triton": {"segments": {"by": "request", "cap": 4}}, "fused": {}, "torch": {}},
    "graphs": {"decode": {"buckets": [1, 8]}, "prefill": {"max_tokens": 32, "max_requests": 4}},
}


@pytest.fixture
def package(build):
    return build(DATA)


@pytest.mark.parametrize(("rows", "adapters"), [(8, 2), (8, 0), (20, 2)])
def test_every_backend_agrees_with_the_workloads_oracle(package, rows, adapters, seed):
    workload = Workload(package, "cpu", 1, seed)
    for backend in package.BACKENDS:
        step = workload.step(backend, rows, adapters)
        for name in workload.modules:
            y = workload.run(step, name, 0)
            assert workload.error(step, name, y) < TOLERANCE[torch.float32]
            y[rows - 1] += y[rows - 1].flip(0) * 0.01
            assert workload.error(step, name, y) > TOLERANCE[torch.float32], "one wrong row goes unseen"


def test_base_is_not_what_an_adapter_gives(package, seed):
    workload = Workload(package, "cpu", 1, seed)
    step = workload.step("triton", 8, 2)
    assert workload.error(step, "qkv_proj", workload.base("qkv_proj", 0, 8)) > 0.1


def test_rows_are_spread_evenly(package):
    assert requests(package, 8, 2) == ("decode", [0, 1, 0, 1, 0, 1, 0, 1], [1] * 8)
    assert requests(package, 20, 3) == ("prefill", [0, 1, 2], [6, 7, 7])
    assert requests(package, 20, 0) == ("prefill", [-1], [20])
    assert row_slots(package, 20, 2) == [0] * 10 + [1] * 10


class Timing:
    us = 10.0


@pytest.fixture
def measurer(package, monkeypatch):
    """A measurer on the CPU, whose graphs never run and whose times are alike."""
    monkeypatch.setattr(measure, "capture", lambda run, pool: run)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 0))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (2, 3))
    monkeypatch.setattr(measure, "interleaved", lambda graphs, *_: [Timing() for _ in graphs])

    def rows(site, launch):
        names = {
            "shrink": ("RANK", "BLOCK_M", "BLOCK_N", "BLOCK_K", "SPLIT_K"),
            "expand": ("RANK", "BLOCK_M", "BLOCK_N"),
        }
        sizes = dict(launch.tile) | {"RANK": launch.rank}
        constants = [sizes[name] for name in (*names[site.stage], *(["BLOCK_K"] if site.stage == "expand" else []))]
        return [(0, launch.rank, launch.adapters, launch.warps, launch.stages, launch.pdl, *constants)]

    return measure.Measurer(package, rows, lambda site: [(1, 16), (2, 16)], "cpu")


def launch(**tile) -> Launch:
    return Launch(8, 16, ANY_ADAPTERS, tuple(sorted(tile.items())), 4, 1, False, "")


SHRINK, EXPAND = (Site("triton", stage, "down_proj", 16, ANY_ADAPTERS, 8) for stage in ("shrink", "expand"))
RIGHT = launch(BLOCK_M=16, BLOCK_N=16, BLOCK_K=128, SPLIT_K=2)
GOOD = launch(BLOCK_M=16, BLOCK_N=16, BLOCK_K=64, SPLIT_K=1)
WRONG = launch(BLOCK_M=16, BLOCK_N=16, BLOCK_K=128, SPLIT_K=3)  # of four blocks, no three equal parts: one is left out
CHOSEN = {SHRINK: RIGHT, EXPAND: launch(BLOCK_M=16, BLOCK_N=32, BLOCK_K=16)}


def test_a_wrong_candidate_is_found_out(measurer):
    good, wrong = measurer.measure(SHRINK, CHOSEN, [GOOD, WRONG])
    assert good.problem == "" and good.us == good.best_us == (10.0, 10.0), "batches of one adapter and of two"
    assert wrong.problem.startswith("wrong: a row's relative error is")


def test_a_wrong_declared_tile_is_an_error(measurer):
    with pytest.raises(BuildError, match="triton.shrink_down_proj at 8 rows is wrong as declared"):
        measurer.measure(SHRINK, CHOSEN | {SHRINK: WRONG}, [GOOD])


def test_every_candidate_is_what_runs(measurer, monkeypatch):
    ran = []
    step = measurer.workload.step("triton", 8, 1, 16)
    kernel = next(kernel for kernel in step.backend.KERNELS if kernel.name == "shrink_down_proj")
    run = type(kernel).run

    def spy(self, launch, grid, **arguments):
        ran.append(launch.constants) if self is kernel else None
        run(self, launch, grid, **arguments)

    monkeypatch.setattr(type(kernel), "run", spy)
    measurer.measure(SHRINK, CHOSEN, [GOOD])
    assert {(of["BLOCK_K"], of["SPLIT_K"]) for of in ran} >= {(128, 2), (64, 1)}
