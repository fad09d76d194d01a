"""From a model's shapes and a spec's targets to the modules that take LoRA, as one tensor-parallel rank holds them."""

from lorac.errors import Problem
from lorac.plan.model import ModulePlan, SlicePlan
from lorac.spec.shapes import Linear, Shapes


def plan_modules(
    shapes: Shapes, targets: tuple[str, ...], tp: int, ep: int, shared_outer: bool
) -> tuple[tuple[ModulePlan, ...], list[Problem]]:
    """One module per target, in the spec's order; problems where a shape cannot be cut over `tp` or `ep` ranks."""
    modules, problems = [], []
    for target in targets:
        key, ranks = ("ep", ep) if target == "experts" else ("tp", tp)
        try:
            modules += _modules(shapes, target, ranks, shared_outer)
        except ValueError as error:
            fitting = next(fewer for fewer in range(ranks - 1, 0, -1) if _fits(shapes, targets, key, fewer))
            hint = f"lower it to {fitting}, which fits every target"
            problems.append(Problem(str(error), ("parallel", key), hint=hint))
    return tuple(modules), problems


def _fits(shapes: Shapes, targets: tuple[str, ...], key: str, ranks: int) -> bool:
    """Whether all targets that `parallel.tp`, or `parallel.ep`, cuts can be cut over so many ranks."""
    try:
        for target in targets:
            if (target == "experts") == (key == "ep"):
                _modules(shapes, target, ranks, False)
    except ValueError:
        return False
    return True


def _modules(shapes: Shapes, target: str, ranks: int, shared_outer: bool) -> list[ModulePlan]:
    """A target's modules on one of the ranks it is cut over. Raises ValueError where it cannot be."""
    return _expert_modules(shapes, ranks, shared_outer) if target == "experts" else [_module(shapes, target, ranks)]


def model_paths(shapes: Shapes) -> tuple[str, ...]:
    """The paths, inside a decoder layer or of the model, of all that could take LoRA, as the checkpoint stores it."""
    stored = {part: name for name, parts in shapes.fused if name in shapes.stored_fused for part in parts}
    paths = [_beside(linear, stored.get(linear.name)) for linear in shapes.linears]
    experts = [shapes.experts.path] if shapes.experts else []
    return tuple(sorted({*paths, *experts, "lm_head", "embed_tokens"}))


def _beside(linear: Linear, name: str | None) -> str:
    """The path of a fused layer of that name, one of whose parts is `linear`; the linear's own without a name."""
    return f"{linear.path.rpartition('.')[0]}.{name}" if name else linear.path


def _module(shapes: Shapes, target: str, tp: int) -> ModulePlan:
    if target == "lm_head":
        width = _even(shapes.vocab, tp, 0, "the vocabulary")
        part = SlicePlan("lm_head", "lm_head", 0, width, shapes.vocab, 0)
        return _plain("lm_head", "lm_head", "lm_head", shapes.hidden, shapes.hidden, (part,), (), "column")
    if target == "embed_tokens":
        part = SlicePlan("embed_tokens", "embed_tokens", 0, shapes.hidden, shapes.hidden, 0)
        return _plain(
            "embed_tokens", "embedding", "embed_tokens", shapes.vocab, shapes.vocab, (part,), (), "replicated"
        )
    names = dict(shapes.fused).get(target, (target,))
    linears = [shapes.linear(name) for name in names]
    first = linears[0]
    heads = max(linear.units for linear in shapes.linears)
    slices, start = [], 0
    for linear in linears:
        width = _width(linear, tp, heads)
        slices.append(SlicePlan(linear.name, linear.path, start, width, linear.out_features, linear.units))
        start += width
    in_features = first.in_features
    if first.sharding == "row":
        in_features = _even(in_features, tp, first.units, f"{target}'s input")
    path = _beside(first, target if len(linears) > 1 else None)
    return _plain(target, "linear", path, in_features, first.in_features, tuple(slices), first.layers, first.sharding)


def _width(linear: Linear, tp: int, heads: int) -> int:
    """The outputs on one of `tp` ranks; kv heads (fewer than the model's `heads`) are replicated over more ranks."""
    if linear.sharding != "column":
        return linear.out_features
    if 0 < linear.units < min(tp, heads):
        if tp % linear.units:
            raise ValueError(f"{linear.name}: {linear.units} heads cannot be replicated evenly over {tp} ranks")
        return linear.out_features // linear.units
    return _even(linear.out_features, tp, linear.units, linear.name)


def _even(size: int, tp: int, units: int, what: str) -> int:
    """The shard of `size`, which consists of so many equal `units`, on one of `tp` ranks."""
    if (units or size) % tp:
        raise ValueError(f"{what}: {f'{units} heads' if units else size} cannot be cut evenly over {tp} ranks")
    return size // tp


def _expert_modules(shapes: Shapes, ep: int, shared_outer: bool) -> list[ModulePlan]:
    experts = shapes.experts
    if experts.count % ep:
        raise ValueError(f"{experts.count} experts cannot be spread evenly over {ep} ranks")
    gate, up, down = experts.names
    width, hidden = experts.intermediate, shapes.hidden
    paths = [f"{experts.path}.*.{name}" for name in (gate, up, down)]
    gate_up = (SlicePlan("gate", paths[0], 0, width, width, 0), SlicePlan("up", paths[1], width, width, width, 0))
    down_part = (SlicePlan("down", paths[2], 0, hidden, hidden, 0),)
    common = dict(kind="experts", path=experts.path, layers=experts.layers, sharding="replicated", experts=experts)
    common["local_experts"] = experts.count // ep
    return [
        ModulePlan("experts_gate_up", in_features=hidden, full_in_features=hidden, out_features=2 * width,
                   slices=gate_up, shared_a=shared_outer, shared_b=False, **common),
        ModulePlan("experts_down", in_features=width, full_in_features=width, out_features=hidden,
                   slices=down_part, shared_a=False, shared_b=shared_outer, **common),
    ]  # fmt: skip


def _plain(
    name: str, kind: str, path: str, in_features: int, full_in: int, slices: tuple[SlicePlan, ...],
    layers: tuple[int, ...], sharding: str,
) -> ModulePlan:  # fmt: skip
    out = sum(part.width for part in slices)
    return ModulePlan(name, kind, path, in_features, full_in, out, slices, layers, sharding, None, 0, False, False)
