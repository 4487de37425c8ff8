"""Least-squares merging: the regression itself, what it measures, and what comes out."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import neuron_merging as nm
from neuron_merging.channels.groups import Axis, Consumer
from neuron_merging.graph.capture import capture
from neuron_merging.graph.macs import node_macs
from neuron_merging.graph.values import Node
from neuron_merging.statistics import synthetic
from neuron_merging.statistics.regression import Regression, solve
from neuron_merging.statistics.uses import Use

RATIO = 0.5


def rows(count: int = 500, features: int = 6, outputs: int = 3) -> tuple[Tensor, Tensor, Tensor]:
    x = torch.randn(count, features, dtype=torch.float64) @ torch.randn(features, features, dtype=torch.float64) + 1
    t = x.relu() @ torch.randn(features, outputs, dtype=torch.float64) + 2
    return x, t, t + x[:, :outputs]


def collected(x: Tensor, t: Tensor, y: Tensor, batches: int = 1) -> Regression:
    regression = Regression()
    for part in zip(x.chunk(batches), t.chunk(batches), y.chunk(batches), strict=True):
        regression.add(*part)
    return regression


def test_the_fit_is_least_squares() -> None:
    x, t, y = rows()
    found = solve(torch.zeros(3, 6, dtype=torch.float64), collected(x, t, y).joint(), 0.0, restore=False)
    ones = torch.cat([x, torch.ones(len(x), 1, dtype=torch.float64)], 1)
    wanted = torch.linalg.lstsq(ones, t).solution
    assert found is not None
    assert torch.allclose(found.weight, wanted[:-1].T, rtol=1e-4, atol=1e-6)
    assert torch.allclose(found.offset, wanted[-1], rtol=1e-4, atol=1e-5)


def test_batches_add_up() -> None:
    x, t, y = rows()
    whole, pieces = collected(x, t, y).joint(), collected(x, t, y, 7).joint()
    for name in ("mean", "target", "xx", "xt", "tt", "yy"):
        assert torch.allclose(getattr(whole, name), getattr(pieces, name), rtol=1e-9, atol=1e-9)


def test_restoring_gives_the_variance_back() -> None:
    x, t, y = rows()
    moments = collected(x, t, y).joint()
    weight = torch.eye(3, 6, dtype=torch.float64)
    found = solve(weight, moments, 0.3, restore=True)
    assert found is not None
    assert torch.allclose(((found.weight @ moments.xx) * found.weight).sum(1), moments.yy, rtol=1e-6)


@pytest.mark.parametrize("count", [1, 2, 5])
def test_singular_statistics_give_finite_weights(count: int) -> None:
    x, t, y = rows(count)
    found = solve(torch.zeros(3, 6, dtype=torch.float64), collected(x, t, y).joint(), 0.01, restore=True)
    assert found is None or bool(found.weight.isfinite().all())


@pytest.mark.parametrize(
    "options", [{}, {"stride": 2}, {"padding": 1}, {"dilation": 2, "padding": 2}, {"stride": 2, "padding": 1}], ids=str
)
def test_patches_are_those_of_unfold(options: dict[str, Any]) -> None:
    conv, x = nn.Conv2d(3, 4, 3, **options), torch.randn(2, 3, 9, 8)
    node = next(n for n in capture(nn.Sequential(conv, nn.Flatten()), x).nodes if n.op == "conv2d")
    use = Use(
        Axis("0.weight", 1), (("", Consumer(node, "x", None, np.arange(3)[:, None], 1)),), np.ones(3, bool), (3, 3)
    )
    at = use.pick(node, x, lambda available, limit: torch.arange(available))
    assert torch.equal(use.rows(node, x, at)[0], F.unfold(x, 3, **options).transpose(1, 2).flatten(0, 1))
    assert torch.equal(use.outputs(node, conv(x), at)[0], conv(x).flatten(2).transpose(1, 2).flatten(0, 1))


def batch_normed(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16, momentum=None), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16, momentum=None), nn.ReLU(),
        nn.Conv2d(16, 8, 1, bias=False), nn.Flatten(), nn.Linear(8 * 64, 5),
    )  # fmt: skip
    for _ in range(3):
        model(synthetic.dead_leaves(64, (3, 16, 16), torch.Generator().manual_seed(seed + 7)))
    return model.eval()


def distance(a: nn.Module, b: nn.Module, x: Tensor) -> float:
    with torch.no_grad():
        return float((a(x) - b(x)).norm() / b(x).norm())


@pytest.mark.parametrize("seed", range(3))
def test_moments_come_closer_than_cosine_and_pruning(seed: int) -> None:
    model = batch_normed(seed)
    x = synthetic.dead_leaves(64, (3, 16, 16), torch.Generator().manual_seed(99))
    found = {m: distance(nm.compress(model, x[:1], merger=m).model, model, x) for m in ("none", "cosine", "moments")}
    assert found["moments"] < min(found["cosine"], found["none"])


def test_moments_are_the_default() -> None:
    how = " ".join(h for g in nm.compress(batch_normed(), torch.randn(1, 3, 16, 16)).summary.groups for h in g.said)
    assert "fitted" in how and "bias added" not in how.split("7:")[0]
    plain = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    assert "fitted" in nm.compress(plain, torch.randn(1, 6)).summary.groups[0].said[0]


def test_a_missing_bias_is_made_and_the_plan_rebuilds_it() -> None:
    model, x = batch_normed(), torch.randn(2, 3, 16, 16)
    small = nm.compress(model, x, merger="moments")
    assert small.plan.biases == {"7.bias": 8}
    assert any("bias added" in h for g in small.summary.groups for h in g.said)
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
    for merger in (nm.Moments(ridge=1e-7, restore_variance=False), nm.Calibrated([x], ridge=1e-7)):
        small = nm.compress(model, x, ratio={"0": 0.5}, criterion=keep_first, merger=merger).model
        assert distance(small, model, x) < 1e-3
    pruned = nm.compress(model, x, ratio={"0": 0.5}, criterion=keep_first, merger="none").model
    assert distance(pruned, model, x) > 1e-2


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_precisions(dtype: torch.dtype) -> None:
    model, x = batch_normed().to(dtype), torch.randn(2, 3, 16, 16, dtype=dtype)
    small = nm.compress(model, x, merger="moments").model
    assert all(p.dtype == dtype and bool(p.isfinite().all()) for p in small.parameters())


def test_dead_and_constant_channels_stay_finite() -> None:
    model, x = batch_normed(), torch.randn(2, 3, 16, 16)
    with torch.no_grad():
        model[1].weight[:3], model[1].bias[:3] = 0, -1
        model[5].weight[2:9] = 0
        model[4].weight[5] = 0
    for criterion in ("l1", lambda rows: rows.sum(1)):
        small = nm.compress(model, x, criterion=criterion, merger="moments", ratio=0.6).model
        assert all(bool(v.isfinite().all()) for v in small.state_dict().values())


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


LOADERS = {
    "pairs": lambda x: [(x, torch.zeros(len(x)))],
    "tensors": lambda x: list(x.split(16)),
    "one tensor": lambda x: x,
    "dicts": lambda x: [{"image": x, "label": torch.zeros(len(x))}],
    "loader": lambda x: torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, torch.zeros(len(x))), 16),
}


@pytest.mark.parametrize("kind", LOADERS)
def test_calibration_takes_what_loaders_yield(kind: str) -> None:
    model, x = batch_normed(), synthetic.dead_leaves(32, (3, 16, 16), torch.Generator().manual_seed(1))
    small = nm.compress(model, x[:1], merger=nm.Calibrated(LOADERS[kind](x))).model
    pruned = nm.compress(model, x[:1], merger="none").model
    assert distance(small, model, x) < 0.75 * distance(pruned, model, x)


@pytest.mark.parametrize("batches", [[], [()]], ids=str)
def test_calibration_without_data_is_an_error(batches: list[Any]) -> None:
    with pytest.raises(nm.MergingError, match="calibration"):
        nm.compress(batch_normed(), torch.randn(1, 3, 16, 16), merger=nm.Calibrated(batches))


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


def test_leaves_look_like_images() -> None:
    x = synthetic.dead_leaves(64, (3, 32, 32), torch.Generator().manual_seed(0))
    assert x.shape == (64, 3, 32, 32)
    assert abs(float(x.mean())) < 1e-5 and abs(float(x.std()) - 1) < 1e-4
    neighbours = float((x[..., 1:] * x[..., :-1]).mean())
    far = float((x[..., 16:] * x[..., :-16]).mean())
    assert 0.6 < neighbours < 0.98 and far < 0.5 * neighbours
    assert 0.6 < float((x[:, 0] * x[:, 1]).mean()) < 0.98
    assert synthetic.dead_leaves(2, (1, 64), torch.Generator()).shape == (2, 1, 64)
    assert synthetic.dead_leaves(2, (1, 9, 8, 7), torch.Generator()).shape == (2, 1, 9, 8, 7)


def test_a_node_can_be_computed_from_bound_arguments() -> None:
    graph = capture(nn.Linear(3, 2), torch.zeros(1, 3))
    assert isinstance(graph.nodes[0], Node) and sum(node_macs(graph).values()) == 6
