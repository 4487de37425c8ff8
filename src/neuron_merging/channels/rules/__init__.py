"""Operator rules: how each operator carries channel labels, by family, and the register of operators.

The register has one row per operator, with all that is known of it. The rule says how labels pass through; the other
columns are facts for later stages. `table` fills it. Code that asks for an operator by its name belongs into a column.
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
"""Reads the labels of a node's inputs, tells the walk what belongs together, returns the labels of the output."""


@dataclass(frozen=True)
class Operator:
    """One row of the table: all that is known of one operator.

    Examples
    --------
    >>> OPERATORS["conv2d"].convolves, OPERATORS["layer_norm"].spans
    (True, True)
    """

    rule: OperatorRule
    """How channels go through."""
    homogeneous: bool = False
    """f(s·x) = s·f(x) for s > 0: the condition of the paper's Theorem 1."""
    moves: bool = False
    """Entries are moved or left out, none is changed."""
    layout: Literal["", "same", "permuted"] = ""
    """Of an operator that moves entries: all stay where they are (a cast, a copy), or dimensions change places."""
    view: bool = False
    """The result may share its memory with the input, so that writing into one writes into the other."""
    moments: Literal["", "execute", "keep", "reshape", "pointwise", "maximum", "batch norm", "span norm"] = ""
    """How a mean and a covariance go through: see `calibration.gaussian`."""
    arithmetic: Literal["", "add", "sub", "mul", "div"] = ""
    """A per-channel tensor as the other operand is a scale or a shift."""
    fills: bool = False
    """Makes a tensor with one value everywhere."""
    joins: bool = False
    """Branches meet and none is scaled."""
    concatenates: bool = False
    """Tensors are put one behind the other along `dim`."""
    scalar_operands: bool = False
    """A whole number among its arguments is an operand; those of other operators are positions and lengths."""
    rectifies: bool = False
    """max(x, 0)."""
    probabilities: Literal["", "sigmoid", "softmax", "log softmax"] = ""
    """Turns scores into probabilities, each by itself or all along one dimension."""
    averages: bool = False
    """A statistic over dimensions that does not grow with their sizes."""
    inside_norms: bool = False
    """A norm that is written out may have it between the mean over channels and their division by it."""
    norm: Literal["", "batch", "instance", "group", "layer", "rms"] = ""
    """Which statistics it normalises by."""
    layer: Literal["", "linear", "product", "convolution", "transposed", "table"] = ""
    """How it reads its weight: outputs × inputs, inputs × outputs, with a kernel, or by row numbers."""
    contraction: Literal["", "einsum", "attention"] = ""
    """Sums products of values: by the letters of an equation, or queries with keys and then with values."""
    sizes: Literal["", "shape", "normalized shape", "pieces", "range", "groups"] = ""
    """Which sizes its arguments hold, that change with the number of channels: see `pruning.surgery`."""
    picks: bool = False
    """Takes one of several results of another operator."""
    hides_operators: bool = False
    """Runs a block of operators that the graph does not show."""

    @property
    def convolves(self) -> bool:
        """Whether it has a kernel."""
        return self.layer in ("convolution", "transposed")

    @property
    def spans(self) -> bool:
        """A norm whose statistics run over the channels themselves."""
        return self.norm in ("layer", "rms")


OPERATORS: dict[str, Operator] = {}
UNKNOWN_OPERATOR = Operator(refuse_all_labels)


def operator(names: str, **facts: Any) -> Callable[[OperatorRule], OperatorRule]:
    """Register the rule of one or more operators, with what else is known of them.

    Parameters
    ----------
    names
        Names of operators as the graph has them, separated by blanks: `relu`, or `squash` for `mine::squash`.
    **facts
        Fields of `Operator` other than `rule`.

    Returns
    -------
    Callable
        A decorator of rules. A rule takes the walk and the node, tells the walk which labels belong together, and
        returns the labels of the output.

    Raises
    ------
    TypeError
        A fact that `Operator` does not have.

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
    """What is known of a node's operator."""
    return OPERATORS.get(node.op, UNKNOWN_OPERATOR)
