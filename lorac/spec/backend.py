"""What a backend folder declares in its `backend.yaml`: parameters, kernels with their tiles, and what it supports."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictFloat, StrictInt, StrictStr

Identifier = Annotated[StrictStr, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,60}$")]
# what a kernel is passed, as the runtime names it: a pointer, a number, or tiles of a tensor by descriptor
_ELEMENT = "(dtype|fp32|fp16|bf16|i32|i64)"
ARGUMENT = rf"^(\*{_ELEMENT}|i32|i64|fp32|tile<{_ELEMENT}>\[[A-Za-z0-9_]+, [A-Za-z0-9_]+\])$"
ArgumentType = Annotated[StrictStr, Field(pattern=ARGUMENT)]
# constants that no tile states: the variant's bounds, the tile's launch options, and what follows from its sizes
GIVEN = frozenset({"RANK", "ACTIVE", "PDL", "STAGES", "WHOLE"})
TemplatePath = Annotated[StrictStr, Field(pattern=r"^[a-z0-9_]+(/[a-z0-9_]+)*\.py\.jinja$")]


class _Declared(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Parameter(_Declared):
    """One parameter of a backend block. Values are whole numbers, floats, switches or one of a set: never free text."""

    type: Literal["int", "float", "bool", "choice", "segments"] = Field(description="what the parameter holds")
    default: StrictBool | StrictInt | StrictFloat | Identifier | dict = Field(
        description="used where the spec is silent"
    )
    minimum: StrictInt | StrictFloat | None = Field(None, description="least value, for numbers")
    maximum: StrictInt | StrictFloat | None = Field(None, description="greatest value, for numbers")
    choices: tuple[Identifier, ...] = Field((), description="legal values of a choice")
    help: StrictStr = Field(description="one sentence for the person who edits a spec")


class Tile(_Declared):
    """A launch configuration and the bounds within which it serves; the first whose bounds hold is taken."""

    model_config = ConfigDict(extra="allow", frozen=True)

    rows: StrictInt | None = Field(None, ge=1, description="serves batches of up to this many rows")
    rank: StrictInt | None = Field(None, ge=1, description="serves adapters of up to this rank")
    adapters: StrictInt | None = Field(None, ge=1, description="serves batches of up to this many adapters")
    in_features: StrictInt | None = Field(None, ge=1, description="serves modules of up to this many input features")
    out_features: StrictInt | None = Field(None, ge=1, description="serves modules of up to this many output features")
    module: Identifier | None = Field(None, description="serves this module alone")
    fill: StrictInt | None = Field(
        None, ge=1, le=100, description="serves where its tiles are this many percent of the multiprocessors or more"
    )
    warps: Literal[1, 2, 4, 8, 16] = Field(4, description="warps of a program")
    stages: StrictInt = Field(2, ge=1, le=8, description="depth of software pipelining")
    pdl: StrictBool = Field(False, description="launch by programmatic dependent launch where the target has it")
    bare: StrictBool = Field(
        False, description="serves batches without adapters alone, summing as the others do or left to the library"
    )
    library: StrictBool = Field(
        False, description="what it serves is left to the library's base GEMM, beside which LoRA is added"
    )

    @property
    def sizes(self) -> dict[str, int]:
        """The block sizes and splits: every key that is not a bound or a launch option."""
        return dict(self.model_extra or {})


class Scratch(_Declared):
    """A scratch buffer: a product of rows, slices, columns (slices x rank), active, out, covered (elements of
    the tiles that cover y), slots, max_rank, pitch (the columns of a slot in the B that is read) and the tile's sizes;
    for experts also pairs, width, shares and tables.
    """

    dtype: Literal["dtype", "fp32", "i32"] = Field(description="element type; `dtype` is the spec's")
    shape: tuple[Identifier, ...] = Field(min_length=1, description="dimensions, by name")


class Kernel(_Declared):
    """One kernel of a backend, rendered once per module it serves."""

    template: TemplatePath = Field(description="template of the kernel, in the backend's folder or in shared/")
    kinds: tuple[Literal["linear", "lm_head", "embedding", "experts"], ...] = Field(
        ("linear", "lm_head"), description="kinds of module it serves"
    )
    modules: tuple[Identifier, ...] = Field((), description="the only modules it serves; empty: all of its kinds")
    arguments: dict[Identifier, ArgumentType] = Field(
        description="arguments in order: name to type; *dtype is of the spec, tile<dtype>[ROWS, COLUMNS] taken in tiles"
    )
    constants: tuple[Identifier, ...] = Field(
        description="constexpr arguments; RANK and ACTIVE are the variant's bounds, PDL and STAGES the tile's options, "
        "WHOLE is whether whole tiles of outputs are stored by descriptor"
    )
    max_rows: StrictInt | None = Field(None, ge=1, description="serves batches of up to this many rows alone")
    beside: Identifier | None = Field(None, description="serves the modules alone that this earlier stage serves")
    in_library: StrictBool = Field(
        False, description="serves what a stage it stands beside leaves to the library alone"
    )
    unless: Identifier | None = Field(None, description="serves the modules alone that this earlier stage does not")
    stands_in: StrictBool = Field(
        False, description="where it serves, a module's kernels that do not stand in are not launched"
    )
    max_columns: StrictInt | None = Field(
        None, ge=1, description="serves packages of up to so many columns of B alone, slots times max_rank"
    )
    base: StrictBool = Field(
        False, description="computes the base as well, so that it is launched without adapters too"
    )
    tensor_cores: StrictBool = Field(
        False,
        description="has tiles that spill where no tensor core multiplies: left out in float32, for a named target",
    )
    when_split: tuple[Identifier, ...] = Field(
        (), description="arguments only a kernel takes whose programs share a sum"
    )
    when_whole: tuple[Identifier, ...] = Field(
        (), description="arguments only a kernel takes that stores whole tiles of outputs, by descriptor"
    )
    dims: dict[Identifier, Literal["rows", "rank", "columns", "slot_columns", "in", "out"]] = Field(
        default_factory=dict, description="the dimension each block size cuts; a block is never larger than it need be"
    )
    limits: dict[Identifier, tuple[StrictInt, StrictInt]] = Field(
        default_factory=dict, description="least and most of sizes that it sums rightly with, powers of two"
    )
    follows: dict[Identifier, Annotated[StrictStr, Field(pattern=r"^[a-z_]+\.[A-Z_]+$")]] = Field(
        default_factory=dict, description="constants that are an earlier stage's for the same batch: STAGE.CONSTANT"
    )
    operands: tuple[tuple[Identifier, Identifier], ...] = Field(
        (), description="tiles held in shared memory, as pairs of block sizes, for the estimate of its size"
    )
    scratch: dict[Identifier, Scratch] = Field(
        default_factory=dict, description="device memory it needs between launches"
    )
    tiles: tuple[Tile, ...] = Field(min_length=1, description="launch configurations; the last serves everything")

    @property
    def sizes(self) -> tuple[str, ...]:
        """The constants that each tile states."""
        return tuple(name for name in self.constants if name not in GIVEN and name not in self.follows)

    @property
    def blocks(self) -> set[str]:
        """The sizes that are known to be of blocks, which in Triton are powers of two."""
        return {*self.dims, *self.limits, *(block for pair in self.operands for block in pair)}

    @property
    def tiled(self) -> bool:
        """Whether it reads tensors by descriptor, tile by tile."""
        return any(of.startswith("tile<") for of in self.arguments.values())

    def takes(self, columns: int) -> bool:
        """Whether it serves packages of so many columns of B."""
        return not self.max_columns or columns <= self.max_columns


class Declaration(_Declared):
    """A backend folder's `backend.yaml`."""

    summary: StrictStr = Field(description="one line: what the backend does")
    phases: tuple[Literal["decode", "prefill"], ...] = ("decode", "prefill")
    decode_graphs: StrictBool = Field(True, description="its decode step can be captured")
    prefill_graphs: tuple[Literal["breakable", "full", "tc_piecewise"], ...] = Field(
        (), description="prefill graph modes it supports"
    )
    no_prefill_graphs: StrictStr = Field("", description="why it has no prefill graphs, when it has none")
    experts: StrictBool = Field(False, description="serves modules of experts")
    dtypes: tuple[Literal["float32", "float16", "bfloat16"], ...] = ("float32", "float16", "bfloat16")
    architectures: tuple[StrictStr, ...] = Field((), description="targets it compiles for; empty: any")
    max_rank: StrictInt = Field(512, ge=1, description="largest rank its kernels take")
    ranks: tuple[StrictInt, ...] = Field((), description="the only values of max_rank it takes; empty: any")
    multiple: StrictInt = Field(1, ge=1, description="input and output features it takes are multiples of this")
    owns_base: StrictBool = Field(False, description="it computes the base GEMM itself in `linear`")
    parameters: dict[Identifier, Parameter] = Field(default_factory=dict)
    kernels: dict[Identifier, Kernel] = Field(default_factory=dict)
    operators: dict[StrictStr, StrictStr] = Field(
        default_factory=dict, description="signatures of operators that live outside lorac, as torch schemas"
    )

    def may_leave(self, stage: str) -> bool:
        """Whether a stage's tiles can leave the base to the library: another stage then has the rest."""
        return any(kernel.in_library and kernel.beside == stage for kernel in self.kernels.values())


def declaration_path(folder: Path) -> Path:
    """Where a backend folder keeps its declaration."""
    return folder / "backend.yaml"
