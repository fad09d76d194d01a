"""The LoRA operators of sgl-kernel-npu as plain torch, under the schemas backends declare. They refuse the same."""

import torch

from lorac.spec.folders import read_declaration

ALLOWED_RANKS = (8, 16, 32, 64)
calls: list[tuple[str, tuple]] = []


def register() -> torch.library.Library:
    """Define every operator that a backend of lorac declares, for the CPU, and note its calls."""
    from kernel_kit import OWN

    libraries = {}
    for folder in sorted(OWN.glob("*/backend.yaml")):
        for name, signature in read_declaration(folder.parent).operators.items():
            space, _, operator = name.partition("::")
            library = libraries.setdefault(space, torch.library.Library(space, "FRAGMENT"))
            library.define(operator + signature)
            library.impl(operator, _noted(name, IMPLEMENTATIONS[name]), "CPU")
    return libraries


def _noted(name: str, function):
    def implementation(*arguments):
        calls.append((name, arguments))
        return function(*arguments)

    return implementation


def _check(x, weight, y, *counts):
    """What the operators' host code and kernels ask for: sizes in whole blocks of 32 bytes, and contiguous memory."""
    for tensor in (x, weight, y, *counts):
        assert tensor.is_contiguous()
    assert all(count.dtype == torch.int64 and count.dim() == 1 for count in counts)
    assert x.dim() == y.dim() == 2 and weight.dim() == 3 and x.shape[0] == y.shape[0]
    assert all(size % 16 == 0 for size in (*weight.shape[1:], x.shape[1], y.shape[1]) if size not in ALLOWED_RANKS)


def _shrink(x, weight, row_slot, y, scale):
    assert x.dtype == weight.dtype in (torch.float16, torch.bfloat16) and y.dtype == torch.float32
    assert x.shape[1] > y.shape[1] and weight.shape[1:] == (y.shape[1], x.shape[1])
    for row, slot in enumerate(row_slot):
        if slot >= 0:
            y[row] = (weight[slot].float() @ x[row].float()) * scale


def _expand(x, weight, row_slot, y, offset, size):
    assert x.dtype == torch.float32 and y.dtype == weight.dtype in (torch.float16, torch.bfloat16)
    assert x.shape[1] in ALLOWED_RANKS and x.shape[1] <= size
    assert weight.shape[1:] == (size, x.shape[1]) and 0 <= offset <= offset + size <= y.shape[1]
    part = y[:, offset : offset + size]
    for row, slot in enumerate(row_slot):
        if slot >= 0:
            part[row] = (part[row].float() + weight[slot].float() @ x[row]).to(y.dtype)
    return y


def _rows(lora_indices, seq_len, rows: int) -> list[int]:
    """The slot of each row: that of the sequence it lies in, -1 past all of them."""
    slots = [int(slot) for slot, count in zip(lora_indices, seq_len, strict=True) for _ in range(int(count))]
    return (slots + [-1] * rows)[:rows]


def bgmv_shrink(x, weight, indices, y, scale):
    _check(x, weight, y, indices)
    assert indices.shape[0] == x.shape[0]
    _shrink(x, weight, indices.tolist(), y, scale)


def bgmv_expand(x, weight, indices, y, offset, size):
    _check(x, weight, y, indices)
    assert indices.shape[0] == x.shape[0]
    return _expand(x, weight, indices.tolist(), y, offset, size)


def sgmv_shrink(x, weight, lora_indices, seq_len, y, scale):
    _check(x, weight, y, lora_indices, seq_len)
    _shrink(x, weight, _rows(lora_indices, seq_len, x.shape[0]), y, scale)


def sgmv_expand(x, weight, lora_indices, seq_len, y, offset, size):
    _check(x, weight, y, lora_indices, seq_len)
    return _expand(x, weight, _rows(lora_indices, seq_len, x.shape[0]), y, offset, size)


IMPLEMENTATIONS = {
    f"npu::{function.__name__}": function for function in (bgmv_shrink, bgmv_expand, sgmv_shrink, sgmv_expand)
}
