"""Offset, deviation, noise and range of inputs: where they are known from, and what follows from them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import neuron_merging as nm
from neuron_merging.evaluation.fidelity import make_example_eval_set
from neuron_merging.inputs import input_sets
from neuron_merging.inputs.input_scale import FROM_BATCH_NORMS, FROM_DTYPE, FROM_EXAMPLE, FROM_GRAPH, holds_real_values
from neuron_merging.inputs.input_sets import (
    JOINED_PRODUCT,
    MAX_JOINED_SAMPLES,
    MAX_ZOOMED_PICTURES,
    MIN_STEPS,
    PASSES_PER_STEP,
    SynthesisEffort,
    add_zoomed_pictures,
    join_few_samples,
    make_fit_inputs,
)
from neuron_merging.inputs.scale_from_norms import count_real_samples, draw_batches, find_input_scales
from neuron_merging.inputs.synthetic import draw_dead_leaves, zoom_pictures

OFFSET, DEVIATION = -40.0, 15.0


def smooth(count: int, channels: int = 1, size: int = 16, seed: int = 7) -> Tensor:
    return draw_dead_leaves(count, (channels, size, size), torch.Generator().manual_seed(seed))


def spectrograms(count: int, seed: int = 7) -> Tensor:
    return OFFSET + DEVIATION * smooth(count, seed=seed)


def normed() -> nn.Sequential:
    """A network whose batch norms have seen spectrograms in decibels."""
    net = nn.Sequential(
        nn.Conv2d(1, 12, 3), nn.BatchNorm2d(12, momentum=None), nn.ReLU(),
        nn.Conv2d(12, 12, 3), nn.BatchNorm2d(12, momentum=None), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(12, 4),
    )  # fmt: skip
    with torch.no_grad():
        for seed in range(4):
            net.train()(spectrograms(64, seed))
    return net.eval()


class Scaled(nn.Module):
    """Normalise inside forward."""

    def __init__(self, offset: float, factor: float, channels: int = 3) -> None:
        super().__init__()
        self.offset, self.factor = offset, factor
        self.net = nn.Sequential(nn.Conv2d(channels, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Flatten())
        self.last = nn.Linear(8 * 12 * 12, 3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(self.net((x.float() - self.offset) * self.factor))
        return y


@pytest.mark.parametrize(
    ("value", "real"),
    [
        (torch.zeros(2, 3, 8, 8), False),
        (torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0)), False),
        (torch.rand(2, 3, 16, 16, generator=torch.Generator().manual_seed(0)), False),
        (255 * torch.rand(2, 3, 16, 16, generator=torch.Generator().manual_seed(0)), False),
        (smooth(2), True),
        ((100 * smooth(2) + 128).clamp(0, 255).to(torch.uint8), True),
        (torch.randn(8, 20, generator=torch.Generator().manual_seed(0)), False),
        (torch.rand(8, 20, generator=torch.Generator().manual_seed(0)), False),
        (torch.randn(8, 20, generator=torch.Generator().manual_seed(0)) * torch.logspace(-2, 3, 20), True),
        (torch.full((2, 3, 8, 8), torch.nan), False),
    ],
)
def test_noise_and_constants_are_not_taken_for_data(value: Tensor, real: bool) -> None:
    assert holds_real_values(value) is real


def test_the_first_batch_norms_tell_offset_and_scale() -> None:
    (scale,) = find_input_scales(nm.analyse(normed(), torch.randn(1, 1, 16, 16)))
    assert scale is not None and scale.source == FROM_BATCH_NORMS
    assert abs(float(scale.mean) - OFFSET) < DEVIATION / 2
    assert 0.5 < float(scale.deviation) / DEVIATION < 2


def test_columns_of_a_table_have_scales_of_their_own() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.BatchNorm1d(6, momentum=None), nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))
    mean, deviation = torch.logspace(2, -1, 6), torch.logspace(-2, 3, 6)
    with torch.no_grad():
        net.train()(mean + deviation * torch.randn(4096, 6))
    (scale,) = find_input_scales(nm.analyse(net.eval(), torch.randn(1, 6)))
    assert scale is not None
    assert torch.allclose(scale.deviation.flatten().float(), deviation, rtol=0.1)
    assert bool(((scale.mean.flatten() - mean).abs() < 0.2 * deviation).all())


@pytest.mark.parametrize("channels", [4, 24])
def test_channels_of_a_signal_may_be_different_quantities(channels: int) -> None:
    pick = torch.Generator().manual_seed(5)
    offset = 30 * torch.randn(channels, 1, generator=pick)
    deviation = torch.randn(channels, 1, generator=pick).exp()
    torch.manual_seed(5)
    net = nn.Sequential(nn.Conv1d(channels, 32, 3), nn.BatchNorm1d(32, momentum=None), nn.ReLU(), nn.Conv1d(32, 2, 3))
    with torch.no_grad():
        for seed in range(4):
            waves = draw_dead_leaves(64, (channels, 32), torch.Generator().manual_seed(seed))
            net.train()(offset + deviation * waves)
    analysis = nm.analyse(net.eval(), torch.randn(1, channels, 32))
    (scale,) = find_input_scales(analysis)
    assert scale is not None
    assert scale.source == FROM_BATCH_NORMS
    if channels == 4:  # fewer than the norm has means: these determine the offsets
        assert (scale.mean[0] - offset).abs().max() < 3
    assert nm.compress(analysis, ratio=0.25).summary.verdict.level != "unknown"  # type: ignore[union-attr]


def test_several_real_samples_are_trusted_more_than_norms() -> None:
    (scale,) = find_input_scales(nm.analyse(normed(), spectrograms(8)))
    assert scale is not None and scale.source == FROM_EXAMPLE
    assert abs(float(scale.mean) - OFFSET) < 1


@pytest.mark.parametrize(
    ("offset", "factor", "mean", "deviation"), [(0, 1 / 255, 127.5, 63.75), (127, 1 / 128, 127, 128)]
)
def test_a_normalisation_in_the_code_tells_the_scale(
    offset: float, factor: float, mean: float, deviation: float
) -> None:
    (scale,) = find_input_scales(nm.analyse(Scaled(offset, factor), torch.randn(1, 3, 16, 16)))
    assert scale is not None and scale.source == FROM_GRAPH
    assert float(scale.mean) == pytest.approx(mean, rel=1e-3)
    assert float(scale.deviation) == pytest.approx(deviation, rel=1e-3)


def test_integers_stay_whole_and_in_range() -> None:
    model = Scaled(127, 1 / 128)
    example = torch.zeros(1, 3, 16, 16, dtype=torch.uint8)
    analysis = nm.analyse(model, example)
    ((made,),) = draw_batches(analysis, 8, 0)
    assert made.dtype == torch.uint8 and made.float().std() > 30
    (plain,) = find_input_scales(nm.analyse(nn.Sequential(Cast(), model.net), example))
    assert plain is not None and plain.source == FROM_DTYPE
    assert nm.compress(analysis, ratio=0.25).model(made).shape == (8, 3)


class Cast(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.float()


def test_batch_norms_are_inverted_through_whole_numbers() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(
        Cast(), nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8, momentum=None), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 14 * 14, 2)
    )
    with torch.no_grad():
        net.train()((60 * smooth(64) + 100).clamp(0, 255))
    analysis = nm.analyse(net.eval(), torch.zeros(1, 1, 16, 16, dtype=torch.uint8))
    found = make_fit_inputs(analysis)
    assert found.batches[0][0].dtype == torch.uint8
    assert found.after < 0.2 and found.resembles_training
    assert nm.compress(analysis, ratio=0.25).summary.verdict.level != "unknown"  # type: ignore[union-attr]


def test_a_denoisers_inputs_get_noise() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16, momentum=None), nn.ReLU(), nn.Conv2d(16, 1, 3, padding=1)
    )
    with torch.no_grad():
        net.train()(0.5 + 0.2 * smooth(64) + 0.2 * torch.randn(64, 1, 16, 16))
    (scale,) = find_input_scales(nm.analyse(net.eval(), torch.randn(1, 1, 16, 16)))
    assert scale is not None and 0.2 < scale.noise < 0.8


def test_pictures_stay_within_the_range_of_pixels() -> None:
    found = make_fit_inputs(nm.analyse(normed(), torch.randn(1, 1, 16, 16)))
    values = torch.cat([batch[0] for batch in found.batches])
    assert float((values - values.mean()).abs().max() / values.std()) < 4


def test_a_guess_is_no_verdict() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3)).eval()
    verdict = nm.compress(net, torch.randn(1, 3, 16, 16), ratio=0.125).summary.verdict
    assert verdict is not None and verdict.fidelity is not None and verdict.fidelity > 0.6
    assert verdict.guessed and verdict.level == "unknown"
    assert "only a guess" in str(verdict) and "a batch of 16" in verdict.advice


def test_the_worse_of_example_and_synthesised_inputs_counts() -> None:
    """The statistics of the norms come from other data than the example, so the outputs on the example are bad."""
    analysis = nm.analyse(normed(), spectrograms(16) * 0.1 + 300)
    verdict = nm.compress(analysis, ratio=0.5).summary.verdict
    assert verdict is not None and verdict.other is not None
    assert verdict.fidelity is not None and verdict.fidelity <= verdict.other[0]
    assert "16 example inputs" in str(verdict)


def test_the_example_counts_only_if_it_is_real() -> None:
    net = normed()
    assert count_real_samples(nm.analyse(net, spectrograms(16))) == 16
    assert make_example_eval_set(nm.analyse(net, torch.randn(16, 1, 16, 16))) is None


def test_few_samples_are_joined_by_synthesised_ones_and_many_are_not() -> None:
    analysis = nm.analyse(normed(), torch.randn(1, 1, 16, 16))
    own = make_fit_inputs(analysis)
    few, many = [spectrograms(4)], [spectrograms(MAX_JOINED_SAMPLES)]
    joined = list(join_few_samples(analysis, few, own))
    assert joined[0] is few[0] and sum(len(batch[0]) for batch in joined[1:]) == 32
    assert join_few_samples(analysis, many, own) is many
    more = list(join_few_samples(analysis, [spectrograms(256)], own))
    assert sum(len(batch[0]) for batch in more[1:]) == JOINED_PRODUCT // 256, "the more real samples, the fewer of ours"


def test_expensive_networks_get_fewer_inputs_and_steps_and_small_ones_more(monkeypatch: pytest.MonkeyPatch) -> None:
    analysis = nm.analyse(normed(), torch.randn(1, 1, 16, 16))
    effort = SynthesisEffort(inputs=256, least=16, steps=20, work=10**9, max_work=10**9)
    work_per_step = PASSES_PER_STEP * 10**5
    expected = {10**3: (256, 40), 10**5: (166, 20), 10**6: (16, 20), 10**7: (16, MIN_STEPS)}
    for work, planned in expected.items():
        monkeypatch.setattr(input_sets, "estimate_work", lambda graph, own=work: own)
        assert input_sets._plan_descent(analysis, effort) == planned
    assert expected[10**5][0] == 10**9 // (20 * work_per_step)


def test_the_summary_says_that_steps_were_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = nm.compress(nm.analyse(normed(), torch.randn(1, 1, 16, 16)), ratio=0.5, effort="fast").summary.notes
    monkeypatch.setitem(input_sets.FIT_EFFORTS, "fast", SynthesisEffort(16, 16, 6, 1, 1))
    fewer = nm.compress(nm.analyse(normed(), torch.randn(1, 1, 16, 16)), ratio=0.5, effort="fast").summary.notes
    words = f"in {MIN_STEPS} steps, usually 6"
    assert any(words in note for note in fewer) and not any("steps" in note for note in usual)


def test_the_summary_says_where_the_scale_is_from() -> None:
    notes = nm.compress(normed(), torch.randn(1, 1, 16, 16), ratio=0.5).summary.notes
    assert "offset and scale of synthetic inputs: the first batch norms" in notes


def test_the_range_of_a_dummy_does_not_bind_what_norms_tell() -> None:
    (scale,) = find_input_scales(nm.analyse(normed(), torch.rand(2, 1, 16, 16)))
    assert scale is not None and scale.low < OFFSET - DEVIATION
    assert abs(float(scale.mean) - OFFSET) < DEVIATION / 2


def test_pictures_of_unknown_scale_are_drawn_at_all_usual_scales() -> None:
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3), nn.Flatten())
    analysis = nm.analyse(net, torch.zeros(1, 3, 16, 16))
    (batch,) = (own[0] for own in draw_batches(analysis, 6, seed=0))
    assert float(batch[::3].min()) >= 0 and float(batch[::3].max()) <= 1
    assert -1 <= float(batch[1::3].min()) < 0 and float(batch[1::3].max()) <= 1
    assert float(batch[2::3].std()) > 2 * float(batch[::3].std())
    assert any("0…1, −1…1" in note for note in nm.compress(analysis, ratio=0.5).summary.notes)


def test_pictures_of_known_scale_are_drawn_at_that_scale() -> None:
    (scale,) = find_input_scales(nm.analyse(Scaled(0.0, 1 / 255), torch.zeros(1, 3, 16, 16)))
    assert scale is not None and scale.source == FROM_GRAPH and not scale.guesses


@pytest.mark.parametrize(
    "dummy",
    [
        torch.arange(512.0).view(2, 1, 16, 16),
        torch.linspace(0, 1, 16).expand(8, 3, 16, 16),
        5 + 1e-4 * torch.linspace(0, 3, 512).sin().view(2, 1, 16, 16),
    ],
    ids=["arange", "linspace", "nearly constant"],
)
def test_ramps_and_constants_are_no_data(dummy: Tensor) -> None:
    assert not holds_real_values(dummy)


def test_zoomed_copies_join_few_pictures_where_no_norm_says_what_inputs_look_like() -> None:
    net = nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3), nn.Flatten())
    analysis, few = nm.analyse(net, torch.zeros(1, 1, 16, 16)), [smooth(4)]
    own, zoomed = add_zoomed_pictures(analysis, few)
    assert own is few[0] and zoomed[0].shape == (12, 1, 16, 16)
    assert bool(zoomed[0].min() >= few[0].min()) and bool(zoomed[0].max() <= few[0].max())
    assert not torch.equal(zoomed[0][:4], few[0])
    many = [smooth(MAX_ZOOMED_PICTURES)]
    assert add_zoomed_pictures(analysis, many) is many
    assert add_zoomed_pictures(nm.analyse(normed(), torch.zeros(1, 1, 16, 16)), few) is few


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_pictures_are_zoomed_in_their_layout_and_dtype(dtype: torch.dtype) -> None:
    pictures = (255 * torch.rand(3, 20, 12, 3, generator=torch.Generator().manual_seed(0))).to(dtype)
    zoomed = zoom_pictures(pictures, seed=0)
    assert zoomed.shape == pictures.shape and zoomed.dtype == dtype


class DeepBranchAndVector(nn.Module):
    """Three norms see the image before the first one sees the vector."""

    def __init__(self) -> None:
        super().__init__()
        blocks = [layer for i in range(4) for layer in (nn.Conv2d(3 if i == 0 else 6, 6, 3), nn.BatchNorm2d(6))]
        self.image, self.vector, self.last = nn.Sequential(*blocks), nn.BatchNorm1d(4), nn.Linear(10, 2)

    def forward(self, image: Tensor, vector: Tensor) -> Tensor:
        out: Tensor = self.last(torch.cat([self.image(image).mean((2, 3)), self.vector(vector)], 1))
        return out


def test_the_first_norms_behind_each_input_give_its_scale() -> None:
    torch.manual_seed(0)
    net = DeepBranchAndVector()
    with torch.no_grad():
        for _ in range(40):
            net(torch.randn(32, 3, 12, 12), 100 + 0.1 * torch.randn(32, 4))
    _, scale = find_input_scales(nm.analyse(net.eval(), (torch.randn(1, 3, 12, 12), torch.randn(1, 4))))
    assert scale is not None and scale.source == FROM_BATCH_NORMS
    assert float((scale.mean - 100).abs().max()) < 3 and 0.03 < float(scale.deviation.mean()) < 0.3


# Waveforms: (batch, time)


class Pitch(nn.Module):
    """A network of convolutions along time whose input has no dimension of channels."""

    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        self.scale = scale
        self.first, self.norm = nn.Conv1d(1, 12, 16, stride=4), nn.BatchNorm1d(12, momentum=None)
        self.second, self.last = nn.Conv1d(12, 8, 4), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.first((x * self.scale)[:, None])).relu()
        z: Tensor = self.last(self.second(y).relu().mean(-1))
        return z


def waves(count: int, seed: int = 3) -> Tensor:
    return draw_dead_leaves(count, (1, 128), torch.Generator().manual_seed(seed))[:, 0]


def neighbours(x: Tensor) -> float:
    return float((x[:, 1:] * x[:, :-1]).mean() / x.square().mean())


@pytest.mark.parametrize("scale", [1.0, 0.25])
def test_a_table_that_a_convolution_reads_is_a_signal(scale: float) -> None:
    net = Pitch(scale)
    with torch.no_grad():
        net.train()(0.1 * waves(256))
    analysis = nm.analyse(net.eval(), torch.randn(1, 128))
    (found,) = find_input_scales(analysis)
    assert found is not None and found.waveform and found.mean.numel() == 1
    batches = make_fit_inputs(analysis, "fast", 0, 32).batches
    x = torch.cat([batch[0] for batch in batches])
    assert x.shape[1:] == (128,) and neighbours(x) > 0.5, "white noise, as for the columns of a table"
    assert 0.05 < float(x.std()) < 0.2


def test_real_waveforms_are_recognised() -> None:
    net = Pitch()
    assert count_real_samples(nm.analyse(net, 5 + 0.01 * waves(4))) == 4
    assert count_real_samples(nm.analyse(net, torch.rand(4, 128, generator=torch.Generator().manual_seed(0)))) == 0
    (found,) = find_input_scales(nm.analyse(net, 5 + 0.01 * waves(16)))
    assert found is not None and found.source == FROM_EXAMPLE
    assert float(found.mean) == pytest.approx(5, abs=0.01) and float(found.deviation) == pytest.approx(0.01, rel=0.2)


def test_a_table_stays_a_table() -> None:
    net = nn.Sequential(nn.Linear(128, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3)).eval()
    (found,) = find_input_scales(nm.analyse(net, torch.randn(1, 128)))
    assert found is not None and not found.waveform
