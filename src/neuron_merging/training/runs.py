"""The state of a training run in one safetensors file, which is replaced at once or not at all."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import msgspec
import safetensors
import yaml
from torch import Tensor, nn

from neuron_merging.atomic import locked, place_of, replace_file
from neuron_merging.errors import MergingError
from neuron_merging.networks.weights import write_weights

CHECKPOINT, WEIGHTS, SETTINGS, LOG = "checkpoint.safetensors", "model.safetensors", "training.yaml", "log.csv"
_MODEL, _MOMENTUM = "model.", "momentum."


@dataclass(frozen=True)
class Epoch:
    """One line of the log; accuracies in percent, `accuracy` on the training images as they were shown."""

    epoch: int
    lr: float
    loss: float
    accuracy: float
    test_accuracy: float | None
    seconds: float


@dataclass(frozen=True, eq=False)
class RunState:
    """All that the next epoch depends on. Chance is not in it: each epoch has a seed of its own."""

    weights: Mapping[str, Tensor]
    momentum: Mapping[str, Tensor]
    settings: Mapping[str, Any]
    log: tuple[Epoch, ...]


def save(folder: Path, state: RunState) -> None:
    """Write the checkpoint, then the log that people read."""
    tensors = {_MODEL + name: value for name, value in state.weights.items()}
    tensors |= {_MOMENTUM + name: value for name, value in state.momentum.items()}
    texts = {"settings": dict(state.settings), "log": [asdict(line) for line in state.log]}
    metadata = {key: msgspec.json.encode(value).decode() for key, value in texts.items()}
    replace_file(folder / CHECKPOINT, lambda part: write_weights(part, tensors, metadata))
    replace_file(folder / LOG, log_text(state.log).encode())


def load(folder: Path) -> RunState | None:
    """The checkpoint of a folder, if it has one."""
    file = folder / CHECKPOINT
    if not file.is_file():
        return None
    try:
        with safetensors.safe_open(file, framework="pt") as content:
            tensors = {name: content.get_tensor(name) for name in content.keys()}
            metadata = content.metadata() or {}
        log = msgspec.json.decode(metadata["log"], type=tuple[Epoch, ...])
        settings = msgspec.json.decode(metadata["settings"], type=dict[str, Any])
    except (safetensors.SafetensorError, msgspec.MsgspecError, KeyError) as error:
        fix = "Remove it and train again."
        raise MergingError(f"the checkpoint is damaged: {error}", where=str(file), fix=fix) from error
    return RunState(_part(tensors, _MODEL), _part(tensors, _MOMENTUM), settings, log)


@contextmanager
def claimed(folder: Path | None) -> Iterator[None]:
    """Keep other runs out of a folder while this one is at work; a crash frees it."""
    if folder is None:
        yield
        return
    folder.mkdir(parents=True, exist_ok=True)
    with locked(place_of(folder), "run", patient=False):
        yield


def check_same(found: Mapping[str, Any], wanted: Mapping[str, Any], where: str) -> None:
    """Refuse to go on with other settings: the result would be that of neither."""
    names = [name for name in {**found, **wanted} if found.get(name) != wanted.get(name)]
    if names:
        pairs = [f"{name} was {found.get(name)!r} and is now {wanted.get(name)!r}" for name in names]
        fix = "Give the same settings again, or another folder."
        raise MergingError(f"the run was started differently: {'; '.join(pairs)}", where=where, fix=fix)


def plain(model: nn.Module) -> dict[str, Tensor]:
    """The state dict, of tensors only: it is the network's own memory, to be written before the next step."""
    state: dict[str, Any] = model.state_dict()
    for name, value in state.items():
        if not isinstance(value, Tensor):
            fix = "get_extra_state() cannot be kept without pickle: make it a buffer."
            raise MergingError(f"the state has a {type(value).__name__}, not a tensor", where=name, fix=fix)
    return state


def log_text(log: Iterable[Epoch]) -> str:
    """The log as CSV."""
    text = io.StringIO()
    writer = csv.DictWriter(text, [field.name for field in fields(Epoch)], lineterminator="\n")
    writer.writeheader()
    writer.writerows(asdict(line) for line in log)
    return text.getvalue()


def settings_text(settings: Mapping[str, Any]) -> str:
    """The settings as YAML."""
    return str(yaml.safe_dump(dict(settings), sort_keys=False, allow_unicode=True))


def _part(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
