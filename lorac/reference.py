"""The oracle: LoRA in twenty lines of torch, in float64, adapter by adapter. Plain, and independent of every kernel."""

import torch


def lora(x, a, b, rank, scale, widths: list[int], row_slot: list[int]) -> torch.Tensor:
    """The delta [rows, out] in float64: scale * B (A x) of each row's own slot, zero for base rows (slot -1).

    x [rows, in], or token ids [rows] for an embedding, whose a is [slots, vocab, R]; a [slots, slices * R, in];
    b [out, slots, R]; rank and scale [slots, slices]; `widths` are the outputs of the slices.
    """
    max_rank = b.shape[-1]
    delta = torch.zeros(x.shape[0], b.shape[0], dtype=torch.float64, device=x.device)
    for slot in set(row_slot) - {-1}:
        rows = torch.tensor([row for row, of in enumerate(row_slot) if of == slot], device=x.device)
        start = 0
        for part, width in enumerate(widths):
            r = int(rank[slot, part])
            if x.dim() == 1:
                h = a[slot, x[rows], :r].double()
            else:
                h = x[rows].double() @ a[slot, part * max_rank : part * max_rank + r].double().T
            outputs = slice(start, start + width)
            delta[rows, outputs] = scale[slot, part].double() * (h @ b[outputs, slot, :r].double().T)
            start += width
    return delta
