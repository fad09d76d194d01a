"""One batch through one module of one backend, against the oracle."""

from dataclasses import dataclass

import torch

from lorac import reference
from lorac.runtime.layout import Module
from lorac.runtime.step import Step
from lorac.verify.cases import Case
from lorac.verify.slots import numbered

# relative error of the whole output (Frobenius norm), with fp32 accumulation and one rounding of h and of y
TOLERANCE = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}


@dataclass(frozen=True)
class Outcome:
    """What one check found; `problem` is empty when the output was right."""

    error: float
    problem: str = ""


def prepare(step: Step, case: Case) -> None:
    """Prepare the step for a batch; every row of a prefill has logits."""
    rows = [rows for _, rows in case.requests]
    logits = rows if case.phase == "prefill" else None
    step.prepare_slots(case.phase, [slot for slot, _ in case.requests], rows, logits=logits)


def check(package, step: Step, module: Module, layer: int, case: Case, generator: torch.Generator) -> Outcome:
    """Run `add` (and `linear` where the backend owns the base) on fresh random inputs with poisoned scratch."""
    device, dtype = step.slots.device, step.slots.dtype
    row_slot = [slot for slot, rows in case.requests for _ in range(rows)]
    x = inputs(module, len(row_slot), device, dtype, generator)
    poison(step)
    tensors = step.slots.instance(module.name, layer)
    widths = [part.width for part in module.slices]
    delta = reference.lora(x, *tensors, widths, row_slot)
    base = random((len(row_slot), module.out_features), device, dtype, generator)
    y = package.add(module.name, layer, x, base.clone(), step)
    outcome = compare(y, base, base.double() + delta, row_slot)
    if outcome.problem or module.name not in step.owned:
        return outcome
    weight = random((module.out_features, module.in_features), device, dtype, generator) * module.in_features**-0.5
    poison(step)
    y = package.linear(module.name, layer, x, weight, step)
    owned = compare(y, None, x.double() @ weight.double().T + delta, row_slot)
    return Outcome(max(outcome.error, owned.error), owned.problem and "linear: " + owned.problem)


def inputs(module: Module, rows: int, device, dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """Random x [rows, in_features], or token ids [rows] for an embedding."""
    if module.kind == "embedding":
        return torch.randint(module.in_features, (rows,), device=device, generator=generator)
    return random((rows, module.in_features), device, dtype, generator)


def filled_slots(package, device: str, layers: dict[str, list[int]], generator: torch.Generator):
    """The package's Slots with random adapters in every slot, of ranks from 1 to R, some without a slice.

    Only the instances of `layers` are filled. What lies past a rank stays zero, as loading leaves it.
    """
    limit = package.LAYOUT.max_rank
    choices = [1, limit, *sorted({max(1, limit // 2), max(1, limit // 4 + 1), min(limit, 8)})]
    ranks = [choices[slot % len(choices)] for slot in range(package.LAYOUT.slots)]
    slots = numbered(package, ranks)(device)
    for slot, rank in enumerate(ranks):
        for module in slots.layout.modules:
            for layer in layers[module.name]:
                _fill_instance(slots.instance(module.name, layer), module, slot, rank, limit, generator)
    slots.renew_copies()
    return slots


def _fill_instance(tensors, module: Module, slot: int, rank: int, limit: int, generator: torch.Generator) -> None:
    a, b, ranks, scales = tensors
    for part, piece in enumerate(module.slices):
        own = 0 if len(module.slices) > 1 and (slot + part) % 5 == 4 else rank
        ranks[slot, part] = own
        scales[slot, part] = 0.5 + 0.25 * slot
        if module.kind == "embedding":
            a_rows = a[slot, :, :own]
        else:
            a_rows = a[slot, ..., part * limit : part * limit + own, :]
        a_scale = 1.0 if module.kind == "embedding" else module.in_features**-0.5
        a_rows.copy_(random(a_rows.shape, a.device, a.dtype, generator) * a_scale)
        outputs = slice(piece.start, piece.start + piece.width)
        b_rows = b[slot, :, outputs, :own] if module.experts else b[outputs, slot, :own]
        b_rows.copy_(random(b_rows.shape, b.device, b.dtype, generator) * max(own, 1) ** -0.5)


def poison(step: Step) -> None:
    """Fill scratch with NaN, so that whatever a kernel reads without having written it shows in the output."""
    for tensor in step.scratch_tensors():
        if tensor.is_floating_point():
            tensor.fill_(float("nan"))


def compare(y: torch.Tensor, base: torch.Tensor | None, expected: torch.Tensor, row_slot: list[int]) -> Outcome:
    """Judge y [rows, out] against the oracle, and against `base`, which rows without an adapter must keep."""
    error = ((y.double() - expected).norm() / expected.norm().clamp_min(1e-30)).item()
    if not error <= TOLERANCE[y.dtype]:
        worst = (y.double() - expected).abs().nan_to_num(float("inf")).amax(1).argmax().item()
        return Outcome(error, f"relative error {error:.1e}, worst in row {worst} (slot {row_slot[worst]})")
    untouched = [row for row, slot in enumerate(row_slot) if slot < 0]
    if base is not None and not torch.equal(y[untouched], base[untouched]):
        return Outcome(error, "a base row changed its bits")
    served = [row for row, slot in enumerate(row_slot) if slot >= 0]
    if base is not None and served and torch.equal(y[served], base[served]):
        return Outcome(error, "no adapter had any effect")
    return Outcome(error)


def random(shape, device, dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    return torch.randn(shape, device=device, dtype=torch.float32, generator=generator).to(dtype)
