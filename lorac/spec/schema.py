"""What a spec says, as frozen pydantic models. Types and limits live here; rules across fields are in rules.py."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from .model_schema import Model

# Names become Python modules and file names of the generated package.
IDENTIFIER = r"^[a-z][a-z0-9_]{0,40}$"
Identifier = Annotated[str, StringConstraints(pattern=IDENTIFIER)]
Target = Literal["sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120", "gfx942"]
# what people call the GPUs of each target
CARDS = {
    "sm_80": ("A100", "A800", "A30"),
    "sm_86": ("A10", "A40", "RTX A6000", "RTX 3090"),
    "sm_89": ("L4", "L40", "L40S", "RTX 6000 Ada", "RTX 4090"),
    "sm_90": ("H100", "H200", "H800", "H20", "GH200"),
    "sm_100": ("B100", "B200", "GB200"),
    "sm_120": ("RTX PRO 6000", "RTX 5090"),
    "gfx942": ("MI300X", "MI300A", "MI325X"),
}
MAX_ROWS = 65_536
MAX_TOKENS = 1_048_576


class _Block(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Adapters(_Block):
    """How many adapters are resident, how large they may be, and which layers they change."""

    slots: int = Field(ge=1, le=256, description="adapters resident at once (L)")
    max_rank: int = Field(ge=1, le=512, description="largest rank an adapter may have (R)")
    targets: list[str] = Field(
        min_length=1,
        description="layers with LoRA: fused (qkv_proj), separate (q_proj), lm_head, embed_tokens, experts",
    )
    shared_outer_experts: bool = Field(
        default=False, description="experts of one adapter share their A of gate and up, and their B of down"
    )


class Backend(BaseModel):
    """One backend block; every key but `kind` and `templates` is a parameter its template folder declares."""

    model_config = ConfigDict(frozen=True, extra="allow", strict=True)

    kind: str | None = Field(default=None, description="template folder, where it differs from the block's name")
    templates: str | None = Field(
        default=None, description="folder, relative to the spec, searched for the template folder before lorac's own"
    )

    @property
    def parameters(self) -> dict[str, Any]:
        """Plain data as written; the plan checks it against the template folder's declaration."""
        return self.__pydantic_extra__ or {}


class Variant(_Block):
    """A bound on the batch a decode graph is specialised for; no bounds means any batch."""

    adapters: int | None = Field(default=None, ge=0, description="most distinct adapters in the batch; 0: no LoRA")
    rank: int | None = Field(default=None, ge=1, description="largest rank of the adapters in the batch")


class Decode(_Block):
    """Decode graphs: one per bucket and variant."""

    buckets: list[Annotated[int, Field(ge=1, le=MAX_ROWS)]] | None = Field(
        default=None,
        min_length=1,
        description="rows graphs are captured for, increasing; max_rows is added where the list stops short of it; "
        "chosen by lorac if left out",
    )
    max_rows: int | None = Field(
        default=None, ge=1, le=MAX_ROWS, description="most rows of a decode batch; the largest bucket if left out"
    )
    variants: dict[Identifier, Variant] = Field(
        default={"nolora": Variant(adapters=0), "lora": Variant()},
        description="bounds graphs are specialised for, no two alike; at least one has no bounds",
    )
    streams: int = Field(default=1, ge=1, le=8, description="CUDA streams LoRA may use beside the base layer")


class Prefill(_Block):
    """Prefill graphs: one per bucket of tokens."""

    mode: Literal["breakable", "full", "tc_piecewise", "off"] = Field(
        default="breakable", description="captured in pieces around attention, whole, by torch.compile, or not at all"
    )
    max_tokens: int = Field(ge=1, le=MAX_TOKENS, description="most tokens of a captured prefill batch")
    buckets: list[Annotated[int, Field(ge=1, le=MAX_TOKENS)]] | None = Field(
        default=None,
        min_length=1,
        description="tokens graphs are captured for, increasing; max_tokens is added where the list stops short of it; "
        "chosen by lorac if left out",
    )
    max_requests: int = Field(default=256, ge=1, le=MAX_ROWS, description="most requests of a captured prefill batch")
    max_padding: float = Field(
        default=2.0, ge=1.0, allow_inf_nan=False, description="a bucket more than this many times the tokens runs eager"
    )


class Graphs(_Block):
    """Which CUDA graphs are captured; a phase left out runs eager."""

    decode: Decode | None = Field(default=None, description="graphs of the decode phase")
    prefill: Prefill | None = Field(default=None, description="graphs of the prefill phase")
    agree: bool = Field(default=False, description="data-parallel ranks agree on the graph of each step")


class Parallel(_Block):
    """How the base model is split over devices."""

    tp: int = Field(default=1, ge=1, le=64, description="tensor-parallel ranks")
    ep: int = Field(default=1, ge=1, le=256, description="expert-parallel ranks")
    dp_attention: bool = Field(default=False, description="attention is data-parallel: ranks hold different batches")


class Moe(_Block):
    """How the base model runs its experts."""

    runner: str = Field(
        default="triton",
        description="the engine's MoE runner; with any but triton, for which alone graphs without adapters were "
        "compared with those for them, the widest variant serves every batch",
    )


class Spec(_Block):
    """The LoRA layer of one serving deployment."""

    # not Literal[1], which takes `true` for 1
    lorac: int = Field(ge=1, le=1, description="version of the spec format")
    name: Identifier = Field(description="name of the generated package")
    model: Model = Field(description="the base model's shapes: a preset, a config.json, or written out")
    dtype: Literal["float32", "float16", "bfloat16"] = Field(description="dtype of activations and adapter weights")
    adapters: Adapters = Field(description="resident adapters and the layers they change")
    backends: dict[Identifier, Backend] = Field(
        min_length=1, description="kernels to generate, name: parameters; the first is the default"
    )
    graphs: Graphs = Field(default=Graphs(), description="CUDA graphs; left out: everything runs eager")
    parallel: Parallel = Field(default=Parallel(), description="how the model is split over devices")
    moe: Moe | None = Field(default=None, description="how the base model runs its experts")
    targets: list[Target] = Field(default=[], description="GPUs kernels are compiled for ahead of time")
