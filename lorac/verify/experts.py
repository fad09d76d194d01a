"""One batch through the experts of one backend, against the oracle: a module alone, then the whole mixture."""

import torch

from lorac import reference
from lorac.runtime.layout import Module
from lorac.runtime.step import Step
from lorac.verify.cases import Case
from lorac.verify.check import Outcome, compare, poison, prepare, random

ROUTINGS = ("even", "even", "absent", "crowded", "nowhere")


def check_experts(package, step: Step, module: Module, layer: int, case: Case, generator: torch.Generator) -> Outcome:
    """Run `add_experts` on one module and, for the second of the two, `moe`, on fresh random inputs and routing."""
    row_slot = [slot for slot, rows in case.requests for _ in range(rows)]
    ids, weights = routing(module, len(row_slot), generator)
    outcome = _add(package, step, module, layer, ids, weights, row_slot, generator)
    if outcome.problem or module.name != "experts_down":
        return outcome
    whole = _moe(package, step, module, layer, case, ids, weights, row_slot, generator)
    return Outcome(max(outcome.error, whole.error), whole.problem and "moe: " + whole.problem)


def routing(module: Module, rows: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """(topk_ids, topk_weights) [rows, top_k]: evenly over the experts, some or all elsewhere, or all on one expert."""
    experts, device = module.experts, generator.device
    scores = torch.rand(rows, experts.count, device=device, generator=generator)
    ids = scores.topk(experts.top_k, 1)[1].to(torch.int32)
    way = ROUTINGS[int(torch.randint(len(ROUTINGS), (1,), device=device, generator=generator))]
    if way == "absent":
        ids[torch.rand(ids.shape, device=device, generator=generator) < 0.4] = -1
    elif way == "crowded":
        ids.fill_(experts.local - 1)
    elif way == "nowhere":
        ids.fill_(-1)
    ids[ids >= experts.local] = -1  # under expert parallelism the others are on other ranks
    return ids, torch.rand(ids.shape, device=device, generator=generator) + 0.1


def _add(package, step: Step, module: Module, layer: int, ids, weights, row_slot: list[int], generator) -> Outcome:
    device, dtype, top_k = step.slots.device, step.slots.dtype, module.experts.top_k
    expert, pairs = ids.flatten(), ids.numel()
    by_row = module.name == "experts_gate_up"
    x = random((len(row_slot) if by_row else pairs, module.in_features), device, dtype, generator)
    base = random((pairs, module.out_features), device, dtype, generator)
    y = base.clone()
    poison(step)
    package.add_experts(module.name, layer, x, y, ids, None if by_row else weights, step)
    pair_slot = [slot for slot in row_slot for _ in range(top_k)]
    tensors, widths = step.slots.instance(module.name, layer), [part.width for part in module.slices]
    delta = reference.expert_lora(x.repeat_interleave(top_k, 0) if by_row else x, expert, *tensors, widths, pair_slot)
    delta = delta if by_row else delta * weights.reshape(-1, 1).double()
    own = [slot if of >= 0 else -1 for slot, of in zip(pair_slot, expert.tolist(), strict=True)]
    return compare(y, base, base.double() + delta, own)


def _moe(
    package, step: Step, down: Module, layer: int, case: Case, ids, weights, row_slot: list[int], generator
) -> Outcome:
    gate_up = package.LAYOUT.by_name["experts_gate_up"]
    device, dtype = step.slots.device, step.slots.dtype
    x = random((len(row_slot), gate_up.in_features), device, dtype, generator)
    w13, w2 = (
        random((of.experts.local, of.out_features, of.in_features), device, dtype, generator) * of.in_features**-0.5
        for of in (gate_up, down)
    )
    poison(step)
    y = package.moe(layer, x, ids, weights, w13, w2, step)
    tensors = [step.slots.instance(of.name, layer) for of in (gate_up, down)]
    outcome = compare(y, None, reference.moe(x, ids, weights, w13, w2, *tensors, row_slot), row_slot)
    if outcome.problem:
        return outcome
    prepare(step, case.bare())
    poison(step)
    plain = package.moe(layer, x, ids, weights, w13, w2, step)
    prepare(step, case)
    bare = [row for row, slot in enumerate(row_slot) if slot < 0]
    if not torch.equal(y[bare], plain[bare]):
        return Outcome(outcome.error, "a base row differs from a batch without adapters")
    return outcome
