"""What a valid spec holds, what strictness refuses, and that one run reports everything."""

import copy
import json
from pathlib import Path
from typing import get_args

import pytest
import yaml

from lorac.errors import SpecError, format_problems
from lorac.spec import load_spec, spec_from_data, target_names
from lorac.spec.init import init_spec
from lorac.spec.model import preset_shapes, presets
from lorac.spec.schema import CARDS, Spec, Target
from lorac.spec.schema_export import json_schema

SPECS = Path(__file__).parents[2] / "specs"
MODEL = {"hidden": 64, "intermediate": 96, "heads": 4, "kv_heads": 2, "layers": 2, "vocab": 128, "tied": False}
LONG = {
    "hidden": 64, "layers": 4, "vocab": 128, "tied": True,
    "linears": {
        "q_proj": {"path": "attn.q", "in": 64, "out": 48, "sharding": "column", "units": 3},
        "k_proj": {"path": "attn.k", "in": 64, "out": 16, "sharding": "column", "units": 1},
        "router": {"path": "mlp.router", "in": 64, "out": 5, "layers": [1, 3]},
    },
    "fused": {"qk_proj": ["q_proj", "k_proj"]},
    "experts": {"count": 5, "top_k": 2, "intermediate": 24, "layers": [1, 3], "names": ["w1", "w3", "w2"]},
}  # fmt: skip
DATA = {
    "lorac": 1,
    "name": "demo",
    "model": MODEL,
    "dtype": "float16",
    "adapters": {"slots": 4, "max_rank": 16, "targets": ["qkv_proj"]},
    "backends": {"torch": {}},
}


def changed(trail, value):
    data = copy.deepcopy(DATA)
    inner = data
    for key in trail[:-1]:
        inner = inner.setdefault(key, {})
    inner[trail[-1]] = value
    return data


def messages(data):
    with pytest.raises(SpecError) as caught:
        spec_from_data(data)
    return [problem.message for problem in caught.value.problems]


def test_defaults():
    spec, _ = spec_from_data(changed(["graphs"], {"decode": {"max_rows": 8}, "prefill": {"max_tokens": 64}}))
    assert spec.graphs.decode.buckets is None and spec.graphs.decode.streams == 1
    assert {name: (v.adapters, v.rank) for name, v in spec.graphs.decode.variants.items()} == {
        "nolora": (0, None),
        "lora": (None, None),
    }
    prefill = spec.graphs.prefill
    assert (prefill.mode, prefill.max_requests, prefill.max_padding) == ("breakable", 256, 2.0)
    assert (spec.parallel.tp, spec.parallel.ep, spec.parallel.dp_attention, spec.moe) == (1, 1, False, None)
    eager, _ = spec_from_data(DATA)
    assert eager.graphs.decode is None and eager.graphs.prefill is None and eager.targets == []


def test_backend_blocks_keep_their_order_and_raw_parameters(tmp_path):
    (tmp_path / "mine").mkdir()
    blocks = {
        "second": {"kind": "csgmv", "segments": {"chunk": {1: 16, 64: 32}}, "parameters": 3},
        "first": {"templates": "mine"},
    }
    spec, _ = spec_from_data(changed(["backends"], blocks), tmp_path)
    assert list(spec.backends) == ["second", "first"]
    assert spec.backends["second"].kind == "csgmv"
    assert spec.backends["second"].parameters == {"segments": {"chunk": {1: 16, 64: 32}}, "parameters": 3}
    assert spec.backends["first"].templates == "mine" and spec.backends["first"].parameters == {}


@pytest.mark.parametrize(
    ("trail", "values"),
    [
        (["adapters", "slots"], ["8", 8.0, True, None, 0, 257, [8]]),
        (["adapters", "max_rank"], ["16", False, 0, 513]),
        (["adapters", "shared_outer_experts"], ["yes", 1, 0, None]),
        (["adapters", "targets"], ["qkv_proj", [], [1], None]),
        (["dtype"], ["fp16", 16, None, "Float16"]),
        (["lorac"], [True, 1.0, "1", 0, 2]),
        (["name"], ["Demo", "1a", "a-b", "a" * 42, "", "a b", "é", "os", "json", "lorac", "class"]),
        (["backends"], [{}, [], None, {"A": {}}, {"a": []}, {"import": {}}]),
        (["parallel", "tp"], [0, "2", 2.5, True]),
        (["graphs", "decode"], [{}, {"buckets": []}, {"buckets": [True]}, {"max_rows": "8"}, {"buckets": [2, 2]}]),
        (["graphs", "decode"], [{"max_rows": 8, "variants": v} for v in ({}, {"a": {"rank": 1}}, {"a": None})]),
        (["graphs", "prefill"], [{}, {"max_tokens": 8, "max_padding": 0.99}, {"max_tokens": 8, "buckets": [9]}]),
        (["targets"], [["sm_91"], "sm_90", ["sm_90", "sm_90"]]),
    ],
)
def test_refused(trail, values):
    for value in values:
        assert messages(changed(trail, value)), value


@pytest.mark.parametrize(
    ("trail", "value", "hint"),
    [
        (["targets"], ["H100"], "H100 is sm_90"),
        (["targets"], ["NVIDIA H200 141GB"], "H200 is sm_90"),
        (["targets"], ["a100-80gb"], "A100 is sm_80"),
        (["targets"], ["L40S"], "L40S is sm_89"),
        (["targets"], ["B200"], "B200 is sm_100"),
        (["targets"], ["mi300x"], "MI300X is gfx942"),
        (["targets"], ["SM90"], "did you mean sm_90?"),
        *[(["targets"], [name], "") for name in ("V100", "sm_91", "sm_70", "90", 90, "T4")],
        (["targets"], "sm_90", "write [sm_90]"),
        (["targets"], "H100", ""),
        (["adapters", "targets"], "all-linear", "write a list: [one, two]"),
        (["graphs", "decode"], {"buckets": "1-16"}, ""),
        (["graphs", "decode"], {"buckets": 16}, "write [16]"),
        (["graphs", "decode"], {"buckets": 0}, ""),
    ],
)
def test_hints_are_accepted(trail, value, hint):
    with pytest.raises(SpecError) as caught:
        spec_from_data(changed(trail, value))
    assert [problem.hint for problem in caught.value.problems] == [hint]


def test_every_target_has_its_cards():
    assert list(CARDS) == list(get_args(Target))


def test_all_problems_of_a_file_at_once(tmp_path):
    path = tmp_path / "spec.yaml"
    path.write_text(
        "lorac: 1\nname: Demo\nname: demo\nmodel: {preset: llama-3.1-8b}\ndtype: half\n"
        "adapters: {slots: 2, max_rank: 8, targets: [qkv_proj, q_proj]}\n"
        "backends: {torch: {templates: ..}, no-name: {}}\n"
        "graphs:\n  decode: {max_rows: 4, buckets: [8], variants: {all: {}, two: {adapters: 3}}}\n"
        "  prefill: {max_tokens: 010, bucket: 3}\ntargets: [sm_9]\n"
    )
    with pytest.raises(SpecError) as caught:
        load_spec(path)
    assert [(problem.line, problem.column) for problem in caught.value.problems] == [
        (2, 7), (3, 1), (5, 8), (6, 55), (7, 31), (7, 36), (9, 35), (9, 75), (10, 25), (10, 30), (11, 11),
    ]  # fmt: skip
    rows = json.loads(format_problems(caught.value.problems, "json"))
    assert [row["line"] for row in rows] == [problem.line for problem in caught.value.problems]
    assert format_problems(caught.value.problems, "github").count(f"::error file={path},line=") == 11


def test_the_file_is_named_as_the_user_named_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "x.yaml").write_text("lorac: 2\n")
    with pytest.raises(SpecError) as caught:
        load_spec("sub/../sub/x.yaml")
    assert str(caught.value).startswith("sub/../sub/x.yaml:1:1: ")


def test_written_out_short_and_long():
    _, short = spec_from_data(DATA)
    assert short.family == "custom" and short.attention == (4, 2, 16)
    assert [(linear.name, linear.in_features, linear.out_features) for linear in short.linears] == [
        ("q_proj", 64, 64), ("k_proj", 64, 32), ("v_proj", 64, 32), ("o_proj", 64, 64),
        ("gate_proj", 64, 96), ("up_proj", 64, 96), ("down_proj", 96, 64),
    ]  # fmt: skip
    data = changed(["model"], LONG)
    data["adapters"]["targets"] = ["qk_proj", "router", "experts", "lm_head"]
    _, long = spec_from_data(data)
    assert long.linear("router").layers == (1, 3) and long.linear("router").sharding == "replicated"
    assert long.linear("q_proj").layers == (0, 1, 2, 3) and long.linear("q_proj").units == 3
    assert long.fused == (("qk_proj", ("q_proj", "k_proj")),) and long.tied
    assert (long.experts.count, long.experts.layers, long.experts.names) == (5, (1, 3), ("w1", "w3", "w2"))
    assert target_names(long) == ["qk_proj", "q_proj", "k_proj", "router", "lm_head", "embed_tokens", "experts"]


def test_config_paths_stay_inside_the_folder(tmp_path):
    folder = tmp_path / "specs"
    (folder / "sub").mkdir(parents=True)
    config = json.dumps(
        {"model_type": "gemma3_text", "hidden_size": 64, "intermediate_size": 8, "num_hidden_layers": 1}
    )
    for file in (tmp_path / "config.json", folder / "sub" / "config.json"):
        file.write_text(config)
    (folder / "link.json").symlink_to(tmp_path / "config.json")
    spec_from_data(changed(["model"], {"config": "sub/config.json"}), folder)
    spec_from_data(changed(["model"], {"config": "sub/../sub/config.json"}), folder)
    for outside in ("../config.json", "link.json", str(folder / "sub" / "config.json"), "sub/../../config.json"):
        with pytest.raises(SpecError, match="not inside the spec's folder"):
            spec_from_data(changed(["model"], {"config": outside}), folder)


def test_example_specs_are_valid_and_name_the_schema():
    paths = sorted(SPECS.glob("*.yaml"))
    assert paths
    for path in paths:
        load_spec(path)
        assert path.read_text().startswith("# yaml-language-server: $schema=schema.json\n")


def test_the_committed_schema_is_current_and_describes_every_key():
    text = json_schema()
    assert (SPECS / "schema.json").read_text() == text
    schema = json.loads(text)
    blocks = [schema, *schema["$defs"].values()]
    assert all(field.get("description") for block in blocks for field in block["properties"].values())
    assert set(schema["properties"]) == set(Spec.model_fields)


@pytest.mark.parametrize("preset", presets())
def test_init_writes_a_spec_that_loads(tmp_path, preset):
    config = tmp_path / "a model's" / "config.json"
    config.parent.mkdir()
    config.write_text((Path(preset_shapes.__code__.co_filename).parent / "presets" / f"{preset}.json").read_text())
    path = tmp_path / "demo.yaml"
    path.write_text(init_spec(config, "demo", tmp_path))
    loaded = load_spec(path)
    assert loaded.shapes == preset_shapes(preset)
    assert "experts" not in loaded.spec.adapters.targets
    assert ("experts" in path.read_text()) == (loaded.shapes.experts is not None)
    # every linear is adapted, once: under its own name or inside a fused one
    fused = dict(loaded.shapes.fused)
    reached = [part for target in loaded.spec.adapters.targets for part in fused.get(target, (target,))]
    assert sorted(reached) == sorted(linear.name for linear in loaded.shapes.linears)
    assert yaml.safe_load(path.read_text())["name"] == "demo"
    # parts are offered only where they are legal targets, and a printed spec says where its config path holds
    parts = {part for _, inner in loaded.shapes.fused for part in inner}
    offered = "list them instead" in " ".join(path.read_text().replace("# ", "").split())
    assert offered == bool(parts.intersection(target_names(loaded.shapes)))
    assert f'relative to this file; save it in "{config.parent}"' in init_spec(config, "demo")


def test_init_refuses_what_would_not_load(tmp_path):
    config = tmp_path / "config.json"
    config.write_text('{"model_type": "bert"}')
    with pytest.raises(SpecError, match="no model_type 'bert'"):
        init_spec(config, "demo")
    with pytest.raises(SpecError, match="cannot be called 'My-Model'"):
        init_spec(config, "My-Model")
    with pytest.raises(SpecError, match="is not inside"):
        init_spec(config, "demo", tmp_path / "specs")
