"""Rules of layers with weights, of matrix products and of einsum: they read channels and make new ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from neuron_merging.channels.labels import FIXED, AxisLabels, Labels, is_channel, make_fixed_labels
from neuron_merging.channels.propagation import LabelWalk
from neuron_merging.channels.rules import lookup_operator
from neuron_merging.channels.rules.common import (
    attach,
    is_torch_layer,
    merge_labels,
    refuse_all_labels,
    unite_broadcast,
)
from neuron_merging.graph.capture import parse_einsum_letters
from neuron_merging.graph.graph import Node, Ref, Shape

COMPUTED_WEIGHT_REASON = "has grouped weights that are computed, not stored"


def linear_rule(walk: LabelWalk, node: Node) -> Labels:
    return _contract_last_dim(walk, node, node.args["input"], node.args["weight"], node.args.get("bias"), (0, 1))


def matmul_rule(walk: LabelWalk, node: Node) -> Labels:
    """A product of a value and a parameter is a layer; of two values, it mixes channels."""
    left, right = node.args.get("mat1", node.args.get("self")), node.args.get("mat2", node.args.get("other"))
    if walk.is_weight(right) and len(walk.shape(right)) == 2:
        return _contract_last_dim(walk, node, left, right, None, (1, 0))
    if walk.is_weight(left) and len(walk.shape(left)) == 2 and len(walk.shape(right)) >= 2:
        return _contract_second_last_dim(walk, node, left, right)
    if walk.is_weight(left) != walk.is_weight(right) and min(len(walk.shape(ref)) for ref in (left, right)) > 1:
        return _multiply_by_experts(walk, node, left, right)
    return _multiply_values(walk, node, left, right)


def baddbmm_rule(walk: LabelWalk, node: Node) -> Labels:
    """Scores of attention, with what is added to them."""
    met = _multiply_values(walk, node, node.args["batch1"], node.args["batch2"])
    added = node.args["self"]
    return unite_broadcast(walk, node, [(met, node.shape), (walk.labels_of(added), walk.shape(added))])


def addmm_rule(walk: LabelWalk, node: Node) -> Labels:
    bias, left, right = node.args["self"], node.args["mat1"], node.args["mat2"]
    if walk.is_weight(right) and walk.is_weight(bias):
        return _contract_last_dim(walk, node, left, right, bias, (1, 0))
    return refuse_all_labels(walk, node)


def _contract_last_dim(walk: LabelWalk, node: Node, x: Ref, weight: Ref, bias: Any, axes: tuple[int, int]) -> Labels:
    """y[…, o] = Σ_i x[…, i] W[o, i] (+ b[o]): reads the last dimension, makes a new one."""
    labels, weights = dict(walk.labels_of(x)), walk.labels_of(weight)
    last = len(walk.shape(x)) - 1
    size = walk.shape(x)[-1]
    taken = labels.pop(last, make_fixed_labels(size))
    walk.consume(node, x, taken, weight, axes[1])
    made = weights.get(axes[0])
    if made is not None:
        labels[len(node.shape) - 1] = made
        attach(walk, node, {0: made}, 0, bias)
        walk.produce(node, made, weight, bias)
    return labels


def _contract_second_last_dim(walk: LabelWalk, node: Node, weight: Ref, x: Ref) -> Labels:
    labels, weights = dict(walk.labels_of(x)), walk.labels_of(weight)
    dim = len(walk.shape(x)) - 2
    taken = labels.pop(dim, make_fixed_labels(walk.shape(x)[dim]))
    walk.consume(node, x, taken, weight, 1)
    if 0 in weights:
        labels[len(node.shape) - 2] = weights[0]
        walk.produce(node, weights[0], weight, None)
    return labels


def _multiply_by_experts(walk: LabelWalk, node: Node, left: Ref, right: Ref) -> Labels:
    """A matrix for each expert, all of them stored as one tensor: their hidden units stand and fall together."""
    result = _unite_batch_dims(walk, node, (left, right))
    weight, x, made, read = (right, left, -1, -2) if walk.is_weight(right) else (left, right, -2, -1)
    ndim, width = len(walk.shape(weight)), len(walk.shape(x))
    labels = walk.labels_of(x)
    taken = labels.get(width + made, make_fixed_labels(walk.shape(x)[made]))
    walk.consume(node, x, taken, weight, ndim + read)
    if width + read in labels:
        result[len(node.shape) + read] = labels[width + read]
    if (own := walk.labels_of(weight).get(ndim + made)) is not None:
        result[len(node.shape) + made] = own
        walk.produce(node, own, weight, None)
    return result


def grouped_mm_rule(walk: LabelWalk, node: Node) -> Labels:
    """A matrix for each expert, and rows that are sorted by expert: each row is read by one of them."""
    x, weight = (node.args.get(new, node.args.get(old)) for new, old in (("input", "self"), ("weight", "mat2")))
    if not walk.is_weight(weight) or len(walk.shape(weight)) != 3 or len(walk.shape(x)) != 2:
        return refuse_all_labels(walk, node)
    labels, weights = walk.labels_of(x), walk.labels_of(weight)
    for line in (labels.get(0), weights.get(0), *walk.labels_of(node.args.get("offs")).values()):
        if line is not None:
            walk.refuse(line, node, "chooses experts by number")
    walk.consume(node, x, labels.get(1, make_fixed_labels(walk.shape(x)[1])), weight, 1)
    if 2 not in weights:
        return {}
    walk.produce(node, weights[2], weight, None)
    return {1: weights[2]}


def _multiply_values(walk: LabelWalk, node: Node, left: Ref, right: Ref) -> Labels:
    if min(len(walk.shape(left)), len(walk.shape(right))) < 2:
        return refuse_all_labels(walk, node)
    result = _unite_batch_dims(walk, node, (left, right))
    for ref, free, contracted in ((left, -2, -1), (right, -1, -2)):
        ndim = len(walk.shape(ref))
        for dim, line in walk.labels_of(ref).items():
            if dim - ndim == free:
                result[len(node.shape) + free] = line
            elif dim - ndim == contracted:
                walk.refuse(line, node, "multiplies channels with each other")
    return result


def _unite_batch_dims(walk: LabelWalk, node: Node, operands: Sequence[Ref], *, grouped: bool = False) -> Labels:
    """The leading dimensions of products of matrices: what stands at the same index stands and falls together."""
    parts = []
    for ref in operands:
        lines = {dim: line for dim, line in walk.labels_of(ref).items() if dim < len(walk.shape(ref)) - 2}
        parts.append((lines, walk.shape(ref)[:-2]))
    if grouped:
        parts = [_repeat_kv_heads(lines, shape, parts[0][1][-1]) for lines, shape in parts]
    result = unite_broadcast(walk, node, parts, shape=node.shape[:-2])
    for line in result.values():
        walk.note_batched(line)
    return result


def _repeat_kv_heads(lines: Labels, shape: Shape, heads: int) -> tuple[Labels, Shape]:
    """Fewer heads of keys and values than of queries: each serves its neighbours."""
    if not shape or shape[-1] == 1:
        return lines, shape
    last, times = len(shape) - 1, heads // shape[-1]
    spread = {dim: np.repeat(line, times) if dim == last else line for dim, line in lines.items()}
    return spread, (*shape[:-1], heads)


def attention_rule(walk: LabelWalk, node: Node) -> Labels:
    """Queries and keys are scaled by their width, so only heads and the values' channels are free."""
    operands = [node.args["query"], node.args["key"], node.args["value"]]
    if isinstance(mask := node.args.get("attn_mask"), Ref):
        operands.append(mask)
    for place, ref in enumerate(operands):  # the same value may be in all of them
        ndim = len(walk.shape(ref))
        for dim, line in walk.labels_of(ref).items():
            if dim >= ndim - 2 and (place != 2 or dim == ndim - 2):
                walk.refuse(line, node, "takes products of queries and keys over them, and scales by their number")
    result = _unite_batch_dims(walk, node, operands, grouped=bool(node.args.get("enable_gqa")))
    if (own := walk.labels_of(operands[2]).get(len(walk.shape(operands[2])) - 1)) is not None:
        result[len(node.shape) - 1] = own
    return result


def embedding_rule(walk: LabelWalk, node: Node) -> Labels:
    """A table: its columns are channels, its rows are chosen by number and so must stay where they are."""
    table = walk.labels_of(node.args["weight"])
    made = table.get(1)
    if 0 in table:
        walk.refuse(table[0], node, "chooses rows of this table by number")
    for line in walk.labels_of(node.args["indices"]).values():
        walk.refuse(line, node, "uses channels as indices")
    if made is None:
        return {}
    walk.produce(node, made, node.args["weight"], None)
    return {len(node.shape) - 1: made}


def convolution_rule(walk: LabelWalk, node: Node) -> Labels:
    x, weight = node.args["input"], node.args["weight"]
    transposed = lookup_operator(node).layer == "transposed"
    groups = int(node.args.get("groups", 1))
    labels = dict(walk.labels_of(x))
    dim = len(walk.shape(x)) - len(walk.shape(weight)) + 1
    channels = walk.shape(x)[dim]
    taken = labels.pop(dim, make_fixed_labels(channels))
    for other in [d for d in labels if d > dim]:
        walk.refuse(labels.pop(other), node, "convolves over channels")
    if groups > 1 and not is_torch_layer(node):
        walk.mark_size_uncertain(node)
    if groups > 1 and groups == channels:
        made = _convolve_depthwise(walk, node, taken, transposed)
    else:
        made = _convolve_dense(walk, node, taken, groups, transposed)
    if made is not None:
        attach(walk, node, {0: made}, 0, node.args.get("bias"))
        labels[dim] = made
    return labels


def _convolve_depthwise(walk: LabelWalk, node: Node, taken: AxisLabels, transposed: bool) -> AxisLabels | None:
    """Every channel has filters of its own: they fall with it, and `groups` shrinks."""
    own = walk.labels_of(node.args["weight"]).get(0)
    if own is None:
        walk.refuse(taken, node, COMPUTED_WEIGHT_REASON)
        return None
    repeat = node.shape[len(node.shape) - len(walk.shape(node.args["weight"])) + 1] // len(taken)
    spread = np.repeat(taken, repeat)
    if (taken == FIXED).all():
        walk.produce(node, own, node.args["weight"], node.args.get("bias"))
    there = taken if transposed else spread
    walk.unite(own, there)
    own = merge_labels(own, there)  # one filter for all has no channels of its own
    return np.repeat(own, repeat) if transposed else own


def _convolve_dense(walk: LabelWalk, node: Node, taken: AxisLabels, groups: int, transposed: bool) -> AxisLabels | None:
    weight = node.args["weight"]
    into, out = (0, 1) if transposed else (1, 0)
    if groups == 1:
        made = walk.labels_of(weight).get(out)
    else:
        blocked = walk.label_grouped_axis(weight, 1, groups)
        if blocked is None:
            walk.refuse(taken, node, COMPUTED_WEIGHT_REASON)
            return None
        plain = walk.labels_of(weight)[0]
        made = blocked if transposed else plain
        walk.balance(made, groups)
        walk.balance(taken, groups)
    walk.consume(node, node.args["input"], taken, weight, into, groups)
    if made is not None:
        walk.produce(node, made, weight, node.args.get("bias"))
    return made


def einsum_rule(walk: LabelWalk, node: Node) -> Labels:
    operands: list[Ref] = node.args["tensors"]
    terms, out = parse_einsum_letters(node.args["equation"], [len(walk.shape(ref)) for ref in operands])
    if any(len(set(term)) < len(term) for term in terms):
        return refuse_all_labels(walk, node)
    result: Labels = {}
    for letter in dict.fromkeys("".join(terms)):
        holders = [(ref, term.index(letter)) for ref, term in zip(operands, terms, strict=True) if letter in term]
        holders = [(ref, dim) for ref, dim in holders if walk.shape(ref)[dim] > 1]
        if letter not in out:
            _contract_letter(walk, node, holders)
        elif (line := _unite_shared_letter(walk, node, holders)) is not None:
            result[out.index(letter)] = line
    return result


def _unite_shared_letter(walk: LabelWalk, node: Node, holders: list[tuple[Ref, int]]) -> AxisLabels | None:
    """A letter of the result: what stands at the same index of every operand that has it."""
    lines = [_get_labels_or_fixed(walk, ref, dim) for ref, dim in holders]
    met = (
        unite_broadcast(walk, node, [({0: line}, (len(line),)) for line in lines], shape=(len(lines[0]),))
        if lines
        else {}
    )
    if 0 in met and len(holders) > 1:
        walk.note_batched(met[0])
    elif 0 in met and is_channel(met[0]).all():
        walk.produce(node, met[0], holders[0][0], None)
    return met.get(0)


def _contract_letter(walk: LabelWalk, node: Node, holders: list[tuple[Ref, int]]) -> None:
    """A letter that the result lacks: a weight reads the channels of a value, or channels meet each other."""
    weights = [holder for holder in holders if walk.is_weight(holder[0])]
    values = [holder for holder in holders if not walk.is_weight(holder[0])]
    if len(weights) == len(values) == 1:
        walk.consume(node, values[0][0], _get_labels_or_fixed(walk, *values[0]), *weights[0])
        return
    why = "multiplies channels with each other" if len(holders) > 1 else "reduces over channels"
    for ref, dim in holders:
        walk.refuse(_get_labels_or_fixed(walk, ref, dim), node, why)


def _get_labels_or_fixed(walk: LabelWalk, ref: Ref, dim: int) -> AxisLabels:
    return walk.labels_of(ref).get(dim, make_fixed_labels(walk.shape(ref)[dim]))
