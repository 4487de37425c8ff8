"""apply: the cut of a plan on other weights of the same network."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn

from neuron_merging.capture import Graph, as_inputs, capture
from neuron_merging.channels import Channels
from neuron_merging.errors import MergingError
from neuron_merging.mergers import Merger, Task
from neuron_merging.operators import Vector
from neuron_merging.pipeline import Compressed, summarise
from neuron_merging.plan import Plan, make_plan, unit_mask
from neuron_merging.probe import analyse
from neuron_merging.surgery import apply_plan
from neuron_merging.verify import verify


@torch.no_grad()
def cut_again(
    plan: Plan, model: nn.Module, graph: Graph, example_inputs: Any, merger: Merger, seed: int = 0
) -> Compressed:
    """Remove the plan's channels from this network, and merge them as its own weights say."""
    channels = analyse(model, graph, example_inputs)
    kept = kept_units(plan, channels)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        task = Task(graph, channels, kept, as_inputs(example_inputs), lambda batch: capture(model, batch))
        merges = tuple(merger.merge(task))
    new = make_plan(model, graph, channels, kept, merges)
    small = apply_plan(model, new, merges)
    error = verify(graph, channels, new, unit_mask(channels, kept), small, example_inputs)
    return Compressed(small, new, summarise(model, small, new, channels, error, example_inputs), merges)


def as_compressed(plan: Plan, model: nn.Module, graph: Graph, small: nn.Module, example_inputs: Any) -> Compressed:
    """A network that was read back, with its summary; how it was merged is not known."""
    channels = analyse(model, graph, example_inputs)
    return Compressed(small, plan, summarise(model, small, plan, channels, None, example_inputs))


def distance(plan: Plan, model: nn.Module, graph: Graph, small: nn.Module, example_inputs: Any) -> float | None:
    """How far `small` is from the full network with the plan's removed units zeroed."""
    channels = analyse(model, graph, example_inputs)
    stays = unit_mask(channels, kept_units(plan, channels))
    return verify(graph, channels, plan, stays, small, example_inputs)


def kept_units(plan: Plan, channels: Channels) -> dict[str, Vector]:
    """The plan's choices, if the network has the plan's groups."""
    sizes = {group.name: group.size for group in channels.groups}
    for choice in plan.groups:
        if sizes.get(choice.name) != choice.size:
            found = f"{sizes[choice.name]} channels" if choice.name in sizes else "no such group"
            raise MergingError(
                f"the plan does not fit this network: it has {found}, the plan {choice.size}",
                where=choice.name,
                fix="Give the network that the plan was made for, with the same sizes.",
            )
    return {choice.name: np.array(choice.kept) for choice in plan.groups}
