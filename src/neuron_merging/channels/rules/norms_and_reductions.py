"""Rules of normalisation, pooling, reductions and softmax: operators that compute over whole dimensions."""

from __future__ import annotations

import math

import numpy as np

from neuron_merging.channels.labels import AxisLabels, Labels
from neuron_merging.channels.propagation import LabelWalk
from neuron_merging.channels.rules import lookup_operator
from neuron_merging.channels.rules.common import (
    attach,
    dim_of,
    is_torch_layer,
    keep_labels,
    pointwise_rule,
    unite_blocks,
    unite_broadcast,
)
from neuron_merging.graph.graph import Node, Ref


def channel_norm_rule(walk: LabelWalk, node: Node) -> Labels:
    """Batch norm and instance norm: per channel, with per-channel tensors."""
    labels = dict(walk.labels_of(node.args["input"]))
    for dim in [d for d in labels if d != 1]:
        walk.refuse(labels.pop(dim), node, "takes statistics over these channels")
    for name in ("weight", "bias", "running_mean", "running_var"):
        attach(walk, node, labels, 1, node.args.get(name))
    return labels


def group_norm_rule(walk: LabelWalk, node: Node) -> Labels:
    """Statistics are shared inside a group of channels, so whole groups stand and fall; of one, it is a layer norm."""
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
        unite_blocks(walk, rows.T.ravel(), rows.shape[1])
        if not is_torch_layer(node):
            walk.mark_size_uncertain(node)
    return labels


def layer_norm_rule(walk: LabelWalk, node: Node) -> Labels:
    """Statistics over all channels: the kept ones define them anew, which merging must know."""
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
    """w = g·v/‖v‖: the norm runs over everything but `dim`."""
    v, g = walk.labels_of(node.args["v"]), walk.labels_of(node.args["g"])
    dim = int(node.args.get("dim", 0))
    for other in [d for d in v if d != dim]:
        walk.refuse(v[other], node, "takes a norm over these channels")
    if dim in v and dim in g:
        walk.unite(v[dim], g[dim])
    return {dim: v[dim]} if dim in v else {}


REDUCTION_REASON = "reduces over channels"


def pool_rule(walk: LabelWalk, node: Node) -> Labels | list[Labels]:
    """Windows over the trailing dimensions; channels must not be among them."""
    digits = [c for c in node.op if c.isdigit()]
    ref = next(node.refs())
    labels, ndim = dict(walk.labels_of(ref)), len(walk.shape(ref))
    first = ndim - int(digits[0])
    for dim in [d for d in labels if d >= first and not _has_window_of_one(node, d - first)]:
        walk.refuse(labels.pop(dim), node, "pools over channels")
    return labels if not node.has_several_outputs else [labels, *({} for _ in node.shapes[1:])]


def _has_window_of_one(node: Node, which: int) -> bool:
    """Whether windows are one wide along this of the dimensions that they run over, and lie side by side."""
    if "kernel_size" not in node.args or node.has_several_outputs:
        return False
    kernel = node.args["kernel_size"]
    sizes = (kernel, node.args.get("stride") or kernel, node.args.get("padding") or [0])
    return [size[min(which, len(size) - 1)] for size in sizes] == [1, 1, 0]


def reduce_rule(walk: LabelWalk, node: Node) -> Labels | list[Labels]:
    """The rule of an operator that sums or averages over dimensions: its channels must not be among them.

    Parameters
    ----------
    walk
        The walk.
    node
        The operator, with the arguments `dim` and `keepdim`.

    Returns
    -------
    Labels | list[Labels]
        Of its output, or of each of its outputs.

    Examples
    --------
    >>> operator("my_mean", homogeneous=True)(reduce_rule)                 # doctest: +SKIP
    """
    ref = next(node.refs())
    labels, ndim = dict(walk.labels_of(ref)), len(walk.shape(ref))
    gone = get_reduced_dims(node, ndim)
    for dim in gone & set(labels):
        if lookup_operator(node).averages and node.args.get("keepdim"):
            walk.note_average(node, dim, labels.pop(dim))
        else:
            walk.refuse(labels.pop(dim), node, REDUCTION_REASON)
    if not node.args.get("keepdim", False):
        labels = {d - sum(g < d for g in gone): v for d, v in labels.items()}
    return labels if not node.has_several_outputs else [labels, *({} for _ in node.shapes[1:])]


def get_reduced_dims(node: Node, ndim: int) -> set[int]:
    """The dimensions of its input that a reduction runs over."""
    dims = node.args.get("dim")
    dims = range(ndim) if dims in (None, []) else [dims] if isinstance(dims, int) else dims
    return {d % ndim for d in dims} if ndim else set()


def classify_averages(walk: LabelWalk) -> None:
    """Means over channels are fine as parts of a norm that is written out, once all labels are known to see that.

    A norm divides by one of them; channels that are only centred are no norm, and would miss those that go.
    """
    ways = [(average, _find_norm_apply_ops(walk, average.node, average.dim, average.line)) for average in walk.averages]
    scaled = [average.line for average, ops in ways if ops and ops - {"sub"}]
    for average, ops in ways:
        if ops and any(np.array_equal(average.line, line) for line in scaled):
            walk.note_norm_across_channels(average.line, average.node)
        else:
            walk.refuse(average.line, average.node, REDUCTION_REASON)


def _find_norm_apply_ops(walk: LabelWalk, node: Node, dim: int, line: AxisLabels) -> set[str]:
    """The operators by which a mean over channels goes back to these, entry by entry; none if it goes elsewhere too."""
    ahead = [node.name]
    met: set[str] = set()
    while ahead:
        name = ahead.pop()
        for user in walk.graph.users(name):
            others = [ref for ref in user.refs() if ref.name != name and math.prod(walk.shape(ref)) > 1]
            row = lookup_operator(user)
            if not others and (row.inside_norms or row.layout == "same"):
                ahead.append(user.name)
            elif (
                others
                and row.arithmetic in ("sub", "mul", "div")
                and all(_has_axis_labels(walk, ref, user, dim, line) for ref in others)
            ):
                met.add(row.arithmetic)
            else:
                return set()
    return met


def _has_axis_labels(walk: LabelWalk, ref: Ref, user: Node, dim: int, line: AxisLabels) -> bool:
    there = walk.labels_of(ref).get(dim)
    return len(walk.shape(ref)) == len(user.shape) and there is not None and np.array_equal(there, line)


def max_min_rule(walk: LabelWalk, node: Node) -> Labels | list[Labels]:
    """torch.max and torch.min: of two tensors entry by entry, or of one over a dimension."""
    return pointwise_rule(walk, node) if "other" in node.args else reduce_rule(walk, node)


def softmax_rule(walk: LabelWalk, node: Node) -> Labels:
    """Softmax and its kin mix the entries of one dimension and keep the others apart."""
    labels = keep_labels(walk, node)
    dim = dim_of(node, walk)
    if dim in labels:
        walk.refuse(labels.pop(dim), node, "mixes all channels")
    return labels
