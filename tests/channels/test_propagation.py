"""Label propagation: what single operators record about their labels, on graphs of a few nodes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import neuron_merging as nm
from neuron_merging.channels.find_channels import find_channels, propagate_labels
from neuron_merging.channels.groups import FIXED, Axis, AxisLabels, Labels
from neuron_merging.channels.propagation import LabelWalk
from neuron_merging.graph.capture import capture
from neuron_merging.graph.graph import Ref


class Between(nn.Module):
    """A layer with four channels, and an operator on what it makes."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.a, self.function = nn.Linear(3, 4), function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.a(x))


def walk_of(function: Callable[[Tensor], Tensor], *shape: int) -> LabelWalk:
    return propagate_labels(capture(Between(function), torch.zeros(*(shape or (2, 3)))))


def stored(walk: LabelWalk, name: str) -> Labels:
    """The labels of a parameter."""
    return walk.labels_of(Ref(next(ref for ref, tensor in walk.graph.parameters.items() if tensor == name)))


def channels(walk: LabelWalk, labels: Labels) -> dict[int, list[int | None]]:
    """Which of the layer's four channels stands at which index; None is what can never be removed."""
    number = {label: i for i, label in enumerate(walk.productions[0].line.tolist())}
    return {dim: [None if x == FIXED else number[x] for x in line.tolist()] for dim, line in labels.items()}


def refusals(walk: LabelWalk) -> list[tuple[str, str]]:
    """Operators, with the reason, that refuse all four of the layer's channels."""
    made = set(walk.productions[0].line.tolist())
    return [(veto.node.op, veto.why) for veto in walk.vetoes if made <= set(veto.line.tolist())]


def pairs(edges: list[tuple[AxisLabels, AxisLabels]]) -> set[frozenset[int]]:
    return {frozenset(pair) for a, b in edges for pair in zip(a.tolist(), b.tolist(), strict=True)}


def test_a_layer_reads_its_columns_and_makes_its_rows() -> None:
    walk = walk_of(lambda x: x.relu())
    weight, bias = stored(walk, "a.weight"), stored(walk, "a.bias")
    assert (len(weight[0]), len(weight[1]), len(bias[0])) == (4, 3, 4)
    assert len({*weight[0], *weight[1], *bias[0]}) == 11  # every index of every axis has a label of its own
    assert [walk.axes[line[0]] for line in (weight[0], weight[1], bias[0])] == [
        Axis("a.weight", 0),
        Axis("a.weight", 1),
        Axis("a.bias", 0),
    ]
    (made,), (taken,) = walk.productions, walk.consumptions
    assert made.line.tolist() == weight[0].tolist() and made.node.op == "linear"
    assert taken.weight_labels.tolist() == weight[1].tolist() and (taken.line == FIXED).all()
    assert pairs(walk.edges) == {frozenset(pair) for pair in zip(weight[0].tolist(), bias[0].tolist(), strict=True)}


ALL = [0, 1, 2, 3]
MOVED: dict[str, tuple[Callable[[Tensor], Tensor], dict[int, list[int | None]]]] = {
    "relu": (lambda x: x.relu(), {1: ALL}),
    "dropout": (lambda x: F.dropout(x, 0.5, False), {1: ALL}),
    "flip": (lambda x: x.flip(1), {1: [3, 2, 1, 0]}),
    "transpose": (lambda x: x.t(), {0: ALL}),
    "unsqueeze": (lambda x: x.unsqueeze(1), {2: ALL}),
    "cat": (lambda x: torch.cat([x, x], 1), {1: [*ALL, *ALL]}),
    "cat with a constant": (lambda x: torch.cat([x, torch.ones(2, 2)], 1), {1: [*ALL, None, None]}),
    "cat of the batch": (lambda x: torch.cat([x, x], 0), {1: ALL}),
    "chunk": (lambda x: x.chunk(2, 1)[1].relu(), {1: [2, 3]}),
    "repeat": (lambda x: x.repeat(1, 2), {1: [*ALL, *ALL]}),
    "repeat one by one": (lambda x: x.repeat_interleave(2, 1), {1: [0, 0, 1, 1, 2, 2, 3, 3]}),
    "mean of the batch": (lambda x: x.mean(0), {0: ALL}),
    "view": (lambda x: x.view(2, 1, 4), {2: ALL}),
    "scaled": (lambda x: 2 * x, {1: ALL}),
}


@pytest.mark.parametrize("name", MOVED)
def test_where_channels_stand_afterwards(name: str) -> None:
    function, wanted = MOVED[name]
    walk = walk_of(function)
    found = walk.labels[walk.graph.nodes[-1].name]
    assert isinstance(found, dict)
    assert channels(walk, found) == wanted
    assert {op for op, _ in refusals(walk)} <= {"output"}


REFUSED: dict[str, tuple[Callable[[Tensor], Tensor], str, str]] = {
    "softmax": (lambda x: x.softmax(1), "softmax", "mixes all channels"),
    "sum": (lambda x: x.sum(1), "sum", "reduces over channels"),
    "sort": (lambda x: x.sort(1).values, "sort", "is not known to act channel by channel"),
    "gram": (lambda x: x @ x.t(), "matmul", "multiplies channels with each other"),
    "pool": (lambda x: F.max_pool1d(x, 2), "max_pool1d", "pools over channels"),
    "met": (
        lambda x: x + torch.arange(4),
        "add",
        "combines them with a tensor whose size is fixed: an input, a constant, a mask, rotary angles",
    ),
    "unknown": (lambda x: torch.linalg.pinv(x), "linalg_pinv", "is not known to act channel by channel"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_operators_refuse_and_why(name: str) -> None:
    function, op, why = REFUSED[name]
    walk = walk_of(function)
    assert (op, why) in refusals(walk)
    assert find_channels(walk.graph).groups == ()


def test_a_sum_is_noted_and_unites_what_it_adds() -> None:
    class Added(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(3, 4, bias=False), nn.Linear(3, 4, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return (self.a(x) + self.b(x)).relu()

    walk = propagate_labels(capture(Added(), torch.zeros(2, 3)))
    a, b = (stored(walk, f"{name}.weight")[0] for name in "ab")
    assert pairs(walk.edges) == {frozenset(pair) for pair in zip(a.tolist(), b.tolist(), strict=True)}
    assert [found.line.tolist() for found in walk.sums] == [a.tolist(), b.tolist()]


def test_a_grouped_convolution_balances_what_it_reads_and_makes() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 1, bias=False), nn.Conv2d(8, 4, 1, groups=2, bias=False))
    walk = propagate_labels(capture(model, torch.zeros(1, 3, 2, 2)))
    read, made = walk.productions[0].line, walk.productions[1].line
    assert [(balance.line.tolist(), balance.blocks) for balance in walk.balances] == [
        (made.tolist(), 2),
        (read.tolist(), 2),
    ]
    taken = walk.consumptions[1]
    assert (
        walk.axes[taken.weight_labels[0]] == Axis("1.weight", 1, 2)
        and len(taken.weight_labels) == 8
        and taken.blocks == 2
    )


def test_a_depthwise_convolution_falls_with_its_channels() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 1, bias=False), nn.Conv2d(4, 8, 1, groups=4, bias=False))
    walk = propagate_labels(capture(model, torch.zeros(1, 3, 2, 2)))
    read, own = walk.productions[0].line.tolist(), stored(walk, "1.weight")[0].tolist()
    assert pairs(walk.edges) == {frozenset((read[i // 2], own[i])) for i in range(8)}
    assert len(walk.productions) == 1 and walk.balances == []


@pytest.mark.parametrize(
    ("function", "doubtful"),
    [
        (lambda x: x.view(-1, 2, 2).flatten(1), True),
        (lambda x: x[:, :2], True),
        (lambda x: x.flatten(1), False),
        (lambda x: x.relu(), False),
    ],
)
def test_sizes_that_may_be_constants_are_in_doubt(function: Callable[[Tensor], Tensor], doubtful: bool) -> None:
    assert bool(walk_of(function).uncertain_sizes) == doubtful


def test_what_the_network_returns_stays() -> None:
    walk = walk_of(lambda x: x.relu())
    assert refusals(walk) == [("output", "is what the network returns")]


def test_a_shared_weight_has_one_set_of_labels() -> None:
    layer = nn.Linear(4, 4, bias=False)
    walk = propagate_labels(capture(nn.Sequential(layer, nn.ReLU(), layer), torch.zeros(2, 4)))
    first, second = walk.productions
    rows, columns = stored(walk, "0.weight").values()
    assert first.line.tolist() == second.line.tolist() == rows.tolist()
    assert pairs(walk.edges) == {frozenset(pair) for pair in zip(rows.tolist(), columns.tolist(), strict=True)}


def test_writing_into_a_part_that_is_read_again_is_refused() -> None:
    def doubled(x: Tensor) -> Tensor:
        x[:, :2].mul_(2.0)
        return x.relu()

    walk = walk_of(doubled)
    assert "writes in place into memory that is read again under another name" in {veto.why for veto in walk.vetoes}


def test_groups_and_refusals_follow_from_the_records() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 2))
    graph = capture(model, torch.zeros(1, 3))
    found = find_channels(graph)
    assert [(g.name, g.start, g.size, g.layers) for g in found.groups] == [("0", 0, 4, ("0",)), ("2", 4, 5, ("2",))]
    assert set(found.groups[0].cuts) == {Axis("0.weight", 0), Axis("0.bias", 0), Axis("2.weight", 1)}
    assert [(r.layer, r.channels) for r in found.refusals] == [("4", 2)]
    first = graph.nodes[0].name
    assert [g.name for g in find_channels(graph, held={first: "must stay"}).groups] == ["2"]
    assert [g.name for g in find_channels(graph, refused={graph.nodes[2].name: "must stay"}).groups] == []


class Pieces(nn.Module):
    """A split that leaves nothing for its last piece."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        left, right, none = self.a(x).relu().split([4, 4, 0], 1)
        result: Tensor = self.b(torch.cat([right, left, none], 1))
        return result


def test_an_empty_piece_holds_no_channel() -> None:
    found = nm.inspect(Pieces(), torch.randn(2, 6))
    assert any("a constant of the model's code" in refusal.why for refusal in found.refusals if refusal.layer == "a")
