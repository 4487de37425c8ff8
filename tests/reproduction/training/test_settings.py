"""The paper's recipes of training."""

from __future__ import annotations

import pytest

from neuron_merging.errors import MergingError
from neuron_merging.reproduction.training import training_recipe
from neuron_merging.reproduction.training.training_recipe import TrainingRecipe

# Recipes


def test_recipe_of_lenet_is_the_papers() -> None:
    recipe = training_recipe.get_paper_recipe("lenet-300-100")
    rates = [recipe.lr_at(epoch) for epoch in range(recipe.epochs)]
    assert len(rates) == 60
    assert rates == pytest.approx([0.1] * 15 + [0.01] * 15 + [0.001] * 15 + [0.0001] * 15)
    assert (recipe.momentum, recipe.weight_decay, recipe.batch) == (0.9, 1e-4, 128)
    assert not recipe.crop and not recipe.flip


@pytest.mark.parametrize("network", ["vgg-16", "resnet-56", "wideresnet-40-4"])
def test_recipe_of_convolutional_networks_is_the_papers(network: str) -> None:
    recipe = training_recipe.get_paper_recipe(network)
    rates = [recipe.lr_at(epoch) for epoch in range(recipe.epochs)]
    assert rates == pytest.approx([0.1] * 100 + [0.01] * 50 + [0.001] * 50)
    assert (recipe.momentum, recipe.weight_decay, recipe.batch) == (0.9, 5e-4, 128)
    assert recipe.crop == 4 and recipe.flip


def test_another_number_of_epochs_moves_the_milestones() -> None:
    assert training_recipe.get_paper_recipe("vgg-16").with_epochs(8).milestones == (4, 6)
    assert training_recipe.get_paper_recipe("lenet-300-100").with_epochs(20).milestones == (5, 10, 15)
    assert training_recipe.get_paper_recipe("vgg-16").with_epochs(1).milestones == ()


@pytest.mark.parametrize(
    "numbers",
    [{"epochs": 0}, {"lr": float("nan")}, {"lr": -1.0}, {"batch": 0}, {"milestones": (5, 3)}, {"decay": 0.5}],
)
def test_recipes_that_cannot_be_meant(numbers: dict[str, float]) -> None:
    with pytest.raises(MergingError, match=next(iter(numbers))):
        TrainingRecipe(**numbers)  # type: ignore[arg-type]


# The folder, and going on


@pytest.mark.parametrize("seed", [-1, 2**63])
def test_seeds_have_bounds(seed: int) -> None:
    with pytest.raises(MergingError, match="seed is"):
        TrainingRecipe(seed=seed)
