"""Outputs that are concatenated of several parts are compared part by part."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

import neuron_merging as nm
from neuron_merging.calibration.output_divergence import find_output_parts, split_outputs
from neuron_merging.evaluation.fidelity import make_synthetic_eval_set
from neuron_merging.inputs.input_sets import make_heldout_inputs
from neuron_merging.selection.cut_simulator import CutSimulator


class Detector(nn.Module):
    """Boxes in pixels and probabilities of classes, which lie far lower, in one tensor."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.boxes, self.hidden = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 4, 1), nn.Conv2d(8, 8, 1)
        self.classes = nn.Conv2d(8, 5, 1)
        nn.init.constant_(self.classes.bias, -6.0)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).relu()
        boxes, classes = self.boxes(x), self.classes(self.hidden(x).relu())
        return torch.cat([torch.cat([boxes[:, :2], boxes[:, 2:]], 1) * 300, classes.sigmoid()], 1)


class Joined(nn.Module):
    """Parts of parts: two scales, of two heads each, with one sigmoid behind all of it."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 3), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([torch.cat([self.a(x), self.b(x)], -1), self.a(x + 1)], 1).sigmoid()


def test_parts_lie_where_they_were_put() -> None:
    model, x = Joined(), torch.randn(6, 4)
    graph = nm.analyse(model, x).graph
    parts = find_output_parts(graph)
    assert [part.slices[-1][2] for part in parts] == [3, 2, 3]
    assert all(graph.node(part.ref.name).op == "linear" for part in parts)  # type: ignore[union-attr]
    want = [model.a(x).sigmoid(), model.b(x).sigmoid(), model.a(x + 1).sigmoid()]
    assert all(torch.allclose(a, b) for a, b in zip(split_outputs([model(x)], parts), want, strict=True))
    other = torch.zeros(6, 9)  # of another size than the parts were found in
    assert split_outputs([other], parts)[0] is other


def test_a_detector_that_has_lost_its_classes_is_not_like_the_original() -> None:
    model, x = Detector(), torch.randn(8, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    lost = Detector()
    nn.init.zeros_(lost.classes.weight)
    analysis = nm.analyse(model, x)
    score = (
        make_synthetic_eval_set(analysis, make_heldout_inputs(analysis, "fast"))
        .compare({"original": model, "lost": lost})
        .scores[-1]
    )
    assert score.fidelity is not None and score.fidelity < 0.05
    assert score.agreement is not None and score.agreement < 0.05


def test_a_budget_sees_what_becomes_of_the_classes() -> None:
    x = torch.randn(8, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    analysis = nm.analyse(Detector(), x)
    group = next(group for group in analysis.channels.groups if group.name == "hidden")
    simulator = CutSimulator(analysis, [(x,)], {group.name: np.arange(8.0)}, merge=False)
    assert simulator.measure_divergence({group.name: 1}) > 0.1


class Stacked(Joined):
    """Two results side by side along a new dimension: one part."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([self.a(x.relu()), self.a(x)], 1)


def test_what_is_stacked_is_of_one_piece() -> None:
    x = torch.randn(6, 4)
    graph = nm.analyse(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4), Stacked()), x).graph
    outputs = [torch.randn(6, 2, 3)]
    (part,) = split_outputs(outputs, find_output_parts(graph))
    assert torch.equal(part, outputs[0])
