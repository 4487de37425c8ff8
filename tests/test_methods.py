"""Folding, weight-space combinations, sequential fits and the choice by expected error."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from graphs import CASES
from torch import Tensor, nn

import neuron_merging as nm
from neuron_merging.channels.selection import Selection
from neuron_merging.choosing.elimination import orders
from neuron_merging.cutting.trial import analyse
from neuron_merging.graph.capture import capture
from neuron_merging.statistics import synthetic
from neuron_merging.statistics.uses import find_uses

keep_first = lambda rows: torch.arange(len(rows), 0.0, -1)  # noqa: E731


def distance(a: nn.Module, b: nn.Module, x: Tensor) -> float:
    with torch.no_grad():
        return float((a(x) - b(x)).norm() / b(x).norm())


class Residual(nn.Module):
    """Blocks that add to a stream, with batch norms whose statistics are those of the data."""

    def __init__(self, width: int = 12, blocks: int = 3) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(width, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(),
                nn.Conv2d(16, width, 3, padding=1, bias=False), nn.BatchNorm2d(width),
            )
            for _ in range(blocks)
        )  # fmt: skip
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = torch.relu(x + block(x))
        return self.head(x.mean((2, 3)))


@pytest.fixture(scope="module")
def residual() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    model = Residual()
    x = synthetic.dead_leaves(64, (3, 12, 12), torch.Generator().manual_seed(3))
    for norm in (m for m in model.modules() if isinstance(m, nn.BatchNorm2d)):
        norm.momentum = None
    model(x)
    return model.eval(), x


def test_a_sequential_fit_is_better_on_what_it_was_fitted_to(residual: tuple[nn.Module, Tensor]) -> None:
    model, x = residual
    mergers = {"plain": nm.Calibrated([x], sequential=False), "sequential": nm.Calibrated([x])}
    found = {name: distance(nm.compress(model, x[:1], merger=m).model, model, x) for name, m in mergers.items()}
    pruned = distance(nm.compress(model, x[:1], merger="none").model, model, x)
    assert found["sequential"] < found["plain"] < pruned


def test_batch_norms_are_re_estimated(residual: tuple[nn.Module, Tensor]) -> None:
    model, x = residual
    small = nm.compress(model, x[:1], merger=nm.Calibrated([x], reestimate=True)).model
    seen: dict[str, Tensor] = {}
    for name, module in small.named_modules():
        if isinstance(module, nn.BatchNorm2d):
            module.register_forward_hook(
                lambda m, i, o, name=name: seen.update({name: i[0].mean((0, 2, 3)) - m.running_mean})
            )
    with torch.no_grad():
        small(x)
    assert len(seen) == 6 and all(float(v.abs().max()) < 1e-3 for v in seen.values())
    assert distance(small, model, x) < distance(nm.compress(model, x[:1], merger="none").model, model, x)


def test_re_estimating_needs_a_sequence() -> None:
    with pytest.raises(nm.MergingError, match="sequential"):
        nm.Calibrated([], reestimate=True, sequential=False)


def test_calibration_is_a_parameter(residual: tuple[nn.Module, Tensor]) -> None:
    model, x = residual
    small, same = nm.compress(model, x[:1], calibration=[x]), nm.compress(model, x[:1], merger=nm.Calibrated([x]))
    assert distance(small.model, same.model, x) < 1e-5
    with pytest.raises(nm.MergingError, match="calibration"):
        nm.compress(model, x[:1], calibration=[x], merger="cosine")


def test_expected_error_keeps_what_cannot_be_replaced(residual: tuple[nn.Module, Tensor]) -> None:
    model, x = residual
    best = distance(nm.compress(model, x[:1], criterion="expected-error", calibration=[x]).model, model, x)
    others = [nm.compress(model, x[:1], criterion="random", seed=s, calibration=[x]).model for s in range(4)]
    assert best < np.mean([distance(other, model, x) for other in others])
    assert nm.compress(model, x[:1], criterion="expected-error").summary.groups


def test_elimination_costs_what_the_fit_loses() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 4)), torch.randn(5000, 6)
    task = Selection(analyse(model, x[:1]), {})
    method = nm.Calibrated([x], ridge=0.0, sequential=False)
    with torch.no_grad():
        order = orders(task, ["0"], method, ridge=0.0)["0"]
    assert sorted(order.units) == list(range(10)) and (np.diff(order.errors) >= -1e-9).all()
    for removed in (1, 4, 7):
        stay = set(order.units[removed:].tolist())
        criterion = lambda rows, stay=stay: torch.tensor([float(i in stay) for i in range(len(rows))])  # noqa: E731
        small = nm.compress(model, x[:1], ratio=removed / 10, criterion=criterion, merger=method).model
        with torch.no_grad():
            lost, whole = (small(x) - model(x)).var(0).sum(), model(x).var(0).sum()
        assert float(lost / whole) == pytest.approx(order.errors[removed - 1], rel=0.05, abs=1e-4)


def copies(bn: bool) -> nn.Module:
    """Channels 4-7 are multiples or copies of channels 0-3."""
    torch.manual_seed(1)
    first, norm = nn.Conv2d(3, 8, 3, padding=1, bias=not bn), nn.BatchNorm2d(8) if bn else nn.Identity()
    with torch.no_grad():
        first.weight[4:] = first.weight[:4]
        if first.bias is not None:
            first.bias[4:] = first.bias[:4]
        if bn:
            norm.running_mean.normal_()
            norm.running_var.uniform_(0.5, 2)
            norm.weight.uniform_(0.5, 2)
            norm.bias.normal_()
            for tensor in (norm.running_mean, norm.running_var, norm.weight, norm.bias):
                tensor[4:] = tensor[:4]
    return nn.Sequential(first, norm, nn.ReLU(), nn.Conv2d(8, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 5)).eval()


@pytest.mark.parametrize("bn", [False, True])
@pytest.mark.parametrize("merger", [nm.Fold(), nm.Linear(ridge=1e-9)], ids=str)
def test_copies_fold_without_loss(merger: nm.Fold | nm.Linear, bn: bool) -> None:
    model, x = copies(bn), torch.randn(4, 3, 8, 8)
    small = nm.compress(model, x, ratio={"0": 0.5}, criterion=keep_first, merger=merger)
    assert distance(small.model, model, x) < 1e-4, str(small.summary)
    assert distance(nm.compress(model, x, ratio={"0": 0.5}, criterion=keep_first, merger="none").model, model, x) > 0.1


def test_folding_two_layers_in_a_row_rewrites_rows_and_columns() -> None:
    torch.manual_seed(2)
    model, x = (
        nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 3)),
        torch.randn(64, 5),
    )
    with torch.no_grad():
        for layer, half in ((model[0], 4), (model[2], 3)):
            layer.weight[half:], layer.bias[half:] = layer.weight[:half], layer.bias[:half]
    for merger in (nm.Fold(), nm.Linear(ridge=1e-9)):
        assert distance(nm.compress(model, x[:1], criterion=keep_first, merger=merger).model, model, x) < 1e-4


def test_folding_repairs_the_variance() -> None:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(16, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 8)).eval()
    x = torch.randn(4000, 16)
    model[1].momentum = None
    model.train()(x)
    model.eval()
    spread = {}
    for repair in (True, False):
        small = nm.compress(model, x[:1], merger=nm.Fold(repair=repair)).model
        with torch.no_grad():
            spread[repair] = float(small[1](small[0](x)).std(0).mean())
    with torch.no_grad():
        original = float(model[1](model[0](x)).std(0).mean())
    assert abs(spread[True] - original) < abs(spread[False] - original)


@pytest.mark.parametrize("merger", ["fold", "linear", "moments"])
@pytest.mark.parametrize("name", sorted(CASES)[::8])
def test_methods_are_verified_or_refuse_on_many_networks(name: str, merger: str) -> None:
    torch.manual_seed(0)
    model, inputs = CASES[name].build(), CASES[name].inputs()
    try:
        small = nm.compress(model, inputs, merger=merger, scope="all")
    except nm.MergingError:
        with pytest.raises(nm.MergingError):
            nm.compress(model, inputs, merger="none", scope="all")
        return
    assert all(bool(v.isfinite().all()) for v in small.model.state_dict().values() if v.is_floating_point())


def test_a_shared_layer_has_one_fit_for_all_its_places() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.up, self.down = nn.Linear(6, 6), nn.Linear(6, 20), nn.Linear(20, 6)

        def forward(self, x: Tensor) -> Tensor:
            for _ in range(2):
                x = self.down(torch.relu(self.up(x)))
            return self.first(x)

    torch.manual_seed(0)
    model, x = Twice(), torch.randn(400, 6)
    task = Selection(analyse(model, x[:1]), {"up": np.arange(10)})
    assert len(find_uses(task)[0].inputs) == 2
    small = nm.compress(model, x[:1], calibration=[x], ratio={"up": 0.5}).model
    assert distance(small, model, x) < distance(
        nm.compress(model, x[:1], ratio={"up": 0.5}, merger="none").model, model, x
    )


def test_layers_too_wide_for_a_fit_take_the_papers_method(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("neuron_merging.statistics.uses.WIDEST", 8)
    model, x = (
        nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 8), nn.ReLU(), nn.Linear(8, 3)),
        torch.randn(64, 6),
    )
    for merger in (nm.Moments(), nm.Calibrated([x])):
        wide, narrow = nm.compress(model, x[:1], merger=merger).summary.groups
        assert "too wide" in wide.said[0] and "fitted" in narrow.said[0]


class Places(nn.Module):
    """Twenty channels through a sigmoid, whose mean is large, into a reader of the test's own."""

    def __init__(self, reader: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.reader = nn.Linear(6, 20), reader

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.reader(torch.sigmoid(self.first(x)))
        return out


class Product(nn.Module):
    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(20, 5))
        self.shift = nn.Parameter(torch.randn(5)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight if self.shift is None else torch.addmm(self.shift, x, self.weight)


class Tied(nn.Module):
    """A weight that is stored under the name of another layer, where no bias would have an effect."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.out = nn.Embedding(7, 20), nn.Linear(20, 7, bias=False)
        self.out.weight = self.table.weight

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.out(x)
        return out


class TwoBiases(nn.Module):
    """One weight in two layers, each with a bias of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(20, 7), nn.Linear(20, 7)
        self.b.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.a(x), self.b(x)], 1)


READERS = {"product": lambda: Product(False), "addmm": lambda: Product(True), "tied": Tied, "two biases": TwoBiases}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("merger", ["moments", "calibrated"])
def test_the_mean_is_made_up_for_wherever_the_reader_keeps_its_bias(reader: str, merger: str) -> None:
    model, x = Places(READERS[reader]()), torch.randn(400, 6)
    method = nm.Calibrated([x]) if merger == "calibrated" else merger
    small, pruned = (nm.compress(model, x[:1], ratio={"first": 0.8}, merger=m).model for m in (method, "none"))
    assert distance(small, model, x) < 0.4 * distance(pruned, model, x)


LAYERS = {
    "transposed": lambda: nn.ConvTranspose2d(16, 4, 2, stride=2),
    "transposed in groups": lambda: nn.ConvTranspose2d(16, 4, 4, stride=2, padding=1, groups=2),
    "transposed, stride 1": lambda: nn.ConvTranspose2d(16, 4, 3, padding=1),
    "same": lambda: nn.Conv2d(16, 4, 3, padding="same", dilation=2),
    "same, even": lambda: nn.Conv2d(16, 4, (2, 4), padding="same"),
    "wide padding": lambda: nn.Conv2d(16, 4, 1, padding=2),
}


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("one_tap", [False, True])
def test_offsets_suit_borders_and_strides(layer: str, one_tap: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if one_tap:
        monkeypatch.setattr("neuron_merging.statistics.uses._window", lambda g, a, c: ((1, 1), True))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.Sigmoid(), LAYERS[layer]())
    x = synthetic.dead_leaves(32, (3, 8, 8), torch.Generator().manual_seed(1))
    pruned = distance(nm.compress(model, x[:1], merger="none").model, model, x)
    for merger in (nm.Moments(), nm.Calibrated([x])):
        small = nm.compress(model, x[:1], merger=merger).model
        assert distance(small, model, x) < 0.7 * pruned
        with torch.no_grad():
            lost = (model(x) - small(x)).mean((0, 2, 3))
        assert float(lost.abs().max()) < 0.03


@pytest.mark.parametrize("options", [{"stride": 2}, {"padding": 1}], ids=str)
def test_rows_of_a_single_tap_are_those_that_the_layer_reads(options: dict[str, int]) -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 4, 1, bias=False, **options))
    x = torch.randn(2, 3, 6, 6)
    graph = capture(model, x)
    (use,) = find_uses(Selection(analyse(model, x), {"0": np.arange(4)}))
    node, value = graph.nodes[-1], model[0](x)
    at = use.pick(node, value, lambda available, limit: torch.arange(available))
    with torch.no_grad():
        rows, outputs = use.rows(node, value, at)[0], use.outputs(node, model(x), at)[0]
        assert torch.allclose(rows @ model[1].weight.flatten(1).T, outputs, atol=1e-6)


def test_a_batch_norm_of_two_layers_keeps_its_mean() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 8, 3, padding=1, bias=False)
            self.c, self.norm = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.norm(self.b(self.a(x).sigmoid())) + self.norm(self.c(x))
            return out

    torch.manual_seed(0)
    model, x = Shared().eval(), synthetic.dead_leaves(32, (3, 8, 8), torch.Generator().manual_seed(1))
    for merger in (nm.Moments(), nm.Calibrated([x])):
        small = nm.compress(model, x[:1], ratio={"a": 0.5}, merger=merger).model
        assert torch.equal(small.norm.running_mean, model.norm.running_mean)
        assert distance(small, model, x) < 0.1


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


def test_kept_channels_that_are_constant_explain_nothing() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16, momentum=None), nn.ReLU(),
        nn.Conv2d(16, 8, 3, padding=1), nn.Flatten(), nn.Linear(512, 5),
    )  # fmt: skip
    x = synthetic.dead_leaves(32, (3, 8, 8), torch.Generator().manual_seed(1))
    model(x)
    with torch.no_grad():
        model[0].weight[:5] = 0
    model.eval()
    pruned = distance(nm.compress(model, x[:1], ratio={"0": 0.7}, criterion=keep_first, merger="none").model, model, x)
    for merger in (nm.Moments(), nm.Calibrated([x]), nm.Calibrated([x], sequential=False)):
        small = nm.compress(model, x[:1], ratio={"0": 0.7}, criterion=keep_first, merger=merger).model
        assert float(small[3].weight.detach().abs().max()) < 100
        assert distance(small, model, x) < pruned


def test_folding_refuses_a_batch_norm_without_a_scale() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8, affine=False), nn.ReLU(), nn.Conv2d(8, 4, 3)).eval()
    assert "no scale" in nm.compress(model, torch.randn(1, 3, 8, 8), merger="fold").summary.groups[0].said[0]


@pytest.mark.parametrize("criterion", ["l2", "expected-error"])
def test_a_generator_of_batches_is_read_once(residual: tuple[nn.Module, Tensor], criterion: str) -> None:
    model, x = residual
    small = nm.compress(model, x[:1], criterion=criterion, calibration=(batch for batch in x.split(16))).model
    same = nm.compress(model, x[:1], criterion=criterion, calibration=x.split(16)).model
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
    residual: tuple[nn.Module, Tensor], calibration: object, sequential: bool
) -> None:
    with pytest.raises(nm.MergingError, match="calibration"):
        nm.compress(residual[0], residual[1][:1], merger=nm.Calibrated(calibration, sequential=sequential))  # type: ignore[arg-type]


@pytest.mark.parametrize("ridge", [-1.0, float("nan"), float("inf"), "small"])
@pytest.mark.parametrize(
    "method", [nm.Linear, lambda ridge: nm.Calibrated([], ridge=ridge)], ids=["linear", "calibrated"]
)
def test_a_ridge_is_a_number(method: type[nm.Linear], ridge: float) -> None:
    with pytest.raises(nm.MergingError, match="ridge"):
        method(ridge=ridge)


def test_calibrated_by_name_asks_for_data(residual: tuple[nn.Module, Tensor]) -> None:
    with pytest.raises(nm.MergingError, match="calibration=batches"):
        nm.compress(residual[0], residual[1][:1], merger="calibrated")


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
        assert all("fitted" in how for group in found.summary.groups for how in group.said)


def test_a_loader_of_dicts_with_labels_for_a_network_that_takes_one() -> None:
    class Single(Nested):
        def forward(self, inputs: dict[str, Any]) -> Tensor:  # type: ignore[override]
            return super().forward(inputs, torch.ones(4))

    batches = [{**nested(16)[0], "label": torch.zeros(16)} for _ in range(2)]
    assert nm.compress(Single(), (nested(2)[0],), calibration=batches).summary.parameters[1] > 0
    with pytest.raises(nm.MergingError, match="not built like the example input, a dict"):
        nm.compress(Single(), (nested(2)[0],), calibration=[{"image": torch.randn(4, 3, 8, 8)}])
