"""The plan: everything a package is, decided. Plain frozen data; nothing here is left to interpret.

A plan is a function of the spec's content, the backend folders and the tuned tables, and of nothing else: no paths,
dates or versions. Its canonical JSON is hashed into the package's fingerprint.
"""

import hashlib
import json
from dataclasses import asdict, dataclass

from lorac.runtime.segments import Grid, Segments
from lorac.spec.shapes import Experts


@dataclass(frozen=True)
class SlicePlan:
    """One stacked part of a module: output rows [start, start + width) on this rank."""

    name: str
    path: str
    start: int
    width: int
    full_width: int
    units: int


@dataclass(frozen=True)
class ModulePlan:
    """A layer that takes LoRA; see `lorac.runtime.layout.Module`, which it becomes."""

    name: str
    kind: str  # linear | lm_head | embedding | experts
    path: str
    in_features: int
    full_in_features: int
    out_features: int
    slices: tuple[SlicePlan, ...]
    layers: tuple[int, ...]
    sharding: str
    experts: Experts | None
    local_experts: int  # on this rank; 0 where the module has none
    shared_a: bool
    shared_b: bool
    narrow: tuple[int, ...] = ()  # columns a slot has in further copies of B, for batches of that rank or below

    @property
    def instances(self) -> int:
        """How many of it the model has."""
        return max(1, len(self.layers))


@dataclass(frozen=True)
class Variant:
    """A bound on a batch, resolved: at most `adapters` distinct adapters, none of a rank above `rank`."""

    name: str
    adapters: int
    rank: int


@dataclass(frozen=True)
class BucketPlan:
    """One bucket as one backend serves it: the grid its launches cover, never another bucket's."""

    size: int
    grid: Grid
    variants: tuple[str, ...]  # those that can occur, narrow to wide


@dataclass(frozen=True)
class Launch:
    """One launch configuration: up to `rows` rows (0: any number), rank up to `rank`, up to `adapters` (-1: any
    number)."""

    rows: int
    rank: int
    adapters: int
    tile: tuple[tuple[str, int], ...]
    warps: int
    stages: int
    pdl: bool
    source: str  # "default" or the tuned table it comes from
    whole: bool = False  # whole tiles of outputs are stored by descriptor


@dataclass(frozen=True)
class LibraryPlan:
    """Rows, from `least` to `most`, at which the library's GEMM has the base: of batches that are `bare` of adapters,
    or of those with some.
    """

    bare: bool
    least: int
    most: int
    source: str  # as of a launch


@dataclass(frozen=True)
class ScratchPlan:
    """Device memory between launches: the product of some dimensions, by name, in elements of `itemsize` bytes."""

    name: str
    itemsize: int
    shape: tuple[str, ...]
    split: bool  # launches that split K need it, others do not


@dataclass(frozen=True)
class KernelPlan:
    """One kernel: a stage of one module, its arguments in order and every configuration it is launched with."""

    name: str
    stage: str
    module: str
    template: str
    arguments: tuple[tuple[str, str], ...]
    constants: tuple[str, ...]  # constexpr arguments, in order
    masks: tuple[str, ...]  # dimensions some configuration does not divide: in, out
    splits: bool  # some configuration splits K
    whole: bool  # some configuration stores whole tiles of outputs by descriptor
    stands_in: bool  # where it serves, kernels of its module that do not stand in are not launched
    max_rows: int  # serves batches of up to this many rows alone; 0: any
    library: tuple[LibraryPlan, ...]  # where it leaves the base to the library's GEMM
    in_library: bool  # serves those rows of another kernel alone
    base: bool  # launched without adapters too
    wide_b: bool  # offsets into this module's B can pass 2**31
    aligned: int  # elements every row of x starts at a multiple of; strides are passed in these units
    aligned_out: int  # the same of y
    precision: str  # of tl.dot: "ieee" for float32, which would be rounded to TF32 otherwise; "" elsewhere
    scratch: tuple[ScratchPlan, ...]
    launches: tuple[Launch, ...]

    def leaves(self, rows: int, bare: bool) -> bool:
        """Whether the library's GEMM has the base of so many rows, with adapters or `bare` of them."""
        return any(part.bare == bare and part.least <= rows <= part.most for part in self.library)


@dataclass(frozen=True)
class BackendPlan:
    """One backend block of the spec with everything decided about it."""

    name: str
    kind: str
    summary: str
    parameters: tuple[tuple[str, object], ...]
    segments: Segments
    owns_base: bool
    experts: bool  # it serves modules of experts
    decode_graphs: bool
    prefill_mode: str  # breakable | full | tc_piecewise | off
    decode: tuple[BucketPlan, ...]
    prefill: tuple[BucketPlan, ...]
    kernels: tuple[KernelPlan, ...]
    scratch: tuple[tuple[str, int], ...]  # bytes of each scratch buffer at the largest bucket
    operators: tuple[tuple[str, str], ...]  # declared signatures of operators that live outside lorac


@dataclass(frozen=True)
class DecodePlan:
    """Decode graphs: buckets in rows, ascending; empty when there are none."""

    buckets: tuple[int, ...]
    streams: int


@dataclass(frozen=True)
class PrefillPlan:
    """Prefill graphs: buckets in tokens, ascending; `mode` is what the spec asked for."""

    mode: str
    buckets: tuple[int, ...]
    max_tokens: int
    max_requests: int
    max_padding: float


@dataclass(frozen=True)
class Buffer:
    """Device memory of a package, by purpose."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    purpose: str


@dataclass(frozen=True)
class Decision:
    """Something decided where the user might have expected otherwise, and why."""

    subject: str
    outcome: str
    reason: str
    level: str = "note"  # note | warning: the spec asks for something else, and could say what works


@dataclass(frozen=True)
class Plan:
    """One deployment."""

    name: str
    family: str
    dtype: str
    slots: int
    max_rank: int
    hidden: int
    vocab: int
    layers: int
    tied: bool
    tp: int
    ep: int
    agree: bool
    moe_runner: str
    modules: tuple[ModulePlan, ...]
    paths: tuple[str, ...]  # of every layer that could take LoRA; see `lorac.runtime.layout.Layout`
    variants: tuple[Variant, ...]
    decode: DecodePlan
    prefill: PrefillPlan
    backends: tuple[BackendPlan, ...]
    buffers: tuple[Buffer, ...]
    decisions: tuple[Decision, ...]
    targets: tuple[str, ...]

    @property
    def narrow(self) -> tuple[int, ...]:
        """Widths of the copies of B, of whatever module has them."""
        return max((module.narrow for module in self.modules), default=())

    def module(self, name: str) -> ModulePlan:
        """The module of that name."""
        return next(module for module in self.modules if module.name == name)

    def canonical(self) -> str:
        """The plan as canonical JSON: sorted keys, no white space, ASCII."""
        return json.dumps(asdict(self), sort_keys=True, separators=(",", ":"))

    def digest(self) -> str:
        """SHA-256 of the canonical JSON, in hex."""
        return hashlib.sha256(self.canonical().encode()).hexdigest()
