"""The shapes of one model, as LoRA sees it: plain data between the spec and the plan."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Linear:
    """A linear layer as checkpoints name it, unfused, unsharded.

    `units` is the number of pieces tensor parallelism may cut the sharded side into (attention heads, kv heads, or 0
    where any even cut will do); a model with fewer kv heads than ranks replicates them.
    """

    name: str  # unique within the model: "q_proj"
    path: str  # inside a decoder layer: "self_attn.q_proj"
    in_features: int
    out_features: int
    layers: tuple[int, ...]  # decoder layers that have it
    sharding: str  # column | row | replicated
    units: int = 0


@dataclass(frozen=True)
class Experts:
    """A mixture of experts in each of `layers`: gate, up [intermediate, hidden] and down [hidden, intermediate]."""

    count: int
    top_k: int
    intermediate: int
    layers: tuple[int, ...]
    path: str  # inside a decoder layer: "mlp.experts"
    names: tuple[str, str, str]  # gate, up, down as checkpoints name them: ("w1", "w3", "w2") in Mixtral
    transposed: bool = False  # parameters stored [experts, in, out] (gpt-oss)
    interleaved: bool = False  # gate and up in even and odd columns (gpt-oss)


@dataclass(frozen=True)
class Shapes:
    """One model. `fused` maps a fused layer to its parts, in order; `stored_fused` are those the checkpoint fuses."""

    family: str  # Hugging Face's model_type, or "custom"
    hidden: int
    vocab: int
    layers: int
    tied: bool  # lm_head shares the embedding's weight
    linears: tuple[Linear, ...]
    fused: tuple[tuple[str, tuple[str, ...]], ...]  # ("qkv_proj", ("q_proj", "k_proj", "v_proj")), ...
    stored_fused: tuple[str, ...] = ()  # phi-3/4: ("qkv_proj", "gate_up_proj")
    experts: Experts | None = None
    attention: tuple[int, int, int] | None = None  # query heads, kv heads, head dim; None for latent attention

    def linear(self, name: str) -> Linear:
        """The linear of that name. Raises KeyError with the names there are."""
        for linear in self.linears:
            if linear.name == name:
                return linear
        raise KeyError(f"{name!r} is none of {[linear.name for linear in self.linears]}")
