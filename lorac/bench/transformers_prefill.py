"""Prefill of one request in a Llama of transformers with lorac attached: eager, and as graphs around attention."""

from types import ModuleType

import torch

from lorac.bench.llama import Llama
from lorac.bench.whole import device_ms
from lorac.runtime.breakable import break_here


def prefill_in_transformers(package: ModuleType, own: Llama, slots, step, count: int) -> tuple[float, float]:
    """Milliseconds of a prefill of `count` tokens with adapter "1", logits of the last token included: eager, replayed.

    The model has the shapes of `own`, and random weights. Needs transformers.
    """
    from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    from lorac.integrations.transformers import attach

    # without a mask function of that name there is no mask, and attention is causal
    AttentionInterface.register("break", break_here(sdpa_attention_forward))
    layout = package.LAYOUT
    intermediate = layout.by_name["down_proj"].in_features
    config = LlamaConfig(
        hidden_size=layout.hidden, intermediate_size=intermediate, num_attention_heads=own.heads,
        num_key_value_heads=own.kv_heads, head_dim=own.width, num_hidden_layers=layout.layers,
        vocab_size=layout.vocab, tie_word_embeddings=False, attn_implementation="break",
    )  # fmt: skip
    with own.device:
        torch.set_default_dtype(own.dtype)
        try:
            model = LlamaForCausalLM(config).eval().requires_grad_(False)
        finally:
            torch.set_default_dtype(torch.float32)
    handle = attach(model, package, slots, step)
    tokens = torch.randint(0, layout.vocab, (1, count), device=own.device)

    def eager():
        with handle.rows(["1"]), torch.no_grad():
            model(tokens, use_cache=False, logits_to_keep=1)

    eager_ms = device_ms(eager)

    def forward(ids, positions):
        hidden = model.model(input_ids=ids.T, position_ids=positions.T, use_cache=False).last_hidden_state
        return hidden[0]

    inputs = [torch.zeros(count, 1, dtype=torch.int64, device=own.device) for _ in range(2)]
    graphs = package.PrefillGraphs(forward, step, inputs)
    graphs.capture([count])
    positions = torch.arange(count, device=own.device)[:, None]

    def served():
        ticket = step.prepare_prefill([("1", count)])
        hidden = graphs.run(ticket, [tokens.T, positions])
        model.lm_head(hidden[-1:])

    return eager_ms, device_ms(served)
