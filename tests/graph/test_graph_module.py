"""A captured graph as a module: it computes what the class does, and can be cut where the class cannot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from torch import Tensor, nn

import neuron_merging as nm
from neuron_merging.graph.graph_module import build_graph_network
from tests.conftest import mark_long


class Constant(nn.Module):
    """Its code says 8 where it means the number of channels."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 6, 3, bias=False), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x = self.a(x).relu().reshape(-1, 8, 36).sigmoid().reshape(-1, 8, 6, 6)
        y = self.b(x).relu().mean((2, 3))
        return {"scores": self.c(y), "means": y.mean(1)}


class Shuffled(nn.Module):
    """Channels change places by constants, and pieces have sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 4, 1)
        self.own = nn.Conv2d(8, 8, 3, groups=8, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.own(self.a(x).relu())
        x = x.view(x.shape[0], 2, 4, 6, 6).transpose(1, 2).reshape(x.shape[0], 8, 6, 6)
        first, second = x.split([4, 4], 1)
        return self.b(torch.cat([second, first[:, :4]], 1)).mean((2, 3))


class Filled(nn.Module):
    """A tensor with one value everywhere has a size."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.b((self.a(x) * torch.full((1, 8, 1, 1), 0.5)).relu()).mean((2, 3))


@pytest.mark.parametrize(("kind", "size"), [(Constant, 8), (Shuffled, 6)])
def test_the_graph_is_the_network_at_any_batch_size(kind: type[nn.Module], size: int) -> None:
    torch.manual_seed(0)
    model = kind().eval()
    network, _ = build_graph_network(model, torch.rand(1, 3, size, size))
    assert network.state_dict().keys() >= model.state_dict().keys()
    for batch in (1, 3, 16):
        x = torch.rand(batch, 3, size, size)
        torch.testing.assert_close(network(x), model(x))


@pytest.mark.parametrize(("kind", "size"), [(Constant, 8), (Shuffled, 6), (Filled, 6)])
@pytest.mark.parametrize("target", mark_long(["small.onnx", "small.pt2"], {"small.pt2"}))
def test_a_constant_of_the_code_is_rewritten(kind: type[nn.Module], size: int, target: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = kind(), torch.rand(1, 3, size, size)
    refused = nm.inspect(model, x)
    assert any('output="graph"' in str(refusal) for refusal in refused.refusals)
    small = nm.compress(model, x, output="graph", ratio=0.5)
    assert small.model.get_parameter("a.weight").shape[0] == 4
    assert small.summary.verified is not None and small.summary.verified.precision == "float64"
    small.save(tmp_path / target)
    run = runner(tmp_path / target)
    for batch in (1, 3, 16):
        x = torch.rand(batch, 3, size, size)
        found = small.model(x)
        want = found["scores"] if isinstance(found, dict) else found
        np.testing.assert_allclose(run(x), want.detach().numpy(), atol=1e-5)


@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.RMSNorm])
def test_the_size_of_a_norm_over_channels_is_rewritten(norm: type[nn.Module]) -> None:
    model = nn.Sequential(nn.Linear(6, 16), norm(16), nn.ReLU(), nn.Linear(16, 5))
    small = nm.compress(model, torch.randn(4, 6), output="graph", ratio=0.5)
    assert small.model.get_parameter("1.weight").shape == (8,) and small.summary.verified is not None


def runner(path: Path) -> Any:
    if path.suffix == ".onnx":
        session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
        return lambda x: session.run(None, {session.get_inputs()[0].name: x.numpy()})[0]
    module = torch.export.load(path).module()

    def run(x: Tensor) -> Any:
        found = module(x)
        return (found["scores"] if isinstance(found, dict) else found).detach().numpy()

    return run


def test_a_graph_goes_into_a_file_not_into_a_folder(tmp_path: Path) -> None:
    small = nm.compress(Constant(), torch.rand(1, 3, 8, 8), output="graph")
    with pytest.raises(nm.FolderError, match=r"small\.pt2"):
        small.save(tmp_path / "small")
    with pytest.raises(nm.MergingError, match="unknown output"):
        nm.compress(Constant(), torch.rand(1, 3, 8, 8), output="grapf")


class Recurrent(nn.Module):
    """The batch is the second size of the first state."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.cell = nn.Linear(3, 8), nn.Linear(8, 4), nn.GRU(4, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        states: Tensor = self.cell(self.b(self.a(x).relu()))[0]
        return states


class Folded(nn.Module):
    """The batch is a factor of the second size."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 8), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        x = x.reshape(1, b * t, c).expand(3, -1, -1)
        return self.b(self.a(x).relu()).mean(0).reshape(b, t, 2)


class Squared(nn.Module):
    """A size grows with the square of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 8), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x).relu()) * torch.ones(1, x.shape[0] ** 2, 1).sum()


@pytest.mark.parametrize("kind", [Recurrent, Folded])
@pytest.mark.parametrize("target", ["small.onnx", "small.pt2"])
def test_the_batch_is_free_where_it_is_not_the_leading_size(kind: type[nn.Module], target: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    small = nm.compress(kind().eval(), torch.rand(1, 4, 3), output="graph", ratio=0.5, merger="none")
    assert not any("batches of" in note for note in small.summary.notes)
    small.save(tmp_path / target)
    run = runner(tmp_path / target)
    for batch in (1, 3, 16):
        x = torch.rand(batch, 4, 3)
        np.testing.assert_allclose(run(x), small.model(x).detach().numpy(), atol=1e-5)


def test_a_graph_with_a_fixed_batch_says_so() -> None:
    small = nm.compress(Squared().eval(), torch.rand(4, 3, 3), output="graph", ratio=0.5, merger="none")
    assert "the graph takes batches of 4 only" in str(small.summary)
