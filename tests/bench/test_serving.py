"""The benches of adapters that are swapped while steps run, on the CPU: what they report, not how fast."""

import importlib
import sys
from pathlib import Path

import pytest
import torch

from lorac.bench import swap, zipf

TINY = Path(__file__).parents[2] / "specs" / "tiny.yaml"


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """One thread for products this small, and batches routed in Python instead of by Triton's interpreter."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    monkeypatch.setattr("lorac.runtime.step.interpreted", lambda: False)
    yield
    torch.set_num_threads(before)


def test_registered_adapters_in_the_order_of_zipf(build, tmp_path):
    server = zipf.Server(build(TINY), "torch", "cpu", 7, tmp_path, seed=0)
    found = zipf.run(server, steps=5, every=3)
    assert found["compared"] == 2 and found["worst_error"] < 1e-5  # the first step, and every third
    assert found["graph_replays"] == 5 and found["adapters_brought"] >= 3
    rows, deltas = server.serve()
    while not any(rows):
        rows, deltas = server.serve()
    changed = tuple(delta.add(1e-2) for delta in deltas)
    assert server.error(rows, changed) > 1e-4  # the check is able to fail


def test_an_adapter_is_swapped_while_others_decode(build, tmp_path):
    decoder = swap.Decoder(build(TINY), "torch", "cpu", rows=2, rank=4, layers=1, root=tmp_path)
    found = swap.measure(decoder, swaps=2)
    assert found["outputs_unchanged"] and found["replays"] > 2
    assert [resident.name for resident in decoder.slots.adapters()][:2] == ["resident0", "resident1"]
    assert decoder.slots.adapters()[-1].name in decoder.turns
    assert found["swap_ms"]["median"] > 0 and torch.isfinite(torch.tensor(found["replay_ratio"]))


@pytest.mark.parametrize("bench", ["fuzz", "graphs", "moe", "sanitize", "swap", "zipf"])
def test_a_bench_without_its_package_says_so_in_a_line(monkeypatch, capsys, tmp_path, bench):
    module = importlib.import_module(f"lorac.bench.{bench}")
    monkeypatch.setattr(sys, "argv", [bench, str(tmp_path / "none")])
    with pytest.raises(SystemExit) as caught:
        module.main()
    assert caught.value.code == 2
    assert capsys.readouterr().err.startswith(f"{tmp_path}/none is no generated package: it has no manifest.json; ")
