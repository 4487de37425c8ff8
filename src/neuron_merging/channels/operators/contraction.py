"""einsum: letters that operands share meet, letters that the result lacks are summed over."""

from __future__ import annotations

from neuron_merging.channels.labels import Labels, Line, fixed, is_channel
from neuron_merging.channels.operators.common import meet, unknown
from neuron_merging.channels.walk import Walk
from neuron_merging.graph.einsum import letters_of
from neuron_merging.graph.values import Node, Ref


def einsum(walk: Walk, node: Node) -> Labels:
    operands: list[Ref] = node.args["tensors"]
    terms, out = letters_of(node.args["equation"], [len(walk.shape(ref)) for ref in operands])
    if any(len(set(term)) < len(term) for term in terms):
        return unknown(walk, node)
    result: Labels = {}
    for letter in dict.fromkeys("".join(terms)):
        holders = [(ref, term.index(letter)) for ref, term in zip(operands, terms, strict=True) if letter in term]
        holders = [(ref, dim) for ref, dim in holders if walk.shape(ref)[dim] > 1]
        if letter not in out:
            _summed(walk, node, holders)
        elif (line := _shared(walk, node, holders)) is not None:
            result[out.index(letter)] = line
    return result


def _shared(walk: Walk, node: Node, holders: list[tuple[Ref, int]]) -> Line | None:
    """A letter of the result: what stands at the same index of every operand that has it."""
    lines = [_line(walk, ref, dim) for ref, dim in holders]
    met = meet(walk, node, [({0: line}, (len(line),)) for line in lines], shape=(len(lines[0]),)) if lines else {}
    if 0 in met and len(holders) > 1:
        walk.note_batched(met[0])
    elif 0 in met and is_channel(met[0]).all():
        walk.produce(node, met[0], holders[0][0], None)
    return met.get(0)


def _summed(walk: Walk, node: Node, holders: list[tuple[Ref, int]]) -> None:
    """A letter that the result lacks: a weight reads the channels of a value, or channels meet each other."""
    weights = [holder for holder in holders if walk.is_weight(holder[0])]
    values = [holder for holder in holders if not walk.is_weight(holder[0])]
    if len(weights) == len(values) == 1:
        walk.consume(node, values[0][0], _line(walk, *values[0]), *weights[0])
        return
    why = "multiplies channels with each other" if len(holders) > 1 else "reduces over channels"
    for ref, dim in holders:
        walk.refuse(_line(walk, ref, dim), node, why)


def _line(walk: Walk, ref: Ref, dim: int) -> Line:
    return walk.of(ref).get(dim, fixed(walk.shape(ref)[dim]))
