"""Verify that the smaller network computes what the merges say. It runs beside the zeroed reference, on the
example and on fresh inputs, in float64 where possible, and the outputs are compared entry by entry. The power
of the test is measured: how far the outputs move when the removed channels alone are zeroed. Without power,
equal outputs prove nothing; so the same cut is also compared with fresh weights. For an expensive network that
is done only where its own weights hide the cut.

Fresh inputs resemble the example, with other values, another batch size and, where the network accepts it, another
spatial size or length. Fresh weights of a large network are not stored: they are drawn when an operator reads them,
with the same values every time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from neuron_merging.channels.analysis import Analysis
from neuron_merging.channels.groups import Axis, Mask
from neuron_merging.channels.masked_run import GraphEdits, MaskedGraph
from neuron_merging.errors import (
    MemoryExhausted,
    MergingError,
    VerificationError,
    deprecated_members,
    describe_error,
    raise_if_out_of_memory,
)
from neuron_merging.graph.compare import (
    NON_FINITE_FAULT,
    check_outputs_finite,
    compare_outputs,
    make_not_finite_error,
)
from neuron_merging.graph.copying import (
    Float64Mode,
    copy_to_float64,
    copy_without_hooks,
    named_tensors_with_aliases,
    to_float64,
)
from neuron_merging.graph.example_inputs import (
    InputTuple,
    call_model,
    clone_inputs,
    draw_like,
    flatten_inputs,
    flatten_outputs,
    infer_batch_size,
    map_batched,
)
from neuron_merging.graph.fake_module import LazyTensorMode
from neuron_merging.graph.graph import Graph, Shape
from neuron_merging.graph.interpreter import run_graph
from neuron_merging.graph.macs import count_graph_macs
from neuron_merging.graph.process_state import disable_fused_attention, exclusive_access, release_free_memory, seed_rng
from neuron_merging.graph.user_code import find_user_line
from neuron_merging.inputs.input_scale import is_signal
from neuron_merging.inputs.synthetic import find_token_inputs
from neuron_merging.merging.fit import build_graph_edits
from neuron_merging.merging.protocol import Merge, MergeResult
from neuron_merging.pruning.plan import Plan
from neuron_merging.pruning.surgery import apply_plan, build_small_network

HALF_DTYPES = (torch.float16, torch.bfloat16)
MIN_POWER = 1e-4
"""Relative change of the outputs, when the removed channels are zeroed, below which equal outputs prove little."""
MAX_CHEAP_MACS = 2**31
"""MACs of the example up to which every check is run: about a second on one core. Larger networks skip the checks
that fresh inputs cover.
"""
MAX_FLOAT64_PARAMETERS = 2**24
"""Parameters up to which a float64 copy is made (128 MiB); larger networks convert each weight when it is read."""

UNEXPLAINED_FIX = (
    "Either the model's code branches on the number of channels, or this package misread it: "
    "leave layers out with ignore=, and report the network."
)


@deprecated_members(compared="comparison")
@dataclass(frozen=True)
class VerificationResult:
    """The result of a verification, and its power.

    `distance` is the largest difference of an output entry, relative to the entry's own scale; None if the network
    returns only integers. `power` is how far the outputs move when the removed channels are zeroed in the original.
    `raised` is the same in a copy with fresh weights, if the original's weights hide what was cut. `inputs` and
    `precision` describe the comparison.
    """

    distance: float | None
    power: float | None
    inputs: tuple[str, ...]
    precision: str
    raised: float | None = None
    independent: bool = True
    """Whether the reference was built from the original and the merges, without the smaller network's weights."""

    @property
    def is_powerless(self) -> bool:
        """Whether equal outputs prove nothing."""
        return self.power is not None and max(self.power, self.raised or 0.0) < MIN_POWER

    def __str__(self) -> str:
        if self.distance is None:
            return "not verified: the network returns only integers"
        return f"equals the original with removed channels zeroed within {self.distance:.1e} ({self.comparison})"

    @property
    def comparison(self) -> str:
        """Description of the precision, the inputs and the power of the comparison."""
        return f"{self.precision}, {' and '.join(self.inputs)}{self._describe_power()}"

    def _describe_power(self) -> str:
        if self.power is None:
            return ""
        if self.is_powerless:
            return "; without power: the outputs do not depend on what was cut"
        if self.raised is not None:
            return "; also with fresh weights, because the network's own hide what was cut"
        return f"; zeroing alone moves the outputs by {min(self.power, 9.99):.1%}"


def verify_small_network(
    analysis: Analysis, plan: Plan, stays: Mask, small: nn.Module, merged: MergeResult | None = None
) -> VerificationResult:
    """Compare the small network with the original whose removed units are zeroed.

    Without `merged` the reference takes its weights from the small network itself.

    Raises
    ------
    VerificationError
        The outputs differ, or the small network does not run.
    """
    with exclusive_access(), torch.no_grad():
        return _Verification(analysis, plan, stays, small, merged).verify()


def run_small_network(small: nn.Module, inputs: Sequence[Any]) -> Any:
    """Run a pruned network and return its outputs; raise VerificationError if its code fails."""
    return _run_forward(copy_without_hooks(small).eval(), inputs)


def _run_forward(network: nn.Module, inputs: Sequence[Any]) -> Any:
    try:
        with torch.no_grad(), disable_fused_attention():
            return call_model(network, clone_inputs(inputs))
    except Exception as error:
        raise_if_out_of_memory(error)
        raise VerificationError(
            f"the smaller network does not run: {describe_error(error)}",
            where=find_user_line(error),
            fix="A constant in the model's code probably fixes a size there: derive it from x.shape, "
            "or keep the layer with ignore=.",
        ) from error


@dataclass(frozen=True)
class _Verification:
    """One verification of a small network: the steps and what they share."""

    analysis: Analysis
    plan: Plan
    stays: Mask
    small: nn.Module
    merged: MergeResult | None

    def verify(self) -> VerificationResult:
        """Run all comparisons, and return the largest distance with the power of the test."""
        graph, example = self.analysis.graph, self.analysis.inputs
        try:
            native = _compute_outputs(lambda: run_small_network(self.small, example))
        except VerificationError:
            _run_graph(graph, example)  # raises a clearer error if the original does not accept the example either
            raise
        edits = (
            _build_edits_from_small(graph, self.plan, self.small)
            if self.merged is None
            else build_graph_edits(graph, self.merged)
        )
        compare = self._compare_with(graph, edits, self.small)
        # Without usable fresh inputs, the power is measured on the example.
        inputs, original, fresh = next(self._find_usable_inputs(), (example, None, False))
        if original is None or count_graph_macs(graph) <= MAX_CHEAP_MACS:
            on_example = _compute_outputs(lambda: _run_graph(graph, example))
            check_outputs_finite(native, on_example)
            original, distance = original or on_example, compare.distance(example)
        else:
            # An expensive network: the fresh inputs below are compared in float64, the example only natively.
            check_outputs_finite(native, native)
            distance = self._compare_in_native_precision(compare, native)
        del native  # logits of a large vocabulary take as much memory as several layers
        power = self._measure_power(graph, inputs, original)
        if fresh:
            distance = _take_largest(distance, compare.distance(inputs, strict=False, power=power))
        result = VerificationResult(
            distance=distance,
            power=None if distance is None else power,
            inputs=("on the example", *(["on fresh inputs"] if fresh else [])),
            precision=_describe_precision(graph, compare),
            independent=self.merged is not None,
        )
        return result if distance is None else self._repeat_with_fresh_weights(result, inputs)

    def _compare_in_native_precision(self, compare: _OutputComparison, native: Sequence[Tensor]) -> float | None:
        """Compare on the example in the network's precision, and again in float64 if that fails.

        A failure may be nothing but rounding, so only the float64 comparison counts.
        """
        if any(output.dtype in HALF_DTYPES for output in native):  # rounding alone exceeds the tolerance
            return None
        try:
            replace(compare, double=False).distance(self.analysis.inputs, native=native)
        except VerificationError:
            return compare.distance(self.analysis.inputs)
        return None

    def _repeat_with_fresh_weights(self, result: VerificationResult, inputs: InputTuple) -> VerificationResult:
        """Compare the same cut with fresh weights everywhere, which exposes errors that the original weights hide.

        An expensive network is compared again only if its own weights hide what was cut.
        """
        graph = self.analysis.graph
        hidden = result.power is not None and (result.power < MIN_POWER or bool(find_blocking_parameters(graph)))
        if not hidden and count_graph_macs(graph) > MAX_CHEAP_MACS:
            return result
        trial = reinit_networks(self.analysis, self.plan, self.merged or MergeResult(()))
        compare = self._compare_with(trial.graph, build_graph_edits(trial.graph, trial.merged), trial.small)
        with trial.within:
            power = self._measure_power(trial.graph, inputs) if hidden else 0.0
            distance = compare.distance(inputs, strict=False, power=power)
        return replace(result, distance=_take_largest(result.distance, distance), raised=power if hidden else None)

    def _compare_with(self, graph: Graph, edits: GraphEdits, small: nn.Module) -> _OutputComparison:
        return _OutputComparison(MaskedGraph(graph, self.analysis.channels), self.stays, edits, small)

    def _find_usable_inputs(self) -> Iterator[tuple[InputTuple, list[Tensor], bool]]:
        """Yield fresh inputs on which the captured graph and the original agree, with the outputs.

        The graph is captured for one example. With other shapes the network's code may take another branch.
        """
        module, graph = copy_without_hooks(self.analysis.model).eval(), self.analysis.graph
        for inputs in make_fresh_inputs(self.analysis):
            try:
                wanted = _compute_outputs(lambda i=inputs: call_model(module, clone_inputs(i)))  # type: ignore[misc]
                got = _compute_outputs(lambda i=inputs: run_graph(graph, flatten_inputs(i), graph.tensors))  # type: ignore[misc]
            except Exception as error:  # noqa: BLE001 (the network's own code, which may reject generated inputs)
                raise_if_out_of_memory(error)
                continue
            if _has_same_outputs(got, wanted):
                yield inputs, got, True

    def _measure_power(self, graph: Graph, inputs: InputTuple, original: Sequence[Tensor] | None = None) -> float:
        """Return the relative change of the outputs when the removed units are zeroed and nothing is merged."""
        original = original or _compute_outputs(lambda: run_graph(graph, flatten_inputs(inputs), graph.tensors))
        masked = MaskedGraph(graph, self.analysis.channels)
        zeroed = _compute_outputs(masked.start(flatten_inputs(inputs), self.stays, GraphEdits()).run)
        return max((diff.relative for diff in compare_outputs(zeroed, original) if not diff.is_integer), default=0.0)


@dataclass
class _OutputComparison:
    """Runs the small network and its reference on the same inputs, in float64 if `double`.

    The reference is the original at full size with the removed channels set to zero and the merged weights. It uses
    neither the plan nor the surgery, so errors in either show in the comparison.
    """

    original: MaskedGraph
    stays: Mask
    edits: GraphEdits
    small: nn.Module
    double: bool = True

    def distance(
        self, inputs: InputTuple, *, strict: bool = True, power: float = 0.0, native: Sequence[Tensor] = ()
    ) -> float | None:
        """Return the largest relative difference of an output entry; raise VerificationError if it is too large.

        `strict` refuses outputs that are NaN or infinite. `power` is how far the outputs move when the removed
        channels are zeroed: a test with little power gets a tolerance of a thousandth of it.
        """
        got, want = self._run_in_float64(inputs) or self._run_in_native_precision(inputs, native)
        return _compare_outputs(got, want, strict=strict, limit=1e-3 * power if power and self.double else None)

    def _run_in_float64(self, inputs: InputTuple) -> tuple[list[Tensor], list[Tensor]] | None:
        """Run both in float64; return None, now and later, if an operator or the memory does not allow it."""
        if not self.double:
            return None
        given, edits = tree_map(to_float64, inputs), self._float64_edits
        try:
            with Float64Mode():  # type: ignore[no-untyped-call]
                want = _compute_outputs(self.original.start(flatten_inputs(given), self.stays, edits).run)
                return _compute_outputs(lambda: _run_forward(self._get_float64_network(), given)), want
        except (RuntimeError, TypeError, NotImplementedError, ValueError, VerificationError, MemoryExhausted):
            self.double = False
            return None

    @cached_property
    def _float64_edits(self) -> GraphEdits:
        """The edits with float64 tensors.

        `Float64Mode` is too late for them: a convolution compares the dtypes of input and bias before it dispatches.
        Matrices of a large network are left as they are; `Float64Mode` converts each when it is read.
        """
        tensors = {**self.original.graph.tensors, **self.edits.tensors}
        return replace(
            self.edits,
            tensors={name: self._convert_to_float64(tensor) for name, tensor in tensors.items()},
            biases={name: self._convert_to_float64(tensor) for name, tensor in self.edits.biases.items()},
        )

    def _convert_to_float64(self, tensor: Tensor) -> Tensor:
        converted: Tensor = to_float64(tensor.detach()) if self._can_copy or tensor.ndim < 2 else tensor
        return converted

    @cached_property
    def _float64_copy(self) -> nn.Module:
        return copy_to_float64(self.small).eval()

    def _get_float64_network(self) -> nn.Module:
        """Return the small network in float64; a new copy for each run if the network writes into its buffers.

        A large network is copied without its weights, which `Float64Mode` converts when they are read.
        """
        if self.original.graph.mutated_tensors:
            return copy_to_float64(self.small).eval()
        return self._float64_copy if self._can_copy else copy_to_float64(self.small, weights=False).eval()

    @property
    def _can_copy(self) -> bool:
        return _count_tensor_entries(self.original.graph) <= MAX_FLOAT64_PARAMETERS

    def _run_in_native_precision(
        self, inputs: InputTuple, native: Sequence[Tensor]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Run both in the network's precision; `native` are outputs of the small network that are known already."""
        want = _compute_outputs(self.original.start(flatten_inputs(inputs), self.stays, self.edits).run)
        return list(native) or _compute_outputs(lambda: run_small_network(self.small, inputs)), want


def _compute_outputs(compute: Callable[[], Any]) -> list[Tensor]:
    """Return all output tensors. The seed is fixed, so that networks which draw random numbers are comparable."""
    seed_rng(0)
    with disable_fused_attention():
        return flatten_outputs(compute())


def _run_graph(graph: Graph, inputs: Sequence[Any]) -> list[Any]:
    try:
        return run_graph(graph, flatten_inputs(inputs), graph.tensors)
    except (RuntimeError, TypeError, IndexError, ValueError) as error:
        raise MergingError(
            f"the model does not run on the example inputs: {describe_error(error)}",
            where="example_inputs",
            fix="Check each example input's shape and dtype.",
        ) from error


def _count_tensor_entries(graph: Graph) -> int:
    return sum(tensor.numel() for tensor in graph.tensors.values())


def _describe_precision(graph: Graph, compare: _OutputComparison) -> str:
    kinds = {str(t.dtype).removeprefix("torch.") for t in graph.tensors.values() if t.is_floating_point()}
    return "float64" if compare.double else " and ".join(sorted(kinds)) or "integers"


def _take_largest(*distances: float | None) -> float | None:
    return max((d for d in distances if d is not None), default=None)


# A reference without merges


def _build_edits_from_small(graph: Graph, plan: Plan, small: nn.Module) -> GraphEdits:
    """Build the reference's weights from the small network's, for a network whose merges are not known."""
    values = named_tensors_with_aliases(small)
    tensors = {name: _embed_small_tensor(tensor, values[name], plan, name) for name, tensor in graph.tensors.items()}
    biases = {}
    for name, size in plan.biases.items():
        weight = name.removesuffix("bias") + "weight"
        layer = small.get_submodule(name.rpartition(".")[0])
        out = 1 if getattr(layer, "transposed", False) else 0
        kept = next((cut.kept for cut in plan.cuts if cut.tensor == weight and cut.dim == out), range(size))
        bias = values[name].detach()
        biases[weight] = bias.new_zeros(size).index_copy_(0, _make_kept_index(kept, bias), bias)
    return GraphEdits(tensors, biases)


def _embed_small_tensor(full: Tensor, small: Tensor, plan: Plan, name: str) -> Tensor:
    """Write the small network's values into the kept indices of a full-size tensor."""
    cuts = [cut for cut in plan.cuts if cut.tensor == name]
    if not cuts:
        return small.detach()
    axes = [Axis(name, cut.dim, cut.blocks) for cut in cuts]
    return _embed_along_axes(full.detach().clone(), small.detach(), axes, [cut.kept for cut in cuts])


def _embed_along_axes(full: Tensor, small: Tensor, axes: Sequence[Axis], kept: Sequence[Sequence[int]]) -> Tensor:
    """Write `small` into `full` along several axes: select along the first, recurse, and copy the result back."""
    if not axes:
        return small
    axis, index = axes[0], _make_kept_index(kept[0], full)
    wide = axis.join_blocks(full).clone()
    part = axis.split_blocks(wide.index_select(axis.dim, index))
    part = _embed_along_axes(part, small, axes[1:], kept[1:])
    wide.index_copy_(axis.dim, index, axis.join_blocks(part))
    return axis.split_blocks(wide)


def _make_kept_index(kept: Sequence[int], like: Tensor) -> Tensor:
    return torch.tensor(list(kept), dtype=torch.int64, device=like.device)


# Comparing outputs


def _compare_outputs(
    got: Sequence[Tensor], want: Sequence[Tensor], *, strict: bool, limit: float | None
) -> float | None:
    """Return the largest difference of an entry, relative to its own scale; None if all outputs are integers."""
    errors = []
    for diff in compare_outputs(got, want, by_entry=True):
        if diff.is_integer and not diff.fault:
            continue
        if diff.fault == NON_FINITE_FAULT or (strict and not diff.fault and not diff.finite):
            raise make_not_finite_error(diff.output)
        if diff.fault:
            raise VerificationError(f"output {diff.output}: {diff.fault}", fix=UNEXPLAINED_FIX)
        # 1e-9 is the floor of any limit: float64 rounding accumulates in deep networks.
        tolerance = diff.tolerance if limit is None else max(1e-9, min(diff.tolerance, limit))
        if not diff.relative <= tolerance:  # also true for NaN
            raise VerificationError(
                f"output {diff.output} differs from the original with the removed channels zeroed by "
                f"{diff.relative:.2g} (relative to the entry's own scale)",
                fix=UNEXPLAINED_FIX,
            )
        errors.append(diff.relative)
    return max(errors, default=None)


def _has_same_outputs(got: Sequence[Tensor], want: Sequence[Tensor]) -> bool:
    """Whether two runs in the network's precision agree and are finite.

    Integer outputs need not agree: an argmax can change with the last digit of a sum.
    """
    return all(
        not diff.fault and (diff.is_integer or (diff.finite and diff.is_close())) for diff in compare_outputs(got, want)
    )


def make_fresh_inputs(analysis: Analysis, seed: int = 0) -> Iterator[InputTuple]:
    """Yield inputs like the example's, the most different first. The network may reject them."""
    batch = infer_batch_size(analysis.inputs)
    # A small batch size other than the example's, unless the graph may be valid for that one only.
    other = batch if analysis.may_fix_batch_size else (2 if batch in (1, 3) else 3)
    shapes = [(other, True), (other, False)] + ([(batch, False)] if other != batch else [])
    for count, resized in shapes:
        generator = torch.Generator("cpu").manual_seed(seed)
        yield _make_inputs(analysis, count, resized, generator)


def _make_inputs(analysis: Analysis, count: int, resized: bool, generator: torch.Generator) -> InputTuple:
    tokens = find_token_inputs(analysis.graph)
    signals = any(is_signal(value) for value in flatten_inputs(analysis.inputs))

    def make(i: int, value: Tensor) -> Tensor:
        return draw_like(value, (count, *_choose_sample_shape(value, signals, resized)), generator, tokens.get(i))

    return map_batched(analysis.inputs, make)


def _choose_sample_shape(value: Tensor, signals: bool, resized: bool) -> tuple[int, ...]:
    """Choose the shape of one sample: another spatial size for images and series, otherwise another length."""
    if not resized or value.ndim < 2:
        return tuple(value.shape[1:])
    if signals:
        return (
            (value.shape[1], *map(_choose_other_size, value.shape[2:])) if is_signal(value) else tuple(value.shape[1:])
        )
    # Short texts: each token has scores over a vocabulary, which may be large.
    return (_choose_other_size(min(value.shape[1], MAX_TEXT_LENGTH)), *value.shape[2:])


MAX_TEXT_LENGTH = 64
"""Tokens of the example up to which fresh texts are nearly as long."""


def _choose_other_size(size: int) -> int:
    """Choose another size: smaller and cheaper where pooling still works, else larger: 224 → 96, 32 → 24, 8 → 12."""
    if size >= 64:  # a multiple of 32, the total stride of most backbones
        return max(32, round(0.45 * size / 32) * 32)
    return size * 3 // 4 if size >= 16 else size * 3 // 2


MIN_CONSTANT_SCALE = 1e-3
"""A constant parameter below this absolute value hides what it multiplies. Layer scales start at 1e-4 to 1e-6."""
MAX_COPIED_PARAMETERS = 2**24
"""Parameters up to which a second copy is held in memory (64 MiB in float32); larger networks are drawn lazily."""
TensorSampler = Callable[[Tensor], Tensor]
"""Returns a tensor like its argument, with fresh values."""


@dataclass(frozen=True)
class ReinitNetworks:
    """The original with fresh weights, the merges with fresh columns, and the same cut of that network.

    Run them only inside the context manager `within`, which draws lazy parameters.
    """

    graph: Graph
    merged: MergeResult
    small: nn.Module
    within: AbstractContextManager[object]


def find_blocking_parameters(graph: Graph) -> list[str]:
    """Return parameters that block the signal: tensors of one constant near zero, except biases."""
    parameters = ((name, tensor.detach()) for name, tensor in _list_float_parameters(graph).items())
    return [
        name
        for name, t in parameters
        if not name.endswith("bias") and _is_constant(t) and float(t.abs().max()) < MIN_CONSTANT_SCALE
    ]


def reinit_networks(analysis: Analysis, plan: Plan, merged: MergeResult) -> ReinitNetworks:
    """Draw fresh values for all parameters, and repeat the cut in that copy."""
    parameters = _list_float_parameters(analysis.graph)
    if sum(tensor.numel() for tensor in parameters.values()) <= MAX_COPIED_PARAMETERS:
        seeds = iter(range(len(parameters) + len(merged.merges)))
        graph, model, merges = _reinit_tensors(analysis, merged, lambda like: _draw_parameter(like, next(seeds)))
        return ReinitNetworks(graph, merges, apply_plan(model, plan, merges), nullcontext())
    release_free_memory()
    lazy_mode = LazyTensorMode()
    graph, model, merges = _reinit_tensors(analysis, merged, partial(_draw_lazily, lazy_mode))
    return ReinitNetworks(
        graph, merges, build_small_network(model, plan, merges, partial(_hold_parameter, lazy_mode)), lazy_mode
    )


def _reinit_tensors(
    analysis: Analysis, merged: MergeResult, draw: TensorSampler
) -> tuple[Graph, nn.Module, MergeResult]:
    """Return the original's graph and module, and the merges, with values from `draw`."""
    parameters = _list_float_parameters(analysis.graph)
    fresh = {name: draw(tensor) for name, tensor in parameters.items()}
    graph = replace(analysis.graph, tensors={**analysis.graph.tensors, **fresh})
    model = copy_without_hooks(analysis.model, {id(parameters[name]): tensor for name, tensor in fresh.items()})
    merges = tuple(_redraw_columns(merge, parameters, draw) for merge in merged.merges)
    return graph, model, MergeResult(merges, merged.tensors)


def _redraw_columns(merge: Merge, parameters: dict[str, Tensor], draw: TensorSampler) -> Merge:
    # Random columns verify the surgery as well as fitted ones, and need no second fit.
    axis = merge.consumer.axis
    if merge.columns is None or axis is None or axis.tensor not in parameters:
        return merge
    return replace(merge, columns=draw(merge.columns.to(parameters[axis.tensor].dtype)).detach())


def _list_float_parameters(graph: Graph) -> dict[str, Tensor]:
    read = set(graph.parameters.values())
    return {
        name: tensor
        for name, tensor in graph.tensors.items()
        if name in read and isinstance(tensor, nn.Parameter) and tensor.is_floating_point() and tensor.numel()
    }


def _is_constant(tensor: Tensor) -> bool:
    return bool((tensor == tensor.flatten()[0]).all())


def _hold_parameter(lazy_mode: LazyTensorMode, old: Tensor, shape: Shape, make: Callable[[], Tensor]) -> Tensor:
    """Return a placeholder for a parameter, and real values for a buffer: the network's code may write into it."""
    return (
        lazy_mode.create_placeholder(old, shape, make)
        if isinstance(old, nn.Parameter) and old.is_floating_point()
        else make()
    )


def _draw_lazily(lazy_mode: LazyTensorMode, like: Tensor) -> Tensor:
    # The seed is fixed now, so every read of the placeholder draws the same values.
    return lazy_mode.create_placeholder(like, tuple(like.shape), partial(_draw_parameter, like, lazy_mode.count))


def _draw_parameter(like: Tensor, seed: int) -> nn.Parameter:
    """Draw a parameter: weights that preserve the signal's variance; scales and shifts in 0.25..0.75."""
    values = _draw_values(tuple(like.shape), torch.Generator("cpu").manual_seed(seed))
    return nn.Parameter(values.to(like.device, like.dtype), requires_grad=False)


def _draw_values(shape: Shape, generator: torch.Generator) -> Tensor:
    if len(shape) < 2:
        return torch.rand(shape, generator=generator, dtype=torch.float32, device="cpu").mul_(0.5).add_(0.25)
    values = torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")
    return values.mul_(max(1, values[0].numel()) ** -0.5)  # variance 1 / fan_in
