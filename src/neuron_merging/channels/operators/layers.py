"""Layers with weights: they read channels and make new ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from neuron_merging.channels.labels import FIXED, Labels, Line, fixed
from neuron_merging.channels.operators.common import attach, either, is_torch_layer, meet, unknown
from neuron_merging.channels.walk import Walk
from neuron_merging.graph.values import Node, Ref, Shape

COMPUTED = "has grouped weights that are computed, not stored"


def linear(walk: Walk, node: Node) -> Labels:
    return _contract(walk, node, node.args["input"], node.args["weight"], node.args.get("bias"), (0, 1))


def matmul(walk: Walk, node: Node) -> Labels:
    """A product of a value and a parameter is a layer; of two values, it mixes channels."""
    left, right = node.args.get("mat1", node.args.get("self")), node.args.get("mat2", node.args.get("other"))
    if walk.is_weight(right) and len(walk.shape(right)) == 2:
        return _contract(walk, node, left, right, None, (1, 0))
    if walk.is_weight(left) and len(walk.shape(left)) == 2 and len(walk.shape(right)) >= 2:
        return _contract_left(walk, node, left, right)
    if walk.is_weight(left) != walk.is_weight(right) and min(len(walk.shape(ref)) for ref in (left, right)) > 1:
        return _experts(walk, node, left, right)
    return _product(walk, node, left, right)


def baddbmm(walk: Walk, node: Node) -> Labels:
    """Scores of attention, with what is added to them."""
    met = _product(walk, node, node.args["batch1"], node.args["batch2"])
    added = node.args["self"]
    return meet(walk, node, [(met, node.shape), (walk.of(added), walk.shape(added))])


def addmm(walk: Walk, node: Node) -> Labels:
    bias, left, right = node.args["self"], node.args["mat1"], node.args["mat2"]
    if walk.is_weight(right) and walk.is_weight(bias):
        return _contract(walk, node, left, right, bias, (1, 0))
    return unknown(walk, node)


def _contract(walk: Walk, node: Node, x: Ref, weight: Ref, bias: Any, axes: tuple[int, int]) -> Labels:
    """y[…, o] = Σ_i x[…, i] W[o, i] (+ b[o]): reads the last dimension, makes a new one."""
    labels, weights = dict(walk.of(x)), walk.of(weight)
    last = len(walk.shape(x)) - 1
    size = walk.shape(x)[-1]
    taken = labels.pop(last, fixed(size))
    walk.consume(node, x, taken, weight, axes[1])
    made = weights.get(axes[0])
    if made is not None:
        labels[len(node.shape) - 1] = made
        attach(walk, node, {0: made}, 0, bias)
        walk.produce(node, made, weight, bias)
    return labels


def _contract_left(walk: Walk, node: Node, weight: Ref, x: Ref) -> Labels:
    labels, weights = dict(walk.of(x)), walk.of(weight)
    dim = len(walk.shape(x)) - 2
    taken = labels.pop(dim, fixed(walk.shape(x)[dim]))
    walk.consume(node, x, taken, weight, 1)
    if 0 in weights:
        labels[len(node.shape) - 2] = weights[0]
        walk.produce(node, weights[0], weight, None)
    return labels


def _experts(walk: Walk, node: Node, left: Ref, right: Ref) -> Labels:
    """A matrix for each expert, all of them stored as one tensor: their hidden units stand and fall together."""
    result = _batched(walk, node, (left, right))
    weight, x, made, read = (right, left, -1, -2) if walk.is_weight(right) else (left, right, -2, -1)
    ndim, width = len(walk.shape(weight)), len(walk.shape(x))
    labels = walk.of(x)
    taken = labels.get(width + made, fixed(walk.shape(x)[made]))
    walk.consume(node, x, taken, weight, ndim + read)
    if width + read in labels:
        result[len(node.shape) + read] = labels[width + read]
    if (own := walk.of(weight).get(ndim + made)) is not None:
        result[len(node.shape) + made] = own
        walk.produce(node, own, weight, None)
    return result


def sorted_experts(walk: Walk, node: Node) -> Labels:
    """A matrix for each expert, and rows that are sorted by expert: each row is read by one of them."""
    x, weight = (node.args.get(new, node.args.get(old)) for new, old in (("input", "self"), ("weight", "mat2")))
    if not walk.is_weight(weight) or len(walk.shape(weight)) != 3 or len(walk.shape(x)) != 2:
        return unknown(walk, node)
    labels, weights = walk.of(x), walk.of(weight)
    for line in (labels.get(0), weights.get(0), *walk.of(node.args.get("offs")).values()):
        if line is not None:
            walk.refuse(line, node, "chooses experts by number")
    walk.consume(node, x, labels.get(1, fixed(walk.shape(x)[1])), weight, 1)
    if 2 not in weights:
        return {}
    walk.produce(node, weights[2], weight, None)
    return {1: weights[2]}


def _product(walk: Walk, node: Node, left: Ref, right: Ref) -> Labels:
    if min(len(walk.shape(left)), len(walk.shape(right))) < 2:
        return unknown(walk, node)
    result = _batched(walk, node, (left, right))
    for ref, free, contracted in ((left, -2, -1), (right, -1, -2)):
        ndim = len(walk.shape(ref))
        for dim, line in walk.of(ref).items():
            if dim - ndim == free:
                result[len(node.shape) + free] = line
            elif dim - ndim == contracted:
                walk.refuse(line, node, "multiplies channels with each other")
    return result


def _batched(walk: Walk, node: Node, operands: Sequence[Ref], *, grouped: bool = False) -> Labels:
    """The leading dimensions of products of matrices: what stands at the same index stands and falls together."""
    parts = []
    for ref in operands:
        lines = {dim: line for dim, line in walk.of(ref).items() if dim < len(walk.shape(ref)) - 2}
        parts.append((lines, walk.shape(ref)[:-2]))
    if grouped:
        parts = [_spread_groups(lines, shape, parts[0][1][-1]) for lines, shape in parts]
    result = meet(walk, node, parts, shape=node.shape[:-2])
    for line in result.values():
        walk.note_batched(line)
    return result


def _spread_groups(lines: Labels, shape: Shape, heads: int) -> tuple[Labels, Shape]:
    """Fewer heads of keys and values than of queries: each serves its neighbours."""
    if not shape or shape[-1] == 1:
        return lines, shape
    last, times = len(shape) - 1, heads // shape[-1]
    spread = {dim: np.repeat(line, times) if dim == last else line for dim, line in lines.items()}
    return spread, (*shape[:-1], heads)


def attention(walk: Walk, node: Node) -> Labels:
    """Queries and keys are scaled by their width, so only heads and the values' channels are free."""
    operands = [node.args["query"], node.args["key"], node.args["value"]]
    if isinstance(mask := node.args.get("attn_mask"), Ref):
        operands.append(mask)
    for place, ref in enumerate(operands):  # the same value may be in all of them
        ndim = len(walk.shape(ref))
        for dim, line in walk.of(ref).items():
            if dim >= ndim - 2 and (place != 2 or dim == ndim - 2):
                walk.refuse(line, node, "takes products of queries and keys over them, and scales by their number")
    result = _batched(walk, node, operands, grouped=bool(node.args.get("enable_gqa")))
    if (own := walk.of(operands[2]).get(len(walk.shape(operands[2])) - 1)) is not None:
        result[len(node.shape) - 1] = own
    return result


def embedding(walk: Walk, node: Node) -> Labels:
    """A table: its columns are channels, its rows are chosen by number and so must stay where they are."""
    table = walk.of(node.args["weight"])
    made = table.get(1)
    if 0 in table:
        walk.refuse(table[0], node, "chooses rows of this table by number")
    for line in walk.of(node.args["indices"]).values():
        walk.refuse(line, node, "uses channels as indices")
    if made is None:
        return {}
    walk.produce(node, made, node.args["weight"], None)
    return {len(node.shape) - 1: made}


def convolution(walk: Walk, node: Node) -> Labels:
    x, weight = node.args["input"], node.args["weight"]
    transposed = "transpose" in node.op
    groups = int(node.args.get("groups", 1))
    labels = dict(walk.of(x))
    dim = len(walk.shape(x)) - len(walk.shape(weight)) + 1
    channels = walk.shape(x)[dim]
    taken = labels.pop(dim, fixed(channels))
    for other in [d for d in labels if d > dim]:
        walk.refuse(labels.pop(other), node, "convolves over channels")
    if groups > 1 and not is_torch_layer(node):
        walk.doubt(node)
    if groups > 1 and groups == channels:
        made = _depthwise(walk, node, taken, transposed)
    else:
        made = _dense(walk, node, taken, groups, transposed)
    if made is not None:
        attach(walk, node, {0: made}, 0, node.args.get("bias"))
        labels[dim] = made
    return labels


def _depthwise(walk: Walk, node: Node, taken: Line, transposed: bool) -> Line | None:
    """Every channel has filters of its own: they fall with it, and `groups` shrinks."""
    own = walk.of(node.args["weight"]).get(0)
    if own is None:
        walk.refuse(taken, node, COMPUTED)
        return None
    repeat = node.shape[len(node.shape) - len(walk.shape(node.args["weight"])) + 1] // len(taken)
    spread = np.repeat(taken, repeat)
    if (taken == FIXED).all():
        walk.produce(node, own, node.args["weight"], node.args.get("bias"))
    there = taken if transposed else spread
    walk.unite(own, there)
    own = either(own, there)  # one filter for all has no channels of its own
    return np.repeat(own, repeat) if transposed else own


def _dense(walk: Walk, node: Node, taken: Line, groups: int, transposed: bool) -> Line | None:
    weight = node.args["weight"]
    into, out = (0, 1) if transposed else (1, 0)
    if groups == 1:
        made = walk.of(weight).get(out)
    else:
        blocked = walk.blocked(weight, 1, groups)
        if blocked is None:
            walk.refuse(taken, node, COMPUTED)
            return None
        plain = walk.of(weight)[0]
        made = blocked if transposed else plain
        walk.balance(made, groups)
        walk.balance(taken, groups)
    walk.consume(node, node.args["input"], taken, weight, into, groups)
    if made is not None:
        walk.produce(node, made, weight, node.args.get("bias"))
    return made
