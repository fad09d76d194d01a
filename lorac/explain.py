"""A plan as tables a person reads in a minute, or as JSON: memory, graphs, segment caps, kernels, and why."""

import json
from dataclasses import asdict
from itertools import groupby

from lorac.plan.graphs import NODE_BYTES, GraphPlan, phases, planned_graphs
from lorac.plan.kernels import UNLIMITED
from lorac.plan.model import BucketPlan, Launch, Plan, Variant
from lorac.tables import compact, size, table


def explain(plan: Plan) -> str:
    """The tables. Bytes are device memory on one rank."""
    graphs = planned_graphs(plan)
    parts = (
        _head(plan),
        _memory(plan),
        _graphs(plan, graphs),
        _each_graph(graphs),
        _caps(plan),
        _kernels(plan),
        _decisions(plan),
        _totals(plan, graphs),
    )
    return "\n\n".join(filter(None, parts))


def explain_json(plan: Plan) -> str:
    """The whole plan, its graphs one by one, and its totals, as indented JSON."""
    graphs = planned_graphs(plan)
    parts = {"plan": asdict(plan), "graphs": [asdict(graph) for graph in graphs], "totals": totals(plan, graphs)}
    return json.dumps(parts, indent=2)


def totals(plan: Plan, graphs: tuple[GraphPlan, ...]) -> dict[str, object]:
    """Sums over the plan: bytes by purpose, and per backend its graphs, kernels, launches and bytes of scratch."""
    slots = sum(buffer.bytes for buffer in plan.buffers if buffer.name != "metadata")
    return {
        "slot_bytes": slots,
        "bytes_per_slot": slots // plan.slots,
        "metadata_bytes": sum(buffer.bytes for buffer in plan.buffers) - slots,
        "backends": {
            backend.name: {
                "graphs": sum(graph.backend == backend.name for graph in graphs),
                "graph_bytes": sum(graph.bytes for graph in graphs if graph.backend == backend.name),
                "kernels": len(backend.kernels),
                "launches": sum(len(kernel.launches) for kernel in backend.kernels),
                "scratch_bytes": sum(count for _, count in backend.scratch),
            }
            for backend in plan.backends
        },
    }


def _head(plan: Plan) -> str:
    model = f"{plan.family}, {plan.layers} layers of width {plan.hidden}, vocabulary {plan.vocab}, {plan.dtype}"
    share = f"; what follows is one rank of tp {plan.tp}, ep {plan.ep}" if plan.tp * plan.ep > 1 else ""
    targets = f"; compiled for {', '.join(plan.targets)}" if plan.targets else ""
    return f"{plan.name}: {model}\n{plan.slots} slots of rank up to {plan.max_rank}{targets}{share}"


def _memory(plan: Plan) -> str:
    bytes_of = {buffer.name: buffer.bytes for buffer in plan.buffers}
    rows = []
    for module in plan.modules:
        a, b, *small = (bytes_of[f"{name}.{module.name}"] for name in ("a", "b", "rank", "scale"))
        b += sum(bytes_of[f"b.{module.name}.{width}"] for width in module.narrow)
        slices = " + ".join(f"{part.name} {part.width}" for part in module.slices)
        experts = f" x {module.local_experts} experts" if module.experts else ""
        total = a + b + sum(small)
        shape = (module.name, module.instances, module.in_features, slices + experts, module.sharding)
        rows.append((*shape, size(a), size(b), size(total), size(total // plan.slots)))
    heads = ("module", "instances", "in", "out", "sharding", "A", "B", "all slots", "one slot")
    return "Modules and their slot buffers\n" + table(heads, rows)


def _graphs(plan: Plan, graphs: tuple[GraphPlan, ...]) -> str:
    rows = []
    for backend in plan.backends:
        for phase, mode, buckets in phases(backend):
            own = [graph.bytes for graph in graphs if (graph.backend, graph.phase) == (backend.name, phase)]
            rows.append((backend.name, phase, mode, len(own), size(sum(own)), _variants(buckets)))
    lines = [f"variant {variant.name}: {_bound(variant)}" for variant in plan.variants]
    for phase, unit, sizes in (("decode", "rows", plan.decode.buckets), ("prefill", "tokens", plan.prefill.buckets)):
        lines += _wrap(f"{phase} buckets, in {unit}:", compact(sizes).split(", "), ", ") if sizes else []
    if plan.decode.streams > 1:
        lines.append(f"{plan.decode.streams} streams of steps, each with graphs, metadata and scratch of its own")
    return "\n".join(["Graphs", *lines, table(("backend", "phase", "mode", "graphs", "bytes", "variants"), rows)])


def _each_graph(graphs: tuple[GraphPlan, ...]) -> str:
    """A table per phase: a row to a bucket, a column to a variant of a backend. One stream stands for all."""
    if not graphs:
        return ""
    lines = [
        "Each graph: a row is a bucket, a column a variant, a cell the device memory that the graph takes",
        f"  included: launches of this package's kernels over all layers, at most, at about {size(NODE_BYTES)} each",
        "  shared: the scratch that those launches use at that bucket, allocated once for the largest",
        "  not included: the forward's own kernels, torch operations, and activations, in one pool for all graphs;",
        "    once captured, `report()` says what each took with them",
    ]
    for phase, mode in dict.fromkeys((graph.phase, graph.mode) for graph in graphs):
        of = [graph for graph in graphs if (graph.phase, graph.mode, graph.stream) == (phase, mode, 0)]
        unit = f"{mode} {phase}, {'rows' if phase == 'decode' else 'tokens'}"
        backends = list(dict.fromkeys(graph.backend for graph in of))
        together = _by_bucket(of, backends, unit)
        wide = max(map(len, together.splitlines())) > 160
        lines += [_by_bucket(of, [backend], unit) for backend in backends] if wide else [together]
    return "\n".join(lines)


def _by_bucket(graphs: list[GraphPlan], backends: list[str], unit: str) -> str:
    """The graphs of some backends, side by side."""
    buckets = sorted({graph.bucket for graph in graphs})
    heads, columns = [unit], [buckets]
    for backend in backends:
        own = {(graph.variant, graph.bucket): graph for graph in graphs if graph.backend == backend}
        variants = list(dict.fromkeys(variant for variant, _ in own))[::-1]  # graphs are listed from wide to narrow
        for variant in variants:
            heads.append(variant if variant != variants[0] else f"{backend}: {variant}")
            cells = [own.get((variant, bucket)) for bucket in buckets]
            columns.append([size(cell.bytes) if cell else "" for cell in cells])
        scratch = [max(graph.scratch_bytes for graph in own.values() if graph.bucket == bucket) for bucket in buckets]
        if any(scratch):
            heads.append("scratch")
            columns.append([size(count) for count in scratch])
    return table(heads, zip(*columns, strict=True))


def _variants(buckets: tuple[BucketPlan, ...]) -> str:
    """The variants, with the bucket each begins to occur at where that is not the first."""
    first = {name: bucket.size for bucket in reversed(buckets) for name in bucket.variants}
    return ", ".join(
        name if at == buckets[0].size else f"{name} (from {at})"
        for name, at in sorted(first.items(), key=lambda i: i[1])
    )


def _bound(variant: Variant) -> str:
    if not variant.adapters:
        return "no adapter"
    return f"at most {variant.adapters} adapter{'s' * (variant.adapters > 1)} of rank up to {variant.rank}"


def _caps(plan: Plan) -> str:
    """Segment caps as `bucket → cap`, neighbouring buckets with the same cap together."""
    lines = []
    for backend in plan.backends:
        for phase in ("decode", "prefill"):
            grids = [(bucket.size, bucket.grid) for bucket in getattr(backend, phase) if bucket.grid.segments]
            for chunk, part in groupby(grids, key=lambda sized: sized[1].chunk):
                caps = [(cap, [size for size, _ in run]) for cap, run in groupby(part, key=lambda s: s[1].segments)]
                items = [f"{sizes[0]}{f'…{sizes[-1]}' if sizes[1:] else ''} → {cap}" for cap, sizes in caps]
                head = f"{backend.name} {phase}{f' in chunks of {chunk}' if chunk else ''}:"
                lines += _wrap(head, items, "   ")
    return "\n".join(["Segments that a bucket's launches cover, bucket → cap", *lines]) if lines else ""


def _kernels(plan: Plan) -> str:
    """Launch configurations. Kernels of one stage that are launched alike share lines, over modules and backends."""
    alike: dict[tuple, dict[str, list[str]]] = {}
    for backend in plan.backends:
        for kernel in backend.kernels:
            users = alike.setdefault((kernel.stage, kernel.launches, kernel.library), {})
            users.setdefault(backend.name, []).append(kernel.module)
    rows = []
    for (stage, launches, library), users in alike.items():
        # backends may serve different modules, so their lists may differ
        for modules, group in groupby(sorted(users, key=users.get), key=users.get):
            name = (stage, ", ".join(modules), ", ".join(group))
            for launch in launches:
                rows.append((*name, *_launch(launch)))
                name = ("", "", "")
            for part in library:
                bound = f"{part.least}…{part.most}" if part.most < UNLIMITED else f"≥ {part.least}"
                whose = ("≤ 0", "≤ 0") if part.bare else ("any", "≥ 1")
                rows.append((*name, bound, *whose, "left to the library's GEMM", "", "", part.source))
    heads = ("kernel", "modules", "backends", "rows", "rank", "adapters", "tile", "warps", "stages", "from")
    return "Kernels, by the batch they serve\n" + table(heads, rows) if rows else ""


def _launch(launch: Launch) -> tuple[object, ...]:
    tile = " ".join(f"{name.removeprefix('BLOCK_')}={value}" for name, value in launch.tile)
    rows = f"≤ {launch.rows}" if launch.rows else "any"
    adapters = f"≤ {launch.adapters}" if launch.adapters >= 0 else "any"
    return rows, f"≤ {launch.rank}", adapters, tile, launch.warps, launch.stages, launch.source + ", PDL" * launch.pdl


def _decisions(plan: Plan) -> str:
    if not plan.decisions:
        return ""
    ordered = sorted(plan.decisions, key=lambda decision: decision.level != "warning")
    rows = [(f"{d.subject}{' (warning)' * (d.level == 'warning')}", d.outcome, d.reason) for d in ordered]
    return "Decisions\n" + table(("about", "decided", "because"), rows)


def _totals(plan: Plan, graphs: tuple[GraphPlan, ...]) -> str:
    sums = totals(plan, graphs)
    slots = f"{size(sums['slot_bytes'])} for {plan.slots} slots, {size(sums['bytes_per_slot'])} each"
    lines = [f"Device memory: {slots}; {size(sums['metadata_bytes'])} for a step's metadata"]
    rows = [
        (name, of["graphs"], of["kernels"], of["launches"], size(of["scratch_bytes"]))
        for name, of in sums["backends"].items()
    ]
    heads = ("backend", "graphs", "kernels", "configurations", "scratch")
    return "\n".join([*lines, table(heads, rows)])


def _wrap(head: str, items: list[str], gap: str) -> list[str]:
    """`head` and its items, in lines of at most 120 columns that are broken between items only."""
    lines, line = [], head
    for number, item in enumerate(items):
        part = (gap if number else " ") + item
        if len(line + part) > 120:
            lines, line = [*lines, line + gap.rstrip()], "   "
            part = " " + item
        line += part
    return [*lines, line]
