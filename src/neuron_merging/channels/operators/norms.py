"""Normalisation."""

from __future__ import annotations

from neuron_merging.channels.labels import Labels
from neuron_merging.channels.operators.common import attach, is_torch_layer, meet, tie_across
from neuron_merging.channels.walk import Walk
from neuron_merging.graph.values import Node, Ref


def channel_norm(walk: Walk, node: Node) -> Labels:
    """Batch norm and instance norm: per channel, with per-channel tensors."""
    labels = dict(walk.of(node.args["input"]))
    for dim in [d for d in labels if d != 1]:
        walk.refuse(labels.pop(dim), node, "takes statistics over these channels")
    for name in ("weight", "bias", "running_mean", "running_var"):
        attach(walk, node, labels, 1, node.args.get(name))
    return labels


def group_norm(walk: Walk, node: Node) -> Labels:
    """Statistics are shared inside a group of channels, so whole groups stand and fall; of one, it is a layer norm."""
    labels = dict(walk.of(node.args["input"]))
    for dim in [d for d in labels if d > 1]:
        walk.refuse(labels.pop(dim), node, "takes statistics over these channels")
    for name in ("weight", "bias"):
        attach(walk, node, labels, 1, node.args.get(name))
    groups = int(node.args["num_groups"])
    if 1 in labels and groups == 1:
        walk.note_mixing(labels[1], node)
    elif 1 in labels:
        rows = labels[1].reshape(groups, -1)
        tie_across(walk, rows.T.ravel(), rows.shape[1])
        if not is_torch_layer(node):
            walk.doubt(node)
    return labels


def layer_norm(walk: Walk, node: Node) -> Labels:
    """Statistics over all channels: the kept ones define them anew, which merging must know."""
    labels = dict(walk.of(node.args["input"]))
    start = len(node.shape) - len(node.args["normalized_shape"])
    parts = [(labels, node.shape)]
    for name in ("weight", "bias"):
        if isinstance(ref := node.args.get(name), Ref):
            parts.append((walk.of(ref), walk.shape(ref)))
    result = meet(walk, node, parts)
    for dim in [d for d in result if d >= start]:
        walk.note_mixing(result[dim], node)
        if not is_torch_layer(node):
            walk.doubt(node)
    return result


def weight_norm(walk: Walk, node: Node) -> Labels:
    """w = g·v/‖v‖: the norm runs over everything but `dim`."""
    v, g = walk.of(node.args["v"]), walk.of(node.args["g"])
    dim = int(node.args.get("dim", 0))
    for other in [d for d in v if d != dim]:
        walk.refuse(v[other], node, "takes a norm over these channels")
    if dim in v and dim in g:
        walk.unite(v[dim], g[dim])
    return {dim: v[dim]} if dim in v else {}
