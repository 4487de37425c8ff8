"""Operator rules: how each operator passes on channel labels; and the registry of operators.

The registry has one row per operator, with all that is known of it. The rule tells how labels pass through; the other
columns are facts for later stages. `table` fills it. Never test `node.op` elsewhere: add a column.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from neuron_merging.channels.labels import Labels
from neuron_merging.channels.propagation import LabelWalk
from neuron_merging.channels.rules.common import refuse_all_labels
from neuron_merging.graph.graph import Node

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
