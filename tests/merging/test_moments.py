"""Least-squares merging with moments that are worked out."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import neuron_merging as nm
from neuron_merging.calibration import layer_stats, regression
from neuron_merging.calibration.layer_stats import find_consumer_weights
from neuron_merging.channels.analysis import Selection
from neuron_merging.inputs import synthetic
from neuron_merging.merging import moments
from neuron_merging.pruning.trial_prune import analyse
from tests.merging.fitting import batch_normed, distance, keep_first


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
    assert len(find_consumer_weights(task)[0].inputs) == 2
    small = nm.compress(model, x[:1], calibration=[x], ratio={"up": 0.5}).model
    assert distance(small, model, x) < distance(
        nm.compress(model, x[:1], ratio={"up": 0.5}, merger="none").model, model, x
    )


def test_layers_too_wide_for_a_fit_take_the_papers_method(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("neuron_merging.calibration.layer_stats.MAX_FIT_FEATURES", 8)
    model, x = (
        nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 8), nn.ReLU(), nn.Linear(8, 3)),
        torch.randn(64, 6),
    )
    for merger in (nm.Moments(), nm.Calibrated([x])):
        wide, narrow = nm.compress(model, x[:1], merger=merger).summary.groups
        assert "too wide" in wide.descriptions[0] and "fitted" in narrow.descriptions[0]


def test_wide_layers_are_fitted_by_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("neuron_merging.calibration.layer_stats.MAX_COVARIANCE_FEATURES", 256)
    monkeypatch.setattr("neuron_merging.calibration.regression.MAX_ROWS", 256)
    model, x = nn.Sequential(nn.Linear(6, 600), nn.ReLU(), nn.Linear(600, 3)), torch.randn(64, 6)
    fitted, cosine = (nm.compress(model, x[:1], merger=merger) for merger in ("moments", "cosine"))
    assert "fitted" in fitted.summary.groups[0].descriptions[0]
    assert distance(fitted.model, model, x) < 0.5 * distance(cosine.model, model, x)


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
        monkeypatch.setattr("neuron_merging.calibration.layer_stats._choose_kernel", lambda g, a, c: ((1, 1), True))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.Sigmoid(), LAYERS[layer]())
    x = synthetic.draw_dead_leaves(32, (3, 8, 8), torch.Generator().manual_seed(1))
    pruned = distance(nm.compress(model, x[:1], merger="none", criterion="l2").model, model, x)
    for merger in (nm.Moments(), nm.Calibrated([x])):
        small = nm.compress(model, x[:1], merger=merger, criterion="l2").model
        assert distance(small, model, x) < 0.7 * pruned
        with torch.no_grad():
            lost = (model(x) - small(x)).mean((0, 2, 3))
        assert float(lost.abs().max()) < 0.03


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
    model, x = Shared().eval(), synthetic.draw_dead_leaves(32, (3, 8, 8), torch.Generator().manual_seed(1))
    for merger in (nm.Moments(), nm.Calibrated([x])):
        small = nm.compress(model, x[:1], ratio={"a": 0.5}, merger=merger).model
        assert torch.equal(small.norm.running_mean, model.norm.running_mean)
        assert distance(small, model, x) < 0.1


def test_kept_channels_that_are_constant_explain_nothing() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16, momentum=None), nn.ReLU(),
        nn.Conv2d(16, 8, 3, padding=1), nn.Flatten(), nn.Linear(512, 5),
    )  # fmt: skip
    x = synthetic.draw_dead_leaves(32, (3, 8, 8), torch.Generator().manual_seed(1))
    model(x)
    with torch.no_grad():
        model[0].weight[:5] = 0
    model.eval()
    example = torch.zeros(1, 3, 8, 8)
    pruned = distance(
        nm.compress(model, example, ratio={"0": 0.7}, criterion=keep_first, merger="none").model, model, x
    )
    for merger in (nm.Moments(), nm.Calibrated([x]), nm.Calibrated([x], sequential=False)):
        small = nm.compress(model, example, ratio={"0": 0.7}, criterion=keep_first, merger=merger).model
        assert float(small[3].weight.detach().abs().max()) < 100
        # Only means can be corrected. Without data that may be rejected, because the stored statistics are wrong here.
        error = distance(small, model, x)
        assert error < pruned or (isinstance(merger, nm.Moments) and error == pruned)


@pytest.mark.parametrize("seed", range(3))
def test_moments_come_closer_than_cosine_and_pruning(seed: int) -> None:
    model = batch_normed(seed)
    x = pictures()
    found = {m: distance(nm.compress(model, x[:1], merger=m).model, model, x) for m in ("none", "cosine", "moments")}
    assert found["moments"] < min(found["cosine"], found["none"])


def test_moments_are_the_default() -> None:
    how = " ".join(
        h for g in nm.compress(batch_normed(), torch.randn(1, 3, 16, 16)).summary.groups for h in g.descriptions
    )
    assert "fitted" in how and "bias added" not in how.split("7:")[0]
    plain = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    assert "fitted" in nm.compress(plain, torch.randn(1, 6)).summary.groups[0].descriptions[0]


def test_a_missing_bias_is_made_and_the_plan_rebuilds_it() -> None:
    model, x = batch_normed(), torch.randn(2, 3, 16, 16)
    small = nm.compress(model, x, merger="moments")
    assert small.plan.biases == {"7.bias": 8}
    assert any("bias added" in h for g in small.summary.groups for h in g.descriptions)
    again = nm.apply_plan(batch_normed(1), nm.Plan.from_json(small.plan.to_json())).eval()
    again.load_state_dict(small.model.state_dict())
    assert torch.equal(again(x), small.model(x))


def copies(activation: nn.Module, consumer: nn.Module) -> nn.Module:
    """Channels 4-7 repeat channels 0-3: a fit over all kept channels loses nothing, whatever follows."""
    torch.manual_seed(0)
    first = nn.Conv2d(3, 8, 3, padding=1)
    with torch.no_grad():
        first.weight[4:], first.bias[4:] = first.weight[:4], first.bias[:4]
    return nn.Sequential(first, activation, consumer).eval()


CONSUMERS = {
    "conv": lambda: nn.Conv2d(8, 4, 3, padding=1),
    "conv without bias": lambda: nn.Conv2d(8, 4, 3, bias=False),
    "strided": lambda: nn.Conv2d(8, 4, 3, stride=2, dilation=2),
    "transposed": lambda: nn.ConvTranspose2d(8, 4, 2, stride=2),
    "same padding": lambda: nn.Conv2d(8, 4, 3, padding="same"),
    "linear": lambda: nn.Sequential(nn.Flatten(), nn.Linear(8 * 64, 5)),
}


@pytest.mark.parametrize("activation", [nn.GELU(), nn.SiLU(), nn.Sigmoid(), nn.AvgPool2d(1)], ids=str)
@pytest.mark.parametrize("consumer", CONSUMERS)
def test_copies_merge_without_loss_through_any_activation(activation: nn.Module, consumer: str) -> None:
    model, x = copies(activation, CONSUMERS[consumer]()), torch.randn(4, 3, 8, 8)
    keep_first = lambda rows: torch.arange(len(rows), 0.0, -1)  # noqa: E731
    analysis = nm.analyse(model, x)
    for merger in (nm.Moments(ridge=1e-7, restore_variance=False), nm.Calibrated([x], ridge=1e-7)):
        small = nm.compress(analysis, ratio={"0": 0.5}, criterion=keep_first, merger=merger).model
        assert distance(small, model, x) < 1e-3
    pruned = nm.compress(analysis, ratio={"0": 0.5}, criterion=keep_first, merger="none").model
    assert distance(pruned, model, x) > 1e-2


def pictures() -> Tensor:
    return synthetic.draw_dead_leaves(64, (3, 16, 16), torch.Generator().manual_seed(99))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_precisions(dtype: torch.dtype) -> None:
    model, x = batch_normed().to(dtype), torch.randn(2, 3, 16, 16, dtype=dtype)
    analysis = nm.analyse(model, x)
    small, pruned = (nm.compress(analysis, merger=merger).model for merger in ("moments", "none"))
    assert all(p.dtype == dtype for p in small.parameters())
    assert distance(small, model, pictures().to(dtype)) < 0.8 * distance(pruned, model, pictures().to(dtype))


def test_dead_and_constant_channels_do_no_harm() -> None:
    model, x = batch_normed(), torch.randn(2, 3, 16, 16)
    with torch.no_grad():
        model[1].weight[:3], model[1].bias[:3] = 0, -1
        model[5].weight[2:9] = 0
        model[4].weight[5] = 0
    analysis = nm.analyse(model, x)
    for criterion in ("l1", lambda rows: rows.sum(1)):
        small, pruned = (
            nm.compress(analysis, criterion=criterion, merger=merger, ratio=0.6).model for merger in ("moments", "none")
        )
        assert distance(small, model, pictures()) < 0.8 * distance(pruned, model, pictures())


@pytest.mark.long
def test_one_and_two_threads_agree() -> None:
    model, x, threads = batch_normed(), torch.randn(2, 3, 16, 16), torch.get_num_threads()
    found = []
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            found.append(nm.compress(model, x, merger="moments").model)
    finally:
        torch.set_num_threads(threads)
    assert distance(*found, x) < 1e-3


class TokenNet(nn.Module):
    """An embedding, a layer norm and a GELU block: inputs that cannot be made up, a size in a view."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(50, 16), nn.LayerNorm(16)
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.norm(self.embed(tokens))
        x = self.down(F.gelu(self.up(x)))
        return x.view(tokens.shape[0], -1)


def test_tokens_and_a_batch_size_in_the_graph() -> None:
    torch.manual_seed(0)
    model, tokens = TokenNet().eval(), torch.randint(0, 50, (2, 7))
    small, pruned = (nm.compress(model, tokens, ratio={"up": 0.5}, merger=m).model for m in ("moments", "none"))
    test = torch.randint(0, 50, (64, 7))
    assert distance(small, model, test) < distance(pruned, model, test)


# Where statistics come from


def test_an_encoder_is_fitted_half_to_tokens_at_random_but_not_in_haste() -> None:
    model, tokens = TokenNet().eval(), torch.randint(0, 50, (2, 7))
    found = [nm.compress(model, tokens, ratio={"up": 0.5}, effort=e).summary.statistics for e in ("normal", "fast")]
    assert found == ["statistics in closed form, random tokens", "statistics in closed form"]


def test_tokens_at_random_tell_what_no_norm_states() -> None:
    torch.manual_seed(0)
    model, tokens = TokenNet().eval(), torch.randint(0, 50, (2, 7))
    with torch.no_grad():
        model.embed.weight[:, 4:] *= 0.1  # words differ in four directions, which the norm behind does not know
    test = torch.randint(0, 50, (64, 7))
    both, closed = (
        nm.compress(model, tokens, ratio={"up": 0.75}, merger=merger).model
        for merger in (nm.Moments(), nm.Moments(source="closed-form"))
    )
    assert distance(both, model, test) < 0.8 * distance(closed, model, test)


def duplicated(kind: str) -> tuple[nn.Module, torch.Tensor]:
    """A network whose second half of channels are multiples of the first."""
    torch.manual_seed(3)
    norm = [nn.BatchNorm2d(12)] if kind in ("norm", "two norms") else []
    behind = [nn.BatchNorm2d(5)] if kind == "two norms" else []
    if kind == "linear":
        model, x = nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 5)), torch.randn(256, 8)
    elif kind == "pooled":
        model = nn.Sequential(nn.Conv2d(3, 12, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(300, 5))
        x = torch.randn(256, 3, 12, 12)
    else:
        tail = [nn.ReLU(), nn.Conv2d(12, 5, 3), *behind, nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
        model, x = nn.Sequential(nn.Conv2d(3, 12, 3), *norm, *tail), torch.randn(256, 3, 12, 12)
    for layer in (m for m in model.modules() if isinstance(m, nn.BatchNorm2d)):
        layer.momentum = None
    model(x)
    with torch.no_grad():
        first = model[0]
        factor = torch.linspace(0.3, 0.8, 6)
        first.weight[6:] = first.weight[:6] * factor.view(-1, *(1 for _ in first.weight.shape[1:]))
        first.bias[6:] = first.bias[:6] * factor
        if norm:
            norm[0].running_mean[6:] = norm[0].running_mean[:6] * factor
            norm[0].running_var[6:] = norm[0].running_var[:6] * factor**2
            norm[0].weight[6:], norm[0].bias[6:] = norm[0].weight[:6] * factor, norm[0].bias[:6] * factor
    return model.eval(), x[:8]


@pytest.mark.parametrize("kind", ["linear", "pooled", "norm", "two norms"])
def test_planted_multiples_are_merged_without_loss(kind: str) -> None:
    model, x = duplicated(kind)
    small = nm.compress(model, x[:1], ratio=0.5, criterion=lambda filters: -torch.arange(len(filters))).model
    with torch.no_grad():
        before, after = model(x), small(x)
    assert float((after - before).square().sum() / (before - before.mean(0)).square().sum()) < 1e-4


@pytest.mark.parametrize("options", [{"source": "data"}, {"effort": "heroic"}])
def test_unknown_sources_and_efforts_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(nm.MergingError, match="not known"):
        nm.Moments(**options)


@pytest.mark.parametrize(
    ("options", "made"), [({}, True), ({"effort": "fast"}, True), ({"source": "dead-leaves"}, False)]
)
def test_the_source_decides_what_is_remembered(options: dict[str, Any], made: bool) -> None:
    model, x = duplicated("norm")
    analysis = nm.analyse(model, x[:1])
    nm.compress(analysis, ratio=0.5, merger=nm.Moments(**options))
    seeds = [key[1] for key in analysis.input_cache if isinstance(key, tuple)]
    assert (0 in seeds) is made  # the seed 1 is for inputs to judge by


def test_few_rows_of_many_features_are_fitted_like_their_covariances(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 40), nn.ReLU(), nn.Linear(40, 3))
    made: list[type] = []
    joint = regression.RowAccumulator.to_fit_statistics
    monkeypatch.setattr(
        regression.RowAccumulator, "to_fit_statistics", lambda rows: made.append(type(rows)) or joint(rows)
    )

    def fitted() -> Tensor:
        merger = nm.Moments(source="dead-leaves", samples=12)
        return nm.compress(net, torch.randn(1, 6), ratio=0.5, merger=merger).model[2].weight.detach()

    by_rows = fitted()
    assert made
    made.clear()
    monkeypatch.setattr(
        layer_stats.ConsumerWeight, "make_accumulator", lambda use, rows: regression.MomentAccumulator()
    )
    assert torch.allclose(fitted(), by_rows, rtol=1e-3, atol=1e-4) and not made


@pytest.mark.parametrize(("macs", "samples"), [(2**38, 128), (2**25, 32), (1, 16)])
def test_expensive_networks_get_few_synthetic_inputs(macs: int, samples: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A feature map has many rows in each sample; many more samples would only take time."""
    net = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 4, 3, padding=1))
    monkeypatch.setitem(moments.MAX_PASS_MACS, "fast", macs)
    seen: list[int] = []
    collect = moments.collect_fit_statistics

    def count_samples(selection: Any, weights: Any, batches: Any, **options: Any) -> Any:
        given = list(batches)
        seen.append(sum(len(batch[0]) for batch in given))
        return collect(selection, weights, given, **options)

    monkeypatch.setattr(moments, "collect_fit_statistics", count_samples)
    nm.compress(net, torch.randn(1, 3, 32, 32), ratio=0.5, effort="fast")
    assert set(seen) == {samples}
