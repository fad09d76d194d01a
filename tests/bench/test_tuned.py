"""Tuned tables: what a search writes is what the next plan launches and `explain` names; mistakes are placed."""

import time

import pytest

from lorac.compile import compile_spec, plan_spec
from lorac.emit import emit
from lorac.errors import SpecError
from lorac.explain import explain
from lorac.stamp import fresh_package, record
from lorac.tune.table import slug, table_path

from .conftest import Measurer, fused, search, wide_is_fast

TABLE = """\
lorac_tuned: 1
gpu: NVIDIA H200
target: sm_90
spec: small
tiles:
  triton:
    shrink:
      - {module: qkv_proj, rows: 8, BLOCK_M: 16, BLOCK_N: 16, BLOCK_K: 32, SPLIT_K: 4, warps: 2, stages: 1}
"""


@pytest.fixture
def table(spec):
    """The file of the spec's table, its folder there."""
    path = table_path(spec, "small", "NVIDIA H200")
    path.parent.mkdir()
    return path


def launches(plan, stage: str, module: str):
    return next(k for k in plan.backends[0].kernels if (k.stage, k.module) == (stage, module)).launches


def test_a_search_is_what_the_next_plan_launches(spec):
    assert "NVIDIA H200" not in explain(plan_spec(spec).plan)
    outcome = search(spec, Measurer(wide_is_fast))
    plan = plan_spec(spec).plan
    for site, found in outcome.searches.items():
        launch = next(
            of
            for of in launches(plan, site.stage, site.module)
            if of.rank >= site.rank and site.rows <= (of.rows or 64)
        )
        assert (launch.tile, launch.warps, launch.stages) == (found.best.tile, found.best.warps, found.best.stages)
        assert launch.source == "NVIDIA H200"
    assert "NVIDIA H200" in explain(plan)
    assert "NVIDIA H200" in compile_spec(spec).files["backends/triton.py"]


def test_declared_tiles_serve_what_a_table_leaves_out(spec, table):
    before = plan_spec(spec).plan
    table.write_text(TABLE)
    plan = plan_spec(spec).plan
    first, *rest = launches(plan, "shrink", "qkv_proj")
    assert (first.rows, dict(first.tile)["BLOCK_K"], first.warps, first.source) == (8, 32, 2, "NVIDIA H200")
    assert rest and all(launch.source == "default" for launch in rest)
    assert launches(plan, "shrink", "down_proj") == launches(before, "shrink", "down_proj")
    assert plan.digest() != before.digest()


def test_a_table_of_another_target_is_not_used(spec, table):
    before = plan_spec(spec).plan.digest()
    table.write_text(TABLE.replace("sm_90", "sm_80"))
    assert plan_spec(spec).plan.digest() == before


def test_a_new_or_changed_table_makes_a_package_stale(spec, table, tmp_path):
    output = tmp_path / "generated"
    for text in ("", TABLE, TABLE.replace("stages: 1", "stages: 2")):
        if text:
            table.write_text(text)
            assert fresh_package(spec, output) is None
        compiled = compile_spec(spec)
        emit(compiled.files, output / "small")
        record(spec, compiled.inputs, output / "small", time.time() + 60)  # the files are younger than this build
        assert fresh_package(spec, output) == output / "small"


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("lorac_tuned: 1", "lorac_tuned: 2", ":1:14: lorac_tuned must be 1, not 2"),
        ("spec: small", "spec: large", ":4:7: the table belongs to large, not to small"),
        ("  triton:", "  tritn:", ":6:3: the spec has no backend tritn"),
        ("    shrink:", "    shirnk:", ":7:5: backend triton has no stage shirnk"),
        ("BLOCK_K: 32", "BLOCK_Q: 32", "a tile of this stage has no BLOCK_Q"),
        ("BLOCK_K: 32, ", "", "the tile lacks BLOCK_K"),
        ("BLOCK_K: 32", "BLOCK_K: 48", "BLOCK_K must be a power of two, not 48"),
        ("SPLIT_K: 4", "SPLIT_K: 0", "SPLIT_K must be a whole number from 1, not 0"),
        (
            "BLOCK_M: 16, BLOCK_N: 16, BLOCK_K: 32, SPLIT_K: 4",
            "library: true",
            "shrink cannot leave anything to the lib",
        ),
        ("SPLIT_K: 4", "library: true", "BLOCK_M is said of a tile left to the library"),
        ("warps: 2", "warps: 3", "warps"),
        ("gpu: NVIDIA H200", "gpus: NVIDIA H200", "gpu"),
    ],
)
def test_mistakes_in_a_table_are_placed(spec, table, old, new, message):
    table.write_text(TABLE.replace(old, new))
    with pytest.raises(SpecError) as error:
        plan_spec(spec)
    assert message in str(error.value)
    assert str(table) in str(error.value)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("BLOCK_K: 64", "BLOCK_K: 32", "BLOCK_K must be from 64 to 256, not 32"),
        ("BLOCK_K: 64", "BLOCK_K: 512", "BLOCK_K must be from 64 to 256, not 512"),
        ("BLOCK_M: 16", "BLOCK_M: 48", "BLOCK_M must be a power of two, not 48"),
        ("WIDE: 1", "WIDE: -1", "WIDE must be a whole number from 0, not -1"),
        ("SHARES: 1", "SHARES: 3", "SHARES must be a power of two, not 3"),
        ("SHARES: 1", "SHARES: 32", "SHARES must be from 1 to 16, not 32"),
        ("rows: 8, SPARSE", "rows: 8, adapters: 1, SPARSE", "tiles of a kernel with the base are for any number"),
        ("rows: 8, SPARSE", "rows: 8, library: true, fill: 50, SPARSE", "fill is said of a tile left to the library"),
    ],
)
def test_mistakes_in_a_table_of_tiles_are_placed(spec, table, old, new, message):
    spec.write_text(fused(spec.read_text()))
    sizes = "SPARSE: 0, WIDE: 1, BLOCK_M: 16, BLOCK_N: 64, BLOCK_K: 64, SHARES: 1, LOOP: 0, EARLY: 0"
    tile = f"rows: 8, {sizes}, warps: 4, stages: 4"
    head = TABLE[: TABLE.index("  triton:")]
    text = f"{head}  fused:\n    tile_project:\n      - {{{tile}}}\n"
    table.write_text(text)
    assert any(launch.source == "NVIDIA H200" for launch in launches(plan_spec(spec).plan, "tile_project", "qkv_proj"))
    table.write_text(text.replace(old, new))
    with pytest.raises(SpecError) as error:
        plan_spec(spec)
    assert message in str(error.value) and str(table) in str(error.value)


def test_two_tables_of_one_target_are_refused(spec, table):
    table.write_text(TABLE)
    table.with_name("small.nvidia-h100.yaml").write_text(TABLE.replace("H200", "H100"))
    with pytest.raises(SpecError, match=r"small.nvidia-h100.yaml is for sm_90 too"):
        plan_spec(spec)


def test_file_names_of_gpus():
    assert slug("NVIDIA H200") == "nvidia-h200"
    assert slug("AMD Instinct MI300X (192 GB)") == "amd-instinct-mi300x-192-gb"
