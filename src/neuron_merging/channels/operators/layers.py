"""Layers with weights: they read channels and make new ones."""

from __future__ import annotations

from typing import Any

import numpy as np

from neuron_merging.channels.labels import FIXED, Labels, Line, fixed
from neuron_merging.channels.operators.common import attach, is_torch_layer, unknown
from neuron_merging.channels.walk import Walk
from neuron_merging.graph.values import Node, Ref


def linear(walk: Walk, node: Node) -> Labels:
    return _contract(walk, node, node.args["input"], node.args["weight"], node.args.get("bias"), (0, 1))


def matmul(walk: Walk, node: Node) -> Labels:
    """A product of a value and a parameter is a layer; of two values, it mixes channels."""
    left, right = node.args.get("mat1", node.args.get("self")), node.args.get("mat2", node.args.get("other"))
    if walk.is_weight(right) and len(walk.shape(right)) == 2:
        return _contract(walk, node, left, right, None, (1, 0))
    if walk.is_weight(left) and len(walk.shape(left)) == 2 and len(walk.shape(right)) >= 2:
        return _contract_left(walk, node, left, right)
    return _product(walk, node, left, right)


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


def _product(walk: Walk, node: Node, left: Ref, right: Ref) -> Labels:
    if min(len(walk.shape(left)), len(walk.shape(right))) < 2:
        return unknown(walk, node)
    result: Labels = {}
    for ref, free, contracted in ((left, -2, -1), (right, -1, -2)):
        ndim = len(walk.shape(ref))
        for dim, line in walk.of(ref).items():
            if dim - ndim == free:
                result[len(node.shape) + free] = line
            else:
                why = "multiplies channels with each other" if dim - ndim == contracted else "batches over channels"
                walk.refuse(line, node, why)
    return result


def attention(walk: Walk, node: Node) -> Labels:
    """Queries and keys are scaled by their width, so only the values' channels are free."""
    for name in ("query", "key", "attn_mask"):
        if isinstance(ref := node.args.get(name), Ref):
            for line in walk.of(ref).values():
                walk.refuse(line, node, "takes products of queries and keys over them, and scales by their number")
    labels = dict(walk.of(node.args["value"]))
    last = len(node.shape) - 1
    for dim in [d for d in labels if d != last]:
        walk.refuse(labels.pop(dim), node, "batches over channels")
    return labels


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
        return None
    repeat = node.shape[len(node.shape) - len(walk.shape(node.args["weight"])) + 1] // len(taken)
    spread = np.repeat(taken, repeat)
    if (taken == FIXED).all():
        walk.produce(node, own, node.args["weight"], node.args.get("bias"))
    walk.unite(own, taken if transposed else spread)
    return np.repeat(own, repeat) if transposed else own


def _dense(walk: Walk, node: Node, taken: Line, groups: int, transposed: bool) -> Line | None:
    weight = node.args["weight"]
    into, out = (0, 1) if transposed else (1, 0)
    if groups == 1:
        made = walk.of(weight).get(out)
    else:
        blocked = walk.blocked(weight, 1, groups)
        if blocked is None:
            walk.refuse(taken, node, "has grouped weights that are computed, not stored")
            return None
        plain = walk.of(weight)[0]
        made = blocked if transposed else plain
        walk.balance(made, groups)
        walk.balance(taken, groups)
    walk.consume(node, node.args["input"], taken, weight, into, groups)
    if made is not None:
        walk.produce(node, made, weight, node.args.get("bias"))
    return made
