"""Train a network on images in memory, with random crops and flips and a checkpoint after each epoch.

An epoch depends on the weights, the momentum and a seed derived from the run's seed and the epoch number, so a
resumed run reaches exactly the same weights.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from neuron_merging.atomic import replace_file
from neuron_merging.data import Images
from neuron_merging.errors import MergingError, describe_error
from neuron_merging.models.state_dicts import load_state_dict_checked, write_safetensors
from neuron_merging.reproduction.training import run_state
from neuron_merging.reproduction.training.processes import TrainingProcesses, detect_processes
from neuron_merging.reproduction.training.run_state import EpochLog, TrainingProgress, TrainingState
from neuron_merging.reproduction.training.training_recipe import TrainingRecipe


@dataclass(frozen=True, eq=False)
class EpochShuffle:
    """The random choices of one epoch: the order of the images, their crops and flips.

    All of them are drawn before the epoch starts, so they depend on the generator only: not on the batch size or the
    number of processes.
    """

    order: Tensor
    shift: Tensor
    """(N, 2): the row and the column at which the crop of an image starts."""
    mirror: Tensor


def draw_epoch_shuffle(count: int, generator: torch.Generator, crop: int = 0, flip: bool = False) -> EpochShuffle:
    """Draw the random choices of an epoch of `count` images."""
    order = torch.randperm(count, generator=generator)
    shift = torch.randint(2 * crop + 1, (count, 2), generator=generator)
    mirror = torch.rand(count, generator=generator) < (0.5 if flip else 0)
    return EpochShuffle(order, shift, mirror)


def crop_and_flip(x: Tensor, shift: Tensor, mirror: Tensor, pad: int) -> Tensor:
    """Pad images (N, C, H, W) with zeros, crop them to their size at `shift`, and mirror some.

    >>> x = torch.tensor([[[[1, 2], [3, 4]]]])
    >>> crop_and_flip(x, torch.tensor([[0, 1]]), torch.tensor([False]), pad=1).tolist()
    [[[[0, 0], [1, 2]]]]
    >>> crop_and_flip(x, torch.tensor([[1, 1]]), torch.tensor([True]), pad=1).tolist()
    [[[[2, 1], [4, 3]]]]
    """
    height, width = x.shape[2:]
    rows = shift[:, :1] + torch.arange(height, device=x.device)
    columns = torch.arange(width, device=x.device).expand(len(x), -1)
    columns = shift[:, 1:] + torch.where(mirror[:, None], width - 1 - columns, columns)
    image = torch.arange(len(x), device=x.device)[:, None, None]
    # One gather for the batch: row and column indices of every image, the columns reversed for mirrored ones.
    padded = F.pad(x, (pad, pad, pad, pad))
    return padded[image, :, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)


EVALUATION_BATCH = 256
PROGRESS_STEPS = 10
"""Steps between updates of the progress bar: reading the loss synchronises with the device."""


@dataclass(frozen=True, eq=False)
class TrainingResult:
    """The result of `train`.

    Attributes
    ----------
    model
        The trained network, in evaluation mode.
    log
        Learning rate, loss, accuracies and seconds of each epoch.

    Examples
    --------
    >>> from neuron_merging import models
    >>> from neuron_merging.reproduction import datasets
    >>> images, recipe = datasets.load_digits("train").head(64), TrainingRecipe(epochs=2, crop=0, flip=False)
    >>> [epoch.epoch for epoch in train(models.create_network("digit-net"), images, recipe, quiet=True).log]
    [1, 2]
    """

    model: nn.Module
    log: tuple[EpochLog, ...]


@dataclass(frozen=True, eq=False)
class _TrainingRun:
    """A run that is ready for its next epoch; the prepared model and optimiser are wrapped by accelerate."""

    model: nn.Module
    optimiser: torch.optim.Optimizer
    prepared_model: nn.Module
    prepared_optimiser: Any
    images: Images
    test: Images | None
    recipe: TrainingRecipe
    team: TrainingProcesses
    layout: torch.memory_format

    @property
    def steps(self) -> int:
        """Steps of an epoch, including its test."""
        shares = 0 if self.test is None else -(-len(self.test) // EVALUATION_BATCH)
        return len(_split_into_batches(torch.arange(len(self.images)), self.recipe.batch, self.team.count)) + shares


def train(
    model: nn.Module,
    images: Images,
    recipe: TrainingRecipe | None = None,
    *,
    test: Images | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    about: Mapping[str, Any] | None = None,
    processes: TrainingProcesses | None = None,
    quiet: bool = False,
) -> TrainingResult:
    """Train a copy of the network; the given one does not change.

    Parameters
    ----------
    model
        The network.
    images
        The training images.
    recipe
        The hyperparameters. Default: the paper's for convolutional networks.
    test
        Images for the test after each epoch.
    out
        A folder for the checkpoint, the log, the settings and finally model.safetensors.
    resume
        Continue from the checkpoint in the folder.
    about
        Further settings of the run. They are stored, and a resumed run must have the same.
    processes
        The processes that train. Default: those that accelerate launched, or this process alone.
    quiet
        Show no progress bar.

    Returns
    -------
    TrainingResult
        The trained network and the log.

    Raises
    ------
    MergingError
        The folder contains other files or another run, the network does not accept the images, or the loss is NaN or
        infinite.

    Examples
    --------
    >>> from neuron_merging import models
    >>> from neuron_merging.reproduction import datasets
    >>> images = datasets.load_digits("train").head(64)
    >>> recipe = TrainingRecipe(epochs=1, crop=0, flip=False)
    >>> len(train(models.create_network("digit-net"), images, recipe, quiet=True).log)
    1
    """
    recipe, team = recipe or TrainingRecipe(), processes or detect_processes()
    data = {"data": images.name, "images": len(images), "images_sha256": images.digest}
    settings = {**(about or {}), **data, **recipe.as_dict()}
    folder = None if out is None else Path(out)
    mine = folder if team.rank == 0 else None  # only the first process writes
    # All processes read the state, since each starts from the same weights.
    state = _load_state_to_resume(folder, settings) if resume else None
    _check_run_folder(folder, resume, state)
    # The result goes back to the device that the user's network is on.
    home = next((p.device for p in model.parameters()), torch.device("cpu"))
    with torch.random.fork_rng([team.device] if team.device.type == "cuda" else []):
        job = _prepare_run(copy.deepcopy(model), images, test, recipe, team)
        log = _restore_state(job, state) if state else ()
        with run_state.lock_run_folder(mine):
            if mine is not None:
                _check_run_folder(mine, resume, state)  # again, under the lock: another run may have started
                replace_file(mine / run_state.SETTINGS_FILE, run_state.format_settings_yaml(settings).encode())
            log = _run_epochs(job, log, mine, settings, quiet or team.rank > 0)
            done = team.unwrap_model(job.prepared_model).to(memory_format=torch.contiguous_format).to(home).eval()  # type: ignore[call-overload]
            if mine is not None:
                replace_file(
                    mine / run_state.TRAINED_WEIGHTS_FILE,
                    lambda part: write_safetensors(part, run_state.get_tensor_state(done)),
                )
    return TrainingResult(done, log)


# The start of a run


def _load_state_to_resume(folder: Path | None, settings: Mapping[str, Any]) -> TrainingState | None:
    """Return the checkpoint to resume from, or None if no epoch was finished."""
    if folder is None:
        raise MergingError("there is no run to resume", where="resume=", fix="Give out=, the folder of the run.")
    state = run_state.load_training_state(folder)
    if state:
        run_state.check_same_settings(state.settings, settings, str(folder))
    return state


def _check_run_folder(folder: Path | None, resume: bool, state: TrainingState | None) -> None:
    """Raise if the folder contains other files, or a run that would be overwritten."""
    names = [file.name for file in folder.iterdir()] if folder and folder.exists() else []
    if names and run_state.SETTINGS_FILE not in names:
        raise MergingError("something else is there", where=str(folder), fix="Give another folder.")
    if run_state.CHECKPOINT_FILE in names and not resume:
        fix = "Give another folder, or --resume to continue the run."
        raise MergingError("the folder already contains a run", where=str(folder), fix=fix)
    if run_state.TRAINED_WEIGHTS_FILE in names and not state:
        raise MergingError("the folder contains a finished run", where=str(folder), fix="Give another folder.")


def _prepare_run(
    model: nn.Module, images: Images, test: Images | None, recipe: TrainingRecipe, team: TrainingProcesses
) -> _TrainingRun:
    if len(images) < 2 * team.count or recipe.batch < team.count:
        what = f"{len(images)} images in batches of {recipe.batch} are too few for {team.count} processes"
        raise MergingError(what, where=images.name, fix="Give more images, a larger --batch, or fewer processes.")
    model.to(team.device)
    layout = _choose_memory_format(model, images, team.device)
    model.to(memory_format=layout)  # type: ignore[call-overload]
    learned = [p for p in model.parameters() if p.requires_grad]
    if not learned:
        raise MergingError("every parameter is frozen", where="train()", fix="Set requires_grad on some.")
    optimiser = torch.optim.SGD(learned, recipe.lr, recipe.momentum, weight_decay=recipe.weight_decay)
    wrapped, stepper = team.prepare(model, optimiser)
    share = None if test is None else _move_images(_take_process_share(test, team), team.device)
    return _TrainingRun(
        model, optimiser, wrapped, stepper, _move_images(images, team.device), share, recipe, team, layout
    )


def _choose_memory_format(model: nn.Module, images: Images, device: torch.device) -> torch.memory_format:
    """Choose channels-last, which is faster for convolutions, unless the network fails with it (as view() does)."""
    x = next(images.head(2).batches(2, device))[0]
    layout = torch.channels_last
    try:
        logits = _try_forward(model, x, layout, images.name)
    except MergingError:
        layout = torch.contiguous_format
        logits = _try_forward(model, x, layout, images.name)
    _check_logits(logits, images)
    return layout


@torch.no_grad()
def _try_forward(model: nn.Module, x: Tensor, layout: torch.memory_format, where: str) -> Any:
    trial = copy.deepcopy(model).to(memory_format=layout).eval()  # type: ignore[call-overload]
    try:
        return trial(x.clone(memory_format=layout))
    except Exception as error:
        what = f"the network does not take a batch of {tuple(x.shape)}: {describe_error(error)}"
        raise MergingError(what, where=where, fix="Give images of the network's input size.") from error


def _check_logits(logits: Any, images: Images) -> None:
    shape = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
    if not isinstance(logits, Tensor) or logits.ndim != 2 or logits.shape[1] < images.classes:
        what = f"the network returns {shape}, the images have {images.classes} classes"
        fix = "Build it to return (images, classes), for instance with --arg num_classes=10."
        raise MergingError(what, where=images.name, fix=fix)


def _take_process_share(images: Images, team: TrainingProcesses) -> Images:
    return replace(images, x=images.x[team.rank :: team.count], y=images.y[team.rank :: team.count])


def _move_images(images: Images, device: torch.device) -> Images:
    return replace(images, x=images.x.to(device), y=images.y.to(device))


def _restore_state(job: _TrainingRun, state: TrainingState) -> tuple[EpochLog, ...]:
    load_state_dict_checked(job.model, state.weights, run_state.CHECKPOINT_FILE)
    for name, parameter in job.model.named_parameters():
        if name in state.momentum:
            # In the parameter's memory format, which the file does not store.
            kept = torch.empty_like(parameter, requires_grad=False).copy_(state.momentum[name])
            job.optimiser.state[parameter]["momentum_buffer"] = kept
    return state.log


# The run


@torch.enable_grad()
def _run_epochs(
    job: _TrainingRun, log: tuple[EpochLog, ...], folder: Path | None, settings: Mapping[str, Any], quiet: bool
) -> tuple[EpochLog, ...]:
    with TrainingProgress(job.recipe.epochs, job.steps, len(log), quiet=quiet) as progress:
        for epoch in range(len(log), job.recipe.epochs):
            line = _run_epoch(job, epoch, progress)
            log = (*log, line)
            if folder is not None:
                run_state.save_training_state(
                    folder, TrainingState(run_state.get_tensor_state(job.model), _collect_momentum(job), settings, log)
                )
            progress.print_epoch(line)
    return log


def _run_epoch(job: _TrainingRun, epoch: int, progress: TrainingProgress) -> EpochLog:
    start = time.perf_counter()
    lr = job.recipe.lr_at(epoch)
    for group in job.optimiser.param_groups:
        group["lr"] = lr
    torch.manual_seed(_derive_seed(job.recipe.seed, epoch, 1 + job.team.rank))  # for dropout
    loss, accuracy = _train_epoch(job, epoch, progress)
    # Before the test, so that all processes test the same network.
    job.team.broadcast_buffers(job.model)
    score = None if job.test is None else _evaluate_epoch(job, job.test, epoch, progress)
    return EpochLog(epoch + 1, lr, loss, accuracy, score, round(time.perf_counter() - start, 2))


def _train_epoch(job: _TrainingRun, epoch: int, progress: TrainingProgress) -> tuple[float, float]:
    """Run one pass over the images; return the mean loss and the accuracy during training."""
    job.prepared_model.train()
    sums = torch.zeros(3, device=job.team.device)  # loss, correct predictions, images
    for step, (x, y, size) in enumerate(_iterate_batches(job, epoch)):
        logits = _forward_batch(job, x)
        loss = F.cross_entropy(logits, y, reduction="sum")
        job.prepared_optimiser.zero_grad()
        job.team.backward(
            loss * (job.team.count / size)
        )  # undo the averaging over processes: the mean over the global batch
        job.prepared_optimiser.step()
        sums += torch.stack([loss.detach().float(), (logits.argmax(1) == y).sum(), sums.new_tensor(len(y))])
        if step % PROGRESS_STEPS == 0:
            progress.show(epoch, *_compute_means(sums, job, epoch))
        progress.advance()
    return _compute_means(job.team.total(sums), job, epoch)


def _forward_batch(job: _TrainingRun, x: Tensor) -> Tensor:
    try:
        logits: Tensor = job.prepared_model(x)
    except (ValueError, RuntimeError) as error:
        what = f"the network does not train on a batch of {tuple(x.shape)}: {describe_error(error)}"
        raise MergingError(what, where="train", fix="Give another --batch.") from error
    return logits


def _compute_means(sums: Tensor, job: _TrainingRun, epoch: int) -> tuple[float, float]:
    loss, right, count = sums.tolist()
    _check_value_finite(loss, "loss", job, epoch)
    return loss / count, 100 * right / count


def _check_value_finite(value: float, name: str, job: _TrainingRun, epoch: int) -> None:
    if not math.isfinite(value):
        raise MergingError(
            f"the {name} is no longer finite (learning rate {job.recipe.lr_at(epoch):g})",
            where=f"epoch {epoch + 1}",
            fix="Train again with a smaller --lr; look for images or weights that are not finite.",
        )


def _iterate_batches(job: _TrainingRun, epoch: int) -> Iterator[tuple[Tensor, Tensor, int]]:
    """Yield this process's part of every batch, normalised and augmented, and the size of the global batch."""
    recipe, images, team = job.recipe, job.images, job.team
    generator = torch.Generator().manual_seed(_derive_seed(recipe.seed, epoch, 0))
    drawn = draw_epoch_shuffle(len(images), generator, recipe.crop, recipe.flip)
    shift, mirror = drawn.shift.to(team.device), drawn.mirror.to(team.device)
    for batch in _split_into_batches(drawn.order, recipe.batch, team.count):
        # Strided, so that the parts differ by at most one image.
        mine = batch[team.rank :: team.count].to(team.device)
        x = images.x[mine]
        if recipe.crop or recipe.flip:
            x = crop_and_flip(x, shift[mine], mirror[mine], recipe.crop)
        # clone(), because contiguous() leaves a tensor with one channel unchanged: it satisfies both layouts
        yield images.normalize(x).clone(memory_format=job.layout), images.y[mine], len(batch)


def _split_into_batches(order: Tensor, size: int, processes: int) -> tuple[Tensor, ...]:
    """Split the order into batches. Drop a last one with a single image per process: batch norm would fail on it."""
    batches: tuple[Tensor, ...] = order.split(size)  # type: ignore[no-untyped-call]
    return batches[:-1] if len(batches[-1]) < min(size, 2 * processes) and len(batches) > 1 else batches


@torch.no_grad()
def _evaluate_epoch(job: _TrainingRun, test: Images, epoch: int, progress: TrainingProgress) -> float:
    job.model.eval()
    right, size = torch.zeros(1, device=job.team.device), torch.zeros((), device=job.team.device)
    for x, y in test.batches(EVALUATION_BATCH, job.team.device):
        logits = job.model(x.clone(memory_format=job.layout))
        right += (logits.argmax(1) == y).sum()
        size = torch.maximum(size, logits.abs().amax())
        progress.advance()
    _check_value_finite(float(size), "network's output", job, epoch)
    count = job.team.total(right.new_tensor([len(test)]))
    return 100 * float(job.team.total(right)) / float(count)


def _collect_momentum(job: _TrainingRun) -> dict[str, Tensor]:
    states = ((name, job.optimiser.state.get(p, {})) for name, p in job.model.named_parameters())
    buffers = ((name, state.get("momentum_buffer")) for name, state in states)
    return {name: buffer for name, buffer in buffers if buffer is not None}


def _derive_seed(*parts: int) -> int:
    return int(np.random.SeedSequence(parts).generate_state(1, np.uint32)[0])
