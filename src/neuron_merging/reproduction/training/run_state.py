"""Store the state of a training run (weights, momentum, settings, log) in one safetensors file, and show its progress.

The file is replaced atomically, so an interruption leaves the state of the last finished epoch.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec
import safetensors
import yaml
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from torch import Tensor, nn

from neuron_merging.atomic import lock_path, replace_file, resolve_path
from neuron_merging.errors import MergingError
from neuron_merging.models.state_dicts import write_safetensors

CHECKPOINT_FILE, TRAINED_WEIGHTS_FILE, SETTINGS_FILE, LOG_FILE = (
    "checkpoint.safetensors",
    "model.safetensors",
    "training.yaml",
    "log.csv",
)
_MODEL_PREFIX, _MOMENTUM_PREFIX = "model.", "momentum."


@dataclass(frozen=True)
class EpochLog:
    """One line of the log. Accuracies are in percent; `accuracy` is that on the augmented training images."""

    epoch: int
    lr: float
    loss: float
    accuracy: float
    test_accuracy: float | None
    seconds: float


@dataclass(frozen=True, eq=False)
class TrainingState:
    """All that the next epoch depends on. There is no random state, because each epoch derives its own seed."""

    weights: Mapping[str, Tensor]
    momentum: Mapping[str, Tensor]
    settings: Mapping[str, Any]
    log: tuple[EpochLog, ...]


def save_training_state(folder: Path, state: TrainingState) -> None:
    """Write the checkpoint, then the log as CSV."""
    tensors = {_MODEL_PREFIX + name: value for name, value in state.weights.items()}
    tensors |= {_MOMENTUM_PREFIX + name: value for name, value in state.momentum.items()}
    texts = {"settings": dict(state.settings), "log": [asdict(line) for line in state.log]}
    metadata = {key: msgspec.json.encode(value).decode() for key, value in texts.items()}
    replace_file(folder / CHECKPOINT_FILE, lambda part: write_safetensors(part, tensors, metadata))
    # After the checkpoint, which holds the log too: a crash in between loses nothing.
    replace_file(folder / LOG_FILE, format_log_csv(state.log).encode())


def load_training_state(folder: Path) -> TrainingState | None:
    """Return the checkpoint of a folder, or None."""
    file = folder / CHECKPOINT_FILE
    if not file.is_file():
        return None
    try:
        with safetensors.safe_open(file, framework="pt") as content:
            tensors = {name: content.get_tensor(name) for name in content.keys()}
            metadata = content.metadata() or {}
        log = msgspec.json.decode(metadata["log"], type=tuple[EpochLog, ...])
        settings = msgspec.json.decode(metadata["settings"], type=dict[str, Any])
    except (safetensors.SafetensorError, msgspec.MsgspecError, KeyError) as error:
        fix = "Remove it and train again."
        raise MergingError(f"the checkpoint is damaged: {error}", where=str(file), fix=fix) from error
    return TrainingState(
        _select_prefix(tensors, _MODEL_PREFIX), _select_prefix(tensors, _MOMENTUM_PREFIX), settings, log
    )


@contextmanager
def lock_run_folder(folder: Path | None) -> Iterator[None]:
    """Lock a folder against other runs; a crash releases the lock."""
    if folder is None:
        yield
        return
    folder.mkdir(parents=True, exist_ok=True)
    with lock_path(resolve_path(folder), "run", patient=False):
        yield


def check_same_settings(found: Mapping[str, Any], wanted: Mapping[str, Any], where: str) -> None:
    """Raise if a run is resumed with other settings: its result would belong to neither."""
    names = [name for name in {**found, **wanted} if found.get(name) != wanted.get(name)]
    if names:
        pairs = [f"{name} was {found.get(name)!r} and is now {wanted.get(name)!r}" for name in names]
        fix = "Give the same settings again, or another folder."
        raise MergingError(f"the run was started differently: {'; '.join(pairs)}", where=where, fix=fix)


def get_tensor_state(model: nn.Module) -> dict[str, Tensor]:
    """Return the state dict; raise if it has non-tensors. The tensors share memory with the network."""
    state: dict[str, Any] = model.state_dict()
    for name, value in state.items():
        if not isinstance(value, Tensor):
            fix = "Replace get_extra_state() by a buffer: extra state cannot be stored without pickle."
            raise MergingError(f"the state has a {type(value).__name__}, not a tensor", where=name, fix=fix)
    return state


def format_log_csv(log: Iterable[EpochLog]) -> str:
    """Format the log as CSV."""
    text = io.StringIO()
    writer = csv.DictWriter(text, [field.name for field in fields(EpochLog)], lineterminator="\n")
    writer.writeheader()
    writer.writerows(asdict(line) for line in log)
    return text.getvalue()


def format_settings_yaml(settings: Mapping[str, Any]) -> str:
    """Format the settings as YAML."""
    return str(yaml.safe_dump(dict(settings), sort_keys=False, allow_unicode=True))


def _select_prefix(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}


class TrainingProgress:
    """Shows a progress bar over all steps of all epochs; without a terminal, only one line per epoch."""

    def __init__(self, epochs: int, steps: int, done: int, *, quiet: bool) -> None:
        self._epochs, self._quiet = epochs, quiet
        self._console = Console(stderr=True, soft_wrap=True)
        left = TimeRemainingColumn(compact=True)
        columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), left, TextColumn("left"))
        hidden = quiet or not self._console.is_terminal
        # Average the speed over two minutes, because test steps are faster than training steps.
        self._bar = Progress(*columns, console=self._console, disable=hidden, speed_estimate_period=120)
        self._task = self._bar.add_task("", total=epochs * steps, completed=done * steps)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def show(self, epoch: int, loss: float, accuracy: float) -> None:
        """Show loss and accuracy of the current epoch."""
        text = f"epoch {epoch + 1}/{self._epochs}  loss {loss:.4f}  accuracy {accuracy:.2f} %"
        self._bar.update(self._task, description=text)

    def advance(self, steps: int = 1) -> None:
        self._bar.advance(self._task, steps)

    def print_epoch(self, line: EpochLog) -> None:
        """Print the line of a finished epoch."""
        if self._quiet:
            return
        test = "" if line.test_accuracy is None else f"  test {line.test_accuracy:.2f} %"
        self._console.print(
            f"epoch {line.epoch}/{self._epochs}  lr {line.lr:.4g}  loss {line.loss:.4f}  "
            f"accuracy {line.accuracy:.2f} %{test}  {line.seconds:.1f} s",
            highlight=False,
        )
