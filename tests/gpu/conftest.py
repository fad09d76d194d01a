"""Fixtures of the tests that need a GPU: the committed package, a two-layer Llama of its shapes, random adapters."""

import sys
from pathlib import Path

import pytest
import torch

import lorac
from lorac.bench.llama import DecodeForward, Llama, filled_slots

sys.path.insert(0, str(Path(__file__).parent))  # for `delays`

BACKENDS = ["fused", "triton", "csgmv"]
ROWS = 256  # the largest decode bucket of the package
PACKAGE = Path(__file__).parents[2] / "generated" / "llama31_8b"


def pytest_collection_modifyitems(items):
    reason = "needs a CUDA device" if not torch.cuda.is_available() else ""
    reason = reason or ("" if PACKAGE.is_dir() else f"needs {PACKAGE}: lorac build specs/llama31_8b.yaml")
    for item in items:
        if reason and Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def package():
    return lorac.load(PACKAGE)


@pytest.fixture(scope="session")
def slots(package):
    return filled_slots(package, "cuda:0", ranks=[16, 64, 8, 32])


@pytest.fixture(scope="session")
def model(package):
    return Llama(package, "cuda:0", layers=2)


@pytest.fixture(params=BACKENDS)
def step(request, package, slots):
    if request.param not in package.BACKENDS:
        pytest.skip(f"the package has no backend {request.param}")
    return package.Step(slots, request.param)


@pytest.fixture
def decode(package, model, step):
    """A captured forward and its graphs, of every decode key."""
    forward = DecodeForward(model, step, ROWS)
    graphs = package.DecodeGraphs(forward, step, forward.inputs(ROWS))
    graphs.capture()
    return forward, graphs
