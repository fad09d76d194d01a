"""LoRA on a mixture of experts: the whole mixture in one call, or the delta alone for the hooks of a MoE runner.

Routing is given: topk_ids [rows, top_k], the experts of each row as this rank numbers its own (-1: on another rank),
and topk_weights [rows, top_k]. A pair is a row and one of its experts, number row * top_k + choice.
"""

import torch

from lorac.runtime.apply import check_parameter, plain, rows_of
from lorac.runtime.compiled import ALIGN
from lorac.runtime.errors import PackageError, ShapeError
from lorac.runtime.layout import Module
from lorac.runtime.step import Step
from lorac.runtime.ticket import Batch

GATE_UP, DOWN = "experts_gate_up", "experts_down"


def moe(
    layer: int,
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    step: Step,
) -> torch.Tensor:
    """sum over a row's experts of weight * W2(silu(W1 x) * W3 x), each product with its LoRA: [..., hidden], as x is.

    x [..., hidden]; w13 [experts, 2 * intermediate, hidden], gate first, and w2 [experts, hidden, intermediate], both
    contiguous. Under expert parallelism, the sum over the experts of this rank. Base rows are bit-equal to a batch
    without adapters. Raises TicketError where the batch was not prepared or its slots changed, ShapeError for tensors
    that do not fit, PackageError for a backend that does not serve experts.
    """
    gate_up, down = _module(GATE_UP, step), _module(DOWN, step)
    run = getattr(step.backend, "MOE", None) or _unserved(step)
    for weight, of, name in ((w13, gate_up, "w13"), (w2, down, "w2")):
        _weight(weight, of, name, step)
    if topk_weights is None:
        raise ShapeError(f"topk_weights is None, expected [rows, {gate_up.experts.top_k}]: the sum is weighted")
    with step.launching():
        batch, up_slot = step.enter(GATE_UP, layer)
        rows = rows_of(x, gate_up, step, batch)
        rows = rows.contiguous()
        ids, weights = _routing(topk_ids, topk_weights, rows.shape[0], gate_up, step)
        _, down_slot = step.enter(DOWN, layer)
        return run(rows, ids, weights, w13, w2, up_slot, down_slot, batch, step.scratch).view(x.shape)


def add_experts(
    module: str,
    layer: int,
    x: torch.Tensor,
    y: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor | None,
    step: Step,
) -> torch.Tensor:
    """y += LoRA of x through each pair's expert, times the router weight if weights are given; in place, returns y.

    For `experts_gate_up`, x [rows, hidden] and y [pairs, 2 * intermediate] before the activation; for `experts_down`,
    x [pairs, intermediate] and y [pairs, hidden] before the sum: pass the weights where y holds weighted outputs.
    [pairs, n] may be [rows, top_k, n]. Pairs of base rows and of experts elsewhere keep their bits. Errors: as `moe`.
    """
    spec = _module(module, step)
    adds = getattr(step.backend, "EXPERT_ADD", None) or _unserved(step)
    if topk_ids.dim() != 2:
        raise ShapeError(f"{module}: topk_ids is {list(topk_ids.shape)}, expected [rows, {spec.experts.top_k}]")
    pairs = topk_ids.shape[0] * spec.experts.top_k
    with step.launching():
        batch, slot = step.enter(module, layer)
        rows = _inputs(x, spec, step, batch, pairs)
        ids, weights = _routing(topk_ids, topk_weights, topk_ids.shape[0], spec, step)
        _live(ids.shape[0], spec, batch)
        target = _target(y, pairs, spec, step)
        if batch.adapters:
            adds[module](rows, target, ids, weights, slot, batch, step.scratch)
    return y


def _module(name: str, step: Step) -> Module:
    found = step.layout.by_name.get(name)
    if found is None or found.experts is None:
        have = ", ".join(module.name for module in step.layout.modules if module.experts) or "none"
        raise ShapeError(f"package {step.layout.name} has no module of experts {name!r}: it has {have}")
    return found


def _unserved(step: Step):
    raise PackageError(
        f"backend {step.backend_name} of package {step.layout.name} has no kernels for experts: "
        "make the Step with a backend that serves them"
    )


def _weight(weight: torch.Tensor, of: Module, name: str, step: Step) -> None:
    check_parameter(name, weight, (of.experts.local, of.out_features, of.in_features), step)
    if not weight.is_contiguous() or weight.data_ptr() % ALIGN:
        raise ShapeError(f"{name} has strides {weight.stride()}; it must be contiguous and aligned to 16 bytes")


def _routing(
    topk_ids: torch.Tensor, topk_weights: torch.Tensor | None, rows: int, of: Module, step: Step
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Ids as int32 and weights as float32, both contiguous and aligned."""
    expected = (rows, of.experts.top_k)
    for tensor, name in ((topk_ids, "topk_ids"), (topk_weights, "topk_weights")):
        if tensor is not None and (tensor.shape != expected or tensor.device != step.device):
            raise ShapeError(
                f"{name} is {list(tensor.shape)} on {tensor.device}, expected {list(expected)} on {step.device}"
            )
    if topk_ids.dtype not in (torch.int32, torch.int64):
        raise ShapeError(f"topk_ids is {topk_ids.dtype}, expected torch.int32 or torch.int64")
    weights = None if topk_weights is None else plain(topk_weights, torch.float32)
    return plain(topk_ids, torch.int32), weights


def _inputs(x: torch.Tensor, of: Module, step: Step, batch: Batch, pairs: int) -> torch.Tensor:
    """x contiguous: a row per token for gate_up, per pair for down."""
    if of.name == GATE_UP:
        return rows_of(x, of, step, batch).contiguous()
    alike = x.dtype == step.slots.dtype and x.device == step.device
    if not alike or x.numel() != pairs * of.in_features or x.shape[-1] != of.in_features:
        raise ShapeError(
            f"{of.name}: x is {list(x.shape)} {x.dtype} on {x.device}, expected {pairs} pairs of {of.in_features} in "
            f"{step.slots.dtype} on {step.device}"
        )
    return plain(x.reshape(pairs, of.in_features), x.dtype)


def _live(rows: int, of: Module, batch: Batch) -> None:
    if rows not in (batch.rows, batch.padded):
        raise ShapeError(f"{of.name}: topk_ids has {rows} rows, but the batch was prepared for {batch.rows}")


def _target(y: torch.Tensor, pairs: int, of: Module, step: Step) -> torch.Tensor:
    """y as [pairs, out_features], sharing its memory."""
    alike = y.dtype == step.slots.dtype and y.device == step.device
    fits = alike and y.shape[-1] == of.out_features and y.numel() == pairs * of.out_features
    if not fits or not y.is_contiguous() or y.data_ptr() % ALIGN:
        raise ShapeError(
            f"{of.name}: y is {list(y.shape)} {y.dtype} on {y.device} with strides {y.stride()}, expected {pairs} "
            f"contiguous pairs of {of.out_features} in {step.slots.dtype} on {step.device}, for it is changed in place"
        )
    return y.view(pairs, of.out_features)
