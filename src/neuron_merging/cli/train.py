"""The commands `train` and `finetune`, and the flags that they share."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from neuron_merging.cli import console
from neuron_merging.config.text_values import parse_pairs
from neuron_merging.errors import MergingError

if TYPE_CHECKING:
    from neuron_merging.data import Images
    from neuron_merging.reproduction.training.processes import TrainingProcesses
    from neuron_merging.reproduction.training.training_recipe import TrainingRecipe
from typing import TYPE_CHECKING

from neuron_merging.cli.model_options import JsonFlag, TextList

if TYPE_CHECKING:
    from torch import nn
from pathlib import Path
from typing import TYPE_CHECKING

from neuron_merging.cli.model_options import CompressedFolder, RebuildOptions

if TYPE_CHECKING:
    from torch import nn

    from neuron_merging.data import Images


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class TrainingOptions:
    """The hyperparameters of a training recipe. Default: the paper's.

    Parameters
    ----------
    epochs
        Number of epochs. The milestones scale with it.
    lr
        Initial learning rate.
    milestones
        Epochs after which the learning rate falls, for example 100,150.
    step
        Instead of milestones: the learning rate falls every STEP epochs.
    decay
        The divisor of the learning rate at each milestone.
    momentum
        Momentum of SGD.
    weight_decay
        Weight decay of SGD.
    batch
        Batch size of all processes together.
    crop
        Padding in pixels before a random crop; 0 for no crop.
    flip
        Flip each image horizontally with probability 1/2.
    seed
        Seed of the initial weights, the order of images, crops and dropout.
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

    def apply_to(self, base: TrainingRecipe) -> TrainingRecipe:
        """Return a recipe in which the given hyperparameters replace those of `base`.

        >>> from neuron_merging.reproduction.training import TrainingRecipe
        >>> TrainingOptions(epochs=20, lr=0.05).apply_to(TrainingRecipe()).milestones
        (10, 15)
        """
        # First: milestones that are not given scale with the number of epochs.
        base = base if self.epochs is None else base.with_epochs(self.epochs)
        given: dict[str, Any] = {k: v for k, v in asdict(self).items() if v is not None and k != "step"}
        if self.milestones is not None and self.step is not None:
            raise MergingError("there are two learning-rate schedules", where="--milestones, --step", fix="Give one.")
        if self.milestones is not None:
            given["milestones"] = _parse_epochs(self.milestones)
        if self.step is not None:
            given["milestones"] = _list_multiples(self.step, base.epochs)
        return replace(base, **given)


def _parse_epochs(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(",") if part.strip())
    except ValueError as error:
        raise MergingError(f"{text!r} is not a list of epochs", where="--milestones", fix="Write 100,150.") from error


def _list_multiples(step: int, epochs: int) -> tuple[int, ...]:
    if step < 1:
        raise MergingError(f"the learning rate cannot fall every {step} epochs", where="--step", fix="Give 1 or more.")
    return tuple(range(step, epochs, step))


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class TrainingDataOptions:
    """The images to train on.

    Parameters
    ----------
    data
        Images as NAME (fashion-mnist, cifar-10, cifar-100, digits), NAME:FOLDER, or the FOLDER with the network's
        default data set (default: that data set, searched in the usual places).
    limit
        Use only the first N images for training and for the test.
    download
        Download the data set if it is missing.
    """

    data: str | None = None
    limit: int | None = None
    download: Annotated[bool, Parameter(negative=())] = False

    def open(self, default: str | None) -> tuple[Images, Images]:
        """Open training and test images; `default` is the name of the network's data set."""
        from neuron_merging.reproduction.datasets import PAPER_DATASETS

        text = self.data or default
        if not text:
            raise MergingError("no data set to train on", where="--data", fix="Give --data cifar-10:FOLDER.")
        name = text.partition(":")[0]
        folder = os.path.isdir(os.path.expanduser(text))
        if name not in (*PAPER_DATASETS, "digits") or (default and folder):
            self._check_folder(text, default, folder)
            name, text = default or "", f"{default}:{text}"
        if name == "imagenet":
            what = "ImageNet's training images are not supported"
            raise MergingError(what, where="--data", fix="Train on cifar-10, cifar-100 or fashion-mnist.")
        return self._read(text, "train"), self._read(text, "test")

    def _check_folder(self, text: str, default: str | None, is_folder: bool) -> None:
        """Raise unless `text` can be the folder of the network's default data set."""
        if default is None or not (is_folder or self.download):
            what = f"there is no data set {text!r}" + (" and no such folder" if default else "")
            raise MergingError(what, where="--data", fix="Give NAME, NAME:FOLDER, or a folder for a built-in network.")

    def _read(self, text: str, split: Literal["train", "test"]) -> Images:
        from neuron_merging.data import Images
        from neuron_merging.data.open_data import open_dataset

        found = open_dataset(text, split, download=self.download)
        assert isinstance(found, Images)
        if self.limit is not None and self.limit < 2:
            raise MergingError(f"{self.limit} images are too few", where="--limit", fix="Give at least 2.")
        return found if self.limit is None else found.head(self.limit)


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Flags of a run.

    Parameters
    ----------
    resume
        Continue after the last finished epoch of the run in OUT; the result is the same as without the interruption.
    device
        The device, as cpu or cuda:1 (default: the accelerator, if there is one).
    """

    resume: Annotated[bool, Parameter(negative=())] = False
    device: str | None = None


def print_run_start(images: Images, test: Images, team: TrainingProcesses) -> None:
    """Print the data, the device and the number of processes, which a launcher may have set differently."""
    where = f"on {team.device}" if team.count == 1 else f"in {team.count} processes on {team.device}"
    if team.rank == 0:
        console.print_message(f"training on {len(images):,} images of {images.name}, testing on {len(test):,}, {where}")


@contextmanager
def hint_resume_on_interrupt() -> Iterator[None]:
    """Print how to continue when the user interrupts a run."""
    try:
        yield
    except KeyboardInterrupt:
        console.print_message("finished epochs are stored: the same command with --resume continues")
        raise


def find_default_dataset(model: str) -> str | None:
    """Return the data set of a built-in network, or None."""
    from neuron_merging import models

    try:
        return models.find_network(model).data
    except ValueError:
        return None


def train(
    network: str,
    /,
    *,
    out: str,
    data: TrainingDataOptions | None = None,
    numbers: TrainingOptions | None = None,
    run: RunOptions | None = None,
    weights: str | None = None,
    arg: TextList = None,
    json: JsonFlag = False,
) -> None:
    """Train a network with the paper's settings, or with others.

    Parameters
    ----------
    network
        A built-in network's name, package.module:factory, timm:NAME or torchvision:NAME.
    out
        The folder for model.safetensors, the checkpoint of the last epoch, log.csv and training.yaml.
    weights
        A state dict to start from: .safetensors, .pt or .pth.
    arg
        An argument of the network's factory, as NAME=VALUE; may be repeated.
    """
    from neuron_merging.reproduction.training import processes, train
    from neuron_merging.reproduction.training.training_recipe import get_paper_recipe

    options = run or RunOptions()
    team = processes.detect_processes(options.device)
    recipe = (numbers or TrainingOptions()).apply_to(get_paper_recipe(network))
    images, test = (data or TrainingDataOptions()).open(find_default_dataset(network))
    settings = parse_pairs(arg, "--arg") or {}
    # Built-in networks take the number of classes; a user's factory has arguments of its own.
    if find_default_dataset(network):
        settings = {"classes": images.classes, **settings}
    model = _build_network(network, settings, weights, recipe.seed)
    about = {"network": network, "arg": settings, "weights": weights}
    print_run_start(images, test, team)
    with hint_resume_on_interrupt():
        done = train(model, images, recipe, test=test, out=out, resume=options.resume, about=about, processes=team)
    if team.rank == 0:
        score = done.log[-1].test_accuracy
        console.print_facts(
            {"accuracy": score if json else f"{score:.2f} %", "epochs": len(done.log), "written": out}, json
        )


def _build_network(network: str, arg: dict[str, Any], weights: str | None, seed: int) -> nn.Module:
    """Build the network with initial weights drawn from the seed, or with those of a file."""
    import torch

    from neuron_merging.models import sources
    from neuron_merging.models.state_dicts import load_weights
    from neuron_merging.onnx.formats import find_format

    if os.path.isdir(network):
        fix = "neuron-merging finetune trains it."
        raise MergingError("this is a folder, perhaps of a compressed network", where=network, fix=fix)
    if (form := find_format(network)) is not None and not form.trainable:
        raise MergingError(f"an {form.suffix} file cannot be trained", where=network, fix="Name the network itself.")
    # So that `train` twice gives the same network.
    torch.manual_seed(seed)
    model = sources.build_from_source(network, arg)
    if weights is not None:
        load_weights(model, weights)
    return model


def finetune(
    folder: CompressedFolder,
    /,
    *,
    out: str | None = None,
    data: TrainingDataOptions | None = None,
    numbers: TrainingOptions | None = None,
    run: RunOptions | None = None,
    rebuild: RebuildOptions | None = None,
    json: JsonFlag = False,
) -> None:
    """Train a compressed network further: a tenth of the paper's epochs at a tenth of its learning rate.

    Parameters
    ----------
    out
        The folder to write (default FOLDER-tuned). It has the same format and the same plan.
    """
    from neuron_merging.checkpoint import load_folder, save_folder
    from neuron_merging.reproduction.training import processes, run_state, train
    from neuron_merging.reproduction.training.training_recipe import get_finetune_recipe

    options = run or RunOptions()
    team = processes.detect_processes(options.device)
    # normpath, or "small/" would become "small/-tuned".
    out = out or f"{os.path.normpath(folder)}-tuned"
    _check_finetune_target(out)
    small, network = _load_small_network(folder, rebuild or RebuildOptions())
    recipe = (numbers or TrainingOptions()).apply_to(get_finetune_recipe(network))
    images, test = (data or TrainingDataOptions()).open(find_default_dataset(network))
    about = {"network": network, "digest": load_folder.read_folder(folder, ())[0].digest}
    print_run_start(images, test, team)
    with hint_resume_on_interrupt():
        done = train(small, images, recipe, test=test, out=out, resume=options.resume, about=about, processes=team)
    # All processes hold the same network; one of them writes it.
    if team.rank > 0:
        return
    # `train` works on a copy, so `small` still has the weights from before.
    scores = _measure_accuracy(small, test), _measure_accuracy(done.model, test)
    notes = {name: (Path(out) / name).read_bytes() for name in (run_state.SETTINGS_FILE, run_state.LOG_FILE)}
    save_folder.save_finetuned(
        folder, done.model, out, accuracy=scores, data=f"{len(test):,} images of {test.name}", more=notes
    )
    # It served --resume, and the folder is complete now.
    (Path(out) / run_state.CHECKPOINT_FILE).unlink(missing_ok=True)
    _print_finetune_result(out, scores, len(done.log), json)


def _check_finetune_target(out: str) -> None:
    """Raise if OUT already contains a compressed network, before any work is done."""
    from neuron_merging import atomic
    from neuron_merging.checkpoint.manifest import PLAN_FILE

    atomic.resolve_path(out)
    if os.path.isfile(os.path.join(out, PLAN_FILE)):
        raise MergingError("the folder already contains a compressed network", where=out, fix="Give another --out.")


def _load_small_network(folder: str, rebuild: RebuildOptions) -> tuple[nn.Module, str]:
    """Return the network of a folder and the name of the original."""
    from neuron_merging.checkpoint import load_folder
    from neuron_merging.checkpoint.recipe_names import check_arguments_trusted

    recipe, name = load_folder.read_recipe(folder), rebuild.model
    if name is None:
        return load_folder.load(folder, trust=rebuild.trust), recipe.model or ""
    arg = parse_pairs(rebuild.arg, "--arg") or recipe.arg
    if rebuild.arg is None:
        check_arguments_trusted(name, arg, folder, rebuild.trust)
    return load_folder.load(
        folder, build=lambda: load_folder.build_or_load_network(name, arg, trust=rebuild.trust)
    ), name


def _measure_accuracy(model: nn.Module, images: Images) -> float:
    from neuron_merging import evaluation

    return evaluation.accuracy(*evaluation.predict(model, images.batches(256)))


def _print_finetune_result(out: str, scores: tuple[float, float], epochs: int, as_json: bool) -> None:
    before, after = scores
    if as_json:
        return console.print_json({"accuracy": scores, "epochs": epochs, "written": out})
    row = ("accuracy", f"{before:.2f} %", f"{after:.2f} %", f"{after - before:+.2f}")
    console.print_table("", ("", "before", "after", "change"), [row])
    console.print_message(f"written to {out}")
