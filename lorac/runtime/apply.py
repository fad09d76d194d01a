"""LoRA on one layer: `add` onto a base output, or `linear` with the base included. Shapes are checked here, once."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch.nn.functional import linear as base_linear

from lorac.runtime.bound import name_bound
from lorac.runtime.buffers import Instance
from lorac.runtime.compiled import ALIGN, Unaligned
from lorac.runtime.errors import ShapeError
from lorac.runtime.layout import Module
from lorac.runtime.step import Step
from lorac.runtime.ticket import Batch

_IDS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


class Site(NamedTuple):
    """A call on one instance of a module, looked up once for a step, and what is launched for it."""

    spec: Module
    launch: Callable
    slot: Instance


def add(module: str, layer: int, x: torch.Tensor, y: torch.Tensor, step: Step) -> torch.Tensor:
    """y += LoRA of x, in place, for the batch `step` was prepared for; returns y.

    x [..., in_features] (token ids [...] for an embedding), y [..., out_features], rows in the batch's order; both of
    the package's dtype on its device. Base rows of y keep their bits. Raises TicketError where the batch was not
    prepared or its slots changed, ShapeError for tensors that do not fit.
    """
    if step.inside:  # entering what would change nothing takes as long as all that is looked up
        return _launch(("ADD", module, layer), x, y, step)
    with step.launching():
        return _launch(("ADD", module, layer), x, y, step)


def linear(
    module: str, layer: int, x: torch.Tensor, weight: torch.Tensor, step: Step, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """x @ weight.T (+ bias) + LoRA of x: [..., out_features]. A backend that owns the base GEMM runs both as one.

    weight [out_features, in_features] and bias [out_features] of the package's dtype. A torch.nn.Parameter is taken not
    to be written by the forward itself: a captured launch may read it before those before it are done. Errors as for
    `add`.
    """
    if bias is not None or module not in step.owned:
        if bias is not None and bias.shape != weight.shape[:1]:  # torch broadcasts some
            _check_base(module, layer, x, weight, step, bias)
        try:
            return add(module, layer, x, base_linear(x, weight, bias), step)
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, ShapeError):  # to look first would take as long as the rest of `add`
            _check_base(module, layer, x, weight, step, bias)
            raise
    if step.inside:
        return _launch(("LINEAR", module, layer), x, weight, step)
    with step.launching():
        return _launch(("LINEAR", module, layer), x, weight, step)


def _launch(key: tuple[str, str, int], x: torch.Tensor, y: torch.Tensor, step: Step) -> torch.Tensor:
    """What was launched before for tensors laid out like these and such a batch, again; or what there is to do first.

    Tensors laid out alike have passed the checks below, but can start anywhere.
    """
    batch = step.logits if key[1] == "lm_head" else step.batch
    if batch is not None:
        for alike, launches, _ in step.scratch.bound(batch).get(key, ()):
            if alike(x, y):
                try:
                    made = launches(x, y)
                except Unaligned:
                    break
                return y if made is None else made
    return _FIRST[key[0]](key, x, y, step)


def _add(key: tuple[str, str, int], x: torch.Tensor, y: torch.Tensor, step: Step) -> torch.Tensor:
    spec, launch, slot = step.sites.get(key) or _site(key, step)
    batch = step.batch_of(spec.name)
    rows = rows_of(x, spec, step, batch)
    target = _target(y, rows.shape[0], spec, step)
    if batch.adapters:
        # rows of a view can start anywhere; the kernels' stores are compiled for aligned ones
        aligned = target.stride(0) % spec.aligned[1] == 0 and target.data_ptr() % ALIGN == 0
        work = target if aligned else target.clone(memory_format=torch.contiguous_format)
        launch(rows, work, slot, batch, step.scratch)
        name_bound(launch, slot, batch, step.scratch, key)
        if not aligned:
            target.copy_(work)
    return y


def _linear(key: tuple[str, str, int], x: torch.Tensor, weight: torch.Tensor, step: Step) -> torch.Tensor:
    spec, launch, slot = step.sites.get(key) or _site(key, step)
    batch = step.batch_of(spec.name)
    _fits(weight, spec, step)
    y = launch(rows_of(x, spec, step, batch), weight, slot, batch, step.scratch)
    name_bound(launch, slot, batch, step.scratch, key)
    return y if x.dim() == 2 else y.view(*x.shape[:-1], spec.out_features)


_FIRST = {"ADD": _add, "LINEAR": _linear}


def rows_of(x: torch.Tensor, spec: Module, step: Step, batch: Batch) -> torch.Tensor:
    """x as [rows, in_features] with rows that start on 16 bytes; copied where it is laid out otherwise."""
    if spec.kind == "embedding":
        # the last token of each row of a batch is strided, and the kernels step from one id to the next
        if x.dtype not in _IDS or x.device != step.device:
            raise ShapeError(
                f"{spec.name}: x is {x.dtype} on {x.device}, expected token ids, of an integer type, on {step.device}"
            )
        return _sized(plain(x.reshape(-1), torch.int64), spec, batch)
    if x.dtype != step.slots.dtype or x.shape[-1:] != (spec.in_features,) or x.device != step.device:
        raise ShapeError(
            f"{spec.name}: x is {list(x.shape)} {x.dtype} on {x.device}, expected [..., {spec.in_features}] "
            f"{step.slots.dtype} on {step.device}"
        )
    rows = _one_row_plain(_sized(x if x.dim() == 2 else x.reshape(-1, spec.in_features), spec, batch))
    # the kernels' loads are compiled for rows aligned as those of a contiguous tensor; a tile's rows lie apart
    row, column = rows.stride()
    if column != 1 or not row or row % spec.aligned[0] or rows.data_ptr() % ALIGN:
        rows = rows.clone(memory_format=torch.contiguous_format)
    return rows


def plain(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The tensor in that dtype, contiguous and aligned as kernels need it; copied where it is not."""
    made = tensor.to(dtype).contiguous()
    return made.clone() if made.data_ptr() % ALIGN else made


def _sized(rows: torch.Tensor, spec: Module, batch: Batch) -> torch.Tensor:
    if rows.shape[0] not in (batch.rows, batch.padded):
        padded = f" or {batch.padded} padded" if batch.padded != batch.rows else ""
        raise ShapeError(
            f"{spec.name}: x has {rows.shape[0]} rows, but the batch was prepared for {batch.rows}{padded}"
        )
    return rows


def _check_base(
    module: str, layer: int, x: torch.Tensor, weight: torch.Tensor, step: Step, bias: torch.Tensor | None
) -> None:
    """Raise ShapeError for the first of `linear`'s tensors that does not fit, where torch runs the base layer."""
    spec = (step.sites.get(("ADD", module, layer)) or _site(("ADD", module, layer), step)).spec
    if spec.kind == "embedding":
        raise ShapeError(f"{module} is an embedding, which linear does not serve: look the rows up, and add to them")
    rows_of(x, spec, step, step.batch_of(module))
    check_parameter(f"{spec.name}: weight", weight, (spec.out_features, spec.in_features), step)
    if bias is not None:
        check_parameter(f"{spec.name}: bias", bias, (spec.out_features,), step)


def check_parameter(name: str, tensor: torch.Tensor, shape: tuple[int, ...], step: Step) -> None:
    """Raise ShapeError for a base layer's tensor of another shape, dtype or device than the package's."""
    if tensor.shape != shape or tensor.dtype != step.slots.dtype or tensor.device != step.device:
        raise ShapeError(
            f"{name} is {list(tensor.shape)} {tensor.dtype} on {tensor.device}, expected {list(shape)} "
            f"{step.slots.dtype} on {step.device}"
        )


def _fits(weight: torch.Tensor, spec: Module, step: Step) -> None:
    """Whether the kernels can read the base layer's weight."""
    check_parameter(f"{spec.name}: weight", weight, (spec.out_features, spec.in_features), step)
    if not weight.is_contiguous():
        raise ShapeError(f"{spec.name}: weight has strides {weight.stride()}, and is read as a contiguous tensor")
    if weight.data_ptr() % ALIGN:
        raise ShapeError(f"{spec.name}: weight starts on no 16 bytes, as the kernels' loads need; pass weight.clone()")


def _target(y: torch.Tensor, rows: int, spec: Module, step: Step) -> torch.Tensor:
    """y as [rows, out_features], sharing its memory."""
    alike = y.dtype == step.slots.dtype and y.device == step.device
    if not alike or y.shape[-1:] != (spec.out_features,) or y.numel() != rows * spec.out_features:
        raise ShapeError(
            f"{spec.name}: y is {list(y.shape)} {y.dtype} on {y.device}, expected {rows} rows of {spec.out_features} "
            f"in {step.slots.dtype} on {step.device}"
        )
    try:
        target = _one_row_plain(y.view(rows, spec.out_features))
    except RuntimeError:
        raise ShapeError(f"{spec.name}: y has strides {y.stride()}; add works in place on rows evenly spaced") from None
    if target.stride(1) != 1:
        raise ShapeError(f"{spec.name}: y has strides {y.stride()}; its last dimension must be contiguous")
    if target.stride(0) < spec.out_features:
        raise ShapeError(f"{spec.name}: y has strides {y.stride()}; rows that share memory cannot each be added to")
    return target


def _one_row_plain(rows: torch.Tensor) -> torch.Tensor:
    """One row has no row after it: however far apart they would be, it is bound for once."""
    if rows.shape[0] == 1 and rows.stride(1) == 1:
        return rows.as_strided(rows.shape, (rows.shape[1], 1))
    return rows


def _site(key: tuple[str, str, int], step: Step) -> Site:
    """Look up what a call, a table of the backend's module, has for an instance; kept in `step.sites`."""
    call, module, layer = key
    spec = step.layout.by_name.get(module)
    if spec is None:
        have = ", ".join(step.layout.by_name)
        raise ShapeError(f"package {step.layout.name} has no module {module!r}: it has {have}")
    if spec.experts is not None:
        raise ShapeError(f"{module} is a module of experts, whose rows are routed: use add_experts, or moe")
    launches = getattr(step.backend, call)[module]
    found = step.sites[key] = Site(spec, launches, step.slots.instance(module, layer))
    return found
