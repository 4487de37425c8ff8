"""Checkpoints as trainers write them: the state dict is found in what lies around it, and what was taken is said."""

from __future__ import annotations

import json
import re
import warnings
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn

from neuron_merging.errors import ModelError, told
from neuron_merging.networks.weights import fit

KEYS = (
    *("state_dict", "model_state_dict", "model", "net", "network", "module", "weights", "params", "student"),
    *("state_dict_ema", "model_ema", "ema", "ema_state_dict", "params_ema", "teacher"),
)
"""Where trainers keep the weights, in the order of preference."""
COMPILED = "_orig_mod."
"""What torch.compile puts into names."""
SHARD = re.compile(r"^(.*)-\d{5}-of-(\d{5})\.safetensors$")
INDEX = "*.safetensors.index.json"


@dataclass(frozen=True)
class Checkpoint:
    """A state dict that was found in a file."""

    tensors: Mapping[str, Tensor] = field(repr=False)
    key: str = ""
    """Under which key of the file it lay; empty for a plain one."""
    others: tuple[str, ...] = ()
    """Further keys under which there are others."""


def load_weights(network: nn.Module, path: str, key: str | None = None) -> list[str]:
    """Give a network the weights of a file; what was taken, in words, where there was a choice.

    Raises
    ------
    ModelError
        There is no state dict in the file, or it does not fit.
    """
    found = read_checkpoint(path, key)
    tensors, said = _renamed(found.tensors, network.state_dict())
    fit(network, tensors, path)
    if found.key and key is None:
        others = f"; the file also has {', '.join(found.others)} (--weights-key)" if found.others else ""
        said = [f"weights: took {found.key!r}{others}", *said]
    return said


def read_checkpoint(path: str, key: str | None = None) -> Checkpoint:
    """The state dict in a file, or in the shards of one, without running code from it."""
    place = Path(path)
    if place.is_dir() or path.endswith(".json"):
        return Checkpoint(_shards(place))
    if not place.is_file():
        raise ModelError("there is no such file", where=path, fix="Give --weights a .safetensors, .pt or .pth file.")
    if path.endswith(".safetensors"):
        return Checkpoint(_of_all([place]) if SHARD.match(place.name) is None else _siblings(place))
    value = _unpickled(path)
    return _chosen(value, path, key) if key is not None else _found(value, path)


# Shards


def _shards(place: Path) -> dict[str, Tensor]:
    """The files that an index names, or all that lie in a folder."""
    index = place if place.is_file() else next(iter(sorted(place.glob(INDEX))), None)
    if index is None:
        files = sorted(place.glob("*.safetensors")) if place.is_dir() else []
    else:
        files = _indexed(index)
    if not files:
        fix = "Give the folder with the .safetensors files, or their index."
        raise ModelError("there are no weights there", where=str(place), fix=fix)
    return _of_all(files)


def _indexed(index: Path) -> list[Path]:
    try:
        named = json.loads(index.read_text())["weight_map"].values()
        names = sorted({str(name) for name in named})
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise ModelError(f"not an index of shards: {told(error)}", where=str(index), fix="Get it again.") from error
    for name in names:
        if Path(name).name != name or not (index.parent / name).is_file():
            raise ModelError(f"the shard {name!r} is not beside its index", where=str(index), fix="Get all of them.")
    return [index.parent / name for name in names]


def _siblings(shard: Path) -> dict[str, Tensor]:
    """All shards, where one was given."""
    match = SHARD.match(shard.name)
    assert match is not None
    count = int(match[2])
    files = [shard.with_name(f"{match[1]}-{i:05}-of-{count:05}.safetensors") for i in range(1, count + 1)]
    for file in files:
        if not file.is_file():
            raise ModelError(f"the shard {file.name} is missing", where=str(shard), fix="Put it beside the others.")
    return _of_all(files)


def _of_all(files: Iterable[Path]) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for file in files:
        try:
            tensors |= safetensors.torch.load_file(file)
        except safetensors.SafetensorError as error:
            raise ModelError(f"not a safetensors file: {error}", where=str(file), fix="Get the file again.") from error
    return tensors


# Pickles


def is_torchscript(path: str | Path) -> bool:
    """Whether a file was written by torch.jit.save."""
    try:
        with zipfile.ZipFile(path) as archive:
            return any("/code/" in name or name.endswith("constants.pkl") for name in archive.namelist())
    except (OSError, zipfile.BadZipFile):
        return False


def torchscript(path: str) -> ModelError:
    """What to do with such a file."""
    return ModelError(
        "the file is a TorchScript program, not a file of weights",
        where=path,
        fix="Export the network to ONNX and give model.onnx; or take its weights, where you trust it: "
        "torch.save(torch.jit.load(file).state_dict(), 'weights.pt'), and name the network.",
    )


def _unpickled(path: str) -> Any:
    if is_torchscript(path):
        raise torchscript(path)
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
        why = "" if "weights_only" in str(error) else f": {told(error)}"
        fix = "Save a state dict with torch.save or safetensors."
        raise ModelError(f"not a file of weights{why}", where=path, fix=fix) from error


def _is_state(value: Any) -> bool:
    return isinstance(value, Mapping) and bool(value) and all(isinstance(part, Tensor) for part in value.values())


def _found(value: Any, path: str) -> Checkpoint:
    """The first state dict under the keys that trainers use."""
    if _is_state(value) or (isinstance(value, Mapping) and not value):
        return Checkpoint(value)
    found = list(_states(value))
    if not found:
        raise _nothing(value, path)
    (key, state), *others = found
    return Checkpoint(state, key, tuple(name for name, _ in others))


def _states(value: Any, above: str = "") -> Iterator[tuple[str, Mapping[str, Tensor]]]:
    """All state dicts inside a checkpoint, by key, the likeliest first."""
    if not isinstance(value, Mapping):
        return
    names = [str(name) for name in value]
    order = [key for key in KEYS if key in names] + [name for name in names if name not in KEYS]
    for name in order:
        part: Any = value.get(name)
        if _is_state(part):
            yield above + name, part
        elif isinstance(part, Mapping) and name in KEYS:
            yield from _states(part, f"{above}{name}.")


def _chosen(value: Any, path: str, key: str) -> Checkpoint:
    part = value
    for name in key.split("."):
        part = part.get(name) if isinstance(part, Mapping) else None
    inner = part if _is_state(part) else next((state for _, state in _states(part)), None)
    if inner is None:
        known = [name for name, _ in _states(value)]
        fix = f"Use one of {', '.join(known)}." if known else "The file holds no state dict."
        raise ModelError(f"there are no weights under {key!r}", where=f"{path}, --weights-key", fix=fix)
    return Checkpoint(inner, key)


def _nothing(value: Any, path: str) -> ModelError:
    has = f" (it has {', '.join(str(name) for name in list(value)[:6])})" if isinstance(value, Mapping) else ""
    return ModelError(f"the file holds no state dict{has}", where=path, fix="Save model.state_dict().")


# Names


def _renamed(state: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], list[str]]:
    """The tensors under the network's own names: without what trainers put before or into them."""
    if any(COMPILED in name for name in state) and not any(COMPILED in name for name in own):
        state = {name.replace(COMPILED, ""): tensor for name, tensor in state.items()}
    prefix = _prefix(state, own)
    if not prefix:
        return dict(state), []
    inside = {name.removeprefix(prefix): tensor for name, tensor in state.items() if name.startswith(prefix)}
    left = len(state) - len(inside)
    said = f"weights: took those under {prefix!r}" + (f", and left {left} others out" if left else "")
    return inside, [said] if left else []


def _prefix(state: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> str:
    """What stands before all of the network's names in the file."""
    if not own or all(name in state for name in own):
        return ""
    first = max(own, key=len)
    for name in state:
        prefix = name.removesuffix(first) if name.endswith("." + first) else ""
        if prefix and all(prefix + other in state for other in own):
            return prefix
    common = next(iter(state), "").partition(".")[0] + "."
    return common if common in ("module.", "model.") and all(name.startswith(common) for name in state) else ""
