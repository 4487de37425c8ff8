"""training: the flags that train and finetune share, and the images that they name."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from neuron_merging.errors import MergingError
from neuron_merging.tool.commands import show

if TYPE_CHECKING:
    from neuron_merging.data import Images
    from neuron_merging.training.processes import Processes
    from neuron_merging.training.settings import TrainingRecipe


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class Numbers:
    """The numbers of a recipe; what is not given is the paper's.

    Parameters
    ----------
    epochs
        How many; the milestones move along, so that they stay at the same fractions of the run.
    lr
        The learning rate at the start.
    milestones
        The learning rate falls after these epochs, as 100,150.
    step
        In place of milestones: it falls every STEP epochs.
    decay
        What the learning rate is divided by each time.
    momentum
        Of SGD.
    weight_decay
        Of SGD.
    batch
        Images in a step, over all processes together.
    crop
        Pixels of black around an image before it is cropped at random; 0 for no crop.
    flip
        Mirror every other image.
    seed
        For the first weights, the order of the images, crops and dropout.
    """

    epochs: int | None = None
    lr: float | None = None
    milestones: str | None = None
    step: int | None = None
    decay: float | None = None
    momentum: float | None = None
    weight_decay: float | None = None
    batch: int | None = None
    crop: int | None = None
    flip: bool | None = None
    seed: int | None = None

    def over(self, base: TrainingRecipe) -> TrainingRecipe:
        """A recipe with these numbers in place of its own.

        >>> from neuron_merging.training.settings import TrainingRecipe
        >>> Numbers(epochs=20, lr=0.05).over(TrainingRecipe()).milestones
        (10, 15)
        """
        base = base if self.epochs is None else base.lasting(self.epochs)
        given: dict[str, Any] = {k: v for k, v in asdict(self).items() if v is not None and k != "step"}
        if self.milestones is not None and self.step is not None:
            raise MergingError("both say when the learning rate falls", where="--milestones, --step", fix="Give one.")
        if self.milestones is not None:
            given["milestones"] = _whole_numbers(self.milestones)
        if self.step is not None:
            given["milestones"] = _multiples(self.step, base.epochs)
        return replace(base, **given)


def _whole_numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(",") if part.strip())
    except ValueError as error:
        raise MergingError(f"{text!r} are no epochs", where="--milestones", fix="Write 100,150.") from error


def _multiples(step: int, epochs: int) -> tuple[int, ...]:
    if step < 1:
        raise MergingError(f"the learning rate cannot fall every {step} epochs", where="--step", fix="Give 1 or more.")
    return tuple(range(step, epochs, step))


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class Data:
    """The images to train on.

    Parameters
    ----------
    data
        Images as NAME (fashion-mnist, cifar-10, cifar-100, digits), NAME:FOLDER, or the FOLDER that has the
        network's own data set. Left out: the network's own data set, from the usual places.
    limit
        Use only the first N images for training, and for the test.
    download
        Fetch the data set if it is not at hand.
    """

    data: str | None = None
    limit: int | None = None
    download: Annotated[bool, Parameter(negative=())] = False

    def open(self, own: str | None) -> tuple[Images, Images]:
        """Training and test images; `own` is the name of the network's data set."""
        from neuron_merging.data import DATASETS

        text = self.data or own
        if not text:
            raise MergingError("nothing says what to train on", where="--data", fix="Give --data cifar-10:FOLDER.")
        name = text.partition(":")[0]
        folder = os.path.isdir(os.path.expanduser(text))
        if name not in (*DATASETS, "digits") or (own and folder):
            self._check_folder(text, own, folder)
            name, text = own or "", f"{own}:{text}"
        if name == "imagenet":
            what = "of ImageNet only the validation images are read"
            raise MergingError(what, where="--data", fix="Train on cifar-10, cifar-100 or fashion-mnist.")
        return self._read(text, "train"), self._read(text, "test")

    def _check_folder(self, text: str, own: str | None, there: bool) -> None:
        """What is no data set's name is the folder of the network's own."""
        if own is None or not (there or self.download):
            what = f"there is no data set {text!r}" + (" and no such folder" if own else "")
            raise MergingError(what, where="--data", fix="Give NAME, NAME:FOLDER, or a folder for a built-in network.")

    def _read(self, text: str, split: Literal["train", "test"]) -> Images:
        from neuron_merging.data import Images
        from neuron_merging.data.opening import open_data

        found = open_data(text, split, download=self.download)
        assert isinstance(found, Images)
        if self.limit is not None and self.limit < 2:
            raise MergingError(f"{self.limit} images are too few", where="--limit", fix="Give at least 2.")
        return found if self.limit is None else found.head(self.limit)


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class Run:
    """How the run goes.

    Parameters
    ----------
    resume
        Go on after the last finished epoch of the run in OUT, to the same result.
    device
        Where to compute, as cpu or cuda:1; left out: the accelerator, if there is one.
    """

    resume: Annotated[bool, Parameter(negative=())] = False
    device: str | None = None


def announce(images: Images, test: Images, team: Processes) -> None:
    """What the run starts with: not every launcher starts as many processes as it is asked for."""
    where = f"on {team.device}" if team.count == 1 else f"in {team.count} processes on {team.device}"
    if team.rank == 0:
        show.say(f"training on {len(images):,} images of {images.name}, testing on {len(test):,}, {where}")


@contextmanager
def resumable() -> Iterator[None]:
    """Tell who breaks off a run how to go on with it."""
    try:
        yield
    except KeyboardInterrupt:
        show.say("the finished epochs are kept: the same command with --resume goes on after them")
        raise


def own_data(model: str) -> str | None:
    """The name of the data set that a built-in network is made for."""
    from neuron_merging import networks

    try:
        return networks.find(model).data
    except ValueError:
        return None
