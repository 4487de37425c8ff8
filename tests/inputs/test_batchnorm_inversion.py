"""Inputs synthesised from batch-norm statistics."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load, save_file
from torch import Tensor, nn

import neuron_merging as nm
from neuron_merging.inputs import batchnorm_inversion, input_sets
from neuron_merging.inputs.batchnorm_inversion import GeneratedInputs, invert_batch_norms
from neuron_merging.inputs.disk_cache import DiskCache
from neuron_merging.inputs.input_sets import make_fit_inputs
from neuron_merging.inputs.scale_from_norms import find_stored_norms
from neuron_merging.merging.protocol import MergeKind
from tests.conftest import mark_long


class Two(nn.Module):
    """Two inputs, one of them a vector beside an image."""

    def __init__(self) -> None:
        super().__init__()
        self.image = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1))
        self.vector = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU())
        self.last = nn.Linear(16, 3)

    def forward(self, image: Tensor, vector: Tensor) -> Tensor:
        y: Tensor = self.last(torch.cat([self.image(image).flatten(1), self.vector(vector)], 1))
        return y


def conv(dims: int) -> nn.Module:
    layer = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1]
    norm = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)[dims - 1]
    pool = (nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d)[dims - 1]
    return nn.Sequential(
        layer(2, 8, 3), norm(8), nn.ReLU(), layer(8, 8, 3), norm(8), nn.ReLU(), pool(1), nn.Flatten(), nn.Linear(8, 4)
    )


def trained(model: nn.Module, *shapes: tuple[int, ...]) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """Batch norms that have seen inputs unlike ours: shifted, and of another size."""
    for norm in (m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)):
        norm.momentum = None
    with torch.no_grad():
        for _ in range(4):
            model.train()(*(3 * torch.randn(64, *shape).cumsum(-1) / 4 + 1 for shape in shapes))
    return model.eval(), tuple(torch.zeros(2, *shape) for shape in shapes)


KINDS = {
    "series": lambda: trained(conv(1), (2, 24)),
    "images": lambda: trained(conv(2), (2, 12, 12)),
    "volumes": lambda: trained(conv(3), (2, 8, 8, 8)),
    "two inputs": lambda: trained(Two(), (3, 12, 12), (5,)),
}


@pytest.mark.parametrize("kind", KINDS)
def test_statistics_approach_the_stored_ones(kind: str) -> None:
    model, inputs = KINDS[kind]()
    found = invert_batch_norms(nm.analyse(model, inputs), 32, steps=30)
    assert not found.refusal
    assert found.after < found.before / 4
    assert found.after == pytest.approx(_distance(model, found), rel=1e-3)


def _distance(model: nn.Module, found: GeneratedInputs) -> float:
    """The same by hooks on the network's own modules."""
    terms: dict[int, list[float]] = {}

    def look(norm: nn.Module, args: tuple[Tensor]) -> None:
        rows = args[0].movedim(1, 0).flatten(1)
        stored, eps = norm.running_var + norm.eps, norm.eps
        off = (rows.mean(1) - norm.running_mean) ** 2 + (
            (rows.var(1, unbiased=False) + eps).sqrt() - stored.sqrt()
        ) ** 2
        terms.setdefault(id(norm), []).append(float((off / stored).mean()))

    norms = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    hooks = [norm.register_forward_pre_hook(look) for norm in norms]
    with torch.no_grad():
        for batch in found.batches:
            model(*batch)
    for hook in hooks:
        hook.remove()
    return sum(sum(each) / len(each) for each in terms.values()) / len(terms)


class TestBfloat16:
    """Convolutions of expensive networks run in bfloat16 where the processor has it; here everywhere."""

    @pytest.fixture(autouse=True)
    def _always(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(batchnorm_inversion, "MIN_BFLOAT16_WORK", 0)
        monkeypatch.setattr(batchnorm_inversion, "is_bfloat16_fast", lambda tensors: True)

    @staticmethod
    def seen_dtypes(monkeypatch: pytest.MonkeyPatch) -> list[torch.dtype]:
        """The dtypes of all batch norms' inputs, in the order of the run."""
        seen: list[torch.dtype] = []
        compute = batchnorm_inversion._compute_statistics

        def look(value: Tensor) -> tuple[Tensor, Tensor]:
            seen.append(value.dtype)
            return compute(value)

        monkeypatch.setattr(batchnorm_inversion, "_compute_statistics", look)
        return seen

    @pytest.mark.parametrize("kind", KINDS)
    def test_inputs_are_as_good(self, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
        torch.manual_seed(0)
        model, inputs = KINDS[kind]()
        found = invert_batch_norms(nm.analyse(model, inputs), 32, steps=30)
        assert found.after == pytest.approx(_distance(model, found), rel=0.05, abs=1e-5)
        seen = self.seen_dtypes(monkeypatch)
        monkeypatch.setattr(batchnorm_inversion, "MIN_BFLOAT16_WORK", 10**30)
        exact = invert_batch_norms(nm.analyse(model, inputs), 32, steps=30)
        assert set(seen) == {torch.float32}
        assert found.after < 1.5 * exact.after + 1e-5

    def test_it_is_used(self, monkeypatch: pytest.MonkeyPatch) -> None:
        seen = self.seen_dtypes(monkeypatch)
        invert_batch_norms(nm.analyse(*KINDS["images"]()), 16, steps=3)
        assert {torch.float32, torch.bfloat16} == set(seen)
        assert seen[0] == seen[-1] == torch.float32

    def test_strided_depthwise_convolutions_keep_float32(self, monkeypatch: pytest.MonkeyPatch) -> None:
        seen = self.seen_dtypes(monkeypatch)
        layers = nn.Conv2d(2, 8, 3), nn.BatchNorm2d(8), nn.Conv2d(8, 8, 3, stride=2, groups=8), nn.BatchNorm2d(8)
        found = invert_batch_norms(nm.analyse(*trained(nn.Sequential(*layers), (2, 12, 12))), 16, steps=5)
        assert found.after < found.before
        assert [torch.bfloat16, torch.float32] in [seen[i : i + 2] for i in range(0, len(seen), 2)]

    def test_not_where_the_difference_of_large_numbers_counts(self, monkeypatch: pytest.MonkeyPatch) -> None:
        torch.manual_seed(0)
        model, inputs = KINDS["images"]()
        assert isinstance(model, nn.Sequential)
        # The first norm's inputs are 1,000 deviations from zero, the network is otherwise the same.
        model[0].bias.data += 1000 * model[1].running_var.sqrt()
        model[1].running_mean += 1000 * model[1].running_var.sqrt()
        seen = self.seen_dtypes(monkeypatch)
        found = invert_batch_norms(nm.analyse(model, inputs), 32, steps=5)
        assert found.after < found.before
        assert seen.count(torch.bfloat16) <= 2  # one pass, which told

    def test_a_network_without_gradients_in_bfloat16_is_differentiated_in_float32(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        compute = batchnorm_inversion._BatchInversion._compute_loss

        def refuse(self: Any, with_gradients: bool, bfloat16: bool) -> tuple[float, str]:
            loss, refusal = compute(self, with_gradients, bfloat16)
            return loss, "only in float32" if bfloat16 and with_gradients else refusal

        monkeypatch.setattr(batchnorm_inversion._BatchInversion, "_compute_loss", refuse)
        found = invert_batch_norms(nm.analyse(*KINDS["images"]()), 16, steps=5)
        assert not found.refusal
        assert found.after < found.before


def test_a_seed_gives_the_same_inputs_and_another_gives_others() -> None:
    model, inputs = KINDS["images"]()
    first, again, other = (invert_batch_norms(nm.analyse(model, inputs), 8, steps=3, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(first.batches[0][0], again.batches[0][0])
    assert not torch.equal(first.batches[0][0], other.batches[0][0])


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda norm: norm.running_var.zero_(), "no variance"),
        (lambda norm: norm.reset_running_stats(), "never trained"),
    ],
)
def test_useless_statistics_are_refused_and_the_merge_goes_on(spoil: object, said: str) -> None:
    model, inputs = KINDS["images"]()
    for norm in (m for m in model.modules() if isinstance(m, nn.BatchNorm2d)):
        spoil(norm)  # type: ignore[operator]
    analysis = nm.analyse(model, inputs)
    assert said in make_fit_inputs(analysis).refusal
    if said == "never trained":
        assert nm.compress(analysis, ratio=0.5).model[0].out_channels == 4  # type: ignore[index, union-attr]


def test_one_useless_norm_does_not_spoil_the_others() -> None:
    model, inputs = KINDS["images"]()
    model[1].running_var.zero_()  # type: ignore[index, union-attr, operator]
    assert len(find_stored_norms(nm.analyse(model, inputs).graph)) == 1


@pytest.mark.parametrize(
    ("model", "example", "said"),
    [
        (nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 3)), torch.zeros(1, 2, 8, 8), "no batch norm"),
        (nn.Sequential(nn.Linear(2, 4), nn.LayerNorm(4), nn.Linear(4, 2)), torch.zeros(1, 2), "no batch norm"),
    ],
)
def test_networks_without_batch_norms_keep_their_sources(model: nn.Module, example: Tensor, said: str) -> None:
    assert said in make_fit_inputs(nm.analyse(model.eval(), example)).refusal


# Kept on disk


def test_what_was_remembered_is_kept_and_taken_up_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that was cut off goes on at the batch where it was."""
    monkeypatch.setenv("NEURON_MERGING_CACHE", str(tmp_path))
    monkeypatch.setattr(batchnorm_inversion, "INVERSION_BATCH_SIZE", 8)
    model, inputs = KINDS["images"]()
    descended: list[int] = []
    right = batchnorm_inversion._BatchInversion.run

    def cut_off(self: object, steps: int, number: int, of: int) -> GeneratedInputs:
        descended.append(number)
        if number == 2 and descended.count(2) == 1:
            raise KeyboardInterrupt
        return right(self, steps, number, of)  # type: ignore[arg-type]

    monkeypatch.setattr(batchnorm_inversion._BatchInversion, "run", cut_off)
    with pytest.raises(KeyboardInterrupt):
        invert_batch_norms(nm.analyse(model, inputs), 24, steps=3)
    found = invert_batch_norms(nm.analyse(model, inputs), 24, steps=3)
    assert descended == [0, 1, 2, 2]
    monkeypatch.setenv("NEURON_MERGING_CACHE", "")
    plain = invert_batch_norms(nm.analyse(model, inputs), 24, steps=3)
    assert all(torch.equal(a[0], b[0]) for a, b in zip(found.batches, plain.batches, strict=True))
    assert (found.before, found.after) == (plain.before, plain.after)


def test_the_cache_knows_networks_by_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEURON_MERGING_CACHE", str(tmp_path))
    model, inputs = KINDS["images"]()
    for _ in range(2):
        invert_batch_norms(nm.analyse(model, inputs), 8, steps=2)
    assert len(list((tmp_path / "remembered").iterdir())) == 1
    with torch.no_grad():
        model[0].weight[0, 0, 0, 0] += 1  # type: ignore[index, union-attr, operator]
    invert_batch_norms(nm.analyse(model, inputs), 8, steps=2)
    assert len(list((tmp_path / "remembered").iterdir())) == 2


def test_a_damaged_or_read_only_cache_is_no_reason_to_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEURON_MERGING_CACHE", str(tmp_path))
    model, inputs = KINDS["images"]()
    first = invert_batch_norms(nm.analyse(model, inputs), 8, steps=2)
    for file in (tmp_path / "remembered").rglob("*.safetensors"):
        file.write_bytes(file.read_bytes()[:100])
    again = invert_batch_norms(nm.analyse(model, inputs), 8, steps=2)
    assert torch.equal(first.batches[0][0], again.batches[0][0])
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("NEURON_MERGING_CACHE", str(tmp_path / "file"))
    assert not invert_batch_norms(nm.analyse(model, inputs), 8, steps=2).refusal


def test_the_oldest_go_when_the_cache_is_full(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path, max_bytes=100)
    for i in range(3):
        cache.write(f"{i}/0.safetensors", bytes(60))
        os.utime(tmp_path / f"{i}/0.safetensors", (i, i))
    assert sorted(folder.name for folder in tmp_path.iterdir()) == ["2"]


def _rewrite(file: Path, tensors: dict[str, Tensor] | None = None, **notes: str) -> None:
    """Change an entry of the cache, as another version, another program or a bad disk may do."""
    content, changed = load(file.read_bytes()), {**_read_notes(file), **notes}
    save_file(content if tensors is None else tensors, file, {k: v for k, v in changed.items() if v})


def _read_notes(file: Path) -> dict[str, str]:
    with safe_open(file, "pt") as opened:
        return dict(opened.metadata())


ENTRIES: dict[str, Callable[[Path], object]] = {
    "no steps": lambda file: _rewrite(file, steps=""),
    "no figures": lambda file: save_file(load(file.read_bytes()), file),
    "steps that are no number": lambda file: _rewrite(file, steps="many"),
    "a distance that is no number": lambda file: _rewrite(file, after="nan"),
    "another version": lambda file: _rewrite(file, version="1"),
    "another shape": lambda file: _rewrite(file, {"0": torch.zeros(8, 2, 9, 9)}),
    "another dtype": lambda file: _rewrite(file, {"0": load(file.read_bytes())["0"].double()}),
    "NaN": lambda file: _rewrite(file, {"0": load(file.read_bytes())["0"].fill_(math.nan)}),
    "other tensors": lambda file: _rewrite(file, {"weight": torch.zeros(3)}),
    "text": lambda file: file.write_text("no tensors"),
    "nothing": lambda file: file.write_bytes(b""),
}


@pytest.mark.parametrize("kind", ENTRIES)
def test_an_entry_of_the_cache_that_does_not_fit_is_replaced(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NEURON_MERGING_CACHE", str(tmp_path))
    model, inputs = KINDS["images"]()
    first = invert_batch_norms(nm.analyse(model, inputs), 8, steps=2)
    (file,) = tmp_path.rglob("*.safetensors")
    right, notes = load(file.read_bytes()), _read_notes(file)
    ENTRIES[kind](file)
    again = invert_batch_norms(nm.analyse(model, inputs), 8, steps=2)
    assert torch.equal(first.batches[0][0], again.batches[0][0])
    assert (first.before, first.after, first.steps) == (again.before, again.after, again.steps)
    assert torch.equal(load(file.read_bytes())["0"], right["0"]) and _read_notes(file) == notes


def test_nothing_is_kept_where_the_cache_is_turned_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEURON_MERGING_CACHE", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    model, inputs = KINDS["images"]()
    assert invert_batch_norms(nm.analyse(model, inputs), 8, steps=2).batches
    assert not list(tmp_path.iterdir())


class OneSample(nn.Module):
    """A network whose code says how many samples there are."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.norm(self.first(x.reshape(1, 1, 8, 8))).relu().mean((2, 3)))
        return out


@pytest.mark.parametrize("asked", mark_long([{"ratio": 0.25}, {"budget": {"macs": 0.8}}], [{"ratio": 0.25}]))
def test_networks_that_take_one_number_of_samples_are_given_no_other(asked: dict[str, Any]) -> None:
    model = OneSample()
    for _ in range(4):
        model(torch.randn(1, 8, 8))
    found = nm.compress(model.eval(), torch.randn(1, 8, 8), **asked)
    assert found.model(torch.randn(1, 8, 8)).shape == (1, 4)
    assert {merge.kind for merge in found.merged.merges} == {MergeKind.FITTED}


class TestMirroredInputs:
    def test_copies_join_if_the_norms_see_the_same_on_them(self) -> None:
        model, example = trained(conv(2), (2, 12, 12))
        symmetric = {
            name: (value + value.flip(-1)) / 2 for name, value in model.state_dict().items() if value.ndim == 4
        }
        model.load_state_dict(symmetric, strict=False)
        norms = [own for own in model.modules() if isinstance(own, nn.BatchNorm2d)]
        with torch.no_grad():  # statistics of the symmetric filters
            model.train()(torch.randn(256, 2, 12, 12).cumsum(2))
        assert norms
        found = invert_batch_norms(nm.analyse(model.eval(), example), 16, steps=4, mirror=True)
        assert found.mirrored
        half = len(found.batches) // 2
        assert found.unmirrored == found.batches[:half]
        for own, copy in zip(found.unmirrored, found.batches[half:], strict=True):
            assert torch.equal(own[0].flip(-1), copy[0])

    def test_vectors_are_not_mirrored(self) -> None:
        model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))
        found = invert_batch_norms(nm.analyse(*trained(model, (6,))), 16, steps=4, mirror=True)
        assert found.batches and not found.mirrored

    def test_the_search_tries_cuts_on_inputs_whose_mirror_images_it_does_not_fit(self) -> None:
        model, example = trained(conv(2), (2, 12, 12))
        analysis = nm.analyse(model, example)
        own = GeneratedInputs(tuple((torch.randn(8, 2, 12, 12),) for _ in range(3)))
        both = replace(own, batches=(*own.batches, *map(batchnorm_inversion.mirror_batch, own.batches)), mirrored=True)
        found = input_sets._make_search_inputs(analysis, input_sets.InputRequest(), both, None)
        probes = torch.cat([batch[0] for batch in found.probes.batches])
        fitted = torch.cat([batch[0] for batch in found.fit])
        assert len(fitted) == 32 and len(probes) == 8
        assert not any(torch.equal(x, y) or torch.equal(x.flip(-1), y) for x in probes for y in fitted)


class OverwritesItsActivation(nn.Module):
    """Writes into the result of an exponential, which the gradient of the exponential needs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x).exp()
        hidden.mul_(2)
        out: Tensor = self.last(self.norm(hidden))
        return out


def test_a_network_without_gradients_is_compressed_on_other_inputs() -> None:
    torch.manual_seed(0)
    net = OverwritesItsActivation()
    with torch.no_grad():
        net(torch.randn(64, 4))
    found = nm.synthesize_inputs(net.eval(), torch.randn(1, 4))
    assert not found.batches and "cannot be differentiated" in found.refusal
    assert nm.compress(net, torch.randn(1, 4), ratio=0.5).model.first.out_features == 4
