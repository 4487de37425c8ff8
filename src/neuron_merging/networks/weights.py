"""Weights from files, without running code from them, and into files, without a copy of them all."""

from __future__ import annotations

import difflib
import os
import re
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn

from neuron_merging.errors import FolderError, ModelError, told

WRAPPERS = ("state_dict", "model_state_dict", "model")


def read_weights(path: str) -> dict[str, Tensor]:
    """The state dict in a file, without running code from it."""
    if not os.path.isfile(path):
        raise ModelError("there is no such file", where=path, fix="Give --weights a .safetensors, .pt or .pth file.")
    if path.endswith(".safetensors"):
        try:
            return dict(safetensors.torch.load_file(path))
        except safetensors.SafetensorError as error:
            raise ModelError(f"not a safetensors file: {error}", where=path, fix="Get the file again.") from error
    return _state(_unpickled(path), path)


def _unpickled(path: str) -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        if named := re.findall(r"GLOBAL ([\w.]+)", str(error)):
            objects = ", ".join(dict.fromkeys(named))
            raise ModelError(
                f"the file holds Python objects ({objects}), and reading those can run any code",
                where=path,
                fix="Where you trust it: torch.save(torch.load(file, weights_only=False).state_dict(), 'weights.pt').",
            ) from error
        what = f"not a file of weights: {told(error)}"
        raise ModelError(what, where=path, fix="Save a state dict with torch.save or safetensors.") from error


def _state(value: Any, path: str) -> dict[str, Tensor]:
    """The state dict inside a checkpoint, without the prefix of data-parallel training."""
    for key in WRAPPERS:
        if isinstance(value, Mapping) and isinstance(value.get(key), Mapping):
            value = value[key]
    if not isinstance(value, Mapping) or not all(isinstance(v, Tensor) for v in value.values()):
        raise ModelError("the file holds no state dict", where=path, fix="Save model.state_dict().")
    if value and all(name.startswith("module.") for name in value):
        return {name.removeprefix("module."): tensor for name, tensor in value.items()}
    return dict(value)


def stored_weights(file: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file, read once into memory of their own: the file may then go or change."""
    try:
        return dict(safetensors.torch.load_file(file, backend="pread"))
    except (safetensors.SafetensorError, OSError) as error:
        raise FolderError(f"not a safetensors file: {error}", where=str(file), fix="Get the folder again.") from error


def write_weights(file: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str] | None = None) -> None:
    """Write a safetensors file piece by piece; tensors that it cannot hold as they are get copied, one by one."""
    try:
        safetensors.torch.save_file(_storable(tensors), file, metadata)
    except safetensors.SafetensorError as error:
        code = re.search(r"os error (\d+)", str(error))
        if code is None:
            raise
        raise OSError(int(code[1]), os.strerror(int(code[1])), str(file)) from error  # a full disk, say


def _storable(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors, contiguous and each in memory of its own; what is so already is not copied."""
    plain = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
    users = Counter(_memory(tensor) for tensor in plain.values())
    return {name: tensor.clone() if users[_memory(tensor)] > 1 else tensor for name, tensor in plain.items()}


def _memory(tensor: Tensor) -> tuple[torch.device, int]:
    return tensor.device, tensor.untyped_storage().data_ptr()


def fit(network: nn.Module, state: Mapping[str, Tensor], where: str, *, assign: bool = False) -> None:
    """Load a state dict whole, or say which names and shapes do not fit."""
    own = network.state_dict()
    faults = [f"{name} is not in the network{_beside(name, own)}" for name in state if name not in own]
    faults += [f"{name} is not in the file{_beside(name, state)}" for name in own if name not in state]
    faults += [
        f"{name} has shape {tuple(state[name].shape)}, the network's is {tuple(own[name].shape)}"
        for name in own
        if name in state and state[name].shape != own[name].shape
    ]
    if assign:
        faults += [
            f"{name} is {state[name].dtype}, the network's is {own[name].dtype}"
            for name in own
            if name in state and _kind(state[name]) != _kind(own[name])
        ]
    if faults:
        rest = f"; and {len(faults) - 6} more" if len(faults) > 6 else ""
        raise ModelError(
            f"the weights do not fit the network: {'; '.join(faults[:6])}{rest}",
            where=where,
            fix="Build the network with the arguments that it was trained with (--arg NAME=VALUE).",
        )
    network.load_state_dict(dict(state), strict=True, assign=assign)


def _kind(tensor: Tensor) -> tuple[bool, bool]:
    return tensor.is_floating_point(), tensor.is_complex()


def _beside(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    return f" (nearest: {close[0]})" if close else ""
