"""The package's operations as `pkg.add` and `pkg.linear`; under torch.compile, as operators it need not look into.

The operators are `lorac::add`, which declares that it changes y, `lorac::linear` and `lorac::cut`. Names and layers
are baked into a trace; the batch is not: an operator finds its step when it runs.
"""

import torch
from torch.nn.functional import linear as base_linear

from lorac.runtime import apply, breakable
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
    if bias is None and module in getattr(step.backend, "LINEAR", {}):
        return torch.ops.lorac.linear(x, weight, step.number, module, layer)
    return add(module, layer, x, base_linear(x, weight, bias), step)


def _add(x: torch.Tensor, y: torch.Tensor, step: int, module: str, layer: int) -> None:
    apply.add(module, layer, x, y, step_of(step))


def _linear(x: torch.Tensor, weight: torch.Tensor, step: int, module: str, layer: int) -> torch.Tensor:
    return apply.linear(module, layer, x, weight, step_of(step))


def _cut(tensors: list[torch.Tensor], number: int) -> torch.Tensor:
    return breakable.call(breakable.BREAKS[number].function, tuple(tensors), {})


# shapes alone, for traces
_META = {
    "add": lambda x, y, step, module, layer: None,
    "linear": lambda x, weight, step, module, layer: x.new_empty(*x.shape[:-1], weight.shape[0]),
    "cut": lambda tensors, number: breakable.BREAKS[number].like(*tensors),
}

# torch.library.custom_op derives the schemas, at ten times the time to import
_LIBRARY = torch.library.Library("lorac", "FRAGMENT")
for _schema, _function in (
    ("add(Tensor x, Tensor(a!) y, int step, str module, int layer) -> ()", _add),
    ("linear(Tensor x, Tensor weight, int step, str module, int layer) -> Tensor", _linear),
    ("cut(Tensor[] tensors, int number) -> Tensor", _cut),
):
    _name = _schema.partition("(")[0]
    _LIBRARY.define(_schema)
    _LIBRARY.impl(_name, _function, "CompositeExplicitAutograd")
    _LIBRARY.impl(_name, _META[_name], "Meta")
