"""Weights from files, without running code from them, and into files, without a copy of them all."""

from __future__ import annotations

import difflib
import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path

import safetensors.torch
import torch
from torch import Tensor, nn

from neuron_merging.errors import FolderError, ModelError


def stored_weights(file: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file, read once into memory of their own: the file may then go or change."""
    try:
        return dict(safetensors.torch.load_file(file, backend="pread"))
    except (safetensors.SafetensorError, OSError) as error:
        raise FolderError(f"not a safetensors file: {error}", where=str(file), fix="Get the folder again.") from error


def write_weights(file: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str] | None = None) -> None:
    """Write a safetensors file piece by piece; tensors that it cannot hold as they are get copied, one by one."""
    file.touch()
    usual = file.stat().st_mode
    try:
        safetensors.torch.save_file(_storable(tensors), file, metadata)
        file.chmod(usual)  # safetensors lets the owner alone read it
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
