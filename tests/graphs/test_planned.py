"""The plan's list of graphs is what packages capture."""

import yaml
from serving import SPEC, spec

from lorac.compile import plan_spec
from lorac.plan.graphs import planned_graphs

WITH_HEAD = spec(adapters__targets=["qkv_proj", "down_proj", "lm_head"])


def test_planned_graphs_are_those_packages_capture(build, tmp_path):
    (tmp_path / "spec.yaml").write_text(yaml.safe_dump(SPEC))
    planned = planned_graphs(plan_spec(tmp_path / "spec.yaml").plan)
    package = build(SPEC)
    for phase in ("decode", "prefill"):
        tables = getattr(package, phase).GRAPHS
        for backend in package.BACKENDS:
            of = [(g.bucket, g.variant) for g in planned if (g.backend, g.phase) == (backend, phase)]
            assert of == list(tables[backend])
    for graph in planned:
        assert (graph.kernels == 0) == (graph.variant == "nolora" or graph.backend == "torch")
        assert (graph.bytes == 0) == (graph.kernels == 0)
        assert graph.segments <= max(4, graph.bucket)


def test_lm_head_is_in_decode_graphs_alone(tmp_path):
    (tmp_path / "spec.yaml").write_text(yaml.safe_dump(WITH_HEAD))
    planned = planned_graphs(plan_spec(tmp_path / "spec.yaml").plan)
    counts = {g.phase: g.kernels for g in planned if g.backend == "csgmv" and g.variant == "lora"}
    assert counts["decode"] - counts["prefill"] == 2  # shrink and expand of lm_head
