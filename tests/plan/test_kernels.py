"""Launch configurations: blocks fit their dimension, splits are whole, stages fit every target's shared memory."""

import copy
from math import prod
from pathlib import Path

import plan_kit as kit
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lorac.compile import plan_spec
from lorac.plan import kernels
from lorac.spec.backend import Declaration
from lorac.spec.backend_rules import declaration_problems

SPECS = Path(__file__).parents[2] / "specs"
ITEMSIZE = {"float32": 4, "float16": 2, "bfloat16": 2}


def is_power_of_two(number: int) -> bool:
    return number.bit_count() == 1


def launches(plan):
    """(declared kernel, module, planned kernel, launch, its block sizes) of every launch."""
    for backend in plan.backends:
        declared = kit.declaration(backend.kind).kernels
        for kernel in backend.kernels:
            for launch in kernel.launches:
                yield declared[kernel.stage], plan.module(kernel.module), kernel, launch, dict(launch.tile)


def check(plan, limits: dict[str, int]):
    targets = plan.targets or ("sm_86",)
    for declared, module, kernel, launch, tile in launches(plan):
        widest = max(part.width for part in module.slices)
        extent = {"rows": launch.rows or 1 << 30, "rank": launch.rank, "in": module.in_features, "out": widest}
        for block, dim in declared.dims.items():
            least, most = declared.limits.get(block, (16, 1 << 30))
            assert is_power_of_two(tile[block]) and least <= tile[block] <= most
            assert tile[block] == least or tile[block] < 2 * extent[dim], (kernel.name, block)
        if "BLOCK_K" in tile and declared.dims["BLOCK_K"] == "in":
            blocks = -(-module.in_features // tile["BLOCK_K"])
            assert blocks % tile["SPLIT_K"] == 0
            assert kernel.splits or tile["SPLIT_K"] == 1
        used = launch.stages * ITEMSIZE[plan.dtype] * sum(prod(tile[b] for b in pair) for pair in declared.operands)
        least = all(tile[block] == 16 for pair in declared.operands for block in pair)
        assert used <= min(limits[target] for target in targets) or (least and launch.stages == 1)
        for dim, sizes in (("in", [module.in_features]), ("out", [part.width for part in module.slices])):
            uneven = any(size % tile[block] for block, of in declared.dims.items() if of == dim for size in sizes)
            assert not uneven or dim in kernel.masks


@settings(max_examples=60)
@given(kit.specs())
def test_launches_fit(data):
    plan = kit.plan_of(data)
    check(plan, kernels.SHARED_LIMIT)
    for backend in plan.backends:
        for kernel in backend.kernels:
            # whatever the rows and the rank, one launch serves them
            for rank in range(1, plan.max_rank + 1):
                for rows in (1, 64, 65, 256, 257, 100_000):
                    assert any(rank <= of.rank and (rows <= of.rows or not of.rows) for of in kernel.launches)


@settings(max_examples=40)
@given(kit.specs(), st.integers(1 << 10, 1 << 17))
def test_launches_fit_a_smaller_gpu(data, limit):
    smaller = {target: limit for target in kernels.SHARED_LIMIT}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "SHARED_LIMIT", smaller)
        check(kit.plan_of(data), smaller)


@pytest.mark.parametrize("limit", [1 << 13, 1 << 17])
def test_no_block_leaves_the_limits_it_sums_rightly_within(monkeypatch, limit):
    """Neither for narrow inputs and few columns of B, nor for want of shared memory."""
    monkeypatch.setattr(kernels, "SHARED_LIMIT", dict.fromkeys(kernels.SHARED_LIMIT, limit))
    model = {"hidden": 24, "intermediate": 2048, "heads": 8, "kv_heads": 2, "head_dim": 16, "layers": 1, "vocab": 160,
             "tied": False}  # fmt: skip
    adapters = {"slots": 2, "max_rank": 8, "targets": ["qkv_proj", "down_proj"]}
    plan = kit.plan_of(kit.spec_data(model=model, adapters=adapters, backends={"fused": {}}, targets=["sm_90"]))
    found = [
        (kernel.stage, module.in_features, tile["BLOCK_K"])
        for declared, module, kernel, _, tile in launches(plan)
        if declared.limits
    ]
    assert {of[:2] for of in found} == {(of, size) for of in ("tile_project", "tile_expand") for size in (24, 2048)}
    assert all(64 <= block <= 256 for _, _, block in found)


def test_the_least_of_all_targets_counts():
    def stages(*targets):
        data = kit.spec_data(dtype="float32", adapters={"slots": 2, "max_rank": 64, "targets": ["qkv_proj"]},
                             model={"preset": "llama-3.1-8b"}, targets=list(targets))  # fmt: skip
        return {(k.name, of.rows, of.rank): of.stages for _, _, k, of, _ in launches(kit.plan_of(data))}

    roomy, cramped = stages("sm_90"), stages("gfx942")
    assert stages("sm_90", "gfx942") == cramped
    assert roomy.keys() == cramped.keys() and any(roomy[key] > cramped[key] for key in roomy)


@pytest.mark.parametrize("slots", [1, 8, 65, 66, 128])
def test_offsets_past_int32_are_seen(slots):
    data = kit.spec_data(
        model={"preset": "llama-3.1-8b"},
        adapters={"slots": slots, "max_rank": 256, "targets": ["lm_head", "o_proj", "gate_up_proj"]},
    )
    plan = kit.plan_of(data)
    wide = {kernel.module: kernel.wide_b for kernel in plan.backends[0].kernels if kernel.stage == "expand"}
    for module in plan.modules:
        last = (module.out_features - 1) * slots * 256 + slots * 256 - 1
        assert wide[module.name] or last < 2**31
        assert not wide[module.name] or last + 1 >= 2**31
    assert wide["lm_head"] == (128_256 * slots * 256 >= 2**31)


def test_ranks_of_kernels_are_the_variants_bounds():
    assert kernels.kernel_ranks((), 48) == (48,)
    plan = kit.plan_of(
        kit.spec_data(graphs={"decode": {"max_rows": 4, "variants": {"narrow": {"rank": 4}, "lora": {}}}})
    )
    ranks = {launch.rank for kernel in plan.backends[0].kernels for launch in kernel.launches}
    assert ranks == {4, 16}


@pytest.mark.parametrize("max_rank", [16, 64])
@pytest.mark.parametrize("preset", ["llama-3.1-8b", "qwen3-4b"])
def test_base_rows_are_summed_alike_beside_few_adapters_and_many(preset, max_rank):
    """A tile for few adapters may differ in how it is launched, not in what a program sums in which order."""
    plan = kit.plan_of(
        kit.spec_data(
            model={"preset": preset},
            dtype="bfloat16",
            adapters={"slots": 8, "max_rank": max_rank, "targets": ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]},
            backends={"fused": {}},
            targets=["sm_90"],
        )
    )
    of_few = 0
    for kernel in plan.backends[0].kernels:
        if kernel.stage != "tile_project":
            continue
        for rows in (1, 16, 17, 64, 200, 256, 512, 1024, 4096):
            serving = [of for of in kernel.launches if of.adapters > 0 and (not of.rows or rows <= of.rows)]
            firsts = {adapters: next(of for of in serving if of.adapters == adapters) for adapters in (1, 8)}
            assert firsts[1].tile == firsts[8].tile, (kernel.name, rows)
            of_few += firsts[1].stages != firsts[8].stages
    assert of_few or max_rank > 16


@pytest.mark.parametrize("spec", sorted(path.stem for path in SPECS.glob("*.yaml")))
def test_base_rows_are_summed_alike_with_adapters_and_without_by_committed_tables(spec):
    """Where neither leaves them to the library: in as many shares of steps of as many inputs."""
    compared = 0
    plan = plan_spec(SPECS / f"{spec}.yaml").plan
    for kernel in (of for backend in plan.backends for of in backend.kernels if of.stage == "tile_project"):
        for rows in sorted({launch.rows for launch in kernel.launches} - {0}):
            if kernel.leaves(rows, bare=True) or kernel.leaves(rows, bare=False):
                continue
            serving = [dict(of.tile) | {"rank": of.rank} for of in kernel.launches if not of.rows or rows <= of.rows]
            bare = next(of for of in serving if not of["rank"])
            for name in ("BLOCK_K", "SHARES"):
                found = {of[name] for of in _firsts(serving)}
                assert found == {bare[name]}, (kernel.name, rows, name)
                compared += 1
    assert compared or "fused" not in {backend.kind for backend in plan.backends} or spec.startswith("tiny")


def _firsts(serving: list[dict]) -> list[dict]:
    """The first of every rank."""
    return [next(of for of in serving if of["rank"] == rank) for rank in {of["rank"] for of in serving}]


def test_tiles_for_few_adapters_must_have_the_sizes_of_those_for_any():
    declared = kit.declaration("fused").model_dump()
    tiles = declared["kernels"]["tile_project"]["tiles"]
    few = next(at for at, tile in enumerate(tiles) if tile["adapters"])

    def problems_with(change: dict) -> list[str]:
        changed = copy.deepcopy(declared)
        changed["kernels"]["tile_project"]["tiles"][few].update(change)
        return [
            problem.message
            for problem in declaration_problems(Declaration.model_validate(changed))
            if problem.path == ("kernels", "tile_project", "tiles", few)
        ]

    for change in ({"BLOCK_K": 64}, {"SHARES": 2}, {"library": True}):
        assert "sizes that none for any number has" in problems_with(change)[0]
    assert not problems_with({"warps": 8})


@pytest.mark.parametrize("target", ["sm_80", "sm_90"])
def test_in_float32_a_gpu_has_the_base_from_the_library(target):
    """Tiles made for tensor cores, which multiply no float32 exactly, spill by kilobytes."""
    data = kit.spec_data(dtype="float32", backends={"fused": {}})
    stages = {kernel.stage for kernel in kit.plan_of(data).backends[0].kernels}
    plan = kit.plan_of(data | {"targets": [target]})
    left = {kernel.stage for kernel in plan.backends[0].kernels}
    assert "tile_project" in stages and left == {"segment_shrink", "segment_expand"}
    assert [note.subject for note in plan.decisions if "float32" in note.reason] == [
        "fused: tile_project",
        "fused: project",
    ]


def test_only_float32_asks_for_exact_products():
    for dtype in ("float32", "float16", "bfloat16"):
        plan = kit.plan_of(kit.spec_data(dtype=dtype))
        assert {kernel.precision for kernel in plan.backends[0].kernels} == ({"ieee"} if dtype == "float32" else {""})


def test_what_fills_too_little_of_the_gpu_is_left_to_the_library():
    linears = {
        "tiny_proj": {"in": 4096, "out": 512, "path": "mlp.tiny_proj"},  # at 16 rows 8 programs
        "narrow_proj": {"in": 4096, "out": 1280, "path": "mlp.narrow_proj"},  # at 16 rows 20, at 512 40
        "wide_proj": {"in": 4096, "out": 28672, "path": "mlp.wide_proj"},
    }
    model = {"hidden": 4096, "layers": 1, "vocab": 160, "tied": False, "linears": linears}
    adapters = {"slots": 4, "max_rank": 16, "targets": [*linears]}
    graphs = {"decode": {"max_rows": 256}, "prefill": {"max_tokens": 64}}
    data = kit.spec_data(model=model, dtype="bfloat16", adapters=adapters, backends={"fused": {}}, graphs=graphs)
    left = {}
    for targets in ([], ["sm_90"]):
        plan = kit.plan_of(data | {"targets": targets})
        for kernel in plan.backends[0].kernels:
            if kernel.stage == "tile_project":
                adapted = [part for part in kernel.library if not part.bare]
                left[kernel.module, bool(targets)] = [(part.least, part.most) for part in adapted]
                classes = [
                    {launch.rows for launch in kernel.launches if launch.adapters == bound} for bound in (0, 1, 4)
                ]
                assert classes[1] == classes[2], "one tile whatever the adapters"
                own = {rows for rows in classes[1] if rows and not kernel.leaves(rows, bare=True)}
                if left[kernel.module, bool(targets)][:1] != [(1, 1024)]:
                    # neighbouring classes may launch the same, and are one then
                    assert classes[0] <= own and max(classes[0]) == max(own), "base rows keep their bits there"
    anywhere = [left[name, targeted] for name, targeted in left if name == "wide_proj" or not targeted]
    assert all(of == anywhere[0] for of in anywhere), "nobody said how many, or there are enough"
    assert left["tiny_proj", True] == [(1, 1024)] and left["narrow_proj", True] == [(257, 1024)]


@given(
    inputs=st.integers(2, 800).map(lambda number: 16 * number),
    columns=st.integers(1, 128).map(lambda number: 16 * number),
    shares=st.sampled_from((2, 4, 8, 16)),
    loop=st.booleans(),
)
def test_of_programs_that_share_a_sum_the_last_has_all_of_h(inputs, columns, shares, loop):
    """Steps over h know their columns from the first of them on; and programs that stay share nothing."""
    linear = {"in": inputs, "out": 64, "path": "mlp.up"}
    spec = kit.spec_data(model={"hidden": inputs, "layers": 1, "vocab": 64, "tied": False, "linears": {"up": linear}})
    module = kit.plan_of(spec | {"adapters": {"slots": 1, "max_rank": 16, "targets": ["up"]}}).module("up")
    project = kit.declaration("fused").kernels["tile_project"]
    tile = project.tiles[0].model_copy(update={"SHARES": shares, "LOOP": int(loop), "BLOCK_M": 16})
    launch = kernels.fit(project, tile, "", 256, 16, module, columns, "bfloat16", ("sm_90",))
    sizes = dict(launch.tile)
    of_inputs, of_h = (-(-extent // sizes["BLOCK_K"]) for extent in (inputs, columns))
    each = -(-(of_inputs + of_h) // sizes["SHARES"])
    assert 1 <= sizes["SHARES"] <= shares and (not loop or sizes["SHARES"] == 1)
    assert each * (sizes["SHARES"] - 1) <= of_inputs
    if not loop and sizes["SHARES"] < shares:
        more = 2 * sizes["SHARES"]
        assert -(-(of_inputs + of_h) // more) * (more - 1) > of_inputs, "no fewer than need be"
