"""Building blocks of rules (read, unite and refuse labels), the rules of operators that act entry by entry, and the
registry of operators.

The registry has one row per operator, with all that is known of it. The rule tells how labels pass through; the other
columns are facts for later stages. `table` fills it. Never test `node.op` elsewhere: add a column.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from neuron_merging.channels.groups import FIXED, AxisLabels, Labels, is_broadcast, is_channel, make_fixed_labels
from neuron_merging.channels.propagation import LabelWalk
from neuron_merging.graph.graph import Node, Ref


def dim_of(node: Node, walk: LabelWalk, name: str = "dim") -> int:
    """Return a dimension that is an argument of a node, counted from the front.

    Parameters
    ----------
    node
        The operator.
    walk
        The walk.
    name
        The argument's name.

    Returns
    -------
    int
        A dimension of the operand `self`.

    Examples
    --------
    >>> dim_of(node, walk)                                            # doctest: +SKIP
    1
    """
    return int(node.args.get(name, 0)) % max(len(walk.shape(node.args["self"])), 1)


def is_torch_layer(node: Node) -> bool:
    """Return whether a module of torch.nn calls the operator: surgery knows which of its attributes are sizes."""
    return node.module_type.startswith("torch.nn.modules.")


def unite_blocks(walk: LabelWalk, line: AxisLabels, blocks: int) -> None:
    """Unite the labels at the same position of every block.

    Parameters
    ----------
    walk
        The walk.
    line
        Labels along a dimension.
    blocks
        The number of equally long blocks.

    Examples
    --------
    >>> unite_blocks(walk, labels[1], 2)                                # doctest: +SKIP
    """
    rows = line.reshape(blocks, -1)
    for row in rows[1:]:
        walk.unite(rows[0], row)


def unite_broadcast(
    walk: LabelWalk,
    node: Node,
    operands: Sequence[tuple[Labels, Sequence[int]]],
    *,
    skip: Iterable[int] = (),
    shape: Sequence[int] | None = None,
) -> Labels:
    """Unite the labels at equal indices after broadcasting. A dimension without labels fixes those of the others.

    Parameters
    ----------
    walk
        The walk.
    node
        The operator that combines them.
    operands
        Labels and shape of each operand. Shapes are aligned at their last dimension, as in broadcasting.
    skip
        Dimensions of the result to leave out.
    shape
        The shape of the result; by default that of the node.

    Returns
    -------
    Labels
        The labels of the result.

    Examples
    --------
    >>> unite_broadcast(walk, node, [(walk.labels_of(ref), walk.shape(ref)) for ref in node.refs()])  # doctest: +SKIP
    """
    shape = node.shape if shape is None else shape
    result: Labels = {}
    for dim in set(range(len(shape))) - set(skip):
        lines: list[AxisLabels] = []
        for labels, size in operands:
            operand_dim = dim - (len(shape) - len(size))
            if operand_dim >= 0 and size[operand_dim] > 1:  # a size of one is broadcast
                lines.append(labels.get(operand_dim, make_fixed_labels(size[operand_dim])))
        # Most dimensions have no channels at all: skip them.
        joined = _unite_axis_labels(walk, node, lines) if any((line != FIXED).any() for line in lines) else None
        if joined is not None and (joined != FIXED).any():
            result[dim] = joined
    return result


def _unite_axis_labels(walk: LabelWalk, node: Node, lines: Sequence[AxisLabels]) -> AxisLabels:
    joined = lines[0].copy()
    for line in lines[1:]:
        walk.unite(joined, line)
        joined = merge_labels(joined, line)
    return joined


def merge_labels(a: AxisLabels, b: AxisLabels) -> AxisLabels:
    """Return the labels of two combined axes: a channel wins over a fixed label, and that over a broadcast.

    Of two broadcasts the lower label wins: that of a constant tensor, which `resolve_constant_axes` replaces.
    """
    channel = is_channel(a) | is_channel(b)
    without_channels: AxisLabels = np.where(is_broadcast(a) & is_broadcast(b), np.minimum(a, b), np.maximum(a, b))
    return np.where(channel, np.where(is_channel(a), a, b), without_channels)


def keep_labels(walk: LabelWalk, node: Node) -> Labels:
    """Apply the rule of an operator with one input and an output of the same layout.

    Parameters
    ----------
    walk
        The walk.
    node
        The operator.

    Returns
    -------
    Labels
        The labels of its first operand.

    Examples
    --------
    >>> @operator("my_activation", moments="pointwise")               # doctest: +SKIP
    ... def my_activation(walk, node):
    ...     return keep_labels(walk, node)
    """
    return dict(walk.labels_of(next(node.refs())))


def attach(walk: LabelWalk, node: Node, labels: Labels, dim: int, ref: Any) -> None:
    """Couple a per-channel tensor, such as a bias or scale, with its channels.

    Parameters
    ----------
    walk
        The walk.
    node
        The operator that uses it.
    labels
        The labels of the value that has the channels.
    dim
        The channel dimension of that value.
    ref
        The per-channel tensor. Anything but a reference is ignored.

    Examples
    --------
    >>> attach(walk, node, labels, 1, node.args["bias"])              # doctest: +SKIP
    """
    if isinstance(ref, Ref) and (line := walk.labels_of(ref).get(0)) is not None:
        walk.unite(line, labels.get(dim, make_fixed_labels(len(line))))


def new_tensor_rule(walk: LabelWalk, node: Node) -> Labels:
    """Apply the rule of a new tensor of fixed size, unrelated to the channels of its arguments."""
    return {}


def constant_tensor_rule(walk: LabelWalk, node: Node) -> Labels:
    """Apply the rule of a constant tensor: it shrinks with the tensors it is combined with, if the code allows that."""
    walk.mark_size_uncertain(node)
    return {dim: walk.add_constant_axis(node, dim) for dim, size in enumerate(node.shape) if size > 1}


def refuse_all_labels(walk: LabelWalk, node: Node) -> Labels:
    """Apply the rule of an unknown operator: refuse all channels that reach it.

    Parameters
    ----------
    walk
        The walk.
    node
        The operator.

    Returns
    -------
    Labels
        No labels.

    Examples
    --------
    >>> refuse_all_labels(walk, node)                                           # doctest: +SKIP
    {}
    """
    for ref in node.refs():
        for line in walk.labels_of(ref).values():
            walk.refuse(line, node, "is not known to act channel by channel")
    return {}


def pointwise_rule(walk: LabelWalk, node: Node) -> Labels:
    """Apply the rule of an operator that combines its operands entry by entry after broadcasting.

    Parameters
    ----------
    walk
        The walk.
    node
        The operator.

    Returns
    -------
    Labels
        The labels of the result.

    Examples
    --------
    >>> operator("my_sum", moments="pointwise", joins=True)(pointwise_rule)      # doctest: +SKIP
    """
    operands = [(walk.labels_of(ref), walk.shape(ref)) for ref in node.refs()]
    return unite_broadcast(walk, node, operands)


def sum_rule(walk: LabelWalk, node: Node) -> Labels:
    """Apply the rule of a sum or difference, where a residual connection may end."""
    # A stored tensor that is added, such as a position table, ends no skip connection.
    walk.note_sum([ref for ref in node.refs() if ref.name in walk.input_dependent])
    return pointwise_rule(walk, node)


def dropout_rule(walk: LabelWalk, node: Node) -> Labels:
    """Apply the rule of dropout: the identity in evaluation, unless the model's code passes `train=True`."""
    return random_rule(walk, node) if node.args.get("train") else keep_labels(walk, node)


def random_rule(walk: LabelWalk, node: Node) -> Labels:
    """Apply the rule of a random operator: with fewer channels, the kept ones would get other random numbers."""
    labels = keep_labels(walk, node)
    for line in labels.values():
        walk.refuse(line, node, "draws at random, entry by entry")
    return labels


def glu_rule(walk: LabelWalk, node: Node) -> Labels:
    """Apply the rule of GLU: a · sigmoid(b) couples channel i of the first half with channel i of the second."""
    # torch's default for GLU is the last dimension, that of `dim_of` the first.
    dim, labels = dim_of(node, walk) if "dim" in node.args else len(node.shape) - 1, keep_labels(walk, node)
    if dim in labels:
        first, second = np.split(labels[dim], 2)
        walk.unite(first, second)
        labels[dim] = first
    return labels


def prelu_rule(walk: LabelWalk, node: Node) -> Labels:
    """Apply the rule of PReLU, whose slope may be one per channel."""
    labels = walk.labels_of(node.args["self"])
    weight = walk.labels_of(node.args["weight"])
    if 0 in weight:
        walk.unite(weight[0], labels.get(1, make_fixed_labels(len(weight[0]))))
    return dict(labels)


OperatorRule = Callable[[LabelWalk, Node], Labels | list[Labels]]
"""Reads the labels of a node's operands, records in the walk what is coupled, returns the labels of the result."""


@dataclass(frozen=True)
class Operator:
    """One row of the registry: all that is known of one operator.

    Examples
    --------
    >>> OPERATORS["conv2d"].convolves, OPERATORS["layer_norm"].spans
    (True, True)
    """

    rule: OperatorRule
    """How channel labels pass through."""
    homogeneous: bool = False
    """f(s·x) = s·f(x) for s > 0: the condition of the paper's Theorem 1."""
    moves: bool = False
    """It moves or drops entries and changes none."""
    layout: Literal["", "same", "permuted"] = ""
    """For an operator that moves entries: "same" keeps the layout (a cast, a copy), "permuted" permutes dimensions."""
    view: bool = False
    """Its result may share memory with its input, so that a write into one changes the other."""
    moments: Literal["", "execute", "keep", "reshape", "pointwise", "maximum", "batch norm", "span norm"] = ""
    """How a mean and a covariance pass through: see `calibration.gaussian`."""
    arithmetic: Literal["", "add", "sub", "mul", "div"] = ""
    """With a per-channel tensor as the other operand, it is a scale or a shift."""
    fills: bool = False
    """It creates a constant tensor, with one value everywhere."""
    joins: bool = False
    """It joins branches without scaling any."""
    concatenates: bool = False
    """It concatenates tensors along `dim`."""
    scalar_operands: bool = False
    """An integer among its arguments is an operand. For other operators it is a position or a length."""
    rectifies: bool = False
    """It computes max(x, 0)."""
    bounds: bool = False
    """It computes tanh(x), which hardly changes small numbers and keeps large ones below 1."""
    probabilities: Literal["", "sigmoid", "softmax", "log softmax"] = ""
    """It turns scores into probabilities, entry by entry or along a dimension."""
    averages: bool = False
    """It is a statistic over dimensions that does not grow with their sizes: a mean, a variance."""
    inside_norms: bool = False
    """A norm that is written out may have it between the mean over channels and the division by it."""
    norm: Literal["", "batch", "instance", "group", "layer", "rms"] = ""
    """Which norm it is."""
    layer: Literal["", "linear", "product", "convolution", "transposed", "table"] = ""
    """How its weight is laid out: outputs × inputs, inputs × outputs, with a kernel, or as a table of rows."""
    contraction: Literal["", "einsum", "attention"] = ""
    """It sums products of activations: by an einsum equation, or as attention."""
    sizes: Literal["", "shape", "normalized shape", "pieces", "range", "groups"] = ""
    """Which of its arguments hold sizes that change with the number of channels: see `pruning.surgery`."""
    picks: bool = False
    """It picks one of several results of another operator."""
    hides_operators: bool = False
    """It runs a block of operators that the graph does not show."""

    @property
    def convolves(self) -> bool:
        """Whether it is a convolution, transposed or not."""
        return self.layer in ("convolution", "transposed")

    @property
    def spans(self) -> bool:
        """Whether it is a norm whose statistics run over the channels."""
        return self.norm in ("layer", "rms")


OPERATORS: dict[str, Operator] = {}
"""The registry: operators by name."""
UNKNOWN_OPERATOR = Operator(refuse_all_labels)
"""The row of every operator that is not in the registry."""


def operator(names: str, **facts: Any) -> Callable[[OperatorRule], OperatorRule]:
    """Register the rule of one or more operators, and facts about them.

    Parameters
    ----------
    names
        Names of operators as in `Node.op`, separated by blanks: `relu`, or `squash` for `mine::squash`.
    **facts
        Fields of `Operator` other than `rule`.

    Returns
    -------
    Callable
        A decorator for rules. A rule takes the walk and the node, records in the walk which labels are coupled, and
        returns the labels of the result.

    Raises
    ------
    TypeError
        A fact is not a field of `Operator`.

    Examples
    --------
    >>> @operator("my_activation", homogeneous=True, moments="pointwise")
    ... def my_activation(walk, node):
    ...     return keep_labels(walk, node)
    >>> OPERATORS["my_activation"].homogeneous
    True
    """

    def register(rule: OperatorRule) -> OperatorRule:
        for name in names.split():
            OPERATORS[name] = Operator(rule, **facts)
        return rule

    return register


def lookup_operator(node: Node) -> Operator:
    """Return the row of a node's operator."""
    return OPERATORS.get(node.op, UNKNOWN_OPERATOR)
