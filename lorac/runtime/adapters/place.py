"""Which slices of which modules an adapter's tensors belong to: decided from names and shapes before data is read."""

from collections import defaultdict
from dataclasses import dataclass

from lorac.runtime.adapters import experts
from lorac.runtime.adapters.config import AdapterConfig
from lorac.runtime.adapters.names import PREFIXES, Pair, Place, locate
from lorac.runtime.adapters.problems import Problems
from lorac.runtime.adapters.tensors import Header
from lorac.runtime.expert_names import ExpertNames, paths_of
from lorac.runtime.layout import Layout, Module

# Projections that some checkpoints keep in one weight, by that weight's name; its adapters have one A for all parts.
_FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
Site = tuple[Module, int]  # a module and the index of one of its slices


@dataclass(frozen=True)
class Placement:
    """One pair of tensors as one slice uses it: A whole, and the rows of B that are the slice's."""

    pair: Pair
    module: Module
    instance: int
    slice: int
    rows: slice  # of B
    rank: int
    scale: float
    expert: int | None = None  # of a pair that is one expert's
    stack: experts.Stack | None = None  # of a pair that holds all experts

    @property
    def layer(self) -> int | None:
        """The decoder layer; None outside of them."""
        return self.module.layers[self.instance] if self.module.layers else None


def place_pairs(config: AdapterConfig, pairs: list[Pair], layout: Layout, problems: Problems) -> list[Placement]:
    """Every pair's placements. Pairs that fit nowhere, shapes and ranks that do not fit, and clashes are problems."""
    sites = sites_of(layout)
    names = ExpertNames(layout.modules)
    swapped = experts.convention(config, pairs, names, problems)
    placed: list[Placement] = []
    for pair in pairs:
        place = locate(pair.module)
        if place is None:
            known = ", ".join(prefix or "(nothing)" for prefix in PREFIXES)
            problems.add(
                f"no layer of the model by its prefix; known behind base_model.model. are {known}", pair.a.name
            )
        elif target := experts.resolve(pair, place, names):
            placed += _place_experts(config, pair, place, target, layout, swapped, problems)
        elif at := sites.get((place.layer is None, place.path)):
            placed += _place_linear(config, pair, place, at, layout, problems)
        else:
            problems.add(_homeless(pair, place, layout, names), pair.a.name)
    _check_clashes(placed, problems)
    if not placed and not problems.found:
        problems.add("it holds no LoRA tensors: nothing of it would take effect")
    return placed


def sites_of(layout: Layout) -> dict[tuple[bool, str], list[Site]]:
    """The slices behind each path, in the order of B's rows: separate projections, fused modules, and known fusions.

    A key is (whether it stands outside the decoder layers, path).
    """
    sites: dict[tuple[bool, str], list[Site]] = defaultdict(list)
    for module in layout.modules:
        if module.kind == "experts":
            continue
        for index, part in enumerate(module.slices):
            sites[not module.layers, part.path].append((module, index))
    for module in layout.modules:
        if module.kind != "experts":
            sites.setdefault((not module.layers, module.path), [(module, index) for index in range(len(module.slices))])
    for outside, path in list(sites):
        parent, _, name = path.rpartition(".")
        for fused, parts in _FUSED.items():
            keys = [(outside, f"{parent}.{part}") for part in parts]
            if name == parts[0] and all(key in sites for key in keys):
                sites.setdefault((outside, f"{parent}.{fused}"), [site for key in keys for site in sites[key]])
    return dict(sites)


def _place_linear(
    config: AdapterConfig, pair: Pair, place: Place, sites: list[Site], layout: Layout, problems: Problems
) -> list[Placement]:
    rank, scale = config.rank_of(pair.module), config.scale_of(pair.module)
    first = sites[0][0]
    if not all(_has_layer(place.layer, module, pair, layout, problems) for module, _ in sites):
        return []
    if pair.embedding != (first.kind == "embedding"):
        wanted = "lora_embedding_A and lora_embedding_B" if first.kind == "embedding" else "lora_A and lora_B"
        problems.add(f"{place.path}: expected {wanted}", pair.a.name)
        return []
    total = sum(module.slices[index].full_width for module, index in sites)
    _check_shape(pair.a, (rank, first.full_in_features), "[rank, in]", problems)
    _check_shape(pair.b, (total, rank), "[out, rank]", problems)
    _check_rank(rank, place.path, layout, problems)
    placements, start = [], 0
    for module, index in sites:
        stop = start + module.slices[index].full_width
        instance = 0 if place.layer is None else module.layers.index(place.layer)
        placements.append(Placement(pair, module, instance, index, slice(start, stop), rank, scale))
        start = stop
    return placements


def _place_experts(
    config: AdapterConfig,
    pair: Pair,
    place: Place,
    target: experts.Target,
    layout: Layout,
    swapped: bool,
    problems: Problems,
) -> list[Placement]:
    module = target.module
    if not _has_layer(place.layer, module, pair, layout, problems):
        return []
    name = target.matched_name(pair.module)
    rank, scale = config.rank_of(name), config.scale_of(name)
    shape_a, shape_b = target.shapes(rank, swapped)
    if target.packed:
        _check_shape(pair.a, _shared(pair.a, shape_a), "[experts or 1, rank, in]", problems)
        _check_shape(pair.b, _shared(pair.b, shape_b), "[experts or 1, out, rank]", problems)
    else:
        many = "" if target.stack(swapped) is None else "experts * "
        _check_shape(pair.a, shape_a, f"[{many}rank, in]", problems)
        _check_shape(pair.b, shape_b, f"[out, {many}rank]", problems)
    _check_rank(rank, experts.without_index(place.path), layout, problems)
    instance, stack = module.layers.index(place.layer), target.stack(swapped)
    return [
        Placement(pair, module, instance, index, rows, rank, scale, target.expert, stack)
        for index, rows in target.rows()
    ]


def _has_layer(layer: int | None, module: Module, pair: Pair, layout: Layout, problems: Problems) -> bool:
    if layer is None or layer in module.layers:
        return True
    problems.add(
        f"layer {layer} has no {module.name} in package {layout.name}, a model of {layout.layers} layers", pair.a.name
    )
    return False


def _shared(header: Header, expected: tuple[int, ...]) -> tuple[int, ...]:
    """The expected shape of a packed factor, which has one for all experts if its first dimension is 1."""
    return (1, *expected[1:]) if header.shape[:1] == (1,) else expected


def _check_shape(header: Header, expected: tuple[int, ...], meaning: str, problems: Problems) -> None:
    """Note a shape that is not exactly the expected one; nothing is ever broadcast."""
    if header.shape != expected:
        problems.add(
            f"shape {list(header.shape)} where its config and the model ask for {list(expected)} = {meaning}",
            header.name,
        )


def _check_rank(rank: int, path: str, layout: Layout, problems: Problems) -> None:
    if rank > layout.max_rank:
        problems.add(
            f"rank {rank} of {path} is above max_rank {layout.max_rank} of package {layout.name}; "
            f"set adapters.max_rank to {rank} or more in the spec and rebuild"
        )


def _check_clashes(placed: list[Placement], problems: Problems) -> None:
    """Two pairs for one slice are a problem, and so are experts of one projection that disagree about their scale."""
    sites: dict[tuple[str, int, int], dict[int | None, Placement]] = defaultdict(dict)
    for item in placed:
        site = sites[item.module.name, item.instance, item.slice]
        other = next(iter(site.values()), item)
        if item.expert in site or (other is not item and None in (item.expert, other.expert)):
            problems.add(f"for the same slice as {other.pair.module}; expected one of them", item.pair.a.name)
        if item.scale != other.scale:
            problems.add(
                f"experts of {item.module.name} differ in scale (by rank_pattern or alpha_pattern); "
                "expected one scale for all experts of a projection",
                item.pair.a.name,
            )
        site[item.expert] = item


def _homeless(pair: Pair, place: Place, layout: Layout, names: ExpertNames) -> str:
    """Why no module of the package takes the pair, and what helps."""
    path = experts.without_index(place.path)
    if names.modules and path in {f"{block.rpartition('.')[0]}.gate" for block in names.paths}:
        return (
            f"{path} is the router of the experts, which takes no LoRA here: train without it "
            "(PEFT's all-linear includes it: list target_modules and target_parameters instead)"
        )
    served = [part.path if module.experts else part.name for module in layout.modules for part in module.slices]
    message = f"{path} fits no module of package {layout.name}"
    if names.modules and names.is_stack(place.path):
        return (
            f"{message}: no rank gives factors of {list(pair.a.shape)} and {list(pair.b.shape)} for all experts of one "
            "of its parameters; train it on the model of the package"
        )
    message += f", which serves {', '.join(dict.fromkeys(served))}: "
    if names.modules and names.projection(place.path):
        return f"{message}its layers have {names.modules[0].experts.count} experts, numbered from 0"
    if _in_model(place.path, layout, names):
        return f"{message}add it to adapters.targets of the spec and rebuild, or train without it"
    return (
        f"{message}its model has no such layer; serve the adapter with a package of the model it was trained on "
        "(where the model does have it, the paths under model in the spec are wrong)"
    )


def _in_model(path: str, layout: Layout, names: ExpertNames) -> bool:
    """Whether the package's model has the layer, alone, fused or in parts, though the package does not serve it."""
    parent, _, name = path.rpartition(".")
    others = [*_FUSED.get(name, ()), *(fused for fused, parts in _FUSED.items() if name in parts)]
    known = {alias for stored in layout.paths for alias in paths_of(stored)}
    if known.intersection([path, *(f"{parent}.{other}" for other in others)]):
        return True
    return not names.modules and any(path.startswith(f"{block}.") for block in known)
