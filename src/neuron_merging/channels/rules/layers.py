"""Rules of layers with weights, of matrix products and of einsum: they consume channels and produce new ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from neuron_merging.channels.groups import FIXED, AxisLabels, Labels, is_channel, make_fixed_labels
from neuron_merging.channels.propagation import LabelWalk
from neuron_merging.channels.rules.common import (
    attach,
    is_torch_layer,
    lookup_operator,
    merge_labels,
    refuse_all_labels,
    unite_broadcast,
)
from neuron_merging.graph.capture import parse_einsum_letters
from neuron_merging.graph.graph import Node, Ref, Shape

COMPUTED_WEIGHT_REASON = "has grouped weights that are computed, not stored"


def linear_rule(walk: LabelWalk, node: Node) -> Labels:
    """Apply the rule of a linear layer."""
    return _contract_last_dim(walk, node, node.args["input"], node.args["weight"], node.args.get("bias"), (0, 1))


def matmul_rule(walk: LabelWalk, node: Node) -> Labels:
    """Apply the rule of a matrix product: with a parameter it is a layer, of two activations it contracts channels."""
    left, right = node.args.get("mat1", node.args.get("self")), node.args.get("mat2", node.args.get("other"))
    if walk.is_weight(right) and len(walk.shape(right)) == 2:
        return _contract_last_dim(walk, node, left, right, None, (1, 0))
    if walk.is_weight(left) and len(walk.shape(left)) == 2 and len(walk.shape(right)) >= 2:
        return _contract_second_last_dim(walk, node, left, right)
    if walk.is_weight(left) != walk.is_weight(right) and min(len(walk.shape(ref)) for ref in (left, right)) > 1:
        return _multiply_by_experts(walk, node, left, right)
    return _multiply_values(walk, node, left, right)


def baddbmm_rule(walk: LabelWalk, node: Node) -> Labels:
    """Apply the rule of `baddbmm`: attention scores plus a bias or mask."""
    product = _multiply_values(walk, node, node.args["batch1"], node.args["batch2"])
    added = node.args["self"]
    return unite_broadcast(walk, node, [(product, node.shape), (walk.labels_of(added), walk.shape(added))])


def addmm_rule(walk: LabelWalk, node: Node) -> Labels:
    """Apply the rule of `addmm`: a linear layer whose weight is stored as inputs × outputs."""
    bias, left, right = node.args["self"], node.args["mat1"], node.args["mat2"]
    if walk.is_weight(right) and walk.is_weight(bias):
        return _contract_last_dim(walk, node, left, right, bias, (1, 0))
    return refuse_all_labels(walk, node)


def _contract_last_dim(walk: LabelWalk, node: Node, x: Ref, weight: Ref, bias: Any, axes: tuple[int, int]) -> Labels:
    """Consume the last dimension of x and produce a new one: y[…, o] = Σ_i x[…, i] W[o, i] (+ b[o]).

    `axes` are the output and the input axis of the weight.
    """
    labels, weights = dict(walk.labels_of(x)), walk.labels_of(weight)
    last = len(walk.shape(x)) - 1
    size = walk.shape(x)[-1]
    inputs = labels.pop(last, make_fixed_labels(size))
    walk.consume(node, x, inputs, weight, axes[1])
    outputs = weights.get(axes[0])
    if outputs is not None:
        labels[len(node.shape) - 1] = outputs
        attach(walk, node, {0: outputs}, 0, bias)
        walk.produce(node, outputs, weight, bias)
    return labels


def _contract_second_last_dim(walk: LabelWalk, node: Node, weight: Ref, x: Ref) -> Labels:
    """Consume the last dimension but one of x: y[…, o, n] = Σ_i W[o, i] x[…, i, n]."""
    labels, weights = dict(walk.labels_of(x)), walk.labels_of(weight)
    dim = len(walk.shape(x)) - 2
    inputs = labels.pop(dim, make_fixed_labels(walk.shape(x)[dim]))
    walk.consume(node, x, inputs, weight, 1)
    if 0 in weights:
        labels[len(node.shape) - 2] = weights[0]
        walk.produce(node, weights[0], weight, None)
    return labels


def _multiply_by_experts(walk: LabelWalk, node: Node, left: Ref, right: Ref) -> Labels:
    """Multiply by one matrix per expert, all stored in one tensor: their hidden units are coupled."""
    result = _unite_batch_dims(walk, node, (left, right))
    # From the end: the output and the input axis of the weight.
    weight, x, output, contracted = (right, left, -1, -2) if walk.is_weight(right) else (left, right, -2, -1)
    ndim, width = len(walk.shape(weight)), len(walk.shape(x))
    labels = walk.labels_of(x)
    # x is contracted along the dimension at which the result has its outputs.
    inputs = labels.get(width + output, make_fixed_labels(walk.shape(x)[output]))
    walk.consume(node, x, inputs, weight, ndim + contracted)
    if width + contracted in labels:
        result[len(node.shape) + contracted] = labels[width + contracted]
    if (outputs := walk.labels_of(weight).get(ndim + output)) is not None:
        result[len(node.shape) + output] = outputs
        walk.produce(node, outputs, weight, None)
    return result


def grouped_mm_rule(walk: LabelWalk, node: Node) -> Labels:
    """Apply the rule of a grouped product: rows are sorted by expert, and each is multiplied by its expert's matrix."""
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
    """Multiply two activations: batch dimensions are coupled, free ones pass on, contracted ones must stay."""
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
    """Unite the leading (batch) dimensions of matrix products at equal indices."""
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
    """Repeat the labels of key and value heads in grouped-query attention: each serves several query heads."""
    # A single head is broadcast to all query heads.
    if not shape or shape[-1] == 1:
        return lines, shape
    last, times = len(shape) - 1, heads // shape[-1]
    repeated = {dim: np.repeat(line, times) if dim == last else line for dim, line in lines.items()}
    return repeated, (*shape[:-1], heads)


def attention_rule(walk: LabelWalk, node: Node) -> Labels:
    """Apply the rule of attention: only heads and the channels of values can be removed.

    The scores are divided by the square root of the width of queries and keys, so that width must stay.
    """
    operands = [node.args["query"], node.args["key"], node.args["value"]]
    if isinstance(mask := node.args.get("attn_mask"), Ref):
        operands.append(mask)
    for position, ref in enumerate(operands):  # by position, since query, key and value may be the same value
        ndim = len(walk.shape(ref))
        for dim, line in walk.labels_of(ref).items():
            if dim >= ndim - 2 and (position != 2 or dim == ndim - 2):
                walk.refuse(line, node, "takes products of queries and keys over them, and scales by their number")
    result = _unite_batch_dims(walk, node, operands, grouped=bool(node.args.get("enable_gqa")))
    if (value_channels := walk.labels_of(operands[2]).get(len(walk.shape(operands[2])) - 1)) is not None:
        result[len(node.shape) - 1] = value_channels
    return result


def embedding_rule(walk: LabelWalk, node: Node) -> Labels:
    """Apply the rule of an embedding: its columns are channels; its rows are chosen by number, so they must stay."""
    table = walk.labels_of(node.args["weight"])
    columns = table.get(1)
    if 0 in table:
        walk.refuse(table[0], node, "chooses rows of this table by number")
    for line in walk.labels_of(node.args["indices"]).values():
        walk.refuse(line, node, "uses channels as indices")
    if columns is None:
        return {}
    walk.produce(node, columns, node.args["weight"], None)
    return {len(node.shape) - 1: columns}


def convolution_rule(walk: LabelWalk, node: Node) -> Labels:
    """Apply the rule of a convolution: dense, grouped or depthwise, transposed or not."""
    x, weight = node.args["input"], node.args["weight"]
    transposed = lookup_operator(node).layer == "transposed"
    groups = int(node.args.get("groups", 1))
    labels = dict(walk.labels_of(x))
    # 1 with a batch dimension, 0 for a single image without one.
    dim = len(walk.shape(x)) - len(walk.shape(weight)) + 1
    channels = walk.shape(x)[dim]
    inputs = labels.pop(dim, make_fixed_labels(channels))
    for other in [d for d in labels if d > dim]:
        walk.refuse(labels.pop(other), node, "convolves over channels")
    if groups > 1 and not is_torch_layer(node):
        walk.mark_size_uncertain(node)
    if groups > 1 and groups == channels:
        outputs = _convolve_depthwise(walk, node, inputs, transposed)
    else:
        outputs = _convolve_dense(walk, node, inputs, groups, transposed)
    if outputs is not None:
        attach(walk, node, {0: outputs}, 0, node.args.get("bias"))
        labels[dim] = outputs
    return labels


def _convolve_depthwise(walk: LabelWalk, node: Node, inputs: AxisLabels, transposed: bool) -> AxisLabels | None:
    """Couple every channel with its own filters: they are removed together, and `groups` shrinks."""
    filters = walk.labels_of(node.args["weight"]).get(0)
    if filters is None:
        walk.refuse(inputs, node, COMPUTED_WEIGHT_REASON)
        return None
    # The channel multiplier: each input channel may have several filters.
    repeat = node.shape[len(node.shape) - len(walk.shape(node.args["weight"])) + 1] // len(inputs)
    repeated = np.repeat(inputs, repeat)
    # The channels of a fixed input must stay; the record makes the layer appear among the refusals.
    if (inputs == FIXED).all():
        walk.produce(node, filters, node.args["weight"], node.args.get("bias"))
    along_filters = inputs if transposed else repeated
    walk.unite(filters, along_filters)
    filters = merge_labels(filters, along_filters)  # a filter that is expanded to all channels has no labels
    return np.repeat(filters, repeat) if transposed else filters


def _convolve_dense(
    walk: LabelWalk, node: Node, inputs: AxisLabels, groups: int, transposed: bool
) -> AxisLabels | None:
    """Consume the input channels and return the labels of the outputs. Every group must keep equally many of both."""
    weight = node.args["weight"]
    into, out = (0, 1) if transposed else (1, 0)
    if groups == 1:
        outputs = walk.labels_of(weight).get(out)
    else:
        blocked = walk.label_grouped_axis(weight, 1, groups)
        if blocked is None:
            walk.refuse(inputs, node, COMPUTED_WEIGHT_REASON)
            return None
        plain = walk.labels_of(weight)[0]
        outputs = blocked if transposed else plain
        walk.balance(outputs, groups)
        walk.balance(inputs, groups)
    walk.consume(node, node.args["input"], inputs, weight, into, groups)
    if outputs is not None:
        walk.produce(node, outputs, weight, node.args.get("bias"))
    return outputs


def einsum_rule(walk: LabelWalk, node: Node) -> Labels:
    """Apply the rule of einsum, letter by letter: shared letters are coupled, contracted ones consumed or refused."""
    operands: list[Ref] = node.args["tensors"]
    terms, out = parse_einsum_letters(node.args["equation"], [len(walk.shape(ref)) for ref in operands])
    if any(len(set(term)) < len(term) for term in terms):  # a diagonal, such as "ii"
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
    """Unite the labels of all operands that have a letter of the result."""
    lines = [_get_labels_or_fixed(walk, ref, dim) for ref, dim in holders]
    united = (
        unite_broadcast(walk, node, [({0: line}, (len(line),)) for line in lines], shape=(len(lines[0]),))
        if lines
        else {}
    )
    if 0 in united and len(holders) > 1:
        walk.note_batched(united[0])
    # A letter of one operand alone: a weight produces it, and `produce` ignores activations.
    elif 0 in united and is_channel(united[0]).all():
        walk.produce(node, united[0], holders[0][0], None)
    return united.get(0)


def _contract_letter(walk: LabelWalk, node: Node, holders: list[tuple[Ref, int]]) -> None:
    """Contract a letter that the result lacks: a weight consumes the channels of an activation, else they must stay."""
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
