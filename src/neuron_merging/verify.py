"""verify: does the smaller network compute what the plan says it computes?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from neuron_merging.capture import (
    Graph,
    Node,
    Ref,
    all_tensors,
    as_inputs,
    bare_copy,
    copied,
    flat,
    place_of,
    plain_attention,
)
from neuron_merging.channels import Axis, Channels
from neuron_merging.errors import MergingError, told
from neuron_merging.operators import Vector
from neuron_merging.plan import Plan

TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-3, torch.float16: 5e-2, torch.bfloat16: 2e-1}


UNEXPLAINED = (
    "Either the model's code branches on the number of channels, or they were misread here: "
    "leave layers out with ignore=, and report the network."
)


class VerificationError(MergingError):
    """The smaller network does not compute what it should."""


@torch.no_grad()
def verify(
    graph: Graph, channels: Channels, plan: Plan, stays: Vector, small: nn.Module, example_inputs: Any
) -> float | None:
    """Run the small network and the original with the removed units zeroed; return their distance.

    The original runs at its full size with the small network's weights in the places that were
    kept, and every removed unit is set to zero wherever it occurs. Both must agree. None means that the
    network returns nothing but whole numbers, which say too little.
    """
    inputs = as_inputs(example_inputs)
    with torch.random.fork_rng(devices=[]):
        _run_original(graph, inputs)
        torch.manual_seed(0)
        got = flatten_outputs(run_small(small, inputs))
        torch.manual_seed(0)
        want = flatten_outputs(zeroed_original(graph, channels, plan, stays, small, inputs))
    return _compare(got, want)


def _run_original(graph: Graph, inputs: Sequence[Any]) -> None:
    try:
        graph.run(flat(inputs), graph.tensors, Node.compute)
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
    graph: Graph, channels: Channels, plan: Plan, stays: Vector, small: nn.Module, inputs: Sequence[Any]
) -> list[Any]:
    """The original graph at full size, the small network's weights inside, removed units zero."""
    own = all_tensors(small)
    tensors = {name: _embed(graph.tensors[name], own[name], plan, name) for name in graph.tensors}

    def call(node: Node, args: dict[str, Any]) -> Any:
        args = _extra_bias(node, args, graph, own, plan)
        masks = unit_masks(channels, stays, node.name)
        spans = node.op in ("layer_norm", "rms_norm")
        value = norm_over_kept(node, args, masks) if spans else node.compute(args)
        for dim, stay in masks.items():
            shape = [1] * value.ndim
            shape[dim] = -1
            value = torch.where(torch.from_numpy(stay).to(value.device).view(shape), value, torch.zeros_like(value))
        return value

    return graph.run(flat(inputs), tensors, call)


def flatten_outputs(value: Any) -> list[Tensor]:
    """All tensors of a network's output, in order."""
    if hasattr(value, "to_tuple"):
        value = value.to_tuple()
    return [leaf for leaf in flat(value) if isinstance(leaf, Tensor)]


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
    out = 1 if "transpose" in node.op else 0
    kept = next((cut.kept for cut in plan.cuts if cut.tensor == name and cut.dim == out), range(len(bias)))
    bias[list(kept)] = own[made]
    return {**args, "bias": bias}


def unit_masks(channels: Channels, stays: Vector, value: str) -> dict[int, Vector]:
    """For each dimension of a value that loses channels, which of them stay."""
    found = {}
    for dim, units in channels.units.get(value, {}).items():
        stay = stays[units] | (units < 0)
        if not stay.all():
            found[dim] = stay
    return found


def _embed(full: Tensor, small: Tensor, plan: Plan, name: str) -> Tensor:
    """The small network's values at the kept places of a full-size tensor."""
    cuts = [cut for cut in plan.cuts if cut.tensor == name]
    if not cuts:
        return small.detach()
    result = full.detach().clone()
    axes = [Axis(name, cut.dim, cut.blocks) for cut in cuts]
    return _put(result, small.detach(), axes, [cut.kept for cut in cuts])


def _put(full: Tensor, small: Tensor, axes: Sequence[Axis], kept: Sequence[Sequence[int]]) -> Tensor:
    if not axes:
        return small
    axis, index = axes[0], torch.tensor(kept[0], device=full.device)
    wide = axis.expose(full).clone()
    part = axis.restore(wide.index_select(axis.dim, index))
    part = _put(part, small, axes[1:], kept[1:])
    wide.index_copy_(axis.dim, index, axis.expose(part))
    return axis.restore(wide)


def norm_over_kept(node: Node, args: dict[str, Any], masks: Mapping[int, Vector]) -> Tensor:
    """A layer norm takes its statistics over the kept channels alone."""
    x = args["input"]
    count = len(args["normalized_shape"])
    inner = {dim: stay for dim, stay in masks.items() if dim >= x.ndim - count}
    if not inner:
        return node.compute(args)  # type: ignore[no-any-return]
    cut = dict(args)
    for dim, stay in inner.items():
        index = torch.from_numpy(np.flatnonzero(stay)).to(x.device)
        cut["input"] = cut["input"].index_select(dim, index)
        for name in ("weight", "bias"):
            if cut.get(name) is not None:
                cut[name] = cut[name].index_select(dim - (x.ndim - count), index)
    cut["normalized_shape"] = list(cut["input"].shape[x.ndim - count :])
    value = node.compute(cut)
    for dim, stay in inner.items():
        index = torch.from_numpy(np.flatnonzero(stay)).to(x.device)
        shape = list(value.shape)
        shape[dim] = x.shape[dim]
        value = value.new_zeros(shape).index_copy_(dim, index, value)
    return value  # type: ignore[no-any-return]


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
