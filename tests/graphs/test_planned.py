"""The plan's list of graphs is what packages capture, launch and need."""

import pytest
import torch
import yaml
from serving import SPEC, spec

from lorac.compile import plan_spec
from lorac.plan.graphs import planned_graphs

# every kind of dense module, K long enough to be split, buckets for every family of the fused kernels
DENSE = spec(
    model__hidden=512,
    model__intermediate=4608,
    adapters__targets=["qkv_proj", "gate_up_proj", "down_proj", "lm_head", "embed_tokens"],
    backends={"fused": {}, **SPEC["backends"]},
    graphs__decode__buckets=[1, 2, 16, 64, 96],
    graphs__prefill__max_tokens=300,
    graphs__prefill__buckets=[16, 128, 300],
)
EXPERTS = {
    "lorac": 1,
    "name": "mixture",
    "model": {
        "hidden": 64, "layers": 1, "vocab": 64, "tied": False,
        "linears": {"o_proj": {"path": "attn.o_proj", "in": 64, "out": 64}},
        "experts": {"count": 4, "top_k": 2, "intermediate": 48},
    },
    "dtype": "float32",
    "adapters": {"slots": 3, "max_rank": 16, "targets": ["experts"]},
    "backends": {"fused": {}},
    "graphs": {"decode": {"buckets": [1, 2, 3, 16, 17, 200]}, "prefill": {"max_tokens": 32, "buckets": [32]}},
}  # fmt: skip


def planned(data: dict, tmp_path):
    (tmp_path / "spec.yaml").write_text(yaml.safe_dump(data))
    return planned_graphs(plan_spec(tmp_path / "spec.yaml").plan)


@pytest.fixture
def taken(monkeypatch):
    """taken(package, graph, forward) -> kernels launched, and bytes of scratch in one run of a graph's batch."""
    launched = []
    monkeypatch.setattr("lorac.runtime.launch.Kernel.run", lambda kernel, *_, **__: launched.append(kernel.name))

    def run(package, graph, forward) -> tuple[int, int]:
        step = package.Step(package.Slots("cpu"), graph.backend)
        batch = step.describe(graph.phase, graph.bucket, graph.variant)
        launched.clear()
        with step.using(batch):
            forward(step, graph.bucket)
        # the counters of split sums are not planned: they are a few integers
        return len(launched), sum(of.nbytes for of in step.scratch_tensors() if of.is_floating_point())

    return run


def test_planned_graphs_are_those_packages_capture(build, tmp_path):
    graphs = planned(spec(graphs__decode__streams=2), tmp_path)
    package = build(SPEC)
    for phase, mode in (("decode", "captured"), ("prefill", "breakable")):
        tables = getattr(package, phase).GRAPHS
        for backend in package.BACKENDS:
            of = [graph for graph in graphs if (graph.backend, graph.phase) == (backend, phase)]
            for stream in (0, 1):
                own = [(graph.bucket, graph.variant) for graph in of if graph.stream == stream]
                assert own == list(tables[backend])
            assert {graph.mode for graph in of} <= {mode}
    for graph in graphs:
        assert (graph.launches == 0) == (graph.variant == "nolora" or graph.backend == "torch")
        assert (graph.bytes == 0) == (graph.scratch_bytes == 0) == (graph.launches == 0)
        assert graph.segments <= max(4, graph.bucket)


def test_dense_graphs_launch_and_need_what_is_planned(build, tmp_path, taken):
    package = build(DENSE)

    def forward(step, rows: int) -> None:
        for module in package.LAYOUT.modules:
            y = torch.zeros(rows, module.out_features)
            if module.kind == "embedding":
                package.add(module.name, 0, torch.zeros(rows, dtype=torch.int64), y, step)
            elif module.kind == "linear" or step.batch.phase == "decode":  # lm_head is not in prefill graphs
                weight = torch.zeros(module.out_features, module.in_features)
                package.linear(module.name, 0, torch.zeros(rows, module.in_features), weight, step)

    graphs = planned(DENSE, tmp_path)
    for graph in graphs:
        if graph.backend != "torch":
            assert taken(package, graph, forward) == (graph.launches, graph.scratch_bytes), graph
    # fused: a kernel with the base in it, for three modules; the library has them at 300 rows
    base = {g.bucket: g.launches for g in graphs if (g.backend, g.variant) == ("fused", "nolora")}
    assert base == {1: 3, 2: 3, 16: 3, 64: 3, 96: 3, 128: 3, 300: 0}
    assert len({graph.scratch_bytes for graph in graphs}) > 10


def test_graphs_of_experts_launch_and_need_no_more_than_is_planned(build, tmp_path, taken):
    package = build(EXPERTS)
    up, down = package.LAYOUT.modules
    w13, w2 = (torch.zeros(4, module.out_features, module.in_features) for module in (up, down))

    def forward(step, rows: int) -> None:
        ids = torch.tensor([[0, 1]] * rows, dtype=torch.int32)
        package.moe(0, torch.zeros(rows, 64), ids, torch.ones(rows, 2), w13, w2, step)

    for graph in planned(EXPERTS, tmp_path):
        launches, scratch = taken(package, graph, forward)
        assert 2 <= launches <= graph.launches <= 8, graph
        assert 0 < scratch <= graph.scratch_bytes, graph
