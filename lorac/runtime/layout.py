"""What a generated package tells the runtime of its modules: names, shapes, where adapters' tensors come from."""

from dataclasses import dataclass, fields
from functools import cached_property
from math import gcd
from typing import NamedTuple

from lorac.runtime.errors import PackageError


class Slice(NamedTuple):
    """One stacked part of a module: rows [start, start + width) of its output on this rank."""

    name: str  # the unfused projection: "q_proj"
    path: str  # that projection inside a decoder layer (or of the model): "self_attn.q_proj"
    start: int
    width: int
    full_width: int  # before tensor parallelism
    units: int = 0  # pieces the width may be cut into (heads); 0: any


class ExpertLayout(NamedTuple):
    """The experts of a module of kind `experts`; `local` of `count` live on this rank."""

    count: int
    local: int
    top_k: int
    path: str  # "mlp.experts"
    names: tuple[str, ...]  # this module's projections as checkpoints name them, one per slice
    shared_a: bool = False  # one A for all experts (shared-outer gate_up)
    shared_b: bool = False  # one B for all experts (shared-outer down)
    transposed: bool = False
    interleaved: bool = False


@dataclass(frozen=True)
class Module:
    """A layer that takes LoRA. `layers` are the decoder layers that have it, () for one of the model itself."""

    name: str
    kind: str  # linear | lm_head | embedding | experts
    path: str  # inside a decoder layer, or of the model: "self_attn.qkv_proj"
    in_features: int  # on this rank
    full_in_features: int
    slices: tuple[Slice, ...]
    layers: tuple[int, ...]
    sharding: str  # column | row | replicated
    experts: ExpertLayout | None = None
    narrow: tuple[int, ...] = ()  # columns a slot has in further copies of B

    @cached_property
    def out_features(self) -> int:
        """Output features on this rank, all slices."""
        return sum(part.width for part in self.slices)

    @cached_property
    def aligned(self) -> tuple[int, int]:
        """Elements that rows of x, and of y, start at multiples of: what kernels are compiled for."""
        return gcd(16, self.in_features), gcd(16, self.out_features)

    @property
    def instances(self) -> int:
        """How many of it the model has."""
        return max(1, len(self.layers))


@dataclass(frozen=True)
class Layout:
    """The constants of one package."""

    name: str
    family: str  # Hugging Face's model_type
    dtype: str  # float32 | float16 | bfloat16
    slots: int  # L
    max_rank: int  # R
    layers: int
    hidden: int
    vocab: int
    tied: bool
    tp: int
    ep: int
    modules: tuple[Module, ...]
    paths: tuple[str, ...]  # of every layer of the model that could take LoRA, as its checkpoint has them

    @cached_property
    def widths(self) -> tuple[int, ...]:
        """The columns a slot has in B, and in each copy of it that some module has."""
        return (self.max_rank, *max((module.narrow for module in self.modules), default=()))

    @cached_property
    def by_name(self) -> dict[str, Module]:
        """Modules by name."""
        return {module.name: module for module in self.modules}

    def check_ranks(self, tp_rank: int, ep_rank: int) -> None:
        """Raise PackageError unless the package was built for such ranks: any other would get nobody's shard."""
        for name, rank, count in (("tp", tp_rank, self.tp), ("ep", ep_rank, self.ep)):
            if rank not in range(count):
                expected = f"0 to {count - 1}" if count > 1 else "0"
                raise PackageError(
                    f"package {self.name}: {name}_rank {rank} of a package for {name} {count}; expected {expected}"
                )

    def check_fits(self, other: "Layout", what: str) -> None:
        """Raise PackageError, with what differs, unless `what`, made for the layout `other`, has this one's tables.

        Packages that differ in nothing but their names and their graphs have the same.
        """
        found = []
        for name in (field.name for field in fields(Layout) if field.name not in ("name", "modules")):
            theirs, ours = getattr(other, name), getattr(self, name)
            found += [f"{name} {theirs} instead of {ours}"] if theirs != ours else []
        names = dict.fromkeys((*self.by_name, *other.by_name))
        modules = [name for name in names if self.by_name.get(name) != other.by_name.get(name)]
        found += [f"other shapes of {', '.join(modules)}"] if modules else []
        if found:
            raise PackageError(
                f"{what} given to package {self.name} is of package {other.name}: {'; '.join(found)}; "
                f"expected that of package {self.name}"
            )
