"""A mixture of experts without LoRA, as plainly as Triton allows: what a generated one is compared with."""

import torch
import triton
import triton.language as tl

_BLOCK_N, _BLOCK_K = 64, 128


@triton.jit
def _grouped(
    x, weight, y, pairs_by_block, block_expert, blocks_used, scale, pairs,
    N: tl.constexpr, K: tl.constexpr, PER_ROW: tl.constexpr, SCALED: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """y[pair] = weight[expert] x[pair // PER_ROW], times scale[pair] if SCALED, for one expert's block of pairs."""
    block = tl.program_id(0)
    if block >= tl.load(blocks_used):
        return
    pair = tl.load(pairs_by_block + block * BLOCK_M + tl.arange(0, BLOCK_M))
    live = pair < pairs
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    x_at = x + (pair // PER_ROW)[:, None] * K + k[None, :]
    w_at = weight + tl.load(block_expert + block).to(tl.int64) * (N * K) + n[None, :] * K + k[:, None]
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for first in range(0, K, BLOCK_K):
        acc = tl.dot(tl.load(x_at + first, mask=live[:, None], other=0.0), tl.load(w_at + first), acc)
    if SCALED:
        acc *= tl.load(scale + pair, mask=live, other=0.0)[:, None]
    tl.store(y + pair[:, None] * N + n[None, :], acc.to(y.dtype.element_ty), mask=live[:, None])


class PlainMoe:
    """One batch's mixture. Pairs are sorted by expert when it is made, so that its time does not count."""

    def __init__(self, topk_ids: torch.Tensor, topk_weights: torch.Tensor, experts: int):
        self.rows, self.top_k = topk_ids.shape
        self.weights, self.pairs = topk_weights, topk_ids.numel()
        self.block = 16 if self.rows <= 64 else 32 if self.rows <= 256 else 64
        by_expert = torch.argsort(topk_ids.flatten(), stable=True).tolist()
        counts = torch.bincount(topk_ids.flatten(), minlength=experts).tolist()
        entries, owners, first = [], [], 0
        for expert, count in enumerate(counts):
            own = by_expert[first : first + count]
            first += count
            entries += own + [self.pairs] * (-count % self.block)
            owners += [expert] * -(-count // self.block)
        made = (entries, owners, [len(owners)])
        device = topk_ids.device
        self.entries, self.owners, self.used = (torch.tensor(of, dtype=torch.int32, device=device) for of in made)

    def __call__(self, x, w13, w2, after_gate_up=None, after_down=None) -> torch.Tensor:
        """[rows, hidden]. Hooks take (y [pairs, out], x), as those of a MoE runner do."""
        width = w2.shape[2]
        y = self._grouped(x, w13, self.top_k, False)
        if after_gate_up:
            after_gate_up(y, x)
        act = torch.nn.functional.silu(y[:, :width]) * y[:, width:]
        y = self._grouped(act, w2, 1, True)
        if after_down:
            after_down(y, act)
        return y.view(self.rows, self.top_k, -1).sum(1)

    def _grouped(self, x, weight, per_row: int, scaled: bool) -> torch.Tensor:
        n, k = weight.shape[1:]
        y = torch.empty(self.pairs, n, dtype=x.dtype, device=x.device)
        grid = (len(self.owners), n // _BLOCK_N)
        _grouped[grid](
            x, weight, y, self.entries, self.owners, self.used, self.weights, self.pairs, n, k, per_row, scaled,
            self.block, _BLOCK_N, _BLOCK_K, num_warps=4, num_stages=4,
        )  # fmt: skip
        return y
