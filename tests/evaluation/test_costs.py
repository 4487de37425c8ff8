"""Costs that are computed for a cut equal what torch counts when the pruned network runs."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import neuron_merging as nm
from neuron_merging.evaluation.costs import Costs, count_parameters
from neuron_merging.graph.macs import count_macs, count_node_macs
from neuron_merging.graph.module_rewrites import fold_parametrizations
from neuron_merging.graph.process_state import disable_fused_attention
from tests.zoo import CASES
from tests.zoo.pruning import every_graph, graphs, prune


@torch.no_grad()
def counted(model: nn.Module, inputs: tuple[Tensor, ...]) -> int:
    """What torch counts while the network itself runs, with its values."""
    for parameter in model.parameters():
        parameter.requires_grad_(False)  # the counter asks for gradients otherwise
    with disable_fused_attention(), FlopCounterMode(display=False) as counter:
        model.eval()(*inputs)
    return int(counter.get_total_flops()) // 2


@every_graph
def test_costs_before_and_after_are_those_of_the_networks_themselves(name: str) -> None:
    done = prune(name)
    model, inputs, small = fold_parametrizations(done.case.build()), done.case.inputs(), done.result
    costs, kept = Costs(done.analysis), {choice.name: choice.kept for choice in small.plan.groups}
    full, cut = counted(model, inputs), counted(copy.deepcopy(small.model), inputs)
    assert (costs.macs({}), costs.macs(kept)) == small.summary.macs == (full, cut)
    assert (costs.parameters({}), costs.parameters(kept)) == (count_parameters(model), count_parameters(small.model))
    assert sum(count_node_macs(done.analysis.graph).values()) == full


@graphs(lambda case: case.name in sorted(CASES)[::8])
def test_a_module_is_counted_as_its_graph_is(name: str) -> None:
    done = prune(name)
    assert count_macs(done.case.build(), done.case.inputs()) == sum(count_node_macs(done.analysis.graph).values())


def test_a_number_of_units_is_enough_where_they_weigh_alike() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 12, 3, groups=2), nn.ReLU(), nn.Conv2d(12, 2, 1))
    inputs = (torch.randn(2, 3, 9, 9),)
    analysis = nm.analyse(model, inputs)
    for ratio in (0.25, 0.5):
        small = nm.compress(analysis, ratio=ratio, merger="none")
        counts = {choice.name: len(choice.kept) for choice in small.plan.groups}
        assert Costs(analysis).macs(counts) == counted(small.model, inputs)
        assert Costs(analysis).parameters(counts) == count_parameters(small.model)
