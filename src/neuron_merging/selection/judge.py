"""Judge a smaller network: compare its outputs with the original's, and find the groups that cause most of the error.

`compress`, `apply`, `report` and sweeps all call `judge_network`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from torch import nn

from neuron_merging.channels.analysis import Analysis
from neuron_merging.evaluation.fidelity import EvalSet, Fidelity, build_compared_networks
from neuron_merging.evaluation.verdict import DEFAULT_REQUEST, CompressionRequest, Culprit, Verdict, make_verdict
from neuron_merging.graph.example_inputs import infer_batch_size
from neuron_merging.graph.macs import count_graph_macs
from neuron_merging.inputs.batchnorm_inversion import InputBatch
from neuron_merging.inputs.input_sets import count_samples, take_first_samples
from neuron_merging.pruning.plan import GroupDecision, Plan
from neuron_merging.selection.cut_simulator import CutSimulator

MAX_CULPRITS = 3
"""Groups that a verdict names."""
PROBE_LIMITS = 4, 16
"""Least and largest number of inputs on which single groups are cut."""
MAX_SUSPECTS = 8
"""Groups that are cut one by one: those with the largest expected error."""
MAX_TRIAL_MACS = 2**36
"""Multiply-accumulates of all these trials together, some seconds on a CPU; large networks try fewer groups."""
MAX_DIVERGENCE = 1e30
"""Replaces an infinite divergence, so that shares of the total stay finite."""


@dataclass(frozen=True)
class Judgement:
    """A verdict, and the comparison of networks that it comes from."""

    verdict: Verdict
    compared: Fidelity


def judge_network(
    analysis: Analysis,
    small: nn.Module,
    plan: Plan,
    eval_set: EvalSet,
    *,
    score: tuple[float, float] | None = None,
    compare_pruned: bool = False,
    request: CompressionRequest = DEFAULT_REQUEST,
    name: str = "merged",
    example: EvalSet | None = None,
    quantized: nn.Module | None = None,
) -> Judgement:
    """Compare a smaller network with the original on an evaluation set.

    `score` holds the user's metric of the original and of the smaller network. `compare_pruned` adds the same cut
    without merging to the comparison. `name` labels the smaller network in it. `request` decides the advice. `example`
    holds the example inputs, if they are real: the verdict is given on both, and the worse one counts. The verdict is
    about `quantized`, the smaller network in int8, if there is one.
    """
    networks = (
        build_compared_networks(analysis.model, small, plan, name)
        if compare_pruned
        else {"original": analysis.model, name: small}
    )
    compared = eval_set.compare(networks if quantized is None else {**networks, "int8": quantized})
    final = {"original": analysis.model, name: quantized or small}
    on_example = None if example is None else example.compare(final)
    verdict = make_verdict(
        compared,
        data=eval_set.data,
        guessed=eval_set.guessed,
        fitted=eval_set.fitted,
        score=score,
        request=request,
        example=on_example,
        mixed=eval_set.compare_on_mixtures(analysis.model, quantized or small),
        on_plain_images=eval_set.compare_on_plain_images(analysis.model, quantized or small),
    )
    return Judgement(_add_culprits(verdict, analysis, plan, eval_set.iterate_inputs()), compared)


def _add_culprits(verdict: Verdict, analysis: Analysis, plan: Plan, batches: Iterable[InputBatch]) -> Verdict:
    """Add the groups that cause most of the error to a verdict that is a warning."""
    if verdict.level != "warning":
        return verdict
    suspects = _select_suspects(plan)
    probes = take_first_samples(batches, analysis.round_up_samples(_choose_probe_count(analysis, len(suspects))))
    if not probes:
        return verdict
    return replace(verdict, culprits=find_culprits(analysis, suspects, probes))


def _select_suspects(plan: Plan) -> list[GroupDecision]:
    """Return the groups with the largest expected error at their consumer layers, else with the largest cuts."""
    lost = {own.name: 1 - len(own.kept) / own.size if own.error is None else own.error for own in plan.groups}
    return sorted(plan.groups, key=lambda own: -lost[own.name])[:MAX_SUSPECTS]


def _choose_probe_count(analysis: Analysis, groups: int) -> int:
    batch = infer_batch_size(analysis.inputs)
    least, most = PROBE_LIMITS
    return max(least, min(most, MAX_TRIAL_MACS * batch // max(1, groups * count_graph_macs(analysis.graph))))


def find_culprits(
    analysis: Analysis, suspects: Sequence[GroupDecision], probes: Sequence[InputBatch]
) -> tuple[Culprit, ...]:
    """Cut and merge each group alone; return those whose cut changes the outputs most."""
    passes = max(
        1,
        MAX_TRIAL_MACS
        // max(1, count_graph_macs(analysis.graph) * count_samples(probes) // infer_batch_size(analysis.inputs)),
    )
    tried = suspects[:passes]
    # Scores of 1 for kept and 0 for removed units make the simulator cut exactly the plan's units.
    scores = {own.name: np.isin(np.arange(own.size), own.kept).astype(float) for own in tried}
    found = CutSimulator(analysis, probes, scores).measure_variations(
        {own.name: own.size for own in tried}, {own.name: [len(own.kept)] for own in tried}
    )
    losses = {name: min(loss, MAX_DIVERGENCE) for (name, _), loss in found.items() if loss > 0}
    total = sum(losses.values())
    worst = sorted(losses, key=lambda name: -losses[name])[:MAX_CULPRITS]
    return tuple(Culprit(name, losses[name] / total) for name in worst)
