"""Static inputs of graphs: tensors a forward was captured with, which each step's live rows are copied into."""

from collections.abc import Mapping, Sequence

import torch

from lorac.runtime.errors import CaptureError, ShapeError


class StaticInputs:
    """Tensors of [rows, ...], by name or in order; rows past a batch hold the input's padding value."""

    def __init__(self, tensors, padding: Mapping[str | int, float]):
        """`padding` gives the value of rows past a batch, by name or place; 0 unless stated."""
        self.named = isinstance(tensors, Mapping)
        self.tensors: dict[str | int, torch.Tensor] = dict(_items(tensors))
        self.padding = dict(padding)
        if unknown := sorted(map(str, set(self.padding) - set(self.tensors))):
            raise ShapeError(f"padding is given for {', '.join(unknown)}, which are no static inputs")

    def check_room(self, rows: int) -> None:
        """Raise ShapeError where an input has fewer than `rows` rows."""
        for name, tensor in self.tensors.items():
            if tensor.dim() == 0 or tensor.shape[0] < rows:
                raise ShapeError(f"static input {name!r} is {list(tensor.shape)}; expected at least {rows} rows first")

    def call(self, forward, rows: int):
        """forward over the first `rows` rows of every static input."""
        return self.apply(forward, {name: tensor[:rows] for name, tensor in self.tensors.items()})

    def live(self, given, rows: int) -> dict[str | int, torch.Tensor]:
        """`rows` live rows, named and ordered as the static inputs, where those are: for a forward without a graph.

        Raises ShapeError as `fill`.
        """
        checked = self._checked(given, rows)
        return {name: checked[name].to(of.device, non_blocking=True) for name, of in self.tensors.items()}

    def apply(self, forward, tensors: dict[str | int, torch.Tensor]):
        """forward over tensors that are named and ordered as the static inputs."""
        return forward(**tensors) if self.named else forward(*tensors.values())

    def fill(self, given, rows: int, bucket: int) -> None:
        """Copy `rows` live rows in, and pad those after them up to the bucket's.

        All of those, each time, for who else writes there (graphs that share the tensors, the caller) is not known. An
        input that already is the static tensor is not copied. Raises ShapeError where one does not fit.
        """
        given = self._checked(given, rows)
        for name, static in self.tensors.items():
            value = given[name]
            if value.data_ptr() != static.data_ptr() or value.device != static.device:
                static[:rows].copy_(value, non_blocking=True)
            if rows < bucket:
                static[rows:bucket].fill_(self.padding.get(name, 0))

    def clear(self) -> None:
        """Make every row padding."""
        for name, static in self.tensors.items():
            static.fill_(self.padding.get(name, 0))

    def addresses(self, forward) -> dict[str, int]:
        """Addresses a graph of this forward bakes in: of inputs, and of parameters and buffers where it is a module."""
        found = {f"static input {name!r}": tensor.data_ptr() for name, tensor in self.tensors.items()}
        module = forward if isinstance(forward, torch.nn.Module) else getattr(forward, "__self__", None)
        if isinstance(module, torch.nn.Module):
            for kind, tensors in (("parameter", module.named_parameters()), ("buffer", module.named_buffers())):
                found |= {f"{kind} {name!r}": tensor.data_ptr() for name, tensor in tensors}
        return found

    def check(self, forward, captured: dict[str, int]) -> None:
        """Raise CaptureError where something a graph reads has moved since it was captured."""
        now = self.addresses(forward)
        moved = [name for name, address in captured.items() if now.get(name) != address]
        if moved:
            raise CaptureError(
                f"{', '.join(moved[:3])} moved since the graph was captured, which would read the old memory: "
                "write into tensors in place, or capture again"
            )

    def _checked(self, given, rows: int) -> dict[str | int, torch.Tensor]:
        """The given inputs by name or place. Raises ShapeError unless they are the static ones, with so many rows."""
        given = dict(_items(given))
        if given.keys() != self.tensors.keys():
            raise ShapeError(f"inputs are {', '.join(map(str, given))}; expected {', '.join(map(str, self.tensors))}")
        for name, static in self.tensors.items():
            value, shape = given[name], (rows, *static.shape[1:])
            if not isinstance(value, torch.Tensor):
                raise ShapeError(f"input {name!r} is of type {type(value).__name__}; expected a tensor")
            if value.shape != shape or value.dtype != static.dtype:
                raise ShapeError(
                    f"input {name!r} is {list(value.shape)} {value.dtype}; expected {list(shape)} {static.dtype}"
                )
        return given


def _items(tensors) -> list[tuple[str | int, torch.Tensor]]:
    if isinstance(tensors, torch.Tensor):
        return [(0, tensors)]
    if isinstance(tensors, Mapping):
        return list(tensors.items())
    if isinstance(tensors, Sequence):
        return list(enumerate(tensors))
    raise ShapeError(f"inputs are {type(tensors).__name__}; expected a tensor, or tensors by name or in order")
