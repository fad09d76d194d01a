"""Makes `model_kit` importable, and serves one small model of each family with adapters that PEFT trained."""

import gc
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

import model_kit as kit


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """One thread, for models this small are slower with more; batches routed in Python, not by Triton's interpreter;
    and captures, which collect garbage first, need not look through all of transformers.
    """
    gc.freeze()
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    monkeypatch.setattr("lorac.runtime.step.interpreted", lambda: False)
    yield
    torch.set_num_threads(before)
    gc.unfreeze()


@pytest.fixture(scope="session")
def served(tmp_path_factory):
    """served(family, backend="torch") -> kit.Served, with its adapters in slots; models and packages are made once."""
    made, packages = {}, {}

    def make(family: str, backend: str = "torch", **options) -> kit.Served:
        if family not in made:
            made[family] = kit.Family(family, tmp_path_factory.mktemp(family))
            packages[family] = kit.package(made[family].model.config, tmp_path_factory.mktemp("spec"))
        return kit.Served(made[family], packages[family], backend, **options)

    return make
