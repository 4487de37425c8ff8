"""Define the hyperparameters of a training run, with the paper's values. Does not import torch."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import Any

from neuron_merging.errors import MergingError


@dataclass(frozen=True, kw_only=True)
class TrainingRecipe:
    """The hyperparameters of SGD with momentum and a step schedule of the learning rate.

    Parameters
    ----------
    epochs
        The number of passes over the images.
    lr
        The initial learning rate.
    milestones
        Numbers of epochs after which the learning rate is divided by `decay`.
    decay
        The divisor of the learning rate at each milestone.
    momentum
        The momentum of SGD.
    weight_decay
        The weight decay of SGD.
    batch
        Images per step, over all processes.
    crop
        Padding in pixels before a random crop to the original size; 0 for no crop.
    flip
        Whether images are mirrored with probability 1/2.
    seed
        The seed of the order of images, crops and dropout.

    Raises
    ------
    MergingError
        A value is out of range.

    Examples
    --------
    >>> recipe = TrainingRecipe(epochs=4, milestones=(2, 3))
    >>> [round(recipe.lr_at(epoch), 4) for epoch in range(4)]
    [0.1, 0.1, 0.01, 0.001]
    """

    epochs: int = 200
    lr: float = 0.1
    milestones: tuple[int, ...] = (100, 150)
    decay: float = 10.0
    momentum: float = 0.9
    weight_decay: float = 5e-4
    batch: int = 128
    crop: int = 4
    flip: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        bounds = {"epochs": 1, "batch": 1, "crop": 0, "lr": 0, "momentum": 0, "weight_decay": 0, "decay": 1}
        for name, least in bounds.items():
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= least):
                raise MergingError(f"{name} is {value}", where=f"--{_format_flag(name)}", fix=f"Give at least {least}.")
        if not 0 <= self.seed < 2**63:
            raise MergingError(f"seed is {self.seed}", where="--seed", fix="Give an integer from 0 to 2**63 - 1.")
        if list(self.milestones) != sorted({m for m in self.milestones if m > 0}):
            fix = "Give numbers of epochs in rising order, as 100,150."
            raise MergingError(f"milestones are {self.milestones}", where="--milestones", fix=fix)

    def lr_at(self, epoch: int) -> float:
        """Return the learning rate of an epoch, counted from 0."""
        return self.lr / self.decay ** sum(milestone <= epoch for milestone in self.milestones)

    def with_epochs(self, epochs: int) -> TrainingRecipe:
        """Return a longer or shorter recipe, with the milestones at the same fractions of the run.

        >>> TrainingRecipe().with_epochs(20).milestones
        (10, 15)
        """
        moved = {round(milestone * epochs / self.epochs) for milestone in self.milestones}
        return replace(self, epochs=epochs, milestones=tuple(sorted(m for m in moved if 0 < m < epochs)))

    def as_dict(self) -> dict[str, Any]:
        """Return the fields as a dictionary for YAML and JSON."""
        return {**asdict(self), "milestones": list(self.milestones)}


CONVOLUTIONAL_RECIPE = TrainingRecipe()
"""The paper's recipe for VGG, ResNet and WideResNet."""
LENET_RECIPE = TrainingRecipe(epochs=60, milestones=(15, 30, 45), weight_decay=1e-4, crop=0, flip=False)


def get_paper_recipe(network: str) -> TrainingRecipe:
    """Return the paper's recipe for a network; unknown networks get the one for convolutional networks.

    Parameters
    ----------
    network
        The name of a network.

    Returns
    -------
    TrainingRecipe
        The hyperparameters.

    Examples
    --------
    >>> get_paper_recipe("lenet-300-100").milestones, get_paper_recipe("vgg-16").milestones
    ((15, 30, 45), (100, 150))
    """
    return LENET_RECIPE if network.startswith("lenet") else CONVOLUTIONAL_RECIPE


def get_finetune_recipe(network: str) -> TrainingRecipe:
    """Return the recipe for fine-tuning: a tenth of the paper's learning rate and of its epochs.

    Parameters
    ----------
    network
        The name of a network.

    Returns
    -------
    TrainingRecipe
        The hyperparameters.

    Examples
    --------
    >>> get_finetune_recipe("vgg-16").epochs, get_finetune_recipe("vgg-16").lr
    (20, 0.01)
    """
    full = get_paper_recipe(network)
    return replace(full.with_epochs(full.epochs // 10), lr=full.lr / 10)


def _format_flag(name: str) -> str:
    return name.replace("_", "-")
