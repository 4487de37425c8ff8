"""The hyperparameters of a training run, and the paper's values for them. Does not import torch."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import Any

from neuron_merging.errors import MergingError


@dataclass(frozen=True, kw_only=True)
class TrainingRecipe:
    """SGD with momentum, and a learning rate that falls at given epochs.

    Parameters
    ----------
    epochs
        How often every image is seen.
    lr
        The learning rate at the start.
    milestones
        After that many epochs the learning rate is divided by `decay`.
    decay
        See `milestones`.
    momentum
        Of SGD.
    weight_decay
        Of SGD.
    batch
        Images in a step, over all processes together.
    crop
        Pixels by which an image is padded before a crop of its own size at a random place.
    flip
        Whether every other image is mirrored.
    seed
        For the order, the crops and dropout.

    Raises
    ------
    MergingError
        A number that cannot be meant.

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
            raise MergingError(f"seed is {self.seed}", where="--seed", fix="Give a whole number from 0 to 2**63 - 1.")
        if list(self.milestones) != sorted({m for m in self.milestones if m > 0}):
            fix = "Give numbers of epochs in rising order, as 100,150."
            raise MergingError(f"milestones are {self.milestones}", where="--milestones", fix=fix)

    def lr_at(self, epoch: int) -> float:
        """The learning rate of an epoch, counted from 0."""
        return self.lr / self.decay ** sum(milestone <= epoch for milestone in self.milestones)

    def with_epochs(self, epochs: int) -> TrainingRecipe:
        """Longer or shorter, with the milestones at the same fractions of the run.

        >>> TrainingRecipe().with_epochs(20).milestones
        (10, 15)
        """
        moved = {round(milestone * epochs / self.epochs) for milestone in self.milestones}
        return replace(self, epochs=epochs, milestones=tuple(sorted(m for m in moved if 0 < m < epochs)))

    def as_dict(self) -> dict[str, Any]:
        """For YAML and JSON."""
        return {**asdict(self), "milestones": list(self.milestones)}


CONVOLUTIONAL_RECIPE = TrainingRecipe()
LENET_RECIPE = TrainingRecipe(epochs=60, milestones=(15, 30, 45), weight_decay=1e-4, crop=0, flip=False)


def get_paper_recipe(network: str) -> TrainingRecipe:
    """What the paper trains a network with; networks that it does not have are trained as its convolutional ones.

    Parameters
    ----------
    network
        A built-in network's name.

    Returns
    -------
    TrainingRecipe
        Its settings.

    Examples
    --------
    >>> get_paper_recipe("lenet-300-100").milestones, get_paper_recipe("vgg-16").milestones
    ((15, 30, 45), (100, 150))
    """
    return LENET_RECIPE if network.startswith("lenet") else CONVOLUTIONAL_RECIPE


def get_finetune_recipe(network: str) -> TrainingRecipe:
    """The same for a network that is trained already: a tenth of the learning rate, a tenth of the epochs.

    Parameters
    ----------
    network
        A built-in network's name.

    Returns
    -------
    TrainingRecipe
        Its settings.

    Examples
    --------
    >>> get_finetune_recipe("vgg-16").epochs, get_finetune_recipe("vgg-16").lr
    (20, 0.01)
    """
    whole = get_paper_recipe(network)
    return replace(whole.with_epochs(whole.epochs // 10), lr=whole.lr / 10)


def _format_flag(name: str) -> str:
    return name.replace("_", "-")
