"""A plan as tables a person reads in a minute, or as JSON: memory, graphs, segment caps, kernels, and why."""

import json
from dataclasses import asdict
from itertools import groupby

from lorac.plan.model import BackendPlan, BucketPlan, Launch, Plan, Variant
from lorac.tables import compact, size, table


def explain(plan: Plan) -> str:
    """The tables. Bytes are device memory on one rank."""
    parts = (_head(plan), _memory(plan), _graphs(plan), _caps(plan), _kernels(plan), _decisions(plan), _totals(plan))
    return "\n\n".join(filter(None, parts))


def explain_json(plan: Plan) -> str:
    """The whole plan, and its totals, as indented JSON."""
    return json.dumps({"plan": asdict(plan), "totals": totals(plan)}, indent=2)


def totals(plan: Plan) -> dict[str, object]:
    """Sums over the plan: bytes by purpose, and per backend its graphs, kernels, launches and bytes of scratch."""
    slots = sum(buffer.bytes for buffer in plan.buffers if buffer.name != "metadata")
    return {
        "slot_bytes": slots,
        "bytes_per_slot": slots // plan.slots,
        "metadata_bytes": sum(buffer.bytes for buffer in plan.buffers) - slots,
        "backends": {
            backend.name: {
                "graphs": sum(len(bucket.variants) for bucket in (*backend.decode, *backend.prefill)),
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
        slices = " + ".join(f"{part.name} {part.width}" for part in module.slices)
        experts = f" x {module.local_experts} experts" if module.experts else ""
        total = a + b + sum(small)
        shape = (module.name, module.instances, module.in_features, slices + experts, module.sharding)
        rows.append((*shape, size(a), size(b), size(total), size(total // plan.slots)))
    heads = ("module", "instances", "in", "out", "sharding", "A", "B", "all slots", "one slot")
    return "Modules and their slot buffers\n" + table(heads, rows)


def _graphs(plan: Plan) -> str:
    rows = []
    for backend in plan.backends:
        for phase, mode, buckets in _phases(backend):
            count = sum(len(bucket.variants) for bucket in buckets)
            rows.append((backend.name, phase, mode, count, _variants(buckets)))
    lines = [f"variant {variant.name}: {_bound(variant)}" for variant in plan.variants]
    for phase, unit, sizes in (("decode", "rows", plan.decode.buckets), ("prefill", "tokens", plan.prefill.buckets)):
        lines += _wrap(f"{phase} buckets, in {unit}:", compact(sizes).split(", "), ", ") if sizes else []
    return "\n".join(["Graphs", *lines, table(("backend", "phase", "mode", "graphs", "variants"), rows)])


def _phases(backend: BackendPlan) -> list[tuple[str, str, tuple[BucketPlan, ...]]]:
    decode = "captured" if backend.decode else "eager"
    prefill = "eager" if backend.prefill_mode == "off" else backend.prefill_mode
    return [("decode", decode, backend.decode), ("prefill", prefill, backend.prefill)]


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
            users = alike.setdefault((kernel.stage, kernel.launches), {})
            users.setdefault(backend.name, []).append(kernel.module)
    rows = []
    for (stage, launches), users in alike.items():
        # backends may serve different modules, so their lists may differ
        for modules, group in groupby(sorted(users, key=users.get), key=users.get):
            name = (stage, ", ".join(modules), ", ".join(group))
            for launch in launches:
                rows.append((*name, *_launch(launch)))
                name = ("", "", "")
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


def _totals(plan: Plan) -> str:
    sums = totals(plan)
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
