"""The graphs of a plan, one by one, with what each takes of the device for the kernels of its package."""

from dataclasses import dataclass, replace

from lorac.plan.buffers import scratch_bytes
from lorac.plan.kernels import ANY_ADAPTERS, launched
from lorac.plan.model import BackendPlan, BucketPlan, KernelPlan, Launch, Plan, Variant

# of a kernel node in an instantiated graph, about; what a graph took in all stands in `graphs.report()`
NODE_BYTES = 2048


@dataclass(frozen=True)
class GraphPlan:
    """One graph that will be captured. The forward's own kernels and its activations are not in the figures."""

    backend: str
    phase: str  # decode | prefill
    mode: str  # captured, for decode | breakable | full | tc_piecewise
    stream: int
    bucket: int
    variant: str
    segments: int  # that its launches cover; 0 without LoRA
    launches: int  # of the package's kernels, over all layers; at most, where a backend chooses between kernels
    bytes: int  # of the graph's own: its nodes for those launches
    scratch_bytes: int  # that those launches use of the step's scratch, which all graphs of the step share


def planned_graphs(plan: Plan) -> tuple[GraphPlan, ...]:
    """Every graph of every backend and stream, in the order of capture."""
    variants = {variant.name: variant for variant in plan.variants}
    modules = {module.name: module for module in plan.modules}
    graphs = []
    for backend in plan.backends:
        for phase, mode, buckets in phases(backend):
            for bucket in reversed(buckets):
                for name in reversed(bucket.variants):
                    served = _served(plan, backend, phase, bucket, variants[name])
                    count = sum(modules[kernel.module].instances for kernel, _ in served)
                    scratch = scratch_bytes(served, modules, bucket.size, plan.slots, plan.max_rank)
                    graph = GraphPlan(
                        backend=backend.name,
                        phase=phase,
                        mode=mode,
                        stream=0,
                        bucket=bucket.size,
                        variant=name,
                        segments=bucket.grid.segments if variants[name].adapters else 0,
                        launches=count,
                        bytes=count * NODE_BYTES,
                        scratch_bytes=sum(scratch.values()),
                    )
                    graphs.append(graph)
    return tuple(replace(graph, stream=stream) for stream in range(plan.decode.streams) for graph in graphs)


def phases(backend: BackendPlan) -> list[tuple[str, str, tuple[BucketPlan, ...]]]:
    """(phase, mode, buckets) of a backend; the mode is `eager` where it has no graphs."""
    decode = "captured" if backend.decode else "eager"
    prefill = "eager" if backend.prefill_mode == "off" else backend.prefill_mode
    return [("decode", decode, backend.decode), ("prefill", prefill, backend.prefill)]


def _served(
    plan: Plan, backend: BackendPlan, phase: str, bucket: BucketPlan, variant: Variant
) -> list[tuple[KernelPlan, Launch]]:
    """The kernels that serve a bucket, each with its configuration. lm_head runs after a prefill graph, not in it."""
    adapters = min(variant.adapters, bucket.grid.requests)
    found = []
    for kernel in launched(backend.kernels, bucket.size, adapters > 0):
        launch = _pick(kernel, bucket.size, adapters, variant.rank)
        if launch and (phase == "decode" or plan.module(kernel.module).kind != "lm_head"):
            found.append((kernel, launch))
    return found


def _pick(kernel: KernelPlan, rows: int, adapters: int, rank: int) -> Launch | None:
    """The configuration that the runtime picks for a batch at these bounds; None where it has none."""
    for launch in kernel.launches:
        within = rank <= launch.rank and (rows <= launch.rows or not launch.rows)
        if within and (adapters <= launch.adapters or launch.adapters == ANY_ADAPTERS):
            return launch
    return None
