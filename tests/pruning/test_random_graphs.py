"""Random networks: whatever the layers and their order, the right channels go."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, Phase, event, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import neuron_merging as nm
from tests.pruning.zeroing import distance, run, without_readers
from tests.zoo.gates import Gate
from tests.zoo.registry import Fn, randomise
from tests.zoo.shuffles import shuffle_by_hand

CLOSE = 1e-9  # in float64
ACTIVATIONS: list[Callable[[], nn.Module]] = [nn.ReLU, nn.GELU, nn.Tanh, nn.SiLU, nn.Sigmoid, lambda: nn.LeakyReLU(0.1)]


class Sum(nn.Module):
    """A residual block."""

    def __init__(self, branch: nn.Module) -> None:
        super().__init__()
        self.branch = branch

    def forward(self, x: Tensor) -> Tensor:
        return x + self.branch(x)


class Append(Sum):
    """A dense block."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, self.branch(x)], 1)


class Multiply(Sum):
    def forward(self, x: Tensor) -> Tensor:
        return x * self.branch(x).tanh()


def gated(x: Tensor) -> Tensor:
    a, b = x.chunk(2, 1)
    return a * b.sigmoid()


def swapped(x: Tensor) -> Tensor:
    return torch.cat(x.chunk(2, 1)[::-1], 1)


def folded(x: Tensor) -> Tensor:
    half = x.shape[1] // 2
    return x[:, :half] + x[:, half:].relu()


def convolution(draw: st.DrawFn, c: int, out: int) -> nn.Module:
    groups = draw(st.sampled_from([g for g in (1, 1, 2, 4) if c % g == 0 and out % g == 0]))
    kernel = draw(st.sampled_from([1, 3]))
    return nn.Conv2d(c, out, kernel, padding=kernel // 2, groups=groups, bias=draw(st.booleans()))


def branch(draw: st.DrawFn, c: int, out: int) -> nn.Module:
    hidden = draw(st.sampled_from([4, 8]))
    middle = [nn.BatchNorm2d(hidden)] if draw(st.booleans()) else []
    activation = draw(st.sampled_from(ACTIVATIONS))()
    return nn.Sequential(convolution(draw, c, hidden), *middle, activation, convolution(draw, hidden, out))


def widths(draw: st.DrawFn) -> int:
    return draw(st.sampled_from([4, 8, 12, 16]))


def wider(draw: st.DrawFn, c: int) -> tuple[nn.Module, int]:
    out = widths(draw)
    return convolution(draw, c, out), out


def transposed(draw: st.DrawFn, c: int) -> tuple[nn.Module, int]:
    out, groups = widths(draw), draw(st.sampled_from([1, 2]))
    return nn.ConvTranspose2d(c, out, 3, padding=1, groups=groups), out


def depthwise(draw: st.DrawFn, c: int) -> tuple[nn.Module, int]:
    times = draw(st.sampled_from([1, 2])) if c <= 16 else 1
    return nn.Conv2d(c, times * c, 3, padding=1, groups=c), times * c


def norm(draw: st.DrawFn, c: int) -> tuple[nn.Module, int]:
    kinds = [nn.BatchNorm2d(c), nn.InstanceNorm2d(c, affine=True), nn.GroupNorm(c // 2, c)]
    return draw(st.sampled_from(kinds)), c


def activation(draw: st.DrawFn, c: int) -> tuple[nn.Module, int]:
    return draw(st.sampled_from([*ACTIVATIONS, lambda: nn.PReLU(c)]))(), c


def pool(draw: st.DrawFn, c: int) -> tuple[nn.Module, int]:
    return draw(st.sampled_from([nn.MaxPool2d(3, 1, 1), nn.AvgPool2d(3, 1, 1), nn.Upsample(scale_factor=1)])), c


def residual(draw: st.DrawFn, c: int) -> tuple[nn.Module, int]:
    return draw(st.sampled_from([Sum, Multiply]))(branch(draw, c, c)), c


def dense(draw: st.DrawFn, c: int) -> tuple[nn.Module, int]:
    return (Append(branch(draw, c, 4)), c + 4) if c <= 20 else (nn.Identity(), c)


def gate(draw: st.DrawFn, c: int) -> tuple[nn.Module, int]:
    return Gate(c, 4), c


def move(draw: st.DrawFn, c: int) -> tuple[nn.Module, int]:
    moves = [Fn(shuffle_by_hand), nn.ChannelShuffle(2), Fn(swapped), Fn(lambda x: x.flip(1))]
    return draw(st.sampled_from(moves)), c


def halve(draw: st.DrawFn, c: int) -> tuple[nn.Module, int]:
    return (Fn(draw(st.sampled_from([gated, folded]))), c // 2) if c >= 8 and c % 8 == 0 else (nn.Identity(), c)


def squeeze(draw: st.DrawFn, c: int) -> tuple[nn.Module, int]:
    layers = nn.Sequential(nn.PixelShuffle(2), nn.MaxPool2d(2))
    return (layers, c // 4) if c == 16 else (nn.Sequential(nn.PixelUnshuffle(2), nn.Upsample(scale_factor=2)), 4 * c)


STEPS = [
    wider,
    wider,
    transposed,
    depthwise,
    norm,
    norm,
    activation,
    activation,
    pool,
    residual,
    residual,
    dense,
    gate,
    move,
    move,
    halve,
    squeeze,
]


@st.composite
def images(draw: st.DrawFn) -> nn.Module:
    """A convolutional network on 3x4x4 inputs with up to eight random steps."""
    torch.manual_seed(draw(st.integers(0, 2**16)))
    channels = widths(draw)
    layers: list[nn.Module] = [nn.Conv2d(3, channels, 3, padding=1)]
    for step in draw(st.lists(st.sampled_from(STEPS), min_size=1, max_size=8)):
        if channels <= 24 or step is not squeeze:
            layer, channels = step(draw, channels)
            layers.append(layer)
            event(step.__name__)
    ending, features = draw(st.sampled_from([(Fn(flat), 16 * channels), (Fn(mean), channels)]))
    head = [ending, nn.Linear(features, 8), nn.ReLU(), nn.Linear(8, 3)]
    return nn.Sequential(*layers, *head).double()


def flat(x: Tensor) -> Tensor:
    return x.flatten(1)


def mean(x: Tensor) -> Tensor:
    return F.adaptive_avg_pool2d(x, 1).view(x.size(0), -1)


@st.composite
def features(draw: st.DrawFn) -> nn.Module:
    """A network of linear layers with sums, concatenations and norms on six features."""
    torch.manual_seed(draw(st.integers(0, 2**16)))
    width, layers = 6, []
    for kind in draw(st.lists(st.sampled_from(["linear", "norm", "act", "sum", "cat"]), min_size=2, max_size=8)):
        out = draw(st.sampled_from([4, 8, 10]))
        inner = nn.Sequential(nn.Linear(width, out), nn.ReLU(), nn.Linear(out, width))
        made = {
            "linear": (nn.Linear(width, out, bias=draw(st.booleans())), out),
            "norm": (nn.BatchNorm1d(width), width),
            "act": (draw(st.sampled_from(ACTIVATIONS))(), width),
            "sum": (Sum(inner), width),
            "cat": (Append(inner), 2 * width) if width <= 20 else (nn.Identity(), width),
        }
        layer, width = made[kind]
        layers.append(layer)
    return nn.Sequential(*layers, nn.Linear(width, 8), nn.ReLU(), nn.Linear(8, 3)).double()


def check(model: nn.Module, x: Tensor, ratio: float, seed: int) -> None:
    """Plain pruning equals the original without readers, and the plan rebuilds the network."""
    fresh = copy.deepcopy(model)
    randomise(model)
    result = nm.compress(
        model, x, ratio=ratio, criterion="random", seed=seed, merger="none", scope="all", effort="fast"
    )
    reference = without_readers(model, result.plan, {})
    other = torch.randn_like(x)
    assert distance(run(result.model, (other,)), run(reference, (other,))) < CLOSE
    rebuilt = nm.apply_plan(fresh, nm.Plan.from_json(result.plan.to_json()))
    rebuilt.load_state_dict(result.model.state_dict())
    assert distance(run(rebuilt, (other,)), run(result.model, (other,))) == 0


def check_merging(model: nn.Module, x: Tensor, ratio: float) -> None:
    """Merging cuts what plain pruning cuts, and what it writes does what it should."""
    randomise(model)
    analysis = nm.analyse(model, x)
    merged, pruned = (nm.compress(analysis, ratio=ratio, merger=merger, scope="all") for merger in ("cosine", "none"))
    assert merged.plan.cuts == pruned.plan.cuts
    assert merged.summary.error is not None and merged.summary.error < CLOSE


# Without shrinking: that would export some hundreds of networks.
quick = settings(
    max_examples=12,
    deadline=None,
    derandomize=True,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)
ratios = st.sampled_from([0.25, 0.5, 0.75, 0.9])


@quick
@given(model=images(), ratio=ratios, seed=st.integers(0, 99))
def test_convolutional_networks(model: nn.Module, ratio: float, seed: int) -> None:
    check(model, torch.randn(2, 3, 4, 4, dtype=torch.float64), ratio, seed)


@quick
@given(model=features(), ratio=ratios, seed=st.integers(0, 99))
def test_networks_of_linear_layers(model: nn.Module, ratio: float, seed: int) -> None:
    check(model, torch.randn(3, 6, dtype=torch.float64), ratio, seed)


@settings(quick, max_examples=6)
@given(model=images(), ratio=ratios)
def test_merging(model: nn.Module, ratio: float) -> None:
    check_merging(model, torch.randn(2, 3, 4, 4, dtype=torch.float64), ratio)


# Other and more networks of each kind: hypothesis draws by the name of the test.


@pytest.mark.long
@settings(quick, max_examples=40)
@given(model=images(), ratio=ratios, seed=st.integers(0, 99))
def test_more_convolutional_networks(model: nn.Module, ratio: float, seed: int) -> None:
    check(model, torch.randn(2, 3, 4, 4, dtype=torch.float64), ratio, seed)


@pytest.mark.long
@settings(quick, max_examples=40)
@given(model=features(), ratio=ratios, seed=st.integers(0, 99))
def test_more_networks_of_linear_layers(model: nn.Module, ratio: float, seed: int) -> None:
    check(model, torch.randn(3, 6, dtype=torch.float64), ratio, seed)


@pytest.mark.long
@settings(quick, max_examples=20)
@given(model=images(), ratio=ratios)
def test_more_merging(model: nn.Module, ratio: float) -> None:
    check_merging(model, torch.randn(2, 3, 4, 4, dtype=torch.float64), ratio)
