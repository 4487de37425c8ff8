"""One interpreter runs a graph: forked at a node, and with other tensors than it started with."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from neuron_merging.graph.capture import capture
from neuron_merging.graph.interpreter import Interpreter


class WritesIntoView(nn.Module):
    """What is written into the first sample is seen by whoever reads all of them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        y[:1].mul_(3.0)
        return self.b(y)


class Transposed(nn.Module):
    """A product that reads its weight through a view."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.weight = nn.Linear(6, 8), nn.Parameter(torch.randn(3, 8))

    def forward(self, x: Tensor) -> Tensor:
        turned = self.weight.t()
        return self.a(x).relu() @ turned


@torch.no_grad()
def test_a_fork_writes_into_memory_of_its_own() -> None:
    model, x = WritesIntoView(), torch.randn(2, 6)
    graph = capture(model, (x,))
    run = Interpreter(graph, [x], graph.tensors)
    for node in graph.nodes:
        (found,) = run.fork().run()
        assert torch.equal(found, model(x))
        run.run_node(node)
    assert torch.equal(run.outputs()[0], model(x))


@torch.no_grad()
def test_views_of_a_replaced_tensor_are_made_again() -> None:
    model, x, new = Transposed(), torch.randn(2, 6), torch.randn(3, 8)
    graph = capture(model, (x,))
    run = Interpreter(graph, [x], graph.tensors)
    for node in graph.nodes[:-1]:
        run.run_node(node)
    other = run.fork()
    other.replace_tensors({**graph.tensors, "weight": new})
    assert torch.equal(other.run()[0], model.a(x).relu() @ new.t())
    assert torch.equal(run.run()[0], model(x))
