"""The graphs of a plan, one by one, with what LoRA adds to each: kernels, and bytes of device memory."""

from dataclasses import dataclass

from lorac.plan.model import BackendPlan, Plan

# of a kernel node in an instantiated graph, about: what was taken stands in `graphs.report()`
NODE_BYTES = 2048


@dataclass(frozen=True)
class GraphPlan:
    """One graph that will be captured, in the order of capture."""

    backend: str
    phase: str  # decode | prefill
    bucket: int
    variant: str
    segments: int  # that its launches cover; 0 without LoRA
    kernels: int  # LoRA's, over all layers
    bytes: int  # that those take on the device; activations are the forward's, in a pool all graphs share


def planned_graphs(plan: Plan) -> tuple[GraphPlan, ...]:
    """Every graph of every backend. Graphs of one stream of steps: each further stream has as many again."""
    bare = {variant.name for variant in plan.variants if not variant.adapters}
    graphs = []
    for backend in plan.backends:
        for phase, buckets in (("decode", backend.decode), ("prefill", backend.prefill)):
            launched = _kernels(plan, backend, phase)
            for bucket in reversed(buckets):
                for variant in reversed(bucket.variants):
                    kernels = 0 if variant in bare else launched
                    segments = 0 if variant in bare else bucket.grid.segments
                    graphs.append(
                        GraphPlan(backend.name, phase, bucket.size, variant, segments, kernels, kernels * NODE_BYTES)
                    )
    return tuple(graphs)


def _kernels(plan: Plan, backend: BackendPlan, phase: str) -> int:
    """Launches of a backend's kernels in one forward; lm_head runs after a prefill graph, not in it."""
    return sum(
        plan.module(kernel.module).instances
        for kernel in backend.kernels
        if phase == "decode" or plan.module(kernel.module).kind != "lm_head"
    )
