"""From a spec to its plan: one call, every decision in it."""

from dataclasses import replace

from lorac.errors import Problem, SpecError
from lorac.plan import buckets, buffers, decisions, kernels, modules, parameters, variants
from lorac.plan.model import BackendPlan, BucketPlan, Decision, DecodePlan, ModulePlan, Plan, PrefillPlan, Variant
from lorac.runtime.segments import Segments, decode_grid, prefill_grid, segment_slots
from lorac.spec.backend import Declaration, Tile
from lorac.spec.folders import serving_experts
from lorac.spec.schema import Spec
from lorac.spec.shapes import Shapes

Tuned = dict[str, dict[str, tuple[tuple[Tile, str], ...]]]  # backend block -> stage -> tiles with their source


def make_plan(spec: Spec, shapes: Shapes, declarations: dict[str, Declaration], tuned: Tuned) -> Plan:
    """Decide everything. `declarations` holds what each backend block's folder declares.

    Raises SpecError with every problem of the plan; their paths are key paths of the spec.
    """
    slots, max_rank, parallel = spec.adapters.slots, spec.adapters.max_rank, spec.parallel
    planned, problems = modules.plan_modules(
        shapes, spec.adapters.targets, parallel.tp, parallel.ep, spec.adapters.shared_outer_experts
    )
    kinds = {module.kind for module in planned}
    experts = "experts" in kinds
    decode, prefill, notes = _graphs(spec)
    bounds = spec.graphs.decode.variants if spec.graphs and spec.graphs.decode else None
    resolved = variants.resolve(bounds, slots, max_rank) if bounds else (Variant("lora", slots, max_rank),)
    runner = spec.moe.runner if spec.moe else "triton"
    resolved, found = decisions.moe_variants(resolved, experts, runner)
    notes += found + decisions.model_notes(kinds, prefill.mode != "off", shapes.tied)
    backends = []
    for block, backend in spec.backends.items():
        declaration = declarations[block]
        values, rule, wrong = parameters.resolve(block, backend.parameters, declaration)
        problems += wrong + _limits(block, declaration, spec) + _uneven(block, declaration, planned, spec)
        plan, more = _backend(
            block, declaration, spec, planned, resolved, decode, prefill, values, rule, tuned.get(block, {}), kinds
        )
        backends.append(plan)
        notes += more
    if experts and not any(declaration.experts for declaration in declarations.values()):
        index = spec.adapters.targets.index("experts")
        hint = f"add one that does to backends, of lorac's own: {', '.join(serving_experts())}"
        problems.append(Problem("no backend of this spec serves experts", ("adapters", "targets", index), hint=hint))
    if problems:
        raise SpecError(problems)
    planned = _with_copies(planned, backends, kernels.narrow_widths(kernels.kernel_ranks(resolved, max_rank), max_rank))
    if copied := max(module.narrow for module in planned):
        columns = " and ".join(map(str, copied))
        reason = "a batch of a variant of such rank does not read the columns of a larger one"
        notes.append(Decision("copies of B", f"with {columns} columns a slot, for modules read in whole tiles", reason))
    memory = _buffers(spec, planned, backends, decode, prefill, 1 + len(copied))
    return Plan(
        name=spec.name,
        family=shapes.family,
        dtype=spec.dtype,
        slots=slots,
        max_rank=max_rank,
        hidden=shapes.hidden,
        vocab=shapes.vocab,
        layers=shapes.layers,
        tied=shapes.tied,
        tp=parallel.tp,
        ep=parallel.ep,
        agree=bool(spec.graphs and spec.graphs.agree),
        moe_runner=runner if experts else "",
        modules=planned,
        paths=modules.model_paths(shapes),
        variants=resolved,
        decode=decode,
        prefill=prefill,
        backends=tuple(backends),
        buffers=memory,
        decisions=tuple(notes),
        targets=spec.targets,
    )


def _graphs(spec: Spec) -> tuple[DecodePlan, PrefillPlan, list[Decision]]:
    """Buckets of both phases; a spec without graphs gets none."""
    notes, decode, prefill = [], DecodePlan((), 1), PrefillPlan("off", (), 0, 0, 1.0)
    asked = spec.graphs.decode if spec.graphs else None
    if asked:
        sizes = buckets.decode_buckets(asked.buckets, asked.max_rows)
        if asked.buckets and sizes != tuple(asked.buckets):
            notes.append(Decision("decode buckets", f"{sizes[-1]} added", "the stated maximum is itself a bucket"))
        decode = DecodePlan(sizes, asked.streams)
    asked = spec.graphs.prefill if spec.graphs else None
    if asked:
        sizes = buckets.prefill_buckets(asked.buckets, asked.max_tokens)
        if asked.buckets and sizes != tuple(asked.buckets):
            notes.append(Decision("prefill buckets", f"{sizes[-1]} added", "the stated maximum is itself a bucket"))
        sizes = () if asked.mode == "off" else sizes
        prefill = PrefillPlan(asked.mode, sizes, asked.max_tokens, asked.max_requests, float(asked.max_padding))
    return decode, prefill, notes


def _limits(block: str, declaration: Declaration, spec: Spec) -> list[Problem]:
    """What makes a backend unable to serve the spec at all."""
    problems = []
    rank, path = spec.adapters.max_rank, ("adapters", "max_rank")
    if rank > declaration.max_rank:
        message = f"max_rank {rank} is above the {declaration.max_rank} that backend {block!r} takes"
        problems.append(Problem(message, path, expected=f"at most {declaration.max_rank}"))
    elif declaration.ranks and rank not in declaration.ranks:
        expected = f"one of {', '.join(map(str, declaration.ranks))}"
        hint = "adapters of a lower rank fit as well"
        problems.append(Problem(f"backend {block!r} takes no max_rank of {rank}", path, expected, hint))
    if spec.dtype not in declaration.dtypes:
        problems.append(
            Problem(
                f"backend {block!r} does not compute in {spec.dtype}",
                ("dtype",),
                expected=", ".join(declaration.dtypes),
            )
        )
    return problems


def _uneven(block: str, declaration: Declaration, planned: tuple[ModulePlan, ...], spec: Spec) -> list[Problem]:
    """Modules whose shapes on this rank are no multiples of what a backend asks for."""
    problems, step = [], declaration.multiple
    for module in planned:
        if module.experts and not declaration.experts:
            continue
        inputs, outputs = module.in_features, [part.width for part in module.slices]
        if any(size % step for size in (*outputs, step if module.kind == "embedding" else inputs)):
            shape = f"{inputs} inputs and {' + '.join(map(str, outputs))} outputs"
            message = f"{module.name} has {shape}, but backend {block!r} takes multiples of {step}"
            index = spec.adapters.targets.index("experts" if module.experts else module.name)
            problems.append(Problem(message, ("adapters", "targets", index), hint="leave the backend or the layer out"))
    return problems


def _backend(
    block: str, declaration: Declaration, spec: Spec, planned, resolved, decode, prefill, values, rule: Segments,
    tuned: dict[str, tuple[tuple[Tile, str], ...]], kinds: set[str],
) -> tuple[BackendPlan, list[Decision]]:  # fmt: skip
    slots = spec.adapters.slots
    mode, notes = decisions.prefill_mode(
        block, prefill.mode, declaration, rule, "experts" in kinds, spec.parallel.dp_attention
    )
    notes += decisions.backend_notes(
        block, declaration, spec.dtype, spec.targets, kinds, bool(decode.buckets), slots, spec.adapters.max_rank
    )
    ranks = kernels.kernel_ranks(resolved, spec.adapters.max_rank)
    adapters = kernels.kernel_adapters(resolved, slots)
    planned_kernels = kernels.plan_kernels(
        declaration, planned, ranks, adapters, spec.dtype, slots, spec.adapters.max_rank, spec.targets, tuned
    )
    if declaration.owns_base:
        notes += decisions.base_notes(block, planned, planned_kernels)
    return BackendPlan(
        name=block,
        kind=spec.backends[block].kind or block,
        summary=declaration.summary,
        parameters=values,
        segments=rule,
        owns_base=declaration.owns_base,
        experts=declaration.experts,
        decode_graphs=declaration.decode_graphs and bool(decode.buckets),
        prefill_mode=mode,
        decode=_decode_buckets(decode, rule, slots, resolved) if declaration.decode_graphs else (),
        prefill=() if mode == "off" else _prefill_buckets(prefill, rule, slots, resolved),
        kernels=planned_kernels,
        scratch=(),
        operators=tuple(sorted(declaration.operators.items())),
    ), notes


def _with_copies(planned, backends: list[BackendPlan], widths: tuple[int, ...]) -> tuple[ModulePlan, ...]:
    """The modules, with copies of B for those that some backend reads in whole tiles."""
    every = (kernel for backend in backends for kernel in backend.kernels)
    tiled = {kernel.module for kernel in every if dict(kernel.arguments).get("b", "").startswith("tile<")}
    return tuple(replace(module, narrow=widths if module.name in tiled else ()) for module in planned)


def _decode_buckets(decode: DecodePlan, rule: Segments, slots: int, resolved) -> tuple[BucketPlan, ...]:
    return tuple(
        BucketPlan(rows, decode_grid(rule, rows, slots), variants.occurring(resolved, rows)) for rows in decode.buckets
    )


def _prefill_buckets(prefill: PrefillPlan, rule: Segments, slots: int, resolved) -> tuple[BucketPlan, ...]:
    plans = []
    for tokens in prefill.buckets:
        requests = min(prefill.max_requests, rule.cap) if rule.by == "request" else prefill.max_requests
        grid = prefill_grid(rule, tokens, slots, requests)
        plans.append(BucketPlan(tokens, grid, variants.occurring(resolved, grid.requests)))
    return tuple(plans)


def _buffers(spec: Spec, planned, backends: list[BackendPlan], decode: DecodePlan, prefill: PrefillPlan, widths: int):
    """Slot buffers, metadata, and each backend's scratch (which it fills in); `widths` as `metadata_buffer` says."""
    slots = spec.adapters.slots
    rows, requests = buffers.room(decode, prefill)
    entries = max(segment_slots(b.segments, rows, slots, requests) for b in backends)
    by_name = {module.name: module for module in planned}
    for index, backend in enumerate(backends):
        every = ((kernel, launch) for kernel in backend.kernels for launch in kernel.launches)
        sizes = buffers.scratch_bytes(every, by_name, rows, slots, spec.adapters.max_rank)
        backends[index] = replace(backend, scratch=tuple(sorted(sizes.items())))
    return (
        *buffers.slot_buffers(planned, slots, spec.adapters.max_rank, spec.dtype),
        buffers.metadata_buffer(rows, requests, entries, slots, widths),
    )
