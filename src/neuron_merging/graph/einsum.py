"""What an einsum says: the letters of every operand, and whether it is a plain layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from neuron_merging.graph.values import Node

MANY = "..."


def letters_of(equation: str, dims: Sequence[int]) -> tuple[list[str], str]:
    """One letter for each dimension of each operand, and of the result; those behind dots get capital ones of Greek.

    >>> letters_of("b...d,df", (3, 2))
    (['bΑd', 'df'], 'Αbf')
    """
    left, arrow, right = equation.replace(" ", "").partition("->")
    terms = left.split(",")
    hidden = [dim - len(term.replace(MANY, "")) if MANY in term else 0 for term, dim in zip(terms, dims, strict=True)]
    behind = "".join(chr(ord("Α") + i) for i in range(max(hidden, default=0)))
    spelt = [term.replace(MANY, behind[len(behind) - count :]) for term, count in zip(terms, hidden, strict=True)]
    if not arrow:
        every = "".join(terms).replace(MANY, "")
        right = MANY + "".join(sorted(letter for letter in set(every) if every.count(letter) == 1))
    return spelt, right.replace(MANY, behind)


def plain(node: Node) -> Node:
    """An einsum of a value and a matrix is a product, or a linear layer; it is then known as one.

    >>> said = {"equation": "bnd,fd->bnf", "tensors": [1, 2]}
    >>> node = Node("y", "einsum", torch.ops.aten.einsum.default, said, (), False, "", "", "")
    >>> plain(node).op
    'linear'
    """
    if node.op != "einsum" or len(node.args["tensors"]) != 2 or "->" not in node.args["equation"]:
        return node
    left, _, out = node.args["equation"].replace(" ", "").partition("->")
    terms, values = left.split(","), list(node.args["tensors"])
    if len(terms[1]) != 2 or MANY in terms[1]:
        terms, values = terms[::-1], values[::-1]
    (x, w), aten = terms, torch.ops.aten
    if len(w) != 2 or MANY in w or len(set(x + w)) != len(x) + 1 or x[-1] not in w:
        return node
    made = w.replace(x[-1], "")
    if out != x[:-1] + made:
        return node
    if w[0] == made:
        return replace(node, op="linear", fn=aten.linear.default, args={"input": values[0], "weight": values[1]})
    return replace(node, op="matmul", fn=aten.matmul.default, args={"self": values[0], "other": values[1]})
