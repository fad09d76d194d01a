"""Decode graphs for a Hugging Face model, over a static cache whose first rows serve smaller batches."""

from collections.abc import Callable
from types import MethodType, ModuleType

import torch
from transformers.cache_utils import Cache, StaticLayer
from transformers.modeling_outputs import CausalLMOutputWithPast

from lorac.runtime.errors import ShapeError
from lorac.runtime.step import Step
from lorac.runtime.ticket import Ticket

_WITH_MASKS = ("sdpa", "eager")  # attention that takes the masks a static cache needs


class StaticDecode:
    """Keys and values [rows, heads, length, head_dim] of every layer, and graphs of the model's one-token forward.

    Layers with a sliding window keep all tokens, and mask those outside of it: what a graph reads must not move.
    """

    def __init__(self, model, forward: Callable, package: ModuleType, step: Step, rows: int, length: int, keyword: str):
        """`forward` is the model's own; it takes the cache as `keyword`. Captures a graph per bucket up to `rows`."""
        buckets = sorted({bucket for bucket, _ in package.decode.GRAPHS[step.backend_name]})
        rows = next((bucket for bucket in buckets if bucket >= rows), rows)
        self.model, self.rows, self.length, self.keyword = model, rows, length, keyword
        config = model.config.get_text_config(decoder=True)
        if config._attn_implementation not in _WITH_MASKS:
            raise ShapeError(
                f"attention is {config._attn_implementation}, which takes no masks; decode graphs need one of "
                f"{', '.join(_WITH_MASKS)}: load the model with attn_implementation='sdpa'"
            )
        heads = config.num_key_value_heads
        width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        device = step.device
        self.position = torch.zeros((), dtype=torch.int64, device=device)  # tokens each row has, padding included
        self.seen = 0  # the same, on the host
        self._memory = [
            tuple(torch.zeros(rows, heads, length, width, dtype=model.dtype, device=device) for _ in range(2))
            for _ in range(config.num_hidden_layers)
        ]
        self._caches: dict[int, Cache] = {}
        masks = self._masks(self._example(device))
        inputs = {
            "input_ids": torch.zeros(buckets[-1], 1, dtype=torch.int64, device=device),
            "position_ids": torch.zeros(buckets[-1], 1, dtype=torch.int64, device=device),
            **{name: mask.new_zeros(buckets[-1], *mask.shape[1:]) for name, mask in masks.items()},
        }
        # padded rows see everything: a row that sees nothing would write NaN where a later batch has its cache
        padding = {name: float(mask.dtype == torch.bool) for name, mask in masks.items()}

        def one_token(model, input_ids, position_ids, **masks):
            mask = masks if len(masks) > 1 else next(iter(masks.values()))
            cache = {keyword: self.cache(len(input_ids))}
            return forward(
                input_ids=input_ids,
                position_ids=position_ids,
                attention_mask=mask,
                use_cache=True,
                return_dict=True,
                **cache,
            ).logits

        # as a method of the model, so that graphs notice when its parameters move
        self.graphs = package.DecodeGraphs(MethodType(one_token, model), step, inputs, padding=padding)
        self.graphs.capture([bucket for bucket in buckets if bucket <= rows])

    def cache(self, rows: int) -> Cache:
        """The cache of a batch, which is the first rows of one memory."""
        if rows > self.rows:
            raise ShapeError(
                f"{rows} rows are above the {self.rows} that decode graphs were captured for: capture more, "
                "or generate inside `rows`, which is eager"
            )
        if rows not in self._caches:
            layers = [_Layer(keys[:rows], values[:rows], self.position) for keys, values in self._memory]
            self._caches[rows] = Cache(layers=layers)
        return self._caches[rows]

    def begin(self, rows: int) -> Cache:
        """An empty cache for a batch."""
        self._move_to(0)
        return self.cache(rows)

    def owns(self, cache: Cache | None) -> bool:
        """Whether that cache is one of these."""
        return cache is not None and any(cache is own for own in self._caches.values())

    def check_room(self, tokens: int) -> None:
        """Raise ShapeError where `tokens` more tokens per row do not fit."""
        if self.seen + tokens > self.length:
            raise ShapeError(
                f"{self.seen + tokens} tokens are above the {self.length} that the static cache holds: "
                "capture with a larger length, or ask for fewer tokens"
            )

    def advance(self, tokens: int) -> None:
        """Every row has got `tokens` tokens."""
        self._move_to(self.seen + tokens)

    def decode(self, ticket: Ticket, given: dict) -> CausalLMOutputWithPast:
        """One token of every row: replays the graph the ticket admits to, or runs eagerly."""
        inputs = {name: given[name] for name in ("input_ids", "position_ids")}
        logits = self.graphs.run(ticket, inputs | self._masks(given["attention_mask"]))
        return CausalLMOutputWithPast(logits=logits, **{self.keyword: given[self.keyword]})

    def _move_to(self, position: int) -> None:
        self.seen = position
        self.position.fill_(position)

    def _example(self, device: torch.device):
        """The masks of a decode step, as `generate` makes them."""
        one = torch.ones(1, 1, dtype=torch.int64, device=device)
        made = self.model.prepare_inputs_for_generation(
            one, attention_mask=one, use_cache=True, **{self.keyword: self.cache(1)}
        )
        return made["attention_mask"]

    @staticmethod
    def _masks(mask) -> dict[str, torch.Tensor]:
        """Masks by name: models with layers of several kinds have one for each."""
        return dict(mask) if isinstance(mask, dict) else {"attention_mask": mask}


class _Layer(StaticLayer):
    """One decoder layer's part of a cache. Its length is all layers' and moves when a forward is over."""

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, position: torch.Tensor):
        super().__init__(max_cache_len=keys.shape[2])
        self.keys, self.values, self.cumulative_length = keys, values, position
        self.device, self.is_initialized = keys.device, True

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs):
        """Write [rows, heads, tokens, head_dim] behind what there is; returns all keys and values."""
        at = torch.arange(key_states.shape[2], device=self.device) + self.cumulative_length
        self.keys.index_copy_(2, at, key_states)
        self.values.index_copy_(2, at, value_states)
        return self.keys, self.values

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """In place: graphs read this memory."""
        for held in (self.keys, self.values):
            held.copy_(held.index_select(0, beam_idx.to(self.device)))
