"""Which labels are united: embedding tables, memory with two names, broadcasts, and maps over space."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import neuron_merging as nm
from neuron_merging.channels.find_channels import find_channels, propagate_labels
from neuron_merging.channels.rules import data_movement
from neuron_merging.graph.capture import capture


class Tied(nn.Module):
    """A table that is also the weight of a hidden layer."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.a, self.b, self.c = nn.Embedding(12, 6), nn.Linear(6, 6), nn.Linear(12, 8), nn.Linear(8, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.a(self.table(tokens))
        return self.c(self.b(F.linear(h, self.table.weight).relu()).relu())


def test_rows_that_tokens_choose_from_stay() -> None:
    tokens = torch.arange(12).view(2, 6)
    small = nm.compress(Tied(), tokens, merger="none", scope="all")
    assert small.model.table.weight.shape[0] == 12
    assert {choice.name for choice in small.plan.groups} == {"b", "table"}
    assert any("rows of this table" in str(refusal) for refusal in small.summary.refusals)


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 4, 1)


class OnePiece(Base):
    def forward(self, x: Tensor) -> Tensor:
        (y,) = self.a(x).chunk(1, 1)
        (y,) = y.relu().split(8, 1)
        (y,) = y.unsqueeze(2).unbind(2)
        (y,) = y.tensor_split(1, 1)
        return self.c(self.b(y).relu())


@pytest.mark.parametrize("merger", ["none", "cosine"])
def test_a_list_of_one_piece_is_taken_apart_like_others(merger: str) -> None:
    small = nm.compress(OnePiece(), torch.randn(2, 3, 6, 6), merger=merger)
    assert {choice.name for choice in small.plan.groups} == {"a", "b"}
    assert merger == "none" or "merged" in small.summary.groups[0].descriptions[0]


class WrittenThroughAView(Base):
    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        w = y.flatten(2)
        y[:, :, 0].mul_(0.5)
        return self.c(self.b(w.unflatten(2, (6, 6))).relu())


class WrittenUnderAView(Base):
    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        w = y.flatten(2)
        y.mul_(0.5)
        return self.c(self.b(w.unflatten(2, (6, 6))).relu())


@pytest.mark.parametrize("kind", [WrittenThroughAView, WrittenUnderAView])
def test_memory_that_is_read_under_a_second_name_keeps_its_layer_alone(kind: type[nn.Module]) -> None:
    small = nm.compress(kind(), torch.randn(2, 3, 6, 6), merger="none")
    assert [choice.name for choice in small.plan.groups] == ["b"]
    assert any("writes in place" in str(refusal) for refusal in small.summary.refusals if refusal.layer == "a")


class InPlace(Base):
    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.a(x), inplace=True)
        y += 1
        return self.c(F.relu(self.b(y), inplace=True))


def test_writing_in_place_is_fine_where_nothing_else_reads_it() -> None:
    assert {choice.name for choice in nm.compress(InPlace(), torch.randn(2, 3, 6, 6)).plan.groups} == {"a", "b"}


class Broadcast(nn.Module):
    """Adds a broadcast: its labels adapt, and must not be taken for the last one of the network."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        h = h + h.mean(1, keepdim=True).expand(-1, x.shape[1], -1)
        return self.c(self.b(h).relu())


class NormedBroadcast(Broadcast):
    def forward(self, x: Tensor) -> Tensor:
        scale = F.layer_norm(x[:, :, :1].expand(-1, -1, 8), (8,))
        return self.c(self.b(self.a(x) * scale).relu())


def test_a_broadcast_in_a_sum_marks_no_other_layer() -> None:
    groups = nm.analyse(Broadcast(), torch.randn(2, 5, 6)).channels.groups
    assert {group.name: group.residual for group in groups}["b"] is False


def test_a_broadcast_under_a_norm_marks_no_other_layer() -> None:
    groups = nm.analyse(NormedBroadcast(), torch.randn(2, 5, 6)).channels.groups
    assert not {group.name: group.norms_across_channels for group in groups}["b"]


class Shuffled(nn.Module):
    """A channel shuffle by hand, of maps that are much larger than their channels are many."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 64, 1), nn.Conv2d(64, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        batch, _, height, width = y.shape
        y = y.view(batch, 4, -1, height, width).transpose(1, 2).reshape(batch, -1, height, width)
        y = y.permute(0, 2, 3, 1).unsqueeze(1).squeeze(1).permute(0, 3, 1, 2).repeat(1, 1, 2, 1)
        left, right = y[:, :, ::2].chunk(2, 1)
        return self.b(torch.cat([left, right], 1))


def test_labels_that_are_constant_over_space_need_no_space(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []

    def counted(line: data_movement.AxisLabels, dim: int, shape: tuple[int, ...]) -> Tensor:
        sizes.append(math.prod(shape))
        return spread(line, dim, shape)

    spread = data_movement._expand_labels
    monkeypatch.setattr(data_movement, "_expand_labels", counted)
    with torch.device("meta"):
        model, x = Shuffled(), torch.empty(2, 3, 256, 256)
    channels = find_channels(capture(model.to_empty(device="cpu").apply(_zero), torch.zeros_like(x, device="cpu")))
    assert [group.size for group in channels.groups] == [16]
    assert len(sizes) >= 8 and max(sizes) <= 4 * 64 * 512  # at most the one side that a slice shortens


@torch.no_grad()
def _zero(module: nn.Module) -> None:
    for parameter in module.parameters():
        parameter.zero_()


def test_a_view_that_mixes_space_into_channels_is_read_as_a_whole() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.Flatten(), nn.Linear(4 * 6 * 5, 2))
    walk = propagate_labels(capture(model, torch.zeros(1, 3, 6, 5)))
    (line,) = walk.labels["flatten"].values()  # type: ignore[union-attr]
    assert len(line) == 120 and (line.reshape(4, 30) == line.reshape(4, 30)[:, :1]).all()
