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


def expert_lora(x, expert, a, b, rank, scale, widths: list[int], pair_slot: list[int]) -> torch.Tensor:
    """The delta [pairs, out] in float64 of pairs of a row and an expert; zero for base rows and for expert -1.

    x [pairs, in], expert [pairs]; a [slots, experts or 1, slices * R, in], b [slots, experts or 1, out, R].
    """
    max_rank = b.shape[-1]
    slots = torch.tensor(pair_slot, device=x.device)
    delta = torch.zeros(x.shape[0], b.shape[2], dtype=torch.float64, device=x.device)
    for pairs in ((slots >= 0) & (expert >= 0)).nonzero()[:, 0].split(256):
        slot, of, start = slots[pairs], expert[pairs].long(), 0
        of_a, of_b = (of if weight.shape[1] > 1 else of * 0 for weight in (a, b))
        for part, width in enumerate(widths):
            known = torch.arange(max_rank, device=x.device) < rank[slot, part][:, None]
            own_a = a[:, :, part * max_rank : (part + 1) * max_rank][slot, of_a].double()
            own_b = b[:, :, start : start + width][slot, of_b].double()
            h = torch.einsum("pi,pri->pr", x[pairs].double(), own_a) * scale[slot, part, None].double()
            own_b = torch.where(known[:, None], own_b, 0)
            delta[pairs, start : start + width] = torch.einsum("pr,por->po", torch.where(known, h, 0), own_b)
            start += width
    return delta


def moe(x, topk_ids, topk_weights, w13, w2, gate_up: tuple, down: tuple, row_slot: list[int]) -> torch.Tensor:
    """The mixture of experts with LoRA, [rows, hidden] in float64.

    x [rows, hidden], topk_ids and topk_weights [rows, top_k], w13 [experts, 2 * intermediate, hidden], w2 [experts,
    hidden, intermediate]; `gate_up` and `down` are (a, b, rank, scale) as `expert_lora` takes them.
    """
    rows, top_k = topk_ids.shape
    expert, width = topk_ids.reshape(-1), w2.shape[2]
    pair_slot = [slot for slot in row_slot for _ in range(top_k)]
    pairs = x.repeat_interleave(top_k, 0)
    y = _through(pairs, w13, expert) + expert_lora(pairs, expert, *gate_up, [width, width], pair_slot)
    act = torch.nn.functional.silu(y[:, :width]) * y[:, width:]
    y = _through(act, w2, expert) + expert_lora(act, expert, *down, [w2.shape[1]], pair_slot)
    return torch.einsum("tk,tko->to", topk_weights.double(), y.view(rows, top_k, -1))


def _through(x, weight, expert) -> torch.Tensor:
    """x [pairs, in] through each pair's expert, in float64; zero for expert -1."""
    y = torch.zeros(x.shape[0], weight.shape[1], dtype=torch.float64, device=x.device)
    for of in set(expert.tolist()) - {-1}:
        own = expert == of
        y[own] = torch.einsum("pi,oi->po", x[own].double(), weight[of].double())
    return y
