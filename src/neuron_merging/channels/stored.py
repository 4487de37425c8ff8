"""Is a layer's weight a stored tensor, seen from another side at most, or computed from one?

Labels alone cannot tell: `W * scale` carries the labels of `W`. So the operators between the tensor and the layer are
looked at: they may only arrange entries anew, and are executed on the entries' own numbers to see how.
"""

from __future__ import annotations

import torch
from torch import Tensor

from neuron_merging.channels.groups import Axis
from neuron_merging.channels.operators.table import row_of
from neuron_merging.graph.values import Graph, Node

CASTS = ("to", "_to_copy", "type_as", "float", "half", "double", "bfloat16")
"""They change the precision, not the place of an entry."""
LARGEST = 2**26
"""Entries that are numbered one by one; a larger weight may only be turned over."""
TURNS = ("t", "transpose", "permute", "numpy_T", "mT", "swapaxes", "swapdims")
SAME = (*CASTS, "alias", "detach", "contiguous", "clone", "identity", "lift_fresh", "lift_fresh_copy")


def is_stored(graph: Graph, node: Node, weight: str, axis: Axis) -> bool:
    """Whether `weight`, which the node reads, holds all entries of the axis's tensor in the order that merging assumes.

    A convolution must read the tensor as it lies. A product reads a matrix: the axis, against all other dimensions in
    their order.
    """
    chain = _chain(graph, weight, axis.tensor)
    if chain is None:
        return False
    moving = [step for step in chain if step.op not in SAME]
    shape = graph.tensors[axis.tensor].shape
    if not moving:
        return row_of(node).convolves or (bool(row_of(node).layer) and len(shape) == 2)
    if axis.blocks > 1 or row_of(node).layer not in ("linear", "product"):
        return False
    if shape.numel() > LARGEST:
        return len(shape) == 2 and all(step.op in TURNS for step in moving)
    numbers = torch.arange(shape.numel(), device="cpu").view(shape)
    wanted, found = numbers.movedim(axis.dim, -1).flatten(0, -2), _executed(moving, numbers)
    return found.ndim == 2 and (torch.equal(found, wanted) or torch.equal(found.T, wanted))


def _executed(steps: list[Node], numbers: Tensor) -> Tensor:
    for step in steps:
        (name,) = (key for key, value in step.args.items() if value in list(step.refs()))
        numbers = step.compute({**step.args, name: numbers})
    return numbers


def _chain(graph: Graph, value: str, tensor: str) -> list[Node] | None:
    """The operators that lead from a stored tensor to a value, if each only moves the entries of one operand."""
    steps: list[Node] = []
    while value not in graph.parameters:
        node = graph.node(value)
        refs = list(node.refs()) if node else []
        if node is None or len(refs) != 1 or len(node.shapes) != 1 or not _moves(node):
            return None
        steps.append(node)
        value = refs[0].name
    return steps[::-1] if graph.parameters[value] == tensor else None


def _moves(node: Node) -> bool:
    return row_of(node).moves and not node.inplace and not node.args.get("train") and node.op != "positive"


def uses_of(graph: Graph, tensor: str) -> set[str]:
    """The nodes that read a stored tensor, seen through those that only move its entries."""
    found: set[str] = set()
    ahead = [name for name, own in graph.parameters.items() if own == tensor]
    while ahead:
        for node in graph.users(ahead.pop()):
            if _moves(node) and len(node.shapes) == 1 and len(list(node.refs())) == 1:
                ahead.append(node.name)
            else:
                found.add(node.name)
    return found
