"""parts: what a network puts together at its end, each a part of its answer that counts on its own.

A detector may return boxes in pixels and probabilities of classes in one tensor: beside the variance of the boxes,
whatever becomes of the classes would look like nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from neuron_merging.channels.operators.table import row_of
from neuron_merging.graph.values import Graph, Node, Ref

SIGMOID, SOFTMAX = "sigmoid", "softmax"


@dataclass(frozen=True)
class Part:
    """A part of one of the outputs."""

    output: int
    ref: Ref
    """The value that it is made of, before a last sigmoid or softmax."""
    places: tuple[tuple[int, int, int, int], ...] = ()
    """Where it lies in the output, from the outside in: dimension, first place, how many of them, and of how many."""

    def within(self, output: Tensor) -> Tensor | None:
        """The part of this output; None if the output has other sizes."""
        for dim, start, length, of in self.places:
            if dim >= output.ndim or output.shape[dim] != of:
                return None
            output = output.narrow(dim, start, length)
        return output


def parts_of(graph: Graph) -> tuple[Part, ...]:
    """The parts of all outputs, in order; an output that is of one piece is one part."""
    return tuple(part for i, ref in enumerate(graph.outputs) for part in _parts(graph, Part(i, ref)))


def _parts(graph: Graph, part: Part) -> Iterator[Part]:
    node = graph.node(part.ref.name)
    if node is None or node.inplace or node.several:
        yield part
    elif node.op == SOFTMAX:
        yield replace(part, ref=next(node.refs()))  # what sums to one is of one piece
    elif node.op == SIGMOID:
        yield from _parts(graph, replace(part, ref=next(node.refs())))
    elif row_of(node).joins and _dim(node) > 0:
        yield from (inner for piece in _pieces(graph, part, node) for inner in _parts(graph, piece))
    else:
        yield part


def _pieces(graph: Graph, part: Part, node: Node) -> Iterator[Part]:
    """What is put together here, one behind the other."""
    dim, start = _dim(node), 0
    for ref in node.refs():
        length = graph.shapes[ref.name][dim]
        yield replace(part, ref=ref, places=(*part.places, (dim, start, length, node.shape[dim])))
        start += length


def _dim(node: Node) -> int:
    """Along which dimension tensors are put one behind the other; 0 is that of samples."""
    return int(node.args.get("dim", 0)) % max(1, len(node.shape))


def cut_up(outputs: Sequence[Tensor], parts: Sequence[Part]) -> list[Tensor]:
    """The outputs part by part; whole where they are not what the parts were found in."""
    if {part.output for part in parts} != set(range(len(outputs))):
        return list(outputs)
    found = [(part.output, part.within(outputs[part.output])) for part in parts]
    whole = {output for output, value in found if value is None}
    pieces = [(output, value) for output, value in found if value is not None and output not in whole]
    pieces += [(output, outputs[output]) for output in whole]
    return [value for _, value in sorted(pieces, key=lambda pair: pair[0])]
