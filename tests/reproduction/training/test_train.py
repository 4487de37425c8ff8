"""Training: steps, seeds, what cannot be trained."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from neuron_merging.errors import MergingError
from neuron_merging.reproduction.training.train import train
from neuron_merging.reproduction.training.training_recipe import TrainingRecipe
from tests.reproduction.training.stripes import SHORT, Net, same, stripes, weights

# Training


def test_steps_are_those_of_sgd_with_momentum_and_weight_decay() -> None:
    images = stripes(24)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 4))
    recipe = TrainingRecipe(epochs=3, milestones=(2,), decay=4, lr=0.2, weight_decay=0.01, batch=24, crop=0, flip=False)
    found = weights(train(model, images, recipe, quiet=True).model)
    x, y = next(iter(images.batches(24)))
    w, b = (p.detach().clone().requires_grad_() for p in (model[1].weight, model[1].bias))
    speeds = [torch.zeros_like(w), torch.zeros_like(b)]
    for lr in (0.2, 0.2, 0.05):
        loss = F.cross_entropy(x.flatten(1) @ w.T + b, y)
        for p, g, v in zip((w, b), torch.autograd.grad(loss, (w, b)), speeds, strict=True):
            v.mul_(0.9).add_(g + 0.01 * p.detach())
            p.data -= lr * v
    torch.testing.assert_close(found["1.weight"], w.detach())
    torch.testing.assert_close(found["1.bias"], b.detach())


def test_it_learns_and_leaves_the_callers_things_alone() -> None:
    model, before, chance = Net(), {}, torch.get_rng_state()
    before = weights(model)
    done = train(model, stripes(256), SHORT, test=stripes(128, seed=1), quiet=True)
    assert done.log[-1].test_accuracy is not None and done.log[-1].test_accuracy > 90
    assert done.log[-1].loss < done.log[0].loss and [line.epoch for line in done.log] == [1, 2, 3, 4]
    assert [line.lr for line in done.log] == pytest.approx([0.05, 0.05, 0.005, 0.0005])
    assert same(before, weights(model)) and model.training and not done.model.training
    assert torch.equal(chance, torch.get_rng_state())
    assert all(p.is_contiguous() for p in done.model.parameters())


def test_the_seed_decides() -> None:
    model, images = Net(), stripes(64)
    first, again = (weights(train(model, images, SHORT, quiet=True).model) for _ in range(2))
    torch.manual_seed(99)
    other = weights(train(model, images, replace(SHORT, seed=1), quiet=True).model)
    assert same(first, again) and not same(first, other)


def test_a_last_batch_of_one_image_is_left_out() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))
    done = train(model, stripes(33), replace(SHORT, epochs=1), quiet=True)
    assert int(done.model[2].num_batches_tracked) == 2  # type: ignore[index]


def test_networks_that_view_their_feature_maps() -> None:
    class Viewing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.fc = nn.Conv2d(1, 8, 3, padding=1), nn.Linear(8 * 64, 4)

        def forward(self, x: Tensor) -> Tensor:
            x = self.conv(x)
            logits: Tensor = self.fc(x.view(x.shape[0], -1))
            return logits

    assert train(Viewing(), stripes(64), SHORT, quiet=True).log[-1].loss < 1


def test_frozen_parameters_stay() -> None:
    model = Net()
    model[0].weight.requires_grad_(False)
    done = train(model, stripes(64), SHORT, quiet=True)
    assert torch.equal(done.model[0].weight, model[0].weight)  # type: ignore[index]
    for p in model.parameters():
        p.requires_grad_(False)
    with pytest.raises(MergingError, match="frozen"):
        train(model, stripes(64), SHORT, quiet=True)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (nn.Sequential(nn.Flatten(), nn.Linear(99, 4)), "does not take a batch"),
        (nn.Sequential(nn.Flatten(), nn.Linear(64, 3)), "have 4 classes"),
        (nn.Conv2d(1, 4, 8), r"returns \(2, 4, 1, 1\)"),
    ],
)
def test_networks_that_do_not_fit_the_images(model: nn.Module, words: str) -> None:
    with pytest.raises(MergingError, match=words):
        train(model, stripes(8), SHORT, quiet=True)


def test_a_loss_that_is_not_finite_is_one_error_and_spoils_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(MergingError, match=r"no longer finite.*smaller --lr"):
        train(Net(), stripes(64), replace(SHORT, lr=1e30), out=tmp_path, quiet=True)
    assert not (tmp_path / "model.safetensors").exists() and not (tmp_path / "checkpoint.safetensors").exists()


# The folder, and going on


class Refusing(Net):
    def forward(self, x: Tensor) -> Tensor:
        raise KeyError("no such thing")


class Flat(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))


def test_a_network_that_cannot_be_trained_is_told(tmp_path: Path) -> None:
    with pytest.raises(MergingError, match=r"does not take a batch of.*KeyError"):
        train(Refusing(), stripes(64), SHORT, quiet=True)
    with pytest.raises(MergingError, match=r"does not train on a batch of \(1, 1, 8, 8\).*--batch"):
        train(Flat(), stripes(64), replace(SHORT, batch=1), quiet=True)


def test_gradients_are_there_wherever_it_is_called_from() -> None:
    with torch.no_grad():
        inside = train(Net(), stripes(64), SHORT, quiet=True)
        assert not torch.is_grad_enabled()
    torch.manual_seed(0)
    assert inside.log[-1].loss < inside.log[0].loss


def test_a_run_that_diverges_in_the_last_step_of_an_epoch_leaves_no_checkpoint(tmp_path: Path) -> None:
    once = replace(SHORT, lr=1e38, batch=64)
    with pytest.raises(MergingError, match="no longer finite"):
        train(Net(), stripes(64), once, test=stripes(32), out=tmp_path, quiet=True)
    assert not (tmp_path / "checkpoint.safetensors").exists()


def test_every_image_is_seen_in_batches_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    plain = nn.Sequential(nn.Flatten(), nn.Linear(64, 4))
    real = F.cross_entropy
    monkeypatch.setattr(F, "cross_entropy", lambda x, y, **more: seen.append(len(y)) or real(x, y, **more))
    train(plain, stripes(5), TrainingRecipe(epochs=1, milestones=(), batch=1, crop=0), quiet=True)
    assert seen == [1] * 5
    seen.clear()
    train(plain, stripes(5), TrainingRecipe(epochs=1, milestones=(), batch=2, crop=0), quiet=True)
    assert seen == [2, 2]
