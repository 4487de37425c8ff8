"""Every case pruned once without merging, for many tests."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

import pytest
import torch
from torch import Tensor, nn

import neuron_merging as nm
from tests.exports import counted
from tests.pruning.zeroing import input_dims
from tests.zoo import CASES, Case

CLOSE = 1e-5


def graphs(where: Callable[[Case], object] = lambda case: True) -> pytest.MarkDecorator:
    """The zoo, or the part of it that a test is for; with --dist loadgroup, one process has all tests of a case."""
    chosen = [name for name, case in CASES.items() if where(case)]
    return pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.xdist_group(name)) for name in chosen])


every_graph = graphs()


@dataclass(frozen=True)
class Run:
    """One plain pruning of a case, with what the user's model was before."""

    case: Case
    model: nn.Module
    state: dict[str, Tensor]
    grads: dict[str, Tensor | None]
    analysis: nm.Analysis
    exports: int
    result: nm.Compressed

    @property
    def small(self) -> nn.Module:
        return self.result.model


def do_nothing(module: nn.Module, inputs: object, output: object) -> None:
    """A hook of the user's."""


@cache
def prune(name: str) -> Run:
    """Half of every group, with marks on the model that must survive: gradients, a hook, frozen weights, modes."""
    case = CASES[name]
    model = case.build()
    model.register_forward_hook(do_nothing)
    for i, parameter in enumerate(model.parameters()):
        parameter.requires_grad_(i % 3 != 0)
        parameter.grad = torch.ones_like(parameter) if i % 3 == 1 else None
    state = copy.deepcopy(model.state_dict())
    grads = {key: p.grad for key, p in model.named_parameters()}
    with counted() as exports:
        analysis = nm.analyse(model, case.inputs())
        result = nm.compress(analysis, ratio=0.5, merger="none", scope="all", effort="fast")
    return Run(case, model, state, grads, analysis, len(exports), result)


def with_weights(analysis: nm.Analysis, model: nn.Module) -> nm.Analysis:
    """The analysis of a network of the same layers with other weights, without another export."""
    weights = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    tensors = {name: weights[name] for name in analysis.graph.tensors}
    graph = replace(analysis.graph, tensors=tensors)
    return replace(analysis, model=model, graph=graph, input_cache={}, _graphs_by_shape={}, _batch_size_changers={})


def output_cuts(done: Run) -> set[str]:
    reads = input_dims(done.model, done.case.reads)
    return {cut.tensor for cut in done.result.plan.cuts if reads.get(cut.tensor) != cut.dim}
