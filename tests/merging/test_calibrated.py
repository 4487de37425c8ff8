"""Fits to batches of data: layer after layer, in every form that loaders yield."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import neuron_merging as nm
from neuron_merging.calibration.layer_stats import find_consumer_weights
from neuron_merging.channels.analysis import Selection
from neuron_merging.graph.interpreter import Interpreter
from neuron_merging.inputs import input_sets, synthetic
from neuron_merging.merging.sequential_fit import fit_sequentially
from tests.merging.fitting import batch_normed, distance
from tests.zoo.unusual import WORDS, Plain


def test_calibration_with_masks_of_minus_infinities_and_single_numbers() -> None:
    class Biased(Plain):
        def forward(self, x: Tensor, mask: Tensor | None = None, scale: Tensor | None = None) -> Any:
            assert mask is not None and scale is not None
            return super().forward(mask.softmax(-1) @ x) * scale

    mask = torch.full((5, 5), -torch.inf).triu(1)
    found = nm.compress(Biased(), (WORDS, mask, torch.tensor(2.0)), calibration=[(WORDS, mask, torch.tensor(3.0))])
    assert found.summary.error is not None


def test_a_sequential_fit_is_better_on_what_it_was_fitted_to(
    residual: tuple[nn.Module, Tensor], residual_analysis: nm.Analysis
) -> None:
    model, x = residual
    mergers = {"plain": nm.Calibrated([x], sequential=False), "sequential": nm.Calibrated([x])}
    found = {name: distance(nm.compress(residual_analysis, merger=m).model, model, x) for name, m in mergers.items()}
    pruned = distance(nm.compress(residual_analysis, merger="none").model, model, x)
    assert found["sequential"] < found["plain"] < pruned


def test_batch_norms_are_re_estimated(residual: tuple[nn.Module, Tensor], residual_analysis: nm.Analysis) -> None:
    model, x = residual
    small = nm.compress(residual_analysis, merger=nm.Calibrated([x], reestimate=True)).model
    seen: dict[str, Tensor] = {}
    for name, module in small.named_modules():
        if isinstance(module, nn.BatchNorm2d):
            module.register_forward_hook(
                lambda m, i, o, name=name: seen.update({name: i[0].mean((0, 2, 3)) - m.running_mean})
            )
    with torch.no_grad():
        small(x)
    assert len(seen) == 6 and all(float(v.abs().max()) < 1e-3 for v in seen.values())
    assert distance(small, model, x) < distance(nm.compress(residual_analysis, merger="none").model, model, x)


@torch.no_grad()
def test_inputs_beside_have_half_of_the_say_however_many_they_are() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 3))
    analysis, x, y = nm.analyse(net, torch.zeros(1, 6)), torch.randn(64, 6), 1 + torch.randn(64, 6)
    selection = Selection(analysis, {analysis.channels.groups[0].name: np.arange(6)})
    weights = find_consumer_weights(selection)

    def fit(beside: list[tuple[Tensor]]) -> Tensor:
        (merge,) = fit_sequentially(selection, weights, [(x,)], ridge=0.0, restore=False, beside=beside).merges
        assert merge.columns is not None
        return merge.columns

    assert torch.allclose(fit([(y,)]), fit([(y,), (y,), (y,)]), atol=1e-5)
    assert not torch.allclose(fit([(y,)]), fit([]), atol=1e-3)


@torch.no_grad()
def test_a_sequential_fit_ends_with_the_last_layer_to_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """The scores of a large vocabulary, which come last, would fill the memory."""
    net = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 3), nn.Tanh())
    analysis, seen = nm.analyse(net, torch.zeros(1, 6)), []
    selection = Selection(analysis, {analysis.channels.groups[0].name: np.arange(6)})
    run_node = Interpreter.run_node
    monkeypatch.setattr(Interpreter, "run_node", lambda own, node: (seen.append(node.name), run_node(own, node)))
    fit_sequentially(selection, find_consumer_weights(selection), [(torch.randn(32, 6),)], ridge=0.1, restore=False)
    assert seen and analysis.graph.nodes[-1].name not in seen


def test_re_estimating_needs_a_sequence() -> None:
    with pytest.raises(nm.MergingError, match="sequential"):
        nm.Calibrated([], reestimate=True, sequential=False)


def test_calibration_is_a_parameter(
    residual: tuple[nn.Module, Tensor], residual_analysis: nm.Analysis, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, x = residual
    monkeypatch.setattr(input_sets, "MAX_JOINED_SAMPLES", 0)  # few samples of the parameter are joined by ours
    small = nm.compress(residual_analysis, calibration=[x])
    same = nm.compress(residual_analysis, merger=nm.Calibrated([x]))
    assert distance(small.model, same.model, x) < 1e-5
    with pytest.raises(nm.MergingError, match="calibration"):
        nm.compress(residual_analysis, calibration=[x], merger="cosine")


@pytest.mark.parametrize("sequential", [True, False])
def test_a_network_that_writes_into_its_input_leaves_the_batches_alone(sequential: bool) -> None:
    class Writes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(6, 20), nn.Linear(20, 6)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.b(torch.relu(self.a(x.mul_(2).sub_(1))))
            return out

    torch.manual_seed(0)
    model, x = Writes(), torch.randn(200, 6)
    given = x.clone()
    small = nm.compress(model, x[:1].clone(), merger=nm.Calibrated([given], sequential=sequential), verify=False).model
    assert torch.equal(given, x)
    with torch.no_grad():
        assert float((small(x.clone()) - model(x.clone())).norm() / model(x.clone()).norm()) < 0.4


@pytest.mark.parametrize("criterion", ["l2", "expected-error"])
def test_a_generator_of_batches_is_read_once(
    residual: tuple[nn.Module, Tensor], residual_analysis: nm.Analysis, criterion: str
) -> None:
    _, x = residual
    small = nm.compress(residual_analysis, criterion=criterion, calibration=(batch for batch in x.split(16))).model
    same = nm.compress(residual_analysis, criterion=criterion, calibration=x.split(16)).model
    assert torch.equal(small(x[:4]), same(x[:4]))


def test_entries_of_a_dict_are_found_by_name() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(6, 20), nn.Linear(20, 4)

        def forward(self, pixels: Tensor, scale: Tensor) -> Tensor:
            out: Tensor = self.b(torch.relu(self.a(pixels) * scale))
            return out

    torch.manual_seed(0)
    model, pixels, scale = Named(), torch.randn(50, 6), torch.rand(50, 1)
    dicts = [{"label": torch.zeros(50), "scale": scale, "pixels": pixels}]
    small, same = (nm.compress(model, (pixels[:1], scale[:1]), calibration=c).model for c in (dicts, [(pixels, scale)]))
    assert torch.equal(small(pixels, scale), same(pixels, scale))


@pytest.mark.parametrize(
    "calibration",
    [5, {"x": torch.zeros(1, 3, 12, 12)}, ["x"], [torch.zeros(4)], [torch.zeros(2, 1, 12, 12)]],
    ids=["number", "dict", "text", "vector", "grey"],
)
@pytest.mark.parametrize("sequential", [True, False])
def test_calibration_that_does_not_fit_is_an_error(
    residual_analysis: nm.Analysis, calibration: object, sequential: bool
) -> None:
    with pytest.raises(nm.MergingError, match="calibration"):
        nm.compress(residual_analysis, merger=nm.Calibrated(calibration, sequential=sequential))  # type: ignore[arg-type]


def test_calibrated_by_name_asks_for_data(residual_analysis: nm.Analysis) -> None:
    with pytest.raises(nm.MergingError, match="calibration=batches"):
        nm.compress(residual_analysis, merger="calibrated")


class Nested(nn.Module):
    """Inputs inside a dict and a list, and one that is no batch."""

    def __init__(self) -> None:
        super().__init__()
        self.image, self.norm, self.vector = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.Linear(6, 8)
        self.both, self.last = nn.Linear(16, 8), nn.Linear(8, 4)

    def forward(self, inputs: dict[str, Any], scale: Tensor) -> Tensor:
        image = self.norm(self.image(inputs["image"])).relu().mean((2, 3))
        vector = self.vector(inputs["more"][0]).relu()
        result: Tensor = self.last(self.both(torch.cat([image, vector], 1)).relu()) * scale
        return result


def nested(count: int) -> tuple[dict[str, Any], Tensor]:
    return {"image": torch.randn(count, 3, 8, 8), "more": [torch.randn(count, 6)]}, torch.ones(4)


@pytest.mark.parametrize(
    "options",
    [{}, {"merger": "cosine"}, {"criterion": "expected-error"}, {"calibration": [nested(16), nested(16)]}],
    ids=["moments", "cosine", "expected-error", "calibrated"],
)
def test_inputs_inside_dicts_and_lists(options: dict[str, Any]) -> None:
    found = nm.compress(Nested(), nested(3), ratio=0.5, **options)
    assert found.summary.error is not None and found.summary.error < 1e-4
    if "merger" not in options:
        assert all("fitted" in how for group in found.summary.groups for how in group.descriptions)


def test_a_loader_of_dicts_with_labels_for_a_network_that_takes_one() -> None:
    class Single(Nested):
        def forward(self, inputs: dict[str, Any]) -> Tensor:  # type: ignore[override]
            return super().forward(inputs, torch.ones(4))

    batches = [{**nested(16)[0], "label": torch.zeros(16)} for _ in range(2)]
    assert nm.compress(Single(), (nested(2)[0],), calibration=batches).summary.parameters[1] > 0
    with pytest.raises(nm.MergingError, match="not built like the example input, a dict"):
        nm.compress(Single(), (nested(2)[0],), calibration=[{"image": torch.randn(4, 3, 8, 8)}])


LOADERS = {
    "pairs": lambda x: [(x, torch.zeros(len(x)))],
    "tensors": lambda x: list(x.split(16)),
    "one tensor": lambda x: x,
    "dicts": lambda x: [{"image": x, "label": torch.zeros(len(x))}],
    "loader": lambda x: torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, torch.zeros(len(x))), 16),
}


@pytest.mark.parametrize("kind", LOADERS)
def test_calibration_takes_what_loaders_yield(kind: str) -> None:
    model, x = batch_normed(), synthetic.draw_dead_leaves(32, (3, 16, 16), torch.Generator().manual_seed(1))
    small = nm.compress(model, x[:1], merger=nm.Calibrated(LOADERS[kind](x))).model
    pruned = nm.compress(model, x[:1], merger="none").model
    assert distance(small, model, x) < 0.75 * distance(pruned, model, x)


@pytest.mark.parametrize("batches", [[], [()]], ids=str)
def test_calibration_without_data_is_an_error(batches: list[Any]) -> None:
    with pytest.raises(nm.MergingError, match="calibration"):
        nm.compress(batch_normed(), torch.randn(1, 3, 16, 16), merger=nm.Calibrated(batches))
