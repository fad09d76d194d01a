"""The `model:` block of a spec: a preset, a config.json, or shapes written out (short or layer by layer)."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

# Both reach generated code as text, so neither may hold anything but identifiers.
LAYER_NAME = r"^[a-z][a-z0-9_]{0,60}$"
LayerName = Annotated[str, StringConstraints(pattern=LAYER_NAME)]
DOTTED_PATH = r"^[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*){0,7}$"
DottedPath = Annotated[str, StringConstraints(pattern=DOTTED_PATH)]
# The limits keep a mistyped number from becoming gigabytes of plan; published models are far below them.
MAX_WIDTH = 1_048_576
MAX_LAYERS = 1_024
MAX_VOCAB = 16_777_216
MAX_EXPERTS = 4_096
LayerIndex = Annotated[int, Field(ge=0, lt=MAX_LAYERS)]

SHORT_FORM = ("intermediate", "heads", "kv_heads", "head_dim")
LONG_FORM = ("linears", "fused", "experts")


class _Block(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class LinearShape(_Block):
    """One linear layer, unfused and unsharded."""

    path: DottedPath = Field(description="dotted path inside a decoder layer, such as self_attn.q_proj")
    in_features: int = Field(alias="in", ge=1, le=MAX_WIDTH, description="input width")
    out_features: int = Field(alias="out", ge=1, le=MAX_WIDTH, description="output width")
    sharding: Literal["column", "row", "replicated"] = Field(
        default="replicated", description="what tensor parallelism cuts: the output, the input, or nothing"
    )
    units: int = Field(
        default=0, ge=0, le=MAX_WIDTH, description="pieces the cut side consists of (heads); 0: any even cut"
    )
    layers: list[LayerIndex] | None = Field(
        default=None, min_length=1, description="decoder layers that have it, increasing; all if left out"
    )


class ExpertsShape(_Block):
    """The mixture of experts of the model's sparse layers."""

    count: int = Field(ge=1, le=MAX_EXPERTS, description="experts per layer")
    top_k: int = Field(ge=1, le=MAX_EXPERTS, description="experts a token is sent to")
    intermediate: int = Field(ge=1, le=MAX_WIDTH, description="width inside one expert")
    layers: list[LayerIndex] | None = Field(
        default=None, min_length=1, description="decoder layers that have experts, increasing; all if left out"
    )
    path: DottedPath = Field(default="mlp.experts", description="dotted path inside a decoder layer")
    names: list[LayerName] = Field(
        default=["gate_proj", "up_proj", "down_proj"],
        min_length=3,
        max_length=3,
        description="gate, up and down as the checkpoint names them, one name twice where gate and up are one weight",
    )
    transposed: bool = Field(default=False, description="weights are stored [experts, in, out]")
    interleaved: bool = Field(default=False, description="gate and up are the even and odd columns of one weight")


class Model(_Block):
    """Exactly one of `preset`, `config`, or written-out shapes (hidden, layers, vocab, tied and one of two forms)."""

    preset: str | None = Field(default=None, description="name of a model lorac knows")
    config: str | None = Field(
        default=None, description="Hugging Face config.json, relative to the spec and not above its folder"
    )

    hidden: int | None = Field(default=None, ge=1, le=MAX_WIDTH, description="width of the residual stream")
    layers: int | None = Field(default=None, ge=1, le=MAX_LAYERS, description="decoder layers")
    vocab: int | None = Field(default=None, ge=1, le=MAX_VOCAB, description="rows of the embedding")
    tied: bool | None = Field(default=None, description="lm_head shares the embedding's weight")

    intermediate: int | None = Field(
        default=None, ge=1, le=MAX_WIDTH, description="short form, a llama-like model: width inside the MLP"
    )
    heads: int | None = Field(default=None, ge=1, le=MAX_WIDTH, description="short form: attention heads")
    kv_heads: int | None = Field(
        default=None, ge=1, le=MAX_WIDTH, description="short form: key/value heads; as many as heads if left out"
    )
    head_dim: int | None = Field(
        default=None, ge=1, le=MAX_WIDTH, description="short form: width of a head; hidden / heads if left out"
    )

    linears: dict[LayerName, LinearShape] | None = Field(
        default=None, min_length=1, description="long form: every linear layer by name"
    )
    fused: dict[LayerName, list[str]] | None = Field(
        default=None, description="long form: layers an engine stacks into one, such as qkv_proj: [q_proj, ...]"
    )
    experts: ExpertsShape | None = Field(default=None, description="long form: the mixture of experts")
