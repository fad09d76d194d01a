"""Hugging Face's config.json -> Shapes: which linear layers a model has, how wide they are and how they are cut."""

from collections.abc import Callable
from typing import Any

from lorac.errors import Problem, SpecError

from .model_schema import MAX_EXPERTS, MAX_LAYERS, MAX_VOCAB, MAX_WIDTH
from .shapes import Experts, Linear, Shapes

_LIMITS = {"num_hidden_layers": MAX_LAYERS, "vocab_size": MAX_VOCAB}
_GATED = ("gate_proj", "up_proj", "down_proj")
# In the order of a layer's forward; a model has those whose parts it has.
_FUSED = (
    ("qkv_proj", ("q_proj", "k_proj", "v_proj")),
    ("fused_qkv_a_proj", ("q_a_proj", "kv_a_proj_with_mqa")),
    ("gate_up_proj", ("gate_proj", "up_proj")),
    ("shared_gate_up_proj", ("shared_gate_proj", "shared_up_proj")),
)


class _Config:
    """Fields of one config.json. A missing or senseless field becomes a problem and reads as 1, so that all show.

    A default that is a text names the field to copy.
    """

    def __init__(self, fields: dict[str, Any], defaults: dict[str, Any]):
        given = {name: value for name, value in fields.items() if value is not None}
        filled = {name: given.get(value) if isinstance(value, str) else value for name, value in defaults.items()}
        self.fields = {name: value for name, value in (filled | given).items() if value is not None}
        self.problems: list[Problem] = []

    def size(self, *names: str, least: int = 1) -> int:
        """The first of these fields that is there, a whole number within the limits."""
        name = next((name for name in names if name in self.fields), None)
        if name is None:
            self.refuse(f"the config has no {names[0]}", f"a config.json of model_type {self.fields['model_type']!r}")
            return 1
        value, most = self.fields[name], _LIMITS.get(names[0], MAX_WIDTH)
        if type(value) is not int or not least <= value <= most:
            self.refuse(f"the config's {name} is {value!r:.40}", f"a whole number from {least} to {most}")
            return 1
        return value

    def flag(self, name: str) -> bool:
        value = self.fields.get(name, False)
        if not isinstance(value, bool):
            self.refuse(f"the config's {name} is {value!r:.40}", "true or false")
        return value is True

    def refuse(self, message: str, expected: str) -> None:
        problem = Problem(message, expected=expected)
        if problem not in self.problems:
            self.problems.append(problem)


def shapes_from_config(config: Any) -> Shapes:
    """The shapes of the text model a config.json describes. Raises SpecError naming every field that is wrong."""
    if not isinstance(config, dict):
        raise SpecError([Problem("the config is not a JSON object", expected="a Hugging Face config.json")])
    family = config.get("model_type")
    known = family if isinstance(family, str) else ""
    if known == "gemma3":  # a vision model whose language model is described in a part of its own
        config = config.get("text_config")
        if not isinstance(config, dict):
            raise SpecError([Problem("the config has no text_config", expected="the config of a gemma3 model")])
        known = "gemma3_text"
    if known not in _FAMILIES:
        message = "the config has no model_type" if family is None else f"lorac knows no model_type {family!r:.40}"
        hint = "write the shapes out: model: {hidden, layers, vocab, tied, linears: {q_proj: {path, in, out}, ...}}"
        raise SpecError([Problem(message, expected=f"one of {', '.join(families())}", hint=hint)])
    build, defaults = _FAMILIES[known]
    fields = _Config({**config, "model_type": known}, defaults)
    shapes = build(fields, str(family))
    if fields.problems:
        raise SpecError(fields.problems)
    return shapes


def families() -> list[str]:
    """The model_types that can be read."""
    return sorted([*_FAMILIES, "gemma3"])


def _column(name: str, path: str, wide: tuple[int, int], layers: tuple[int, ...], units: int = 0) -> Linear:
    """A linear of (in, out) features whose output tensor parallelism cuts."""
    return Linear(name, path, *wide, layers, "column", units)


def _row(name: str, path: str, wide: tuple[int, int], layers: tuple[int, ...], units: int = 0) -> Linear:
    """A linear of (in, out) features whose input tensor parallelism cuts."""
    return Linear(name, path, *wide, layers, "row", units)


def _attention(config: _Config, layers: tuple[int, ...]) -> tuple[list[Linear], tuple[int, int, int]]:
    hidden, heads = config.size("hidden_size"), config.size("num_attention_heads")
    kv_heads = config.size("num_key_value_heads")
    head_dim = config.size("head_dim") if "head_dim" in config.fields else hidden // heads
    if not config.problems and heads % kv_heads:
        config.refuse(
            f"{heads} heads cannot share {kv_heads} key/value heads", "heads that are a multiple of key/value heads"
        )
    if not config.problems and "head_dim" not in config.fields and hidden % heads:
        config.refuse(f"a width of {hidden} is no multiple of {heads} heads", "a head_dim")
    query, key = (hidden, heads * head_dim), (hidden, kv_heads * head_dim)
    linears = [
        _column("q_proj", "self_attn.q_proj", query, layers, heads),
        _column("k_proj", "self_attn.k_proj", key, layers, kv_heads),
        _column("v_proj", "self_attn.v_proj", key, layers, kv_heads),
        _row("o_proj", "self_attn.o_proj", (heads * head_dim, hidden), layers, heads),
    ]
    return linears, (heads, kv_heads, head_dim)


def _mlp(hidden: int, width: int, layers: tuple[int, ...], path: str = "mlp", prefix: str = "") -> list[Linear]:
    if not layers:
        return []
    return [
        _column(f"{prefix}gate_proj", f"{path}.gate_proj", (hidden, width), layers),
        _column(f"{prefix}up_proj", f"{path}.up_proj", (hidden, width), layers),
        _row(f"{prefix}down_proj", f"{path}.down_proj", (width, hidden), layers),
    ]


def _shapes(config: _Config, family: str, linears: list[Linear], **more: Any) -> Shapes:
    names = {linear.name for linear in linears}
    return Shapes(
        family=family,
        hidden=config.size("hidden_size"),
        vocab=config.size("vocab_size"),
        layers=config.size("num_hidden_layers"),
        tied=config.flag("tie_word_embeddings"),
        linears=tuple(linears),
        fused=tuple((name, parts) for name, parts in _FUSED if names.issuperset(parts)),
        **more,
    )


def _layers(config: _Config) -> tuple[int, ...]:
    return tuple(range(config.size("num_hidden_layers")))


def _experts(config: _Config, count: int, intermediate: int, layers: tuple[int, ...], **more: Any) -> Experts | None:
    top_k = config.size("num_experts_per_tok", "experts_per_token")
    if not config.problems and not top_k <= count <= MAX_EXPERTS:
        config.refuse(f"the config sends a token to {top_k} of {count} experts", f"at most {MAX_EXPERTS} experts")
    more = {"path": "mlp.experts", "names": _GATED, **more}
    return Experts(count, top_k, intermediate, layers, **more) if layers else None


def _dense(config: _Config, family: str) -> Shapes:
    layers = _layers(config)
    linears, heads = _attention(config, layers)
    linears += _mlp(config.size("hidden_size"), config.size("intermediate_size"), layers)
    return _shapes(config, family, linears, attention=heads)


def _phi3(config: _Config, family: str) -> Shapes:
    layers = _layers(config)
    linears, heads = _attention(config, layers)
    linears += _mlp(config.size("hidden_size"), config.size("intermediate_size"), layers)
    return _shapes(config, family, linears, attention=heads, stored_fused=("qkv_proj", "gate_up_proj"))


def _mixtral(config: _Config, family: str) -> Shapes:
    layers = _layers(config)
    linears, heads = _attention(config, layers)
    count, width = config.size("num_local_experts"), config.size("intermediate_size")
    experts = _experts(config, count, width, layers, path="block_sparse_moe.experts", names=("w1", "w3", "w2"))
    return _shapes(config, family, linears, attention=heads, experts=experts)


def _gpt_oss(config: _Config, family: str) -> Shapes:
    layers = _layers(config)
    linears, heads = _attention(config, layers)
    count, width = config.size("num_local_experts", "num_experts"), config.size("intermediate_size")
    # gate and up are one parameter here, its even and odd columns
    names = ("gate_up_proj", "gate_up_proj", "down_proj")
    experts = _experts(config, count, width, layers, names=names, transposed=True, interleaved=True)
    return _shapes(config, family, linears, attention=heads, experts=experts)


def _qwen3_moe(config: _Config, family: str) -> Shapes:
    layers = _layers(config)
    linears, heads = _attention(config, layers)
    dense_by_name = config.fields["mlp_only_layers"]
    if not isinstance(dense_by_name, list | tuple):
        config.refuse(f"the config's mlp_only_layers is {dense_by_name!r:.40}", "a list of layers")
        dense_by_name = []
    step = config.size("decoder_sparse_step")
    sparse = tuple(layer for layer in layers if layer not in dense_by_name and (layer + 1) % step == 0)
    dense = tuple(layer for layer in layers if layer not in sparse)
    if dense:
        linears += _mlp(config.size("hidden_size"), config.size("intermediate_size"), dense)
    experts = _experts(config, config.size("num_experts"), config.size("moe_intermediate_size"), sparse)
    return _shapes(config, family, linears, attention=heads, experts=experts)


def _deepseek_v3(config: _Config, family: str) -> Shapes:
    layers, hidden, heads = _layers(config), config.size("hidden_size"), config.size("num_attention_heads")
    rope, nope, value = (config.size(f"{part}_head_dim") for part in ("qk_rope", "qk_nope", "v"))
    latent = config.size("kv_lora_rank")
    if "q_lora_rank" in config.fields:
        rank = config.size("q_lora_rank")
        linears = [
            Linear("q_a_proj", "self_attn.q_a_proj", hidden, rank, layers, "replicated"),
            _column("q_b_proj", "self_attn.q_b_proj", (rank, heads * (nope + rope)), layers, heads),
        ]
    else:
        linears = [_column("q_proj", "self_attn.q_proj", (hidden, heads * (nope + rope)), layers, heads)]
    linears += [
        Linear("kv_a_proj_with_mqa", "self_attn.kv_a_proj_with_mqa", hidden, latent + rope, layers, "replicated"),
        _column("kv_b_proj", "self_attn.kv_b_proj", (latent, heads * (nope + value)), layers, heads),
        _row("o_proj", "self_attn.o_proj", (heads * value, hidden), layers, heads),
    ]
    first, every = config.size("first_k_dense_replace", least=0), config.size("moe_layer_freq")
    sparse = tuple(layer for layer in layers if layer >= first and layer % every == 0)
    dense = tuple(layer for layer in layers if layer not in sparse)
    linears += _mlp(hidden, config.size("intermediate_size"), dense)
    width, shared = config.size("moe_intermediate_size"), config.size("n_shared_experts", least=0)
    if shared:
        linears += _mlp(hidden, shared * width, sparse, "mlp.shared_experts", "shared_")
    experts = _experts(config, config.size("n_routed_experts"), width, sparse)
    return _shapes(config, family, linears, experts=experts)


# What transformers fills in where a published config leaves the field out; anything else must be there.
_GEMMA3 = {
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "vocab_size": 262_208,
    "tie_word_embeddings": True,
}
_AS_MANY_AS_HEADS = {"num_key_value_heads": "num_attention_heads"}
_FAMILIES: dict[str, tuple[Callable[[_Config, str], Shapes], dict[str, Any]]] = {
    "llama": (_dense, _AS_MANY_AS_HEADS),
    "mistral": (_dense, {}),
    "qwen2": (_dense, {}),
    "qwen3": (_dense, {"head_dim": 128}),
    "qwen3_moe": (_qwen3_moe, {"decoder_sparse_step": 1, "mlp_only_layers": ()}),
    "mixtral": (_mixtral, {}),
    "gemma2": (_dense, {"head_dim": 256, "tie_word_embeddings": True}),
    "gemma3_text": (_dense, _GEMMA3),
    "phi3": (_phi3, _AS_MANY_AS_HEADS),
    "gpt_oss": (_gpt_oss, {"head_dim": 64}),
    "deepseek_v3": (_deepseek_v3, {"moe_layer_freq": 1}),
}
