"""Inputs and outputs, nested as people nest them."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map


def flat(inputs: Any) -> list[Any]:
    """What tuples, lists and mappings hold, in the order of `Graph.inputs`.

    >>> flat(({"image": 1, "boxes": [2, 3]}, None))
    [1, 2, 3, None]
    """
    return tree_leaves(inputs)


def copied(inputs: Any) -> Any:
    """A network may write into its inputs, which are not its own."""
    return tree_map(lambda value: value.clone() if isinstance(value, Tensor) else value, inputs)


def as_inputs(example_inputs: Any) -> tuple[Any, ...]:
    """A tensor, or a tuple or list of positional inputs, as a tuple."""
    if isinstance(example_inputs, (tuple, list)):
        return tuple(example_inputs)
    return (example_inputs,)


def flatten_outputs(value: Any) -> list[Tensor]:
    """All tensors of a network's output, in order."""
    if hasattr(value, "to_tuple"):
        value = value.to_tuple()
    return [leaf for leaf in flat(value) if isinstance(leaf, Tensor)]
