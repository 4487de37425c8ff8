"""Rules of normalisation, pooling, reductions and softmax: operators that compute over dimensions."""

from __future__ import annotations

import math

import numpy as np

from neuron_merging.channels.groups import AxisLabels, Labels
from neuron_merging.channels.propagation import LabelWalk
from neuron_merging.channels.rules.common import (
    attach,
    dim_of,
    is_torch_layer,
    keep_labels,
    lookup_operator,
    pointwise_rule,
    unite_blocks,
    unite_broadcast,
)
from neuron_merging.graph.graph import Node, Ref


def channel_norm_rule(walk: LabelWalk, node: Node) -> Labels:
    """Apply the rule of batch norm and instance norm: per channel, with per-channel tensors."""
    labels = dict(walk.labels_of(node.args["input"]))
    for dim in [d for d in labels if d != 1]:
        walk.refuse(labels.pop(dim), node, "takes statistics over these channels")
    for name in ("weight", "bias", "running_mean", "running_var"):
        attach(walk, node, labels, 1, node.args.get(name))
    return labels


def group_norm_rule(walk: LabelWalk, node: Node) -> Labels:
    """Apply the rule of group norm: the channels of a group share statistics, so whole groups are the units.

    With a single group it is a layer norm over all channels.
    """
    labels = dict(walk.labels_of(node.args["input"]))
    for dim in [d for d in labels if d > 1]:
        walk.refuse(labels.pop(dim), node, "takes statistics over these channels")
    for name in ("weight", "bias"):
        attach(walk, node, labels, 1, node.args.get(name))
    groups = int(node.args["num_groups"])
    if 1 in labels and groups == 1:
        walk.note_norm_across_channels(labels[1], node)
    elif 1 in labels:
        rows = labels[1].reshape(groups, -1)
        unite_blocks(walk, rows.T.ravel(), rows.shape[1])  # transposed, to unite all channels of one group
        if not is_torch_layer(node):
            walk.mark_size_uncertain(node)
    return labels


def layer_norm_rule(walk: LabelWalk, node: Node) -> Labels:
    """Apply the rule of layer norm and RMS norm.

    Channels can be removed, but the statistics then run over the kept ones alone. Merging has to account for that.
    """
    labels = dict(walk.labels_of(node.args["input"]))
    start = len(node.shape) - len(node.args["normalized_shape"])
    parts = [(labels, node.shape)]
    for name in ("weight", "bias"):
        if isinstance(ref := node.args.get(name), Ref):
            parts.append((walk.labels_of(ref), walk.shape(ref)))
    result = unite_broadcast(walk, node, parts)
    for dim in [d for d in result if d >= start]:
        walk.note_norm_across_channels(result[dim], node)
        if not is_torch_layer(node):
            walk.mark_size_uncertain(node)
    return result


def weight_norm_rule(walk: LabelWalk, node: Node) -> Labels:
    """Apply the rule of weight norm, w = g·v/‖v‖: the norm runs over all dimensions but `dim`, so these must stay."""
    v, g = walk.labels_of(node.args["v"]), walk.labels_of(node.args["g"])
    dim = int(node.args.get("dim", 0))
    for other in [d for d in v if d != dim]:
        walk.refuse(v[other], node, "takes a norm over these channels")
    if dim in v and dim in g:
        walk.unite(v[dim], g[dim])
    return {dim: v[dim]} if dim in v else {}


REDUCTION_REASON = "reduces over channels"


def pool_rule(walk: LabelWalk, node: Node) -> Labels | list[Labels]:
    """Apply the rule of pooling and resampling over the trailing dimensions: channels must not be among them."""
    # The number of dimensions is in the name: max_pool2d, adaptive_avg_pool3d.
    digits = [c for c in node.op if c.isdigit()]
    ref = next(node.refs())
    labels, ndim = dict(walk.labels_of(ref)), len(walk.shape(ref))
    first = ndim - int(digits[0])
    for dim in [d for d in labels if d >= first and not _has_window_of_one(node, d - first)]:
        walk.refuse(labels.pop(dim), node, "pools over channels")
    # The further results are positions of maxima, which carry no channels.
    return labels if not node.has_several_outputs else [labels, *({} for _ in node.shapes[1:])]


def _has_window_of_one(node: Node, window_dim: int) -> bool:
    """Return whether windows along this dimension have size 1, stride 1 and no padding: nothing is pooled."""
    if "kernel_size" not in node.args or node.has_several_outputs:
        return False
    kernel = node.args["kernel_size"]
    sizes = (kernel, node.args.get("stride") or kernel, node.args.get("padding") or [0])
    return [size[min(window_dim, len(size) - 1)] for size in sizes] == [1, 1, 0]


def reduce_rule(walk: LabelWalk, node: Node) -> Labels | list[Labels]:
    """Apply the rule of an operator that reduces over dimensions: channels must not be among them.

    Parameters
    ----------
    walk
        The walk.
    node
        The operator, with the arguments `dim` and `keepdim`.

    Returns
    -------
    Labels | list[Labels]
        The labels of its output, or of each of its outputs.

    Examples
    --------
    >>> operator("my_mean", homogeneous=True)(reduce_rule)                 # doctest: +SKIP
    """
    ref = next(node.refs())
    labels, ndim = dict(walk.labels_of(ref)), len(walk.shape(ref))
    reduced = get_reduced_dims(node, ndim)
    for dim in reduced & set(labels):
        # A mean over channels with keepdim may be part of a norm: `classify_averages` decides once all is known.
        if lookup_operator(node).averages and node.args.get("keepdim"):
            walk.note_average(node, dim, labels.pop(dim))
        else:
            walk.refuse(labels.pop(dim), node, REDUCTION_REASON)
    if not node.args.get("keepdim", False):
        # Each dimension moves forward by the reduced dimensions before it.
        labels = {d - sum(r < d for r in reduced): line for d, line in labels.items()}
    return labels if not node.has_several_outputs else [labels, *({} for _ in node.shapes[1:])]


def get_reduced_dims(node: Node, ndim: int) -> set[int]:
    """Return the dimensions of its input that a reduction runs over."""
    dims = node.args.get("dim")
    dims = range(ndim) if dims in (None, []) else [dims] if isinstance(dims, int) else dims
    return {d % ndim for d in dims} if ndim else set()


def classify_averages(walk: LabelWalk) -> None:
    """Decide for every mean over channels whether it is part of a norm that is written out; refuse the others.

    A norm divides its channels by a statistic of them. Channels from which only their mean is subtracted are refused:
    that is no norm, and the mean would change with the removed channels.
    """
    uses = [(average, _find_norm_apply_ops(walk, average.node, average.dim, average.line)) for average in walk.averages]
    scaled = [average.line for average, ops in uses if ops and ops - {"sub"}]
    for average, ops in uses:
        if ops and any(np.array_equal(average.line, line) for line in scaled):
            walk.note_norm_across_channels(average.line, average.node)
        else:
            walk.refuse(average.line, average.node, REDUCTION_REASON)


def _find_norm_apply_ops(walk: LabelWalk, node: Node, dim: int, line: AxisLabels) -> set[str]:
    """Return the operations (sub, mul, div) that apply a mean over channels to these channels.

    The set is empty if the mean is also used in another way.
    """
    ahead = [node.name]
    operations: set[str] = set()
    while ahead:
        name = ahead.pop()
        for user in walk.graph.users(name):
            # Scalars, such as the epsilon of a norm, do not count as operands.
            others = [ref for ref in user.refs() if ref.name != name and math.prod(walk.shape(ref)) > 1]
            row = lookup_operator(user)
            if not others and (row.inside_norms or row.layout == "same"):
                ahead.append(user.name)
            elif (
                others
                and row.arithmetic in ("sub", "mul", "div")
                and all(_has_axis_labels(walk, ref, user, dim, line) for ref in others)
            ):
                operations.add(row.arithmetic)
            else:
                return set()
    return operations


def _has_axis_labels(walk: LabelWalk, ref: Ref, user: Node, dim: int, line: AxisLabels) -> bool:
    labels = walk.labels_of(ref).get(dim)
    return len(walk.shape(ref)) == len(user.shape) and labels is not None and np.array_equal(labels, line)


def max_min_rule(walk: LabelWalk, node: Node) -> Labels | list[Labels]:
    """Apply the rule of torch.max and torch.min: of two tensors entry by entry, or of one over a dimension."""
    return pointwise_rule(walk, node) if "other" in node.args else reduce_rule(walk, node)


def softmax_rule(walk: LabelWalk, node: Node) -> Labels:
    """Apply the rule of softmax and cumulative sums, which mix the entries along one dimension."""
    labels = keep_labels(walk, node)
    dim = dim_of(node, walk)
    if dim in labels:
        walk.refuse(labels.pop(dim), node, "mixes all channels")
    return labels
