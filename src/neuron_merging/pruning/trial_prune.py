"""Analyse a model, and test by trial pruning whether its own code works with fewer channels. A captured graph
shows sizes as numbers: it cannot tell `x.view(b, 4, 16)` from `x.view(b, 4, x.shape[1] // 4)`. So one channel
of every group is removed on a fake module, which costs almost nothing to run. Channels are marked as not
prunable if they reach an operator that then fails, returns another shape than predicted, or computes with
another number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from torch import nn

from neuron_merging.channels.analysis import Analysis
from neuron_merging.channels.find_channels import find_channels, find_heads
from neuron_merging.channels.groups import Channels, Group, Mask, Units
from neuron_merging.channels.masked_run import build_keep_mask
from neuron_merging.channels.rules.table import lookup_operator
from neuron_merging.errors import MergingError, VerificationError, describe_error
from neuron_merging.graph.batch_size import make_batch_of_one
from neuron_merging.graph.capture import capture, check_hooks_only_observe, check_model
from neuron_merging.graph.copying import (
    copy_with_own_tensors,
    has_float64,
    iter_module_tensors,
    leave_inference_mode,
    unwrap_model,
)
from neuron_merging.graph.example_inputs import clone_inputs, move_tensors, normalize_inputs
from neuron_merging.graph.graph import Graph, Node, Ref, Shape
from neuron_merging.graph.module_rewrites import find_computed_weights, fold_parametrizations
from neuron_merging.graph.process_state import exclusive_access
from neuron_merging.graph.user_code import find_user_line
from neuron_merging.onnx.formats import find_format
from neuron_merging.pruning.plan import Plan
from neuron_merging.pruning.size_dependence import (
    ForwardFailure,
    TracedCall,
    build_trial_network,
    find_changed_scalars,
    find_forward_failure,
    find_shape_mismatches,
    find_size_attributes,
    find_size_attributes_at_mismatch,
    fix_shape_mismatches,
    make_trial_plan,
    trace_scalars,
)
from neuron_merging.pruning.surgery import build_fake_module, check_kept_indices

REASON_CONSTANT_SIZE = (
    "takes a size from a constant of the model's code, or from a tensor that does not shrink along "
    '(the graph can be cut there: output="graph", --output graph)'
)
REASON_CHANNEL_COUNT = "computes with the number of channels"
REASON_CODE_BREAKS = "has a number of channels that the model's code depends on"
KeptUnits = Mapping[str, Units]
"""By group name, the units that stay."""
MAX_EXPORTS = 2
"""Trial cuts that are exported and compared, which is slow. Sizes still in doubt after that are not pruned."""
MAX_HEAD_EXPORTS = 1
"""The same for groups of attention heads."""


@dataclass(frozen=True)
class Blame:
    """Operators that break under pruning, each with the reason.

    No channel that reaches an operator in `refused` is prunable. An operator in `held` only keeps its own outputs.
    """

    refused: Mapping[str, str] = field(default_factory=dict)
    held: Mapping[str, str] = field(default_factory=dict)

    def __or__(self, other: Blame) -> Blame:
        return Blame({**self.refused, **other.refused}, {**self.held, **other.held})

    def __bool__(self) -> bool:
        return bool(self.refused or self.held)

    def exclude_known(self, analysis: Analysis) -> Blame:
        """Return only the operators that the analysis does not exclude yet."""
        refused = {name: why for name, why in self.refused.items() if name not in analysis.refused_operators}
        return Blame(refused, {name: why for name, why in self.held.items() if name not in analysis.held_operators})


def analyse(model: nn.Module | Analysis | str | Path, example_inputs: Any = None) -> Analysis:
    """Capture a network and find its channels, once for every later call.

    Parameters
    ----------
    model
        The network; the path of an .onnx or .pt2 file; or an analysis, which is returned unchanged.
    example_inputs
        A tensor, a tuple of the network's positional inputs, or a dict of its inputs by name, as a tokenizer returns
        it. Not needed for a file.

    Returns
    -------
    Analysis
        The captured network and its channels. `compress`, `inspect`, `apply` and the report accept it as a model.

    Raises
    ------
    ModelError
        The model cannot be captured.
    MergingError
        A model comes without example inputs, or an analysis with them.

    Examples
    --------
    >>> import torch
    >>> net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> analysis = analyse(net, torch.zeros(1, 4))
    >>> [group.name for group in analysis.channels.groups]
    ['0']
    """
    if isinstance(model, Analysis):
        if example_inputs is not None:
            what = "an analysis has example inputs of its own"
            raise MergingError(what, where="example_inputs", fix="Leave them out, or give the model.")
        return model
    if isinstance(model, str | Path) and (form := find_format(model)) is not None:
        given = None if example_inputs is None else normalize_inputs(example_inputs)
        return analyse(*form.read(model, given))
    if example_inputs is None:
        what = "a model needs example inputs to be captured with"
        raise MergingError(what, where="example_inputs", fix="Give a tensor or a tuple of tensors.")
    model = unwrap_model(model)
    with exclusive_access():
        # Cloned, because tensors made in inference mode cannot be used outside of it.
        inputs = clone_inputs(normalize_inputs(example_inputs, model))
        check_model(model)
        assert isinstance(model, nn.Module)
        model = leave_inference_mode(model)
        plain, inputs, device = _move_to_float64_device(fold_parametrizations(model), inputs)
        graph = capture(plain, inputs)
        if graph.writes_to_weights:  # work on a copy: running the network must not change the user's weights
            plain = copy_with_own_tensors(plain)
            graph = capture(plain, inputs)
        check_hooks_only_observe(plain, inputs)
        # All later stages take dimension 0 of an input for the batch.
        if _reads_single_sample(graph):
            inputs = make_batch_of_one(plain, inputs)
            graph = capture(plain, inputs)
        folded = find_computed_weights(model)
        found = Analysis(plain, inputs, graph, find_channels(graph), folded_weights=folded, user_device=device)
        # From the inside out: how the code runs on shapes, which sizes it fixes, which counts it computes with. Heads
        # come last, because they are tried apart from single channels.
        return add_head_groups(exclude_counted_channels(_resolve_doubts(_enable_export_if_needed(found))))


def _move_to_float64_device(
    model: nn.Module, inputs: tuple[Any, ...]
) -> tuple[nn.Module, tuple[Any, ...], torch.device | None]:
    """Return the network, its inputs, and None; or, if its device lacks float64, copies on the CPU and that device.

    The whole package sums and solves in float64. A copy on the CPU is simpler and safer than moving each step.
    """
    devices = {tensor.device for tensor in iter_module_tensors(model)}
    lacking = next((device for device in devices if not has_float64(device)), None)
    if lacking is None:
        return model, inputs, None
    cpu = torch.device("cpu")
    return copy_with_own_tensors(model, cpu), move_tensors(inputs, cpu), lacking


def _reads_single_sample(graph: Graph) -> bool:
    """Whether a layer reads the first input as one sample: an image without a batch dimension, or a single vector."""
    name = next((name for name in graph.inputs if name is not None and graph.shapes[name]), "")
    return any(len(graph.shapes[name]) == _count_sample_dims(graph, node) for node in graph.users(name))


def _count_sample_dims(graph: Graph, node: Node) -> int:
    """Count the dimensions of one sample that a layer reads: channels, and the spatial ones of a convolution."""
    weight, row = node.args.get("weight"), lookup_operator(node)
    if not isinstance(weight, Ref) or not (row.convolves or row.layer == "linear"):
        return 0
    return len(graph.shapes[weight.name]) - 1


def _enable_export_if_needed(analysis: Analysis) -> Analysis:
    """Set the export flag if the model's code runs without values only while `torch.compiler.is_exporting()`."""
    exported = replace(analysis, needs_export_flag=True)
    fails = find_forward_failure(analysis, {}) is not None
    return exported if fails and find_forward_failure(exported, {}) is None else analysis


def add_head_groups(analysis: Analysis) -> Analysis:
    """Return the analysis with groups of attention heads. They are tried separately from channels inside heads:
    code that fixes the width of a head may still work with fewer heads.
    """
    heads = replace(
        analysis, channels=find_heads(analysis.graph), refused_operators={}, held_operators={}, search=find_heads
    )
    if heads.channels.groups:
        heads = exclude_counted_channels(_resolve_doubts(heads, MAX_HEAD_EXPORTS))
    return analysis.add_heads(heads)


def _resolve_doubts(analysis: Analysis, exports_left: int = MAX_EXPORTS) -> Analysis:
    """Remove one unit of every group, and repeat until the model's code runs with the predicted shapes.

    Each round adds size attributes or excludes operators. At most `exports_left` rounds export the network.
    """
    while analysis.channels.groups:
        doubts, kept = _list_doubtful_nodes(analysis), _drop_one_unit_per_group(analysis)
        failure = _find_failure_from_cut(analysis, kept)
        if failure is not None:
            # Cheapest repair first: attributes that store a size can be changed with the channels.
            better = find_size_attributes(analysis, kept, failure)
            better = better or find_size_attributes_at_mismatch(analysis, kept, failure, list(doubts.values()))
            if better is not None:
                analysis = better
                continue
            blame = _blame_forward_failure(analysis, failure, doubts, kept)
        elif not doubts:
            return analysis
        elif (better := fix_shape_mismatches(analysis, kept, list(doubts.values()))) is not None:
            analysis = better
            continue
        elif exports_left:
            exports_left -= 1
            blame = _blame_export_differences(analysis, make_trial_plan(analysis, kept), doubts)
        else:
            blame = Blame(dict.fromkeys(doubts, REASON_CONSTANT_SIZE))
        fresh = blame.exclude_known(analysis)
        if not fresh:
            return analysis
        analysis = _exclude_blamed(analysis, fresh)
    return analysis


def _find_failure_from_cut(analysis: Analysis, kept: KeptUnits) -> ForwardFailure | None:
    """Return the failure that a cut causes; None if it runs, or if the unpruned network fails without values too."""
    failure = find_forward_failure(analysis, kept)
    return None if failure is None or find_forward_failure(analysis, {}) is not None else failure


def exclude_counted_channels(analysis: Analysis) -> Analysis:
    """Return the analysis without channels whose count enters a computation, as in `x / x.shape[1]`."""
    pruned = _trace_scalars_with(analysis, _drop_one_unit_per_group(analysis))
    # Without scalars in the pruned run there is nothing to compare.
    original = _trace_scalars_with(analysis, {}) if any(call.values for call in pruned) else []
    while find_changed_scalars(original, pruned) and analysis.channels.groups:
        fewer = _exclude_if_fewer_removable(
            analysis, _blame_changed_scalars(analysis, original, _drop_one_unit_per_group(analysis))
        )
        if fewer is None:
            break
        analysis, pruned = fewer, _trace_scalars_with(fewer, _drop_one_unit_per_group(fewer))
    return analysis


def _blame_changed_scalars(analysis: Analysis, original: list[TracedCall], kept: KeptUnits) -> Blame:
    """Blame operators whose scalar arguments change when a group is cut.

    If none of them reads the group's channels, the group's producers are held instead.
    """
    blame = Blame()
    for group in analysis.channels.groups:
        changed = _find_scalars_changed_by(analysis, original, {group.name: kept[group.name]})
        nodes = [node for call in changed for node in _find_nodes_of_call(analysis, call)]
        near = {
            node.name: REASON_CHANNEL_COUNT for node in nodes if _has_group_channels(analysis.channels, node, group)
        }
        first = changed[0] if changed and not near else None
        far = f"{REASON_CHANNEL_COUNT}: {first.op}, {', '.join(first.places[:1])}" if first else ""
        blame |= Blame(near, {producer.node.name: far for producer in group.producers if far})
    return blame


def _find_scalars_changed_by(analysis: Analysis, original: list[TracedCall], kept: KeptUnits) -> list[TracedCall]:
    """Return the calls whose scalars a cut changes; none if the pruned network fails, which is handled elsewhere."""
    return find_changed_scalars(original, _trace_scalars_with(analysis, kept))


def _trace_scalars_with(analysis: Analysis, kept: KeptUnits) -> list[TracedCall]:
    """Trace the scalars of a pruned network; an empty list if its code does not run without values."""
    try:
        return trace_scalars(build_trial_network(analysis, kept), analysis.inputs)
    except Exception:  # noqa: BLE001 (code that looks at values, or that a trial cut breaks: both show elsewhere)
        return []


def _find_nodes_of_call(analysis: Analysis, call: TracedCall) -> list[Node]:
    """Return the graph's operators that a call may correspond to: of the same name at its lines, else all there."""
    names = {node.name for place in call.places for node in _find_nodes_at_line(analysis.graph.nodes, place)}
    nodes = [node for node in analysis.graph.nodes if node.name in names]
    return [node for node in nodes if node.op == call.op.rstrip("_")] or nodes


def shrink_after_failure(
    analysis: Analysis, plan: Plan, find_error: Callable[[KeptUnits], Exception | None]
) -> Analysis | None:
    """Return the analysis without the channels that broke the pruned network; None if they cannot be found.

    `find_error` carries out a part of the cut and returns what is wrong with it. It is used last, because it is
    expensive: the pruned network may run with the right shapes and still compute wrong values.
    """
    kept = resolve_kept_units(plan, analysis.channels)
    if fewer := _exclude_if_fewer_removable(analysis, _blame_single_groups(analysis, {}, kept)):
        return fewer
    differences = _blame_export_differences(analysis, plan, {})
    if REASON_CONSTANT_SIZE in differences.refused.values():
        if fewer := _exclude_if_fewer_removable(analysis, differences):
            return fewer
    scalar_users = [node for node in analysis.graph.nodes if node.name in differences.refused]
    culprits = _bisect_culprits(kept, find_error)
    return _exclude_if_fewer_removable(analysis, _blame_scalar_users(analysis, culprits, scalar_users))


def _exclude_if_fewer_removable(analysis: Analysis, blame: Blame) -> Analysis | None:
    """Exclude the blamed operators, and return the new analysis if it has fewer removable units; else None."""
    fresh = blame.exclude_known(analysis)
    fewer = _exclude_blamed(analysis, fresh) if fresh else analysis
    return _resolve_doubts(fewer) if _count_removable(fewer.channels) < _count_removable(analysis.channels) else None


def _count_removable(channels: Channels) -> int:
    return sum(group.size - int(group.locked.sum()) for group in channels.groups)


def find_training_failure(analysis: Analysis, plan: Plan) -> str:
    """Return the error of the smaller network in training mode, if cutting caused it; else an empty text.

    Only a network with parameters that evaluation does not read, such as an auxiliary head, can fail that way.
    """
    if all(analysis.graph.nodes_reading(name) for name, _ in analysis.model.named_parameters()):
        return ""
    no_cuts = msgspec.structs.replace(plan, cuts=(), modules={}, sizes={})
    return "" if _run_in_training_mode(analysis, no_cuts) else _run_in_training_mode(analysis, plan)


def _run_in_training_mode(analysis: Analysis, plan: Plan) -> str:
    """Run the planned network on shapes in training mode, and return its error; an empty text if it runs."""
    network = build_fake_module(analysis.model, plan)
    network.model.train()
    try:
        network.run(analysis.inputs)
    except Exception as error:  # noqa: BLE001 (any exception of the user's code is the result)
        return describe_error(error) + (f", {place}" if (place := find_user_line(error)) else "")
    return ""


def _exclude_blamed(analysis: Analysis, blame: Blame) -> Analysis:
    return analysis.exclude_operators(blame.refused, blame.held)


def _list_doubtful_nodes(analysis: Analysis) -> dict[str, Node]:
    """Return the operators with uncertain sizes that removable channels still reach, by name."""
    nodes = [node for node in analysis.channels.uncertain_sizes if node.name not in analysis.refused_operators]
    return {node.name: node for node in nodes if analysis.channels.touches_node(node)}


def _has_group_channels(channels: Channels, node: Node, group: Group) -> bool:
    return any(channels.carries(name, group) for name in (node.name, *(ref.name for ref in node.refs())))


def _blame_forward_failure(
    analysis: Analysis, failure: ForwardFailure, doubts: Mapping[str, Node], kept: KeptUnits
) -> Blame:
    """Blame the operators or groups that make the code fail when one unit of every group is removed."""
    if lines := _list_names_at_line(doubts.values(), find_user_line(failure.error)):
        return Blame(dict.fromkeys(lines, REASON_CONSTANT_SIZE))
    if _find_forward_error(analysis, {}) is not None:
        return Blame(dict.fromkeys(doubts, REASON_CONSTANT_SIZE))  # the code reads values: no trial is possible
    return _blame_single_groups(analysis, doubts, kept) or _hold_groups(
        analysis, _find_incompatible_groups(analysis, kept)
    )


def _find_forward_error(analysis: Analysis, kept: KeptUnits) -> Exception | None:
    """Return the exception that the model's code raises in a pruned network; None if it runs."""
    failure = find_forward_failure(analysis, kept)
    return None if failure is None else failure.error


def _find_incompatible_groups(analysis: Analysis, kept: KeptUnits) -> dict[str, Exception]:
    """Return the groups that fail together with earlier ones, though each can be cut alone."""
    chosen: dict[str, Units] = {}
    culprits = {}
    for name, units in kept.items():
        error = _find_forward_error(analysis, {**chosen, name: units})
        if error is None:
            chosen[name] = units
        else:
            culprits[name] = error
    return culprits


def _bisect_culprits(kept: KeptUnits, find_error: Callable[[KeptUnits], Exception | None]) -> dict[str, Exception]:
    """Find the groups that cause an error when cut alone, by bisection."""
    error = find_error(kept)
    if error is None:
        return {}
    if len(kept) == 1:
        return dict.fromkeys(kept, error)
    names = list(kept)
    # Both halves may run although the whole fails; then no group is to blame alone.
    halves = (names[: len(names) // 2], names[len(names) // 2 :])
    first, second = (_bisect_culprits({name: kept[name] for name in half}, find_error) for half in halves)
    return {**first, **second}


def _blame_single_groups(analysis: Analysis, doubts: Mapping[str, Node], kept: KeptUnits) -> Blame:
    """Blame, for each group that fails alone, the doubtful line at which the code stops; else hold the group."""
    channels, blame = analysis.channels, Blame()
    groups = {group.name: group for group in channels.groups}
    for name, error in _bisect_culprits(kept, lambda part: _find_forward_error(analysis, part)).items():
        near = [node for node in doubts.values() if _has_group_channels(channels, node, groups[name])]
        lines = _list_names_at_line(near, find_user_line(error)) or find_shape_mismatches(
            analysis, {name: kept[name]}, near
        )
        blame |= Blame(dict.fromkeys(lines, REASON_CONSTANT_SIZE)) if lines else _hold_groups(analysis, {name: error})
    return blame


def _blame_scalar_users(analysis: Analysis, culprits: Mapping[str, Exception], scalar_users: Sequence[Node]) -> Blame:
    """Blame operators that compute with a culprit's channel count; hold a culprit that reaches none of them."""
    blame = Blame()
    for group in analysis.channels.groups:
        if group.name in culprits:
            reached = [node.name for node in scalar_users if _has_group_channels(analysis.channels, node, group)]
            far = f"{REASON_CHANNEL_COUNT}: {scalar_users[0].op}, {scalar_users[0].location}" if scalar_users else ""
            culprit = {group.name: culprits[group.name]}
            blame |= (
                Blame(dict.fromkeys(reached, REASON_CHANNEL_COUNT)) if reached else _hold_groups(analysis, culprit, far)
            )
    return blame


def _hold_groups(analysis: Analysis, culprits: Mapping[str, Exception], why: str = "") -> Blame:
    """Hold the producers of these groups, so that none of their channels is pruned."""
    groups = [group for group in analysis.channels.groups if group.name in culprits]
    return Blame(
        held={
            p.node.name: why or _explain_code_error(culprits[group.name]) for group in groups for p in group.producers
        }
    )


def _explain_code_error(error: Exception) -> str:
    if isinstance(error, VerificationError):
        return f"{REASON_CODE_BREAKS}: {error.what}"
    place = find_user_line(error)
    return f"{REASON_CODE_BREAKS}: {describe_error(error)}" + (f", {place}" if place else "")


def _blame_export_differences(analysis: Analysis, plan: Plan, doubts: Mapping[str, Node]) -> Blame:
    """Blame operators of the exported pruned network whose shape or scalars differ from the prediction."""
    try:
        after = build_fake_module(analysis.model, plan).trace(analysis.inputs)
    except MergingError as error:
        return Blame(dict.fromkeys(_list_names_at_line(doubts.values(), error.where) or doubts, REASON_CONSTANT_SIZE))
    return _compare_traced_graphs(
        analysis, after, build_keep_mask(analysis.channels, resolve_kept_units(plan, analysis.channels)), doubts
    )


def _compare_traced_graphs(analysis: Analysis, after: Graph, stays: Mask, doubts: Mapping[str, Node]) -> Blame:
    """Compare two graphs operator by operator, up to the first wrong shape: errors behind it are consequences."""
    scalar_users: dict[str, str] = {}
    for node, new in zip(analysis.graph.nodes, after.nodes, strict=False):
        if node.op != new.op:  # the code branches on a size
            return Blame(dict.fromkeys(doubts, REASON_CONSTANT_SIZE) if not scalar_users else scalar_users)
        shape = analysis.channels.shape_after_pruning(node.name, node.shape, stays)
        if (not node.has_several_outputs and new.shape != shape) or not _has_scaled_norm_groups(node, new, shape):
            return Blame(
                dict.fromkeys([node.name, *_list_names_at_line(doubts.values(), node.source)], REASON_CONSTANT_SIZE)
                | scalar_users
            )
        if _collect_scalar_args(node, every=not doubts) != _collect_scalar_args(new, every=not doubts):
            scalar_users[node.name] = REASON_CHANNEL_COUNT
    return Blame(scalar_users)


def _has_scaled_norm_groups(node: Node, new: Node, shape: Shape) -> bool:
    """Whether a group norm's number of groups shrinks with its channels, which are removed in entire groups.

    A norm with a single group keeps it and becomes narrower.
    """
    if lookup_operator(node).norm != "group" or int(new.args["num_groups"]) == int(node.args["num_groups"]) == 1:
        return True
    return int(new.args["num_groups"]) * node.shape[1] == int(node.args["num_groups"]) * shape[1]


def _collect_scalar_args(node: Node, every: bool) -> dict[str, object]:
    """Return the scalar arguments to compare: all floats, and integers if the operator is arithmetic or `every`.

    Integers of other operators may be positions and lengths, which change with the channels.
    """
    kinds = (int, float) if every or lookup_operator(node).scalar_operands else (float,)
    return {k: v for k, v in node.args.items() if isinstance(v, kinds) and k not in ("groups", "num_groups")}


def _list_names_at_line(nodes: Iterable[Node], place: str) -> list[str]:
    """Return all operators at a line of code: every block that runs the line is affected."""
    return [node.name for node in _find_nodes_at_line(nodes, place)]


def _find_nodes_at_line(nodes: Iterable[Node], place: str) -> list[Node]:
    line = place.split(": ")[0]
    return [node for node in nodes if line and node.source.split(": ")[0] == line]


def _drop_one_unit_per_group(analysis: Analysis) -> dict[str, Units]:
    return {group.name: _drop_one_unit_per_cell(group) for group in analysis.channels.groups}


def _drop_one_unit_per_cell(group: Group) -> Units:
    """Return all units except the last free one of each cell; all units if a cell cannot lose one.

    Cells must keep equally many units, so each loses one.
    """
    removed = []
    for cell in range(int(group.balance_cells.max()) + 1):
        free = np.flatnonzero((group.balance_cells == cell) & ~group.locked)
        if len(free) == 0 or (group.balance_cells == cell).sum() < 2:
            return np.arange(group.size)
        removed.append(free[-1])
    return np.setdiff1d(np.arange(group.size), removed)


def resolve_kept_units(plan: Plan, channels: Channels) -> dict[str, Units]:
    """Return the units that a plan keeps, by group; refuse a plan whose groups the network does not have."""
    sizes = {group.name: group.size for group in channels.groups}
    for choice in plan.groups:
        if sizes.get(choice.name) != choice.size:
            found = f"{sizes[choice.name]} channels" if choice.name in sizes else "no such group"
            raise MergingError(
                f"the plan does not fit this network: it has {found}, the plan {choice.size}",
                where=choice.name,
                fix="Give the network that the plan was made for, with the same sizes.",
            )
        check_kept_indices(choice.kept, choice.size, choice.name)
    return {choice.name: np.array(choice.kept) for choice in plan.groups}
