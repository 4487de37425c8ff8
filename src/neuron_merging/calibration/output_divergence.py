"""Measure how far the outputs of a network are from the original's.

Class scores are compared by the Kullback-Leibler divergence, all other outputs by the relative squared error. Outputs
that end in a sigmoid or softmax are compared before it: on synthesised inputs all probabilities may be near zero. An
output that ends in a concatenation is compared part by part, because one part may dominate the variance.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from neuron_merging.channels.rules.table import lookup_operator
from neuron_merging.graph.compare import (
    MAX_ENTRIES_AT_ONCE,
    MIN_SAMPLES_FOR_MEANS,
    MIN_SCALE,
    ErrorSums,
    compute_error_share,
)
from neuron_merging.graph.graph import Graph, Node, Ref
from neuron_merging.inputs.synthetic import find_token_inputs


@dataclass(frozen=True)
class OutputPart:
    """One operand of the concatenation that an output ends in, or the whole output."""

    output: int
    ref: Ref
    """The value that the part is computed from, before a last sigmoid or softmax."""
    slices: tuple[tuple[int, int, int, int], ...] = ()
    """Where the part lies in the output, outermost first: dimension, start, length, and size of the dimension."""

    def within(self, output: Tensor) -> Tensor | None:
        """Return this part of an output; None if the output has other sizes."""
        for dim, start, length, of in self.slices:
            if dim >= output.ndim or output.shape[dim] != of:
                return None
            output = output.narrow(dim, start, length)
        return output


def find_output_parts(graph: Graph) -> tuple[OutputPart, ...]:
    """Return the parts of all outputs, in order; an output without a final concatenation is one part."""
    return tuple(part for i, ref in enumerate(graph.outputs) for part in _split_output(graph, OutputPart(i, ref)))


def _split_output(graph: Graph, part: OutputPart) -> Iterator[OutputPart]:
    node = graph.node(part.ref.name)
    # An operator in place has overwritten its operand, which then cannot be read again.
    if node is None or node.inplace or node.has_several_outputs:
        yield part
    elif lookup_operator(node).probabilities == "softmax":
        yield replace(part, ref=next(node.refs()))  # one softmax spans all its operands, so they are not split
    elif lookup_operator(node).probabilities == "sigmoid":
        yield from _split_output(graph, replace(part, ref=next(node.refs())))
    elif lookup_operator(node).concatenates and _get_concat_dim(node) > 0:
        yield from (inner for piece in _split_concatenation(graph, part, node) for inner in _split_output(graph, piece))
    else:
        yield part


def _split_concatenation(graph: Graph, part: OutputPart, node: Node) -> Iterator[OutputPart]:
    """Yield the operands of a concatenation, each with its position in the output."""
    dim, start = _get_concat_dim(node), 0
    for ref in node.refs():
        length = graph.shapes[ref.name][dim]
        yield replace(part, ref=ref, slices=(*part.slices, (dim, start, length, node.shape[dim])))
        start += length


def _get_concat_dim(node: Node) -> int:
    """Return the dimension of a concatenation; 0 is the batch, along which outputs are not split."""
    return int(node.args.get("dim", 0)) % max(1, len(node.shape))


def split_outputs(outputs: Sequence[Tensor], parts: Sequence[OutputPart]) -> list[Tensor]:
    """Split outputs into their parts; an output of other sizes than the captured one is not split."""
    if {part.output for part in parts} != set(range(len(outputs))):
        return list(outputs)
    found = [(part.output, part.within(outputs[part.output])) for part in parts]
    whole = {output for output, value in found if value is None}
    pieces = [(output, value) for output, value in found if value is not None and output not in whole]
    pieces += [(output, outputs[output]) for output in whole]
    return [value for _, value in sorted(pieces, key=lambda pair: pair[0])]


@dataclass
class Divergence:
    """Accumulates the divergence between a network's outputs and the original's over batches.

    Attributes
    ----------
    classes
        Positions of the outputs that are class scores, compared by the Kullback-Leibler divergence. All others are
        compared by the squared error relative to the variance of the original's outputs over all samples.
    temperature
        Class scores are divided by it, and their divergence is multiplied by its square. A higher temperature gives
        less weight to single inputs between two classes.
    """

    classes: frozenset[int] = frozenset()
    temperature: float = 1.0
    rows: int = 0
    """Rows of class scores so far: one per sample, or one per token of a language model."""
    kl: float = 0.0
    sums: dict[int, dict[tuple[int, ...], ErrorSums]] = field(default_factory=dict)
    """Error sums by output and by the shape of one sample: batches may differ in length or image size."""

    def add(self, original: Sequence[Tensor], changed: Sequence[Tensor]) -> None:
        """Add the outputs of both networks for one batch."""
        for i, (before, after) in enumerate(zip(original, changed, strict=True)):
            if i in self.classes:
                self.kl += _sum_kl_divergence(before, after, self.temperature)
                self.rows += before.numel() // before.shape[-1] if i == min(self.classes) else 0
            elif isinstance(before, Tensor) and before.is_floating_point() and before.numel():
                x, y = (value if value.ndim else value[None] for value in (before, after))
                self.sums.setdefault(i, {}).setdefault(tuple(x.shape[1:]), ErrorSums()).add(x, y)

    @property
    def value(self) -> float:
        """Mean divergence per row of class scores plus relative errors, summed over outputs.

        Infinite if outputs are NaN or none can be compared.
        """
        outputs = [list(shapes.values()) for shapes in self.sums.values()]
        shares = [compute_error_share(parts) for parts in outputs if any(own.known for own in parts)]
        if self.sums and not shares and not self.classes:
            return float("inf")
        total = self.kl / max(self.rows, 1) + sum(shares)
        return total if total == total else float("inf")  # NaN would compare false with every other cut


def _sum_kl_divergence(before: Tensor, after: Tensor, temperature: float) -> float:
    """Sum the divergence over rows of class scores, some rows at a time: a vocabulary may be large."""
    rows = [value.reshape(-1, value.shape[-1]) for value in (before, after)]
    count = max(1, MAX_ENTRIES_AT_ONCE // rows[0].shape[1])
    # Probabilities are recognised by the first rows.
    probabilities = _are_probabilities(rows[0][:count])
    starts = range(0, len(rows[0]), count)
    parts = ([value[start : start + count].double() for value in rows] for start in starts)
    return sum(float(_compare_scores(x, y, temperature, probabilities)) for x, y in parts)


def _are_probabilities(scores: Tensor) -> bool:
    sums = scores.double().sum(1)
    return bool((scores >= 0).all()) and torch.allclose(sums, torch.ones_like(sums), atol=1e-4)


def _compare_scores(before: Tensor, after: Tensor, temperature: float, probabilities: bool) -> Tensor:
    """Return the divergence. Outputs that are probabilities already are not put through a softmax again."""
    if probabilities:
        before, after = (value.clamp(min=1e-12).log() for value in (before, after))
    p, q = ((scores / temperature).log_softmax(1) for scores in (before, after))
    # A class with the score −∞ has probability 0 and no share in the divergence; p − q would be −∞ + ∞ = NaN.
    # The factor T² keeps the scale: at temperature T the divergence of small differences is 1/T² as large.
    return temperature**2 * torch.where(p.isneginf(), 0.0, p.exp() * (p - q)).sum()


def differentiate_divergence(
    original: Sequence[Tensor], changed: Sequence[Tensor], classes: frozenset[int]
) -> list[Tensor | None]:
    """Return the gradient of the divergence of one batch at each changed output; None where an output has none.

    It is computed some rows of class scores at a time: a vocabulary may be large, and a backward pass through the
    divergence itself would hold several tensors of the size of all scores.
    """
    found: list[Tensor | None] = []
    for i, (before, after) in enumerate(zip(original, changed, strict=True)):
        if i in classes:
            found.append(_differentiate_kl_divergence(before, after))
        elif before.is_floating_point() and before.numel() and before.shape == after.shape:
            found.append(2 * (after - before) / _sum_squared_deviations(before))
        else:
            found.append(None)
    return found


def _differentiate_kl_divergence(before: Tensor, after: Tensor) -> Tensor:
    rows = [value.reshape(-1, value.shape[-1]) for value in (before, after)]
    count = max(1, MAX_ENTRIES_AT_ONCE // rows[0].shape[1])
    probabilities = _are_probabilities(rows[0][:count])
    # In 16 bits, gradients of rare tokens would be zero.
    dtype = torch.promote_types(after.dtype, torch.float32)
    gradient = torch.empty_like(rows[1], dtype=dtype)
    for start in range(0, len(gradient), count):
        x, y = (value[start : start + count].to(dtype) for value in rows)
        part = -x / y.clamp(min=1e-12) if probabilities else y.softmax(1) - x.softmax(1)
        gradient[start : start + count] = part / len(gradient)
    return gradient.view_as(after)


def _sum_squared_deviations(output: Tensor) -> Tensor:
    """Return the variance of an output, summed over samples.

    It is around the mean of each entry if there are many samples; else of each channel of a map, or of all entries.
    """
    samples = output.float()
    many = samples.ndim > 0 and len(samples) >= MIN_SAMPLES_FOR_MEANS
    dims = [0] if many else [dim for dim in range(samples.ndim) if dim != 1 or samples.ndim < 4]
    mean = samples.mean(dims, keepdim=True) if dims else samples
    return (samples - mean).square().sum().clamp(min=MIN_SCALE)


def strip_output_activations(graph: Graph) -> Graph:
    """Return a graph whose outputs are the parts of the original outputs, before a last sigmoid or softmax."""
    return replace(graph, outputs=tuple(part.ref for part in find_output_parts(graph)))


def find_logits_outputs(graph: Graph, shapes: Sequence[tuple[int, ...]]) -> frozenset[int]:
    """Return the outputs that are class scores, straight from a linear layer or a softmax.

    These have one row per sample, or one row per token over the vocabulary of a language model.
    """
    vocabularies = set(find_token_inputs(graph).values())
    found = set()
    for i, (ref, shape) in enumerate(zip(graph.outputs, shapes, strict=True)):
        node = graph.node(ref.name)
        rows = (len(shape) == 2 and shape[1] > 1) or (len(shape) == 3 and shape[2] in vocabularies)
        if node is not None and rows and _is_logits_node(graph, node):
            found.add(i)
    return frozenset(found)


def find_token_logits(graph: Graph) -> int | None:
    """Return the output of a language model: scores over its vocabulary for each token; None for other networks."""
    shapes = [tuple(graph.shapes.get(ref.name, ())) for ref in graph.outputs]
    found = [i for i in find_logits_outputs(graph, shapes) if len(shapes[i]) == 3]
    return found[0] if found else None


def _is_logits_node(graph: Graph, node: Node) -> bool:
    """Return whether a value is, through views, the output of a linear layer, convolution or softmax."""
    node = _skip_views(graph, _skip_cap(graph, node))
    row = lookup_operator(node)
    return row.probabilities in ("softmax", "log softmax") or row.layer in ("linear", "product", "convolution")


def _skip_views(graph: Graph, node: Node) -> Node:
    while lookup_operator(node).moves and (before := graph.node(next(node.refs()).name)) is not None:
        node = before
    return node


def _skip_cap(graph: Graph, node: Node) -> Node:
    """Return the scores that some language models cap, as cap · tanh(score / cap); another value as it is."""
    product, tanh, quotient = _list_operand_chain(graph, node, 3)
    is_cap = lookup_operator(product).arithmetic == "mul" and lookup_operator(tanh).bounds
    return _list_operand_chain(graph, quotient, 2)[1] if is_cap and lookup_operator(quotient).arithmetic else node


def _list_operand_chain(graph: Graph, node: Node, count: int) -> list[Node]:
    """Return a node, its operand, the operand of that, and so on, while there is one; then repeat the last."""
    chain = [node]
    while len(chain) < count:
        names = [ref.name for ref in chain[-1].refs()]
        before = graph.node(names[0]) if len(names) == 1 else None
        chain.append(before or chain[-1])
    return chain
