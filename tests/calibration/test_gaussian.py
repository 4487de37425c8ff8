"""Means and covariances in closed form, against sampling and against formulas that are known."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import neuron_merging as nm
from neuron_merging.calibration import gaussian as closed_form
from neuron_merging.calibration.gaussian import (
    MAX_GAUSSIAN_ENTRIES,
    GaussianStats,
    apply_linear,
    apply_pointwise,
    apply_window_max,
    make_input_prior,
    propagate_gaussian,
)
from neuron_merging.graph.capture import capture
from neuron_merging.graph.graph import Graph

SAMPLES = 200_000
ACTIVATIONS: list[nn.Module] = [
    nn.ReLU(), nn.ReLU6(), nn.LeakyReLU(0.1), nn.ELU(), nn.SELU(), nn.CELU(), nn.GELU(), nn.GELU(approximate="tanh"),
    nn.SiLU(), nn.Mish(), nn.Hardswish(), nn.Hardsigmoid(), nn.Hardtanh(), nn.Tanh(), nn.Sigmoid(), nn.LogSigmoid(),
    nn.Softplus(), nn.Softsign(), nn.Tanhshrink(), nn.Softshrink(), nn.Hardshrink(), nn.Threshold(0.2, -1.0),
    nn.PReLU(), nn.PReLU(5),
]  # fmt: skip


def gaussian(size: int, seed: int, spread: float = 1.0) -> GaussianStats:
    pick = torch.Generator().manual_seed(seed)
    root = torch.randn(size, size + 1, generator=pick, dtype=torch.float64) * spread / math.sqrt(size)
    return GaussianStats(torch.randn(size, generator=pick, dtype=torch.float64), root @ root.T)


def all_reached(graph: Graph, start: dict[str, GaussianStats]) -> dict[str, GaussianStats]:
    return dict(propagate_gaussian(graph, start, [node.name for node in graph.nodes]))


def sample(stats: GaussianStats, count: int = SAMPLES, seed: int = 1) -> Tensor:
    root = torch.linalg.cholesky(stats.cov + 1e-12 * torch.eye(len(stats.cov), dtype=torch.float64))
    noise = torch.randn(count, len(root), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (noise @ root.T).view(count, *stats.mean.shape) + stats.mean


def agree(
    found: GaussianStats, values: Tensor, tolerance: float = 0.03, floor: float = 1e-9, mean: float | None = None
) -> None:
    """Within these many standard deviations."""
    flat = values.flatten(1)
    scale = flat.std(0).clamp(min=floor)
    assert float(((found.mean.flatten() - flat.mean(0)) / scale).abs().max()) < (mean or tolerance)
    assert float((found.cov - flat.T.cov()).div(scale).div(scale[:, None]).abs().max()) < tolerance


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
def test_every_activation_agrees_with_sampling(activation: nn.Module) -> None:
    model = nn.Sequential(nn.Linear(4, 5), activation, nn.Linear(5, 2)).double().eval()
    with torch.no_grad():
        model[0].weight.mul_(3)
    graph = capture(model, torch.zeros(1, 4, dtype=torch.float64))
    given_input = gaussian(4, seed=3)
    reached = all_reached(graph, {str(graph.inputs[0]): given_input})
    last = [n.name for n in graph.nodes if n.op != "linear"][-1]
    with torch.no_grad():
        agree(reached[last], model[1](model[0](sample(given_input))), 0.06)


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 10_000), st.floats(0.1, 3.0), st.sampled_from([torch.relu, torch.tanh, nn.functional.gelu]))
def test_pointwise_functions_agree_with_sampling(
    seed: int, spread: float, function: Callable[[Tensor], Tensor]
) -> None:
    before = gaussian(4, seed, spread)
    agree(apply_pointwise(function, before), function(sample(before)), 0.05, floor=0.2 * float(before.var.sqrt().min()))


def test_relu_has_its_known_moments() -> None:
    mean = torch.tensor([-2.0, 0.0, 0.7], dtype=torch.float64)
    sigma = torch.tensor([0.5, 1.0, 2.0], dtype=torch.float64)
    x = mean / sigma
    phi, cdf = torch.exp(-x.square() / 2) / math.sqrt(2 * math.pi), torch.special.ndtr(x)
    found = apply_pointwise(torch.relu, GaussianStats(mean, torch.diag(sigma.square())))
    wanted = sigma * (x * cdf + phi)
    assert torch.allclose(found.mean, wanted, atol=1e-5)
    assert torch.allclose(found.var, sigma.square() * ((x * x + 1) * cdf + x * phi) - wanted.square(), atol=1e-5)


def test_identical_channels_stay_identical() -> None:
    cov = torch.ones(2, 2, dtype=torch.float64)
    after = apply_pointwise(torch.relu, GaussianStats(torch.zeros(2, dtype=torch.float64), cov)).cov
    assert torch.allclose(after, after[0, 0].expand(2, 2), rtol=1e-6)


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 10_000))
def test_covariances_are_positive(seed: int) -> None:
    after = apply_pointwise(torch.relu, gaussian(12, seed)).cov
    assert float(torch.linalg.eigvalsh(after)[0]) > -1e-6 * float(after.diagonal().max())


def test_constant_entries_have_no_variance() -> None:
    found = apply_pointwise(
        torch.sigmoid, GaussianStats(torch.tensor([3.0, 0.0]).double(), torch.diag(torch.tensor([0.0, 1.0])).double())
    )
    assert float(found.mean[0]) == pytest.approx(1 / (1 + math.exp(-3)), abs=1e-9)
    assert float(found.cov[0].abs().max()) < 1e-12 and bool(found.cov.isfinite().all())


def test_linear_operators_are_exact() -> None:
    before = gaussian(32, 5)
    conv = nn.Conv2d(2, 3, 3, padding=1, stride=2).double()
    shaped = GaussianStats(before.mean.view(2, 4, 4), before.cov)
    found = apply_linear(lambda batch: conv(batch), shaped)
    matrix = torch.stack(
        [(conv(e.view(1, 2, 4, 4)) - conv(torch.zeros(1, 2, 4, 4).double())).flatten() for e in torch.eye(32).double()],
        1,
    )
    assert torch.allclose(found.cov, matrix @ before.cov @ matrix.T, atol=1e-10)
    assert torch.allclose(found.mean, conv(shaped.mean[None])[0])


@settings(max_examples=10, deadline=None)
@given(st.integers(0, 10_000))
def test_maxima_come_close_to_sampling(seed: int) -> None:
    before = gaussian(8, seed)
    windows = torch.arange(8).view(4, 2)
    agree(apply_window_max(windows, (4,), before), sample(before)[:, windows].amax(-1), 0.3, mean=0.03)


CHAINS = {
    "convolution, max pooling, flatten": (
        lambda: nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(36, 8)),
        (1, 8, 8)),
    "convolution, average pooling, flatten": (
        lambda: nn.Sequential(nn.Conv2d(1, 4, 3), nn.GELU(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(36, 8)),
        (1, 8, 8)),
    "depthwise with its norm": (
        lambda: nn.Sequential(
            nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3, groups=4), nn.BatchNorm2d(4), nn.ReLU6(),
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 8)), (1, 8, 8)),
    "two layers": (lambda: nn.Sequential(nn.Linear(16, 32), nn.SiLU(), nn.Linear(32, 8)), (16,)),
}  # fmt: skip


@pytest.mark.parametrize("name", CHAINS)
def test_chains_agree_with_sampling(name: str) -> None:
    torch.manual_seed(0)
    build, shape = CHAINS[name]
    model = build().double().eval()
    before = make_input_prior(torch.zeros(1, *shape, dtype=torch.float64))
    assert before is not None
    values = sample(before, 20_000)
    for norm in (m for m in model if isinstance(m, nn.BatchNorm2d)):
        norm.train().momentum = None
        model(values)
    model.eval()
    graph = capture(model, torch.zeros(1, *shape, dtype=torch.float64))
    with torch.no_grad():
        found, wanted = all_reached(graph, {str(graph.inputs[0]): before})[graph.nodes[-1].name], model(values)
    assert float(((found.mean - wanted.mean(0)) / wanted.std(0)).abs().max()) < 0.15
    cov = wanted.T.cov()
    assert float((found.cov * cov).sum() / found.cov.norm() / cov.norm()) > 0.93
    assert 0.75 < float(found.var.sum() / cov.diagonal().sum()) < 1.1


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm, self.up, self.down = (
            nn.Embedding(9, 6),
            nn.LayerNorm(6),
            nn.Linear(6, 20),
            nn.Linear(20, 6),
        )
        nn.init.normal_(self.norm.weight)
        nn.init.normal_(self.norm.bias)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.down(nn.functional.gelu(self.up(self.norm(self.embed(tokens)))))


def test_a_layer_norm_states_what_follows_it() -> None:
    model = Block().eval()
    graph = capture(model, torch.zeros(2, 5, dtype=torch.int64))
    reached = all_reached(graph, {})
    hidden = next(n.name for n in graph.nodes if n.op == "gelu")
    noise = torch.randn(SAMPLES, 6, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        agree(reached[hidden], nn.functional.gelu(model.up(noise * model.norm.weight + model.norm.bias)).double())


def test_covariances_that_nobody_reads_any_more_are_dropped() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.GELU(), nn.LayerNorm(6)) for _ in range(4))).eval()
    graph, start = capture(model, torch.zeros(1, 6)), make_input_prior(torch.zeros(1, 6))
    assert start is not None
    whole = all_reached(graph, {str(graph.inputs[0]): start})
    wanted = [node.name for node in graph.nodes if node.op == "gelu"]
    seen: list[weakref.ref[Tensor]] = []
    for name, found in propagate_gaussian(graph, {str(graph.inputs[0]): start}, wanted):
        assert torch.equal(found.cov, whole[name].cov)
        assert all(old() is None for old in seen[:-1])  # the last one is still the loop's
        seen.append(weakref.ref(found.cov))
    assert len(seen) == 4


def test_rows_of_a_covariance_are_worked_out_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    before = gaussian(5, 0)
    whole = apply_pointwise(torch.relu, before)
    monkeypatch.setattr(closed_form, "COVARIANCE_ROW_CHUNK", 2)
    assert torch.equal(apply_pointwise(torch.relu, before).cov, whole.cov)


def test_what_has_no_rule_has_no_statistics() -> None:
    class Gate(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return torch.softmax(self.a(x), -1) * self.b(x)

    graph = capture(Gate(), torch.zeros(1, 4))
    start = make_input_prior(torch.zeros(1, 4))
    assert start is not None
    reached = all_reached(graph, {str(graph.inputs[0]): start})
    assert {n.op for n in graph.nodes if n.name in reached} == {"linear"}


def test_priors() -> None:
    image = make_input_prior(torch.zeros(1, 3, 6, 6))
    assert image is not None and image.cov.shape == (108, 108)
    assert float(torch.linalg.eigvalsh(image.cov)[0]) > 0
    near, far, colour = image.cov[0, 1], image.cov[0, 5], image.cov[0, 36]
    assert image.cov[0, 0] > near > far > 0 and colour > near
    white = make_input_prior(torch.zeros(1, 7))
    assert white is not None and torch.equal(white.cov, torch.eye(7, dtype=torch.float64))
    assert (
        make_input_prior(torch.zeros(1, MAX_GAUSSIAN_ENTRIES + 1)) is None
        and make_input_prior(torch.zeros(1, 4, dtype=torch.int64)) is None
    )


class Mixer(nn.Module):
    """Tokens are normalised over features, then mixed over places."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.a, self.b = nn.LayerNorm(6), nn.Linear(5, 8), nn.Linear(8, 5)
        self.last = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        mixed = self.b(self.a(self.norm(x).transpose(1, 2)).relu()).transpose(1, 2)
        last: Tensor = self.last((x + mixed).mean(1))
        return last


def test_features_that_change_places_with_tokens_have_no_closed_form() -> None:
    small = nm.compress(Mixer(), torch.randn(2, 5, 6), ratio=0.5)
    assert small.summary.groups[0].readers[0].kind == "fitted"
