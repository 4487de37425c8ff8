"""One analysis for all that follows: how often a network is exported, and that an analysis stands for its model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import neuron_merging as nm
from neuron_merging import report
from neuron_merging.channels.find_channels import propagate_labels
from neuron_merging.graph.interpreter import run_graph
from tests.conftest import mark_long
from tests.exports import MOST, counted
from tests.zoo import CASES
from tests.zoo.pruning import every_graph, prune


@every_graph
def test_a_network_is_exported_once_and_where_sizes_are_in_doubt_a_few_times_at_most(name: str) -> None:
    done = prune(name)
    found = propagate_labels(done.analysis.graph)
    doubts = [
        *found.uncertain_sizes,
        *found.averages,
        *propagate_labels(done.analysis.graph, head_dims={}).uncertain_sizes,
    ]
    alone = done.analysis.inputs[0].ndim > CASES[name].inputs()[0].ndim
    exports = done.exports - alone  # a sample without a batch dimension is seen in a graph, and another one is made
    assert exports == 1 if not doubts else exports <= MOST


CALLS: dict[str, Callable[[Any, Any], Any]] = {
    "inspect": lambda model, x: nm.inspect(model, x),
    "pruned": lambda model, x: nm.compress(model, x, merger="none"),
    "cosine": lambda model, x: nm.compress(model, x, merger="cosine", scope="all"),
    "moments": lambda model, x: nm.compress(model, x),
    "expected error": lambda model, x: nm.compress(model, x, criterion="expected-error"),
}
NAMES = ("batch norm 2d", "residual", "grouped", "channel shuffle by hand", "view literal", "chunk")


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("name", mark_long(NAMES, {"batch norm 2d", "grouped", "view literal"}))
def test_an_analysis_gives_the_same_result_to_the_bit_and_is_exported_no_more(name: str, call: str) -> None:
    case = CASES[name]
    model = case.build()
    analysis = nm.analyse(model, case.inputs())
    with counted() as alone:
        wanted = CALLS[call](model, case.inputs())
    assert 1 <= len(alone) <= (MOST if propagate_labels(analysis.graph).uncertain_sizes else 1)
    with counted() as more:
        got = CALLS[call](analysis, None)
    assert more == []
    assert equal(wanted, got)


class Positions(nn.Module):
    """Batch sizes wherever people write them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.a, self.b = nn.Parameter(torch.randn(1, 1, 6)), nn.Linear(6, 16), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([self.first.expand(x.shape[0], -1, -1), x], 1)
        x = x + torch.zeros(x.shape[0], 1, 6)
        rows = torch.arange(x.shape[0])
        y = self.b(self.a(x.reshape(x.shape[0] * x.shape[1], 6)).relu()).view(x.shape[0], -1, 3)
        return y[rows].flatten(1)


@pytest.mark.parametrize("batch", [1, 2, 5])
def test_a_batch_size_in_the_graph_is_replaced_without_another_export(batch: int) -> None:
    net = Positions().eval()
    analysis = nm.analyse(net, torch.randn(batch, 4, 6))
    assert analysis.may_fix_batch_size
    for size in (1, 3, 8):
        x = torch.randn(size, 4, 6)
        with counted() as exports, torch.no_grad():
            (got,) = run_graph(analysis.graph_for((x,)), [x], analysis.graph.tensors)
            assert torch.allclose(got, net(x), atol=1e-5)
        assert exports == []


class Transposed(nn.Module):
    """With a batch of one, nothing tells the batch from the dimension that is put before it."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.b(self.a(x).relu())
        return y.view(1, x.shape[0], 2).cumsum(1)


def test_a_size_that_only_looks_like_the_batch_is_captured_anew() -> None:
    net = Transposed().eval()
    analysis = nm.analyse(net, torch.randn(1, 6))
    x = torch.randn(4, 6)
    with counted() as exports, torch.no_grad():
        (got,) = run_graph(analysis.graph_for((x,)), [x], analysis.graph.tensors)
    assert len(exports) == 1 and torch.allclose(got, net(x), atol=1e-6)


class Remembering(nn.Module):
    """A recurrent layer starts from zeros, of which the batch is the second size."""

    def __init__(self, kind: type[nn.RNNBase], first: bool) -> None:
        super().__init__()
        self.memory, self.a, self.b = kind(6, 8, batch_first=first), nn.Linear(8, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(self.memory(x)[0]).relu())


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_a_recurrent_layer_is_given_no_states_of_another_batch(kind: type[nn.RNNBase], first: bool) -> None:
    """Torch would read and write beyond the end of them, which ends the process."""
    net = Remembering(kind, first).eval()
    analysis = nm.analyse(net, torch.randn(2, 5, 6) if first else torch.randn(5, 2, 6))
    x = torch.randn(7, 5, 6) if first else torch.randn(5, 7, 6)
    with torch.no_grad():
        with pytest.raises(RuntimeError, match="a state has 2 samples in place of 7"):
            run_graph(analysis.graph, [x], analysis.graph.tensors)
        if first:
            (got,) = run_graph(analysis.graph_for((x,)), [x], analysis.graph.tensors)
            assert torch.allclose(got, net(x), atol=1e-6)


def equal(a: Any, b: Any) -> bool:
    """Everything that two results say, and every bit of their networks."""
    if not isinstance(a, nm.Compressed):
        return str(a) == str(b) and bool(a == b)
    states = a.model.state_dict(), b.model.state_dict()
    same = states[0].keys() == states[1].keys() and all(torch.equal(v, states[1][k]) for k, v in states[0].items())
    return same and a.plan == b.plan and str(a.summary) == str(b.summary) and repr(a.model) == repr(b.model)


@pytest.mark.parametrize("name", ["batch norm 2d", "channel shuffle by hand"])
def test_the_page_takes_an_analysis(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("neuron_merging.evaluation.latency._time_call", lambda *_: 1e-3)
    case = CASES[name]
    model = case.build()
    analysis = nm.analyse(model, case.inputs())
    small = nm.compress(analysis, merger="cosine")
    with counted() as alone:
        wanted = report.render_report(small, model, case.inputs())
    assert 1 <= len(alone) <= (MOST if propagate_labels(analysis.graph).uncertain_sizes else 1)
    with counted() as more:
        got = report.render_report(small, analysis)
    assert more == []
    assert got == wanted


def test_an_analysis_comes_back_as_it_is_and_takes_no_other_inputs() -> None:
    analysis = nm.analyse(nn.Linear(4, 2), torch.zeros(1, 4))
    assert nm.analyse(analysis) is analysis
    with pytest.raises(nm.MergingError, match="inputs of its own"):
        nm.compress(analysis, torch.zeros(1, 4))
    with pytest.raises(nm.MergingError, match="needs example inputs"):
        nm.inspect(nn.Linear(4, 2))


class Widths(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.into, self.out, self.last = nn.Linear(6, 16), nn.Linear(16, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.into(x).relu()
        if x.shape[1] <= 8:
            raise ValueError("too narrow")
        return self.last(self.out(x).relu())


def test_a_cut_that_breaks_the_code_leaves_the_analysis_as_it_was() -> None:
    """Code that takes another way once it is much narrower: the layer that it counts on stays whole in the result."""
    analysis = nm.analyse(Widths(), torch.randn(2, 6))
    channels, held, refused = analysis.channels, dict(analysis.held_operators), dict(analysis.refused_operators)
    assert [group.name for group in channels.groups] == ["into", "out"] and not held
    with counted() as exports:
        small = nm.compress(analysis, merger="none")
    assert small.model.into.out_features == 16 and small.model.out.out_features == 4
    assert len(exports) < MOST
    assert (analysis.channels, analysis.held_operators, analysis.refused_operators) == (channels, held, refused)
