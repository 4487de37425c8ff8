"""The paper's merging: exact where channels are redundant, plain pruning where no theorem holds, never NaN."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import neuron_merging as nm
from tests.pruning.zeroing import distance, run
from tests.zoo.gates import Gate
from tests.zoo.registry import FLAT, IMAGE, around_flat, around_image, image_to_flat, randomise
from tests.zoo.residual import PreActivation

CLOSE = 1e-5
KEPT = (0, 1, 4, 5)
COPIES = {2: 1, 3: 0, 6: 4, 7: 5}  # removed channel: the kept one that it is a multiple of


# Theorem 1


@st.composite
def scalings(draw: st.DrawFn) -> Tensor:
    """A matrix Z >= 0 with at most one positive entry per column."""
    kept, total = draw(st.integers(1, 5)), draw(st.integers(1, 8))
    z = torch.zeros(kept, total, dtype=torch.float64)
    for column in range(total):
        z[draw(st.integers(0, kept - 1)), column] = draw(st.one_of(st.just(0.0), st.floats(1e-3, 1e3)))
    return z


@settings(max_examples=100, deadline=None, derandomize=True)
@given(z=scalings(), seed=st.integers(0, 10_000))
def test_relu_commutes_with_such_a_matrix(z: Tensor, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    y, v, x = (torch.randn(shape, generator=generator).double() for shape in [(z.shape[0], 4), (3, z.shape[1]), (4, 5)])
    torch.testing.assert_close(v @ (z.T @ y @ x).relu(), (v @ z.T) @ (y @ x).relu())


@pytest.mark.parametrize("z", [[[-1.0]], [[1.0], [1.0]]], ids=["negative", "two entries"])
def test_relu_does_not_commute_with_others(z: list[list[float]]) -> None:
    matrix, x = torch.tensor(z), torch.randn(len(z), 50)
    assert not torch.allclose((matrix.T @ x).relu(), matrix.T @ x.relu())


@pytest.mark.long
@settings(max_examples=25, deadline=None, derandomize=True, phases=[Phase.generate])
@given(data=st.data(), seed=st.integers(0, 10_000))
def test_the_library_finds_the_matrix(data: st.DataObject, seed: int) -> None:
    """Any channels that are multiples of kept ones, in any order, fold without loss."""
    torch.manual_seed(seed)
    size, kept = 9, data.draw(st.permutations(range(9)))[: data.draw(st.integers(1, 8))]
    model = nn.Sequential(nn.Linear(5, size), nn.ReLU(), nn.Linear(size, 3)).double()
    with torch.no_grad():
        for n in set(range(size)) - set(kept):
            m, scale = data.draw(st.sampled_from(kept)), data.draw(st.floats(0.01, 100))
            model[0].weight[n], model[0].bias[n] = scale * model[0].weight[m], scale * model[0].bias[m]
    score = torch.tensor([float(i in kept) for i in range(size)])
    x = torch.randn(7, 5, dtype=torch.float64)
    small = nm.compress(model, x, ratio=1 - len(kept) / size, criterion=lambda rows: score, merger="cosine")
    assert small.plan.groups[0].kept == tuple(sorted(kept))
    assert distance(run(small.model, (x,)), run(model, (x,))) < 1e-10


# Planted redundancy


@torch.no_grad()
def plant(model: nn.Module, layer: str = "a", norm: str = "", width: int = 1) -> nn.Module:
    """Make channels 2, 3, 6, 7 of `layer` positive multiples of kept ones, and of `norm` too so that B = 0."""
    target = model.get_submodule(layer)
    for n, m in COPIES.items():
        s, g = 0.5 + 2 * torch.rand(()), 0.5 + torch.rand(())
        mine, theirs = (slice(i * width, (i + 1) * width) for i in (n, m))
        target.weight[mine] = s * target.weight[theirs]
        if target.bias is not None:
            target.bias[mine] = s * target.bias[theirs]
        if norm:
            plant_norm(model.get_submodule(norm), n, m, float(s), float(g))
    return model


def plant_norm(norm: nn.Module, n: int, m: int, s: float, g: float) -> None:
    norm.running_mean[n] = s * norm.running_mean[m]
    norm.running_var[n] = s**2 * (norm.running_var[m] + norm.eps) - norm.eps
    norm.weight[n], norm.bias[n] = g * norm.weight[m], g * norm.bias[m]


def keep_originals(rows: Tensor) -> Tensor:
    return torch.tensor([float(i in KEPT) for i in range(len(rows))])


def compress(
    model: nn.Module | nm.Analysis, inputs: tuple[Tensor, ...] | None, merger: Any, layer: str = "a"
) -> nm.Compressed:
    result = nm.compress(model, inputs, ratio={layer: 0.5}, criterion=keep_originals, merger=merger, scope="all")
    assert [group.kept for group in result.plan.groups] == [KEPT]
    return result


def merge_and_prune(
    model: nn.Module, inputs: tuple[Tensor, ...], merger: Any = "cosine"
) -> tuple[nm.Compressed, nm.Compressed]:
    """One analysis, with merging and without."""
    analysis = nm.analyse(model, inputs)
    return compress(analysis, None, merger), compress(analysis, None, "none")


class SeveralConsumers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 4, 3), nn.Linear(8, 4), nn.Conv2d(8, 2, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x = self.a(x)
        return self.b(x.relu()), self.c(F.leaky_relu(x, 0.1).mean((2, 3))), self.d(x)


class Concatenated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.d, self.b = nn.Conv2d(3, 8, 3), nn.Conv2d(3, 5, 3), nn.Conv2d(13, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.cat([self.d(x), self.a(x)], 1).relu())


def net(*layers: nn.Module) -> nn.Sequential:
    return nn.Sequential(*layers)


def without_bias() -> nn.Module:
    model = around_flat(nn.ReLU())
    model.a = nn.Linear(6, 8, bias=False)
    return model


def grouped_producer() -> nn.Module:
    return net(nn.Conv2d(3, 4, 1), nn.Conv2d(4, 8, 3, groups=2), nn.ReLU(), nn.Conv2d(8, 4, 1))


def transposed_producer() -> nn.Module:
    return net(nn.ConvTranspose2d(3, 8, 2), nn.ReLU(), nn.Conv2d(8, 4, 1))


PLANTED: dict[str, tuple[Callable[[], nn.Module], Any]] = {
    "linear": (lambda: plant(randomised(without_bias())), FLAT),
    "linear with bias": (lambda: plant(randomised(around_flat(nn.ReLU()))), FLAT),
    "no activation": (lambda: plant(randomised(around_flat(nn.Identity()))), FLAT),
    "convolution": (lambda: plant(randomised(around_image(nn.ReLU()))), IMAGE),
    "batch norm": (lambda: plant_with_norm(net(nn.BatchNorm2d(8), nn.ReLU())), IMAGE),
    "batch norm after relu": (lambda: plant_with_norm(net(nn.ReLU(), nn.BatchNorm2d(8)), "op.1"), IMAGE),
    "batch norm without relu": (lambda: plant_with_norm(net(nn.BatchNorm2d(8))), IMAGE),
    "pre-activation": (lambda: planted_preactivation(), IMAGE),
    "max pool": (lambda: plant(randomised(around_image(net(nn.ReLU(), nn.MaxPool2d(2))))), IMAGE),
    "pool before relu": (lambda: plant(randomised(around_image(net(nn.MaxPool2d(2), nn.ReLU())))), IMAGE),
    "average pool": (lambda: plant(randomised(around_image(net(nn.ReLU(), nn.AvgPool2d(3, padding=1))))), IMAGE),
    "flatten": (lambda: plant(randomised(image_to_flat(net(nn.ReLU(), nn.Flatten()), 512))), IMAGE),
    "mean": (lambda: plant(randomised(image_to_flat(lambda x: x.relu().mean((2, 3)), 8))), IMAGE),
    "batch norm, pool, flatten": (lambda: planted_flatten(), IMAGE),
    "dropout": (lambda: plant(randomised(around_image(net(nn.Dropout(), nn.ReLU(), nn.Dropout2d())))), IMAGE),
    "leaky relu": (lambda: plant(randomised(around_image(nn.LeakyReLU(0.2)))), IMAGE),
    "prelu": (lambda: plant(randomised(around_image(nn.PReLU()))), IMAGE),
    "rrelu": (lambda: plant(randomised(around_image(nn.RReLU()))), IMAGE),
    "functional relu in place": (lambda: plant(randomised(around_image(lambda x: F.relu_(x)))), IMAGE),
    "interpolation": (lambda: plant(randomised(around_image(net(nn.ReLU(), nn.Upsample(scale_factor=2))))), IMAGE),
    "zero padding": (lambda: plant(randomised(around_image(lambda x: F.pad(x.relu(), (1, 1, 1, 1))))), IMAGE),
    "several consumers": (lambda: plant(randomised(SeveralConsumers())), IMAGE),
    "concatenated": (lambda: plant(randomised(Concatenated())), IMAGE),
    "grouped consumer": (lambda: plant(randomised(with_consumer(nn.Conv2d(8, 6, 3, groups=2)))), IMAGE),
    "transposed consumer": (lambda: plant(randomised(with_consumer(nn.ConvTranspose2d(8, 6, 3)))), IMAGE),
    "grouped transposed consumer": (
        lambda: plant(randomised(with_consumer(nn.ConvTranspose2d(8, 6, 3, groups=2)))),
        IMAGE,
    ),
    "pixel shuffle": (lambda: plant(randomised(pixel_shuffled()), width=4), IMAGE),
    "pixel unshuffle": (
        lambda: plant(randomised(around_image(net(nn.ReLU(), nn.PixelUnshuffle(2)), out=32))),
        IMAGE,
    ),
}


def randomised(model: nn.Module) -> nn.Module:
    torch.manual_seed(3)
    randomise(model)
    return model


def plant_with_norm(op: nn.Module, norm: str = "op.0") -> nn.Module:
    return plant(randomised(around_image(op)), norm=norm)


def planted_preactivation() -> nn.Module:
    model = PreActivation()
    model.a, model.n2 = nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
    model.b = nn.Conv2d(8, 8, 3, padding=1)
    return plant(randomised(model), norm="n2")


def planted_flatten() -> nn.Module:
    layers = net(nn.BatchNorm2d(8), nn.ReLU(), nn.AvgPool2d(2), nn.Flatten(), nn.Dropout())
    return plant(randomised(image_to_flat(layers, 128)), norm="op.0")


def with_consumer(consumer: nn.Module) -> nn.Module:
    model = around_image(nn.ReLU())
    model.b = consumer
    return model


def pixel_shuffled() -> nn.Module:
    return around_image(net(nn.PixelShuffle(2), nn.ReLU()), mid=32)


@pytest.mark.parametrize("name", PLANTED)
def test_redundant_channels_fold_without_loss(name: str) -> None:
    build, shapes = PLANTED[name]
    model, inputs = build(), (torch.randn(shapes[0]),)
    wanted = run(model, inputs)
    merged, pruned = merge_and_prune(model, inputs)
    assert distance(run(merged.model, inputs), wanted) < CLOSE
    assert distance(run(pruned.model, inputs), wanted) > 1e-2
    assert all("merged 4 of 4" in how for group in merged.summary.groups for how in group.descriptions)


@pytest.mark.parametrize("build", [grouped_producer, transposed_producer])
def test_redundant_channels_of_other_producers(build: Callable[[], nn.Module]) -> None:
    model = randomised(build())
    index = next(i for i, layer in enumerate(model) if getattr(layer, "out_channels", 0) == 8)
    plant_rows(model[index])
    inputs = (torch.randn(2, 3, 8, 8),)
    merged = compress(model, inputs, "cosine", str(index))
    assert distance(run(merged.model, inputs), run(model, inputs)) < CLOSE


@torch.no_grad()
def plant_rows(layer: nn.Module) -> None:
    rows = layer.weight.transpose(0, 1) if isinstance(layer, nn.ConvTranspose2d) else layer.weight
    for n, m in COPIES.items():
        rows[n], layer.bias[n] = 1.7 * rows[m], 1.7 * layer.bias[m]


def test_a_bias_in_front_of_batch_norm_is_part_of_its_mean() -> None:
    """What counts is the mean less the bias: a channel stays redundant whatever its bias is."""
    model = plant_with_norm(net(nn.BatchNorm2d(8), nn.ReLU()))
    with torch.no_grad():
        shift = 5 * torch.randn(8)
        model.a.bias += shift
        model.op[0].running_mean += shift
    inputs = (torch.randn(2, 3, 8, 8),)
    assert distance(run(compress(model, inputs, "cosine").model, inputs), run(model, inputs)) < CLOSE


# Where the theorem does not hold


NOT_HOMOGENEOUS: dict[str, tuple[Callable[[], Any], tuple[str, ...]]] = {
    "gelu": (nn.GELU, ("gelu",)),
    "sigmoid": (nn.Sigmoid, ("sigmoid",)),
    "relu6": (nn.ReLU6, ("relu6", "hardtanh")),
    "elu": (nn.ELU, ("elu",)),
    "selu": (nn.SELU, ("selu",)),
    "celu": (nn.CELU, ("celu",)),
    "silu": (nn.SiLU, ("silu",)),
    "mish": (nn.Mish, ("mish",)),
    "hardswish": (nn.Hardswish, ("hardswish",)),
    "hardsigmoid": (nn.Hardsigmoid, ("hardsigmoid",)),
    "hardtanh": (nn.Hardtanh, ("hardtanh",)),
    "softplus": (nn.Softplus, ("softplus",)),
    "tanh": (nn.Tanh, ("tanh",)),
    "softsign": (nn.Softsign, ("add", "div")),
    "softshrink": (nn.Softshrink, ("softshrink",)),
    "hardshrink": (nn.Hardshrink, ("hardshrink",)),
    "threshold": (lambda: nn.Threshold(0.2, 0.5), ("threshold",)),
    "square": (lambda: lambda x: x * x, ("mul",)),
    "power": (lambda: lambda x: x.pow(2), ("pow",)),
    "square root": (lambda: lambda x: x.relu().sqrt(), ("sqrt",)),
    "exponential": (lambda: lambda x: x.exp(), ("exp",)),
    "clamp": (lambda: lambda x: x.clamp(max=0.5), ("clamp",)),
    "padding with ones": (lambda: lambda x: F.pad(x, (1, 1), value=1.0), ("pad",)),
    "softmax over space": (lambda: lambda x: x.flatten(2).softmax(2).view(x.shape), ("softmax",)),
    "instance norm": (lambda: nn.InstanceNorm2d(8), ("instance_norm",)),
    "group norm of singles": (lambda: nn.GroupNorm(8, 8), ("group_norm",)),
    "batch norm of the batch": (lambda: nn.BatchNorm2d(8, track_running_stats=False), ("batch_norm",)),
    "layer norm over space": (lambda: nn.LayerNorm([8, 8], bias=False), ("layer_norm",)),
}


@pytest.mark.parametrize("name", NOT_HOMOGENEOUS)
def test_elsewhere_it_is_plain_pruning(name: str) -> None:
    make, words = NOT_HOMOGENEOUS[name]
    model = plant(randomised(around_image(make())))
    inputs = (torch.randn(2, 3, 8, 8),)
    merged, pruned = merge_and_prune(model, inputs)
    reader = next(how for how in merged.summary.groups[0].descriptions if how.startswith("b:"))
    assert "pruned" in reader and any(word in reader for word in words)
    assert torch.equal(merged.model.b.weight, pruned.model.b.weight)
    assert distance(run(merged.model, inputs), run(pruned.model, inputs)) == 0


def test_a_gate_is_plain_pruning_for_what_lies_behind_it() -> None:
    model, inputs = plant(randomised(around_image(Gate(8, 4)))), (torch.randn(2, 3, 8, 8),)
    merged, pruned = merge_and_prune(model, inputs)
    how = dict(line.split(": ", 1) for line in merged.summary.groups[0].descriptions)
    assert how["b"].startswith("pruned") and how["op.down"] == "merged 4 of 4"
    assert torch.equal(merged.model.b.weight, pruned.model.b.weight)


def test_layer_norm_over_channels_is_plain_pruning() -> None:
    model = plant(randomised(around_flat(net(nn.LayerNorm(8), nn.ReLU()))))
    inputs = (torch.randn(4, 6),)
    merged, pruned = merge_and_prune(model, inputs)
    assert (
        "pruned" in merged.summary.groups[0].descriptions[0]
        and "layer_norm" in merged.summary.groups[0].descriptions[0]
    )
    assert distance(run(merged.model, inputs), run(pruned.model, inputs)) == 0


SCALED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "scale": lambda x, scale: (x * scale).relu(),
    "scale behind relu": lambda x, scale: x.relu() * scale,
    "division": lambda x, scale: (x / scale).relu(),
    "shift": lambda x, scale: (x + scale).relu(),
    "prelu": lambda x, scale: F.prelu(x, scale.flatten() / 5),
}


class Scaled(nn.Module):
    """One number per channel on the way, which the copies do not share."""

    def __init__(self, function: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 4, 3)
        self.scale, self.function = nn.Parameter(torch.rand(8, 1, 1) + 0.5), function

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.function(self.a(x), self.scale))


@pytest.mark.parametrize("name", ["scale", "scale behind relu", "division"])
def test_a_number_per_channel_is_part_of_the_scale(name: str) -> None:
    model, inputs = plant(Scaled(SCALED[name])), (torch.randn(2, 3, 8, 8),)
    wanted = run(model, inputs)
    merged, pruned = merge_and_prune(model, inputs)
    exact = distance(run(merged.model, inputs), wanted) < CLOSE
    left_alone = torch.equal(merged.model.b.weight, pruned.model.b.weight)
    assert exact or ("pruned" in merged.summary.groups[0].descriptions[0] and left_alone)


@pytest.mark.parametrize("name", SCALED)
def test_merging_is_no_worse_than_pruning_where_channels_are_redundant(name: str) -> None:
    model, inputs = plant(Scaled(SCALED[name])), (torch.randn(2, 3, 8, 8),)
    wanted = run(model, inputs)
    merged, pruned = (run(small.model, inputs) for small in merge_and_prune(model, inputs))
    assert distance(merged, wanted) <= distance(pruned, wanted)


# Numbers that break careless arithmetic


def normed() -> nn.Module:
    return randomised(around_image(net(nn.BatchNorm2d(8), nn.ReLU())))


def zero_filters(model: nn.Module) -> None:
    model.a.weight[[0, 3, 6]] = 0
    model.a.bias[[0, 3]] = 0


def all_filters_zero(model: nn.Module) -> None:
    model.a.weight.zero_()
    model.a.bias.zero_()


def zero_gamma(model: nn.Module) -> None:
    model.op[0].weight[[0, 2, 5]] = 0


def all_gamma_zero(model: nn.Module) -> None:
    model.op[0].weight.zero_()


def negative_gamma(model: nn.Module) -> None:
    model.op[0].weight[:] = -model.op[0].weight.abs()
    model.op[0].weight[::3] *= -1


def ties(model: nn.Module) -> None:
    model.a.weight[:] = model.a.weight[0]
    for tensor in (model.a.bias, *model.op[0].parameters(), model.op[0].running_mean, model.op[0].running_var):
        tensor[:] = tensor[0]


def constant_channels(model: nn.Module) -> None:
    model.op[0].running_var[[1, 4]] = 0
    model.a.weight[[1, 4]] = 0


def tiny_filters(model: nn.Module) -> None:
    model.a.weight[[1, 3]] *= 1e-38


def tiny_variances(model: nn.Module) -> None:
    model.op[0].running_var[[5, 6]] = 1e-38


def large_numbers(model: nn.Module) -> None:
    model.a.weight[[1, 3]] *= 1e15
    model.op[0].running_var[[1, 3]] = 1e30


SPOILERS = [
    zero_filters,
    all_filters_zero,
    zero_gamma,
    all_gamma_zero,
    negative_gamma,
    ties,
    constant_channels,
    tiny_filters,
    tiny_variances,
    large_numbers,
]


@pytest.mark.parametrize("spoil", SPOILERS)
def test_numbers_stay_finite(spoil: Callable[[nn.Module], None]) -> None:
    model = normed()
    with torch.no_grad():
        spoil(model)
    inputs = (torch.randn(2, 3, 8, 8),)
    analysis, wanted = nm.analyse(model, inputs), run(model, inputs)
    for criterion in ("l2", keep_originals):
        paper, released, pruned = (
            nm.compress(analysis, ratio=0.5, criterion=criterion, merger=merger).model
            for merger in (nm.Cosine(bn="paper"), nm.Cosine(bn="released"), "none")
        )
        for bn, small in {"paper": paper, "released": released}.items():
            assert all(value.isfinite().all() for value in small.state_dict().values()), (bn, criterion)
            most = 1.7 * distance(run(pruned, inputs), wanted)
            assert distance(run(small, inputs), wanted) < most, (bn, criterion)


@pytest.mark.parametrize("spoil", [zero_filters, all_filters_zero])
@pytest.mark.parametrize("criterion", ["l1", "l2-gm", keep_originals])
def test_numbers_stay_finite_without_norm(spoil: Callable[[nn.Module], None], criterion: Any) -> None:
    model = randomised(around_image(nn.ReLU()))
    with torch.no_grad():
        spoil(model)
    inputs = (torch.randn(2, 3, 8, 8),)
    analysis = nm.analyse(model, inputs)
    small, pruned = (nm.compress(analysis, criterion=criterion, merger=merger).model for merger in ("cosine", "none"))
    wanted = run(model, inputs)
    assert distance(run(small, inputs), wanted) < 1.7 * distance(run(pruned, inputs), wanted)


@pytest.mark.parametrize("gamma", [1e-8, 1e-30, 1e-42, 0.0])
def test_a_tiny_gamma_does_not_blow_up(gamma: float) -> None:
    """The scale S divides by the kept channel's gamma: channels that are all but dead are no partners."""
    model, inputs = normed(), (torch.randn(2, 3, 8, 8),)
    with torch.no_grad():
        model.op[0].weight[list(KEPT)] = gamma
        model.op[0].weight[list(COPIES)] = 1
    wanted = run(model, inputs)
    merged, pruned = (run(small.model, inputs) for small in merge_and_prune(model, inputs))
    assert distance(merged, pruned) == 0 < distance(pruned, wanted)


def test_equal_filters_fold_without_loss() -> None:
    model = normed()
    with torch.no_grad():
        ties(model)
    inputs = (torch.randn(2, 3, 8, 8),)
    small = nm.compress(model, inputs, ratio={"a": 0.9}, merger="cosine").model
    assert small.a.out_channels == 1
    assert distance(run(small, inputs), run(model, inputs)) < CLOSE


@pytest.mark.parametrize("bn", ["paper", "released"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_precisions(dtype: torch.dtype, bn: str) -> None:
    model, inputs = normed().to(dtype), (torch.randn(2, 3, 8, 8, dtype=dtype),)
    small = nm.compress(model, inputs, merger=nm.Cosine(bn=bn)).model
    exact = nm.compress(copy.deepcopy(model).double(), inputs[0].double(), merger=nm.Cosine(bn=bn)).model
    assert all(p.dtype == dtype for p in small.parameters()) and small.op[0].running_var.dtype == dtype
    wanted = run(exact, (inputs[0].double(),))
    assert distance([value.double() for value in run(small, inputs)], wanted) < 16 * torch.finfo(dtype).eps


@pytest.mark.parametrize(("dtype", "close"), [(torch.float64, 1e-12), (torch.bfloat16, 5e-2), (torch.float16, 5e-3)])
def test_redundancy_in_other_precisions(dtype: torch.dtype, close: float) -> None:
    model = plant(randomised(around_flat(nn.ReLU()).to(torch.float64)))
    model, inputs = model.to(dtype), (torch.randn(4, 6, dtype=dtype),)
    merged = compress(model, inputs, "cosine")
    assert distance(run(merged.model, inputs), run(model, inputs)) < close


# Against the formulas, one pair at a time


def cosine_of(a: Tensor, b: Tensor) -> float:
    return float(a.flatten() @ b.flatten() / a.norm() / b.norm())


def equation6(model: nn.Module, n: int, m: int) -> tuple[float, float]:
    """METHOD section 1: n is removed, m kept; a bias in front of the norm counts as part of the mean."""
    bn, weight = model.op[0], model.a.weight
    s = float(weight[n].norm() / weight[m].norm())
    sigma = {i: (float(bn.running_var[i]) + bn.eps) ** 0.5 for i in (n, m)}
    gamma, beta = bn.weight.tolist(), bn.bias.tolist()
    mean = (bn.running_mean - model.a.bias).tolist() if model.a.bias is not None else bn.running_mean.tolist()
    scale = s * (gamma[n] / gamma[m]) * (sigma[m] / sigma[n])
    inner = s * (mean[m] - sigma[m] * beta[m] / gamma[m]) - mean[n]
    return scale, (gamma[n] / sigma[n]) * inner + beta[n]


def released(model: nn.Module, n: int, m: int) -> tuple[float, float]:
    """What the authors' program computes: index 1 is removed, index 2 kept, the variance for the deviation."""
    bn, weight = model.op[0], model.a.weight
    s = float(weight[n].norm() / weight[m].norm())
    g1, g2, b1, b2 = (float(t[i]) for t in (bn.weight, bn.bias) for i in (n, m))
    mu1, mu2, v1, v2 = (float(t[i]) for t in (bn.running_mean, bn.running_var) for i in (n, m))
    return s * (g2 / g1) * (v1 / v2), (g2 / v2) * (s * (mu1 - v1 * b1 / g1) - mu2) + b2


def minmax(values: list[float]) -> list[float]:
    low, high = min(values), max(values)
    return [(value - low) / (high - low) if high > low else 0.0 for value in values]


def reference_partner(
    model: nn.Module, n: int, kept: list[int], formula: Callable[..., tuple[float, float]], balance: float
) -> tuple[int, float] | None:
    pairs = {m: formula(model, n, m) for m in kept}
    if formula is equation6:
        pairs = {m: pair for m, pair in pairs.items() if pair[0] > 0}
    if not pairs:
        return None
    spread = dict(zip(pairs, minmax([abs(bias) / scale for scale, bias in pairs.values()]), strict=True))
    cosine = {m: cosine_of(model.a.weight[n], model.a.weight[m]) for m in pairs}
    best = min(pairs, key=lambda m: balance * (1 - cosine[m]) + (1 - balance) * spread[m])
    return best, pairs[best][0]


@torch.no_grad()
def reference_weights(
    model: nn.Module, kept: list[int], formula: Callable[..., tuple[float, float]], threshold: float, balance: float
) -> Tensor:
    """The next layer's new weights, column by column."""
    weight = model.b.weight.clone()
    for n in sorted(set(range(len(model.a.weight))) - set(kept)):
        partner = reference_partner(model, n, kept, formula, balance)
        if partner and cosine_of(model.a.weight[n], model.a.weight[partner[0]]) >= threshold:
            weight[:, partner[0]] += partner[1] * weight[:, n]
    return weight[:, kept]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_batch_norm_formulas(bias: bool, seed: int) -> None:
    torch.manual_seed(seed)
    model = around_image(net(nn.BatchNorm2d(16), nn.ReLU()), mid=16, out=16)
    model.a = nn.Conv2d(3, 16, 3, padding=1, bias=bias)
    randomise(model.double())
    analysis = nm.analyse(model, torch.randn(2, 3, 8, 8).double())
    for bn, formula in (("paper", equation6), ("released", released)):
        for threshold, balance in ((0.1, 0.85), (-1.0, 0.85), (0.0, 0.3), (0.45, 0.0), (-1.0, 1.0)):
            merger = nm.Cosine(threshold=threshold, balance=balance, bn=bn)
            result = nm.compress(analysis, ratio={"a": 0.5}, merger=merger)
            kept = list(result.plan.groups[0].kept)
            wanted = reference_weights(model, kept, formula, threshold, balance)
            torch.testing.assert_close(
                result.model.b.weight, wanted, msg=lambda text, merger=merger: f"{merger}\n{text}"
            )
            assert (result.model.b.weight != model.b.weight[:, kept]).any() or threshold == 0.45, merger


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("threshold", [-1.0, 0.1, 0.45])
@torch.no_grad()
def test_formula_without_norm(bias: bool, threshold: float) -> None:
    """Algorithms 1 and 2; the bias is one more entry of the filter."""
    model = nn.Sequential(nn.Linear(5, 12, bias=bias), nn.ReLU(), nn.Linear(12, 3)).double()
    result = nm.compress(model, torch.randn(2, 5).double(), merger=nm.Cosine(threshold=threshold))
    kept = list(result.plan.groups[0].kept)
    rows = torch.cat([model[0].weight, model[0].bias[:, None]], 1) if bias else model[0].weight
    wanted = model[2].weight.clone()
    for n in set(range(12)) - set(kept):
        best = max(kept, key=lambda m: cosine_of(rows[n], rows[m]))
        if cosine_of(rows[n], rows[best]) >= threshold:
            wanted[:, best] += rows[n].norm() / rows[best].norm() * wanted[:, n]
    torch.testing.assert_close(result.model[2].weight, wanted[:, kept])


@torch.no_grad()
def test_partners_lie_in_the_same_group_of_the_next_layer() -> None:
    model, groups = randomised(around_image(nn.ReLU(), mid=16, out=16)), 2
    model.b = nn.Conv2d(16, 6, 3, groups=groups)
    result = nm.compress(model, torch.randn(2, 3, 8, 8), ratio={"a": 0.5}, merger=nm.Cosine(threshold=-1.0))
    kept = result.plan.groups[0].kept
    rows = torch.cat([model.a.weight.flatten(1), model.a.bias[:, None]], 1)
    for half in range(groups):
        inside = range(8 * half, 8 * half + 8)
        wanted = model.b.weight[3 * half : 3 * half + 3].clone()
        near = [m for m in kept if m in inside]
        for n in set(inside) - set(kept):
            best = max(near, key=lambda m: cosine_of(rows[n], rows[m]))
            wanted[:, best - 8 * half] += rows[n].norm() / rows[best].norm() * wanted[:, n - 8 * half]
        torch.testing.assert_close(
            result.model.b.weight[3 * half : 3 * half + 3], wanted[:, [m - 8 * half for m in near]]
        )


@torch.no_grad()
def test_partners_lie_in_the_same_group_of_a_transposed_layer() -> None:
    model = randomised(around_image(nn.ReLU(), mid=16, out=16))
    model.b = nn.ConvTranspose2d(16, 6, 3, groups=2)
    result = nm.compress(model, torch.randn(2, 3, 8, 8), ratio={"a": 0.5}, merger=nm.Cosine(threshold=-1.0))
    kept = result.plan.groups[0].kept
    rows = torch.cat([model.a.weight.flatten(1), model.a.bias[:, None]], 1)
    wanted = model.b.weight.clone()
    for n in set(range(16)) - set(kept):
        best = max((m for m in kept if m // 8 == n // 8), key=lambda m: cosine_of(rows[n], rows[m]))
        wanted[best] += rows[n].norm() / rows[best].norm() * model.b.weight[n]
    torch.testing.assert_close(result.model.b.weight, wanted[list(kept)])


def test_a_threshold_of_one_is_plain_pruning() -> None:
    model, x = normed(), torch.randn(2, 3, 8, 8)
    strict, plain = (nm.compress(model, x, merger=merger) for merger in (nm.Cosine(threshold=1), "none"))
    assert strict.model.state_dict().keys() == plain.model.state_dict().keys()
    assert all(torch.equal(a, b) for a, b in zip(strict.model.parameters(), plain.model.parameters(), strict=True))


def test_layers_are_merged_with_their_original_weights() -> None:
    """Similarity and choice in a layer do not depend on what was merged into it before (METHOD 2e)."""
    model, x = randomised(around_flat(nn.ReLU())), torch.randn(4, 6)
    both = nm.compress(model, x, merger="cosine")
    alone = {layer: nm.compress(model, x, ratio={layer: 0.5}, merger="cosine") for layer in ("a", "b")}
    assert {g.name: g.kept for g in both.plan.groups} == {k: v.plan.groups[0].kept for k, v in alone.items()}
    rows = list(both.plan.groups[1].kept)
    assert torch.equal(both.model.b.weight, alone["a"].model.b.weight[rows])
    assert torch.equal(both.model.c.weight, alone["b"].model.c.weight)


def test_the_default_is_a_merger_that_needs_no_data() -> None:
    model, inputs = plant(randomised(around_flat(nn.ReLU()))), (torch.randn(4, 6),)
    wanted = run(model, inputs)
    merged, pruned = (run(small.model, inputs) for small in merge_and_prune(model, inputs, None))
    assert distance(merged, wanted) < 0.5 * distance(pruned, wanted)


def test_the_original_is_not_merged_into() -> None:
    model = plant(normed(), norm="op.0")
    before = copy.deepcopy(model.state_dict())
    compress(model, (torch.randn(2, 3, 8, 8),), "cosine")
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
