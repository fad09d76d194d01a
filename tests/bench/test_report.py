"""What a person reads: taxes with their doubt, what could not be timed, and when the machine was too noisy to say."""

import json
import random

import pytest

from lorac.bench.host import HostTime
from lorac.bench.kernels import Timed
from lorac.bench.noise import doubt, spread, tax_of, too_noisy
from lorac.bench.plot import plot
from lorac.bench.rates import Rates
from lorac.bench.report import Report
from lorac.bench.tax import Batch, Cell, Contender, batches
from lorac.errors import BuildError


def report(**changes) -> Report:
    cells = [
        Cell(
            1, 1, 16, "lora", 117.0, {"fused": Contender(120.0, 0.0256, 0.001, 3e-3), "vllm": Contender(problem="no")}
        ),
        Cell(
            64, 8, 16, "lora", 128.0, {"fused": Contender(131.0, 0.0234, 0.008, 3e-3), "vllm": Contender(260.0, 1.03)}
        ),
    ]
    values = {
        "cells": cells,
        "missing": {"sglang-triton": "sglang is not installed"},
        "peers": ["vllm", "sglang-triton"],
    }
    return Report("small", "NVIDIA H200", {"torch": "2.11"}, 6, Rates(4.3e12, 7.9e14), **(values | changes))


def test_the_table_says_taxes_doubts_and_what_is_missing():
    text = report().text()
    lines = text.splitlines()
    assert "small on NVIDIA H200, torch 2.11, 6 layers, reaching 4.30 TB/s and 790 Tflop/s" in lines
    assert any(line.split() == ["1", "1", "16", "117.0", "2.6", "-"] for line in lines)
    assert any(line.split() == ["64", "8", "16", "128.0", "2.3", "±", "0.8", "103.0"] for line in lines)
    assert "sglang-triton: sglang is not installed" in lines
    assert "vllm: no" in lines
    assert not report().complete


def test_noise_is_marked_and_explained():
    noisy = Cell(8, 1, 16, "lora", 120.0, {"fused": Contender(130.0, 0.08)}, "half of the base's times lie apart")
    text = report(cells=[noisy], missing={}).text()
    assert "8.0 ?" in text and "8 rows, 1 adapters: half of the base's times lie apart" in text
    assert not report(cells=[noisy], missing={}).complete
    quiet = Cell(8, 1, 16, "lora", 120.0, {"fused": Contender(130.0, 0.08)})
    assert report(cells=[quiet], missing={}).complete


def test_kernels_and_host_times_have_tables_and_everything_is_in_the_json():
    kernels = [Timed("triton", "shrink_qkv_proj", 16, 8, 4.0, 2.0, 0.5)]
    host = [HostTime("triton", "prepare, 256 decode rows", 41.5, 8.5, 17.0, 1, 1, 0)]
    full = report(kernels=kernels, host=host)
    assert any(line.split()[-4:] == ["4.00", "2.00", "0.50", "2.0"] for line in full.text().splitlines())
    assert any(line.split()[-6:] == ["41.5", "8.5", "17.0", "1", "1", "0"] for line in full.text().splitlines())
    data = json.loads(full.json())
    assert data["cells"][1]["contenders"]["fused"]["tax"] == 0.0234
    assert data["kernels"][0]["us"] == 4.0 and data["host"][0]["kernels"] == 1


def test_the_plot_is_a_png(tmp_path):
    pytest.importorskip("matplotlib")
    plot(report(), tmp_path / "tax.png")
    assert (tmp_path / "tax.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(BuildError, match="no tax to plot"):
        plot(report(cells=[]), tmp_path / "none.png")


def test_batches_are_the_fullest_of_each_variant_each_once():
    variants = {"nolora": (0, 0), "one": (1, 16), "lora": (8, 16)}
    found = batches(variants, 8, [1, 4, 16])
    assert Batch(1, 1, 16, "one") in found and Batch(16, 8, 16, "lora") in found and Batch(4, 4, 16, "lora") in found
    assert sum(batch.rows == 1 for batch in found) == 2, "one row has one adapter, whichever variant"


def times(generator: random.Random, middle: float, sigma: float, count: int = 41) -> tuple[float, ...]:
    return tuple(generator.gauss(middle, sigma) for _ in range(count))


def test_a_tax_is_taken_turn_by_turn(seed):
    generator = random.Random(seed)
    drift = [1 + turn / 40 for turn in range(41)]  # the clock falls during the run: paired, it cancels
    base = tuple(100 * of for of in drift)
    mine = tuple(110 * of * generator.gauss(1, 0.001) for of in drift)
    tax, uncertain = tax_of(base, mine)
    assert abs(tax - 0.1) < 0.002 and uncertain < 0.002
    assert spread(base) > 0.1, "unpaired, the same times would say nothing"


def test_doubt_holds_the_median_and_shrinks_with_samples(seed):
    generator = random.Random(seed)
    hits = 0
    for _ in range(300):
        samples = times(generator, 1.0, 0.05)
        hits += abs(sorted(samples)[20] - 1.0) <= doubt(samples)
    assert hits > 255
    few, many = (sum(doubt(times(generator, 1.0, 0.05, count)) for _ in range(20)) for count in (11, 1001))
    assert many < few / 4


def test_the_noise_rule(seed):
    generator = random.Random(seed)
    assert too_noisy(times(generator, 100, 0.5), [0.002]) == ""
    assert "lie more than" in too_noisy(times(generator, 100, 12), [0.002])
    assert "uncertain by more than 3.0%" in too_noisy(times(generator, 100, 0.5), [0.03, 0.05])
