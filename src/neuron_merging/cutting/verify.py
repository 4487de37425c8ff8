"""verify: does the smaller network compute what the plan says it computes?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from neuron_merging.channels.analysis import Analysis
from neuron_merging.channels.groups import Axis, Channels
from neuron_merging.channels.labels import Mask
from neuron_merging.channels.masks import masks_of, norm_over_kept
from neuron_merging.channels.operators.table import row_of
from neuron_merging.cutting.plan import Plan
from neuron_merging.errors import MergingError, VerificationError, told
from neuron_merging.graph.copying import all_tensors, bare_copy
from neuron_merging.graph.execution import run
from neuron_merging.graph.quiet import plain_attention
from neuron_merging.graph.trees import copied, flat, flatten_outputs
from neuron_merging.graph.usercode import place_of
from neuron_merging.graph.values import Graph, Node, Ref

TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-3, torch.float16: 5e-2, torch.bfloat16: 2e-1}


UNEXPLAINED = (
    "Either the model's code branches on the number of channels, or they were misread here: "
    "leave layers out with ignore=, and report the network."
)


@torch.no_grad()
def verify(analysis: Analysis, plan: Plan, stays: Mask, small: nn.Module) -> float | None:
    """Run the small network and the original with the removed units zeroed; return their distance.

    The original runs at its full size with the small network's weights in the places that were
    kept, and every removed unit is set to zero wherever it occurs. Both must agree. None means that the
    network returns nothing but whole numbers, which say too little.
    """
    graph, inputs = analysis.graph, analysis.inputs
    with torch.random.fork_rng(devices=[]):
        _run_original(graph, inputs)
        torch.manual_seed(0)
        got = flatten_outputs(run_small(small, inputs))
        torch.manual_seed(0)
        want = flatten_outputs(zeroed_original(graph, analysis.channels, plan, stays, small, inputs))
    return _compare(got, want)


def _run_original(graph: Graph, inputs: Sequence[Any]) -> None:
    try:
        run(graph, flat(inputs), graph.tensors)
    except (RuntimeError, TypeError, IndexError, ValueError) as error:
        raise MergingError(
            f"the model does not run on the example inputs: {told(error)}",
            where="example_inputs",
            fix="Check each example input's shape and dtype.",
        ) from error


def run_small(small: nn.Module, inputs: Sequence[Any]) -> Any:
    quiet = bare_copy(small).eval()
    try:
        with torch.no_grad(), plain_attention():
            return quiet(*copied(inputs))
    except Exception as error:
        raise VerificationError(
            f"the smaller network does not run: {told(error)}",
            where=place_of(error),
            fix="A constant in the model's code probably fixes a size there: derive it from x.shape, "
            "or keep the layer with ignore=.",
        ) from error


def zeroed_original(
    graph: Graph, channels: Channels, plan: Plan, stays: Mask, small: nn.Module, inputs: Sequence[Any]
) -> list[Any]:
    """The original graph at full size, the small network's weights inside, removed units zero."""
    own = all_tensors(small)
    tensors = {name: _embed(graph.tensors[name], own[name], plan, name) for name in graph.tensors}

    def call(node: Node, args: dict[str, Any]) -> Any:
        args = _extra_bias(node, args, graph, own, plan)
        masks = masks_of(channels, stays, node.name)
        spans = row_of(node).spans
        value = norm_over_kept(node, args, masks) if spans else node.compute(args)
        for dim, stay in masks.items():
            shape = [1] * value.ndim
            shape[dim] = -1
            value = torch.where(torch.from_numpy(stay).to(value.device).view(shape), value, torch.zeros_like(value))
        return value

    return run(graph, flat(inputs), tensors, call)


def _extra_bias(
    node: Node, args: dict[str, Any], graph: Graph, own: Mapping[str, Tensor], plan: Plan
) -> dict[str, Any]:
    """A bias that merging has made is not in the captured graph."""
    weight = node.args.get("weight")
    name = graph.parameters.get(weight.name, "") if isinstance(weight, Ref) else ""
    made = name.rpartition(".")[0] + ".bias" if "." in name else "bias"
    if made not in plan.biases or args.get("bias") is not None:
        return args
    bias = own[made].new_zeros(plan.biases[made])
    out = 1 if row_of(node).layer == "transposed" else 0
    kept = next((cut.kept for cut in plan.cuts if cut.tensor == name and cut.dim == out), range(len(bias)))
    bias[list(kept)] = own[made]
    return {**args, "bias": bias}


def _embed(full: Tensor, small: Tensor, plan: Plan, name: str) -> Tensor:
    """The small network's values at the kept places of a full-size tensor."""
    cuts = [cut for cut in plan.cuts if cut.tensor == name]
    if not cuts:
        return small.detach()
    result = full.detach().clone()
    axes = [Axis(name, cut.dim, cut.blocks) for cut in cuts]
    return _embedded(result, small.detach(), axes, [cut.kept for cut in cuts])


def _embedded(full: Tensor, small: Tensor, axes: Sequence[Axis], kept: Sequence[Sequence[int]]) -> Tensor:
    if not axes:
        return small
    axis, index = axes[0], torch.tensor(kept[0], device=full.device)
    wide = axis.expose(full).clone()
    part = axis.restore(wide.index_select(axis.dim, index))
    part = _embedded(part, small, axes[1:], kept[1:])
    wide.index_copy_(axis.dim, index, axis.expose(part))
    return axis.restore(wide)


def _compare(got: Sequence[Tensor], want: Sequence[Tensor]) -> float | None:
    errors = []
    if len(got) != len(want):
        raise VerificationError(f"the smaller network returns {len(got)} tensors, the original {len(want)}")
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        if a.shape != b.shape:
            raise VerificationError(
                f"output {i} has shape {tuple(a.shape)}, the original's is {tuple(b.shape)}",
                fix=UNEXPLAINED,
            )
        if not a.is_floating_point() and not a.is_complex():
            continue
        error = _distance(_real(a), _real(b), i)
        if not error <= TOLERANCE.get(a.dtype, 1e-3):
            raise VerificationError(
                f"output {i} differs from the original with the removed channels zeroed by {error:.2g} "
                "(relative to its largest entry)",
                fix=UNEXPLAINED,
            )
        errors.append(error)
    return max(errors, default=None)


def _real(value: Tensor) -> Tensor:
    return torch.view_as_real(value).double() if value.is_complex() else value.double()


def _distance(got: Tensor, want: Tensor, output: int) -> float:
    """The largest difference, relative to the largest entry; masks may put infinities where both have them."""
    finite = got.isfinite() & want.isfinite()
    if not bool((finite | (got == want)).all()) or (got.numel() and not bool(finite.any())):
        raise VerificationError(
            f"output {output} is not finite in the smaller network or in the original",
            where="example_inputs",
            fix="Look for very large weights, or give example inputs on which all outputs are numbers.",
        )
    if not got.numel():
        return 0.0
    return float((got - want)[finite].abs().amax() / want[finite].abs().amax().clamp(min=1e-12))
