"""The oracle: LoRA in a few lines of torch, in float64, row by row. Slow, plain, and independent of every kernel."""

import torch


def lora(
    x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, rank: torch.Tensor, scale: torch.Tensor, widths, row_slot
) -> torch.Tensor:
    """The delta [rows, out] in float64: scale * B (A x) of each row's own slot, zero for base rows (slot -1).

    x [rows, in] or token ids [rows] (an embedding, whose a is [slots, vocab, R]); a [slots, slices * R, in];
    b [out, slots, R]; rank and scale [slots, slices]; `widths` are the slices' outputs; row_slot one number per row.
    """
    max_rank = b.shape[-1]
    delta = torch.zeros(x.shape[0], b.shape[0], dtype=torch.float64, device=x.device)
    for row, slot in enumerate(row_slot):
        if slot < 0:
            continue
        start = 0
        for part, width in enumerate(widths):
            r = int(rank[slot, part])
            if x.dim() == 1:
                h = a[slot, x[row], :r].double()
            else:
                h = a[slot, part * max_rank : part * max_rank + r].double() @ x[row].double()
            delta[row, start : start + width] = scale[slot, part].double() * (b[start : start + width, slot, :r].double() @ h)
            start += width
    return delta
