"""Tensors inside tuples, lists and dicts, as forward functions take and return them."""

from collections.abc import Callable, Iterator

import torch


def map_tensors(tree, change: Callable[[torch.Tensor], object]):
    """The same structure with every tensor changed; anything else is kept as it is."""
    if isinstance(tree, torch.Tensor):
        return change(tree)
    if isinstance(tree, dict):
        return type(tree)((name, map_tensors(value, change)) for name, value in tree.items())
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(map_tensors(value, change) for value in tree))
    if isinstance(tree, (tuple, list)):
        return type(tree)(map_tensors(value, change) for value in tree)
    return tree


def tensors_of(tree) -> Iterator[torch.Tensor]:
    """Every tensor, in the order `map_tensors` meets them."""
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, dict):
        for value in tree.values():
            yield from tensors_of(value)
    elif isinstance(tree, (tuple, list)):
        for value in tree:
            yield from tensors_of(value)
