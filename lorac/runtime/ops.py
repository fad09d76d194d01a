"""The package's operations: `pkg.add`, `pkg.linear` and so on; under torch.compile, operators it need not look into.

The operators are `lorac::add` and `lorac::add_experts`, which declare that they change y, `lorac::linear`, `lorac::moe`
and `lorac::cut`. Names and layers are baked into a trace; the batch is not: an operator finds its step when it runs.
"""

import torch
from torch.nn.functional import linear as base_linear

from lorac.runtime import apply, breakable, experts
from lorac.runtime.step import Step, step_of


def add(module: str, layer: int, x: torch.Tensor, y: torch.Tensor, step: Step) -> torch.Tensor:
    """See `lorac.runtime.apply.add`."""
    if torch.compiler.is_compiling():
        torch.ops.lorac.add(x, y, step.number, module, layer)
        return y
    return apply.add(module, layer, x, y, step)


def linear(
    module: str, layer: int, x: torch.Tensor, weight: torch.Tensor, step: Step, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """See `lorac.runtime.apply.linear`."""
    if not torch.compiler.is_compiling():
        return apply.linear(module, layer, x, weight, step, bias)
    if bias is None and module in step.owned:
        return torch.ops.lorac.linear(x, weight, step.number, module, layer)
    return add(module, layer, x, base_linear(x, weight, bias), step)


def moe(
    layer: int, x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor, w13: torch.Tensor,
    w2: torch.Tensor, step: Step,
) -> torch.Tensor:  # fmt: skip
    """See `lorac.runtime.experts.moe`."""
    if torch.compiler.is_compiling():
        return torch.ops.lorac.moe(x, topk_ids, topk_weights, w13, w2, step.number, layer)
    return experts.moe(layer, x, topk_ids, topk_weights, w13, w2, step)


def add_experts(
    module: str, layer: int, x: torch.Tensor, y: torch.Tensor, topk_ids: torch.Tensor,
    topk_weights: torch.Tensor | None, step: Step,
) -> torch.Tensor:  # fmt: skip
    """See `lorac.runtime.experts.add_experts`."""
    if torch.compiler.is_compiling():
        torch.ops.lorac.add_experts(x, y, topk_ids, topk_weights, step.number, module, layer)
        return y
    return experts.add_experts(module, layer, x, y, topk_ids, topk_weights, step)


def _add(x: torch.Tensor, y: torch.Tensor, step: int, module: str, layer: int) -> None:
    apply.add(module, layer, x, y, step_of(step))


def _linear(x: torch.Tensor, weight: torch.Tensor, step: int, module: str, layer: int) -> torch.Tensor:
    return apply.linear(module, layer, x, weight, step_of(step))


def _moe(x, topk_ids, topk_weights, w13, w2, step: int, layer: int) -> torch.Tensor:
    return experts.moe(layer, x, topk_ids, topk_weights, w13, w2, step_of(step))


def _add_experts(x, y, topk_ids, topk_weights, step: int, module: str, layer: int) -> None:
    experts.add_experts(module, layer, x, y, topk_ids, topk_weights, step_of(step))


def _cut(tensors: list[torch.Tensor], number: int) -> torch.Tensor:
    return breakable.call(breakable.BREAKS[number].function, tuple(tensors), {})


# shapes alone, for traces
_META = {
    "add": lambda x, y, step, module, layer: None,
    "linear": lambda x, weight, step, module, layer: x.new_empty(*x.shape[:-1], weight.shape[0]),
    "moe": lambda x, topk_ids, topk_weights, w13, w2, step, layer: torch.empty_like(x),
    "add_experts": lambda x, y, topk_ids, topk_weights, step, module, layer: None,
    "cut": lambda tensors, number: breakable.BREAKS[number].like(*tensors),
}

# torch.library.custom_op derives the schemas, at ten times the time to import
_LIBRARY = torch.library.Library("lorac", "FRAGMENT")
for _schema, _function in (
    ("add(Tensor x, Tensor(a!) y, int step, str module, int layer) -> ()", _add),
    ("linear(Tensor x, Tensor weight, int step, str module, int layer) -> Tensor", _linear),
    ("moe(Tensor x, Tensor topk_ids, Tensor topk_weights, Tensor w13, Tensor w2, int step, int layer) -> Tensor", _moe),
    (
        "add_experts(Tensor x, Tensor(a!) y, Tensor ids, Tensor? by, int step, str module, int layer) -> ()",
        _add_experts,
    ),
    ("cut(Tensor[] tensors, int number) -> Tensor", _cut),
):
    _name = _schema.partition("(")[0]
    _LIBRARY.define(_schema)
    _LIBRARY.impl(_name, _function, "CompositeExplicitAutograd")
    _LIBRARY.impl(_name, _META[_name], "Meta")
