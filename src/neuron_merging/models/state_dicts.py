"""Read and write weights without running code from files: safetensors, shards, and checkpoints of training frameworks.
Reading finds the state dict inside a checkpoint, removes prefixes, and reports what it chose.
"""

from __future__ import annotations

import difflib
import json
import os
import re
import warnings
import zipfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn

from neuron_merging.errors import FolderError, ModelError, describe_error


def read_safetensors(file: Path) -> dict[str, Tensor]:
    """Read the tensors of a safetensors file into memory, without a mapping: the file may be replaced afterwards."""
    try:
        return dict(safetensors.torch.load_file(file, backend="pread"))
    except (safetensors.SafetensorError, OSError) as error:
        raise FolderError(f"not a safetensors file: {error}", where=str(file), fix="Get the folder again.") from error


def write_safetensors(file: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str] | None = None) -> None:
    """Write a safetensors file; tensors that share storage or are not contiguous are copied first."""
    file.touch()
    mode = file.stat().st_mode  # the permissions that the umask gives
    try:
        safetensors.torch.save_file(_make_storable(tensors), file, metadata)
        file.chmod(mode)  # safetensors makes the file readable by its owner only
    except safetensors.SafetensorError as error:
        code = re.search(r"os error (\d+)", str(error))
        if code is None:
            raise
        # Callers handle a full disk as an OSError.
        raise OSError(int(code[1]), os.strerror(int(code[1])), str(file)) from error


def _make_storable(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return contiguous tensors with separate storage, as safetensors requires; copy only where necessary."""
    plain = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
    users = Counter(_get_storage_key(tensor) for tensor in plain.values())
    return {name: tensor.clone() if users[_get_storage_key(tensor)] > 1 else tensor for name, tensor in plain.items()}


def _get_storage_key(tensor: Tensor) -> tuple[torch.device, int]:
    return tensor.device, tensor.untyped_storage().data_ptr()


def load_state_dict_checked(
    network: nn.Module, state: Mapping[str, Tensor], where: str, *, assign: bool = False
) -> None:
    """Load a complete state dict, or raise an error that lists the names and shapes that do not fit."""
    expected = network.state_dict()
    faults = [
        f"{name} is not in the network{_suggest_near_name(name, expected)}" for name in state if name not in expected
    ]
    faults += [f"{name} is not in the file{_suggest_near_name(name, state)}" for name in expected if name not in state]
    faults += [
        f"{name} has shape {tuple(state[name].shape)}, the network's is {tuple(expected[name].shape)}"
        for name in expected
        if name in state and state[name].shape != expected[name].shape
    ]
    if assign:  # assigned tensors keep their dtype, so an integer must not replace a float
        faults += [
            f"{name} is {state[name].dtype}, the network's is {expected[name].dtype}"
            for name in expected
            if name in state and _get_dtype_kind(state[name]) != _get_dtype_kind(expected[name])
        ]
    if faults:
        rest = f"; and {len(faults) - 6} more" if len(faults) > 6 else ""
        raise ModelError(
            f"the weights do not fit the network: {'; '.join(faults[:6])}{rest}",
            where=where,
            fix="Build the network with the arguments that it was trained with (--arg NAME=VALUE).",
        )
    network.load_state_dict(dict(state), strict=True, assign=assign)


def _get_dtype_kind(tensor: Tensor) -> tuple[bool, bool]:
    return tensor.is_floating_point(), tensor.is_complex()


def _suggest_near_name(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    return f" (nearest: {close[0]})" if close else ""


STATE_DICT_KEYS = (
    *("state_dict", "model_state_dict", "model", "net", "network", "module", "weights", "params", "student"),
    *("state_dict_ema", "model_ema", "ema", "ema_state_dict", "params_ema", "teacher"),
)
"""Keys under which training frameworks store weights, in order of preference; averaged weights (EMA) come last."""
COMPILED_PREFIX = "_orig_mod."
"""Prefix that torch.compile adds to names."""
SHARD_PATTERN = re.compile(r"^(.*)-\d{5}-of-(\d{5})\.safetensors$")
SHARD_INDEX_GLOB = "*.safetensors.index.json"


@dataclass(frozen=True)
class FoundStateDict:
    """A state dict that was found in a file."""

    tensors: Mapping[str, Tensor] = field(repr=False)
    key: str = ""
    """Key of the state dict in the file; empty if the file is a plain state dict."""
    other_keys: tuple[str, ...] = ()
    """Keys of other state dicts in the file."""


def load_weights(network: nn.Module, path: str, key: str | None = None) -> list[str]:
    """Load the weights of a file into a network, and return notes on choices that were made.

    Raises
    ------
    ModelError
        There is no state dict in the file, or it does not fit.
    """
    found = read_state_dict(path, key)
    tensors, notes = _match_parameter_names(found.tensors, network.state_dict())
    load_state_dict_checked(network, tensors, path)
    if found.key and key is None:
        others = f"; the file also has {', '.join(found.other_keys)} (--weights-key)" if found.other_keys else ""
        notes = [f"weights: took {found.key!r}{others}", *notes]
    return notes


def read_state_dict(path: str, key: str | None = None) -> FoundStateDict:
    """Read the state dict of a file, or of several shards, without running code from it."""
    place = Path(path)
    if place.is_dir():
        return FoundStateDict(_read_shards(place))
    if not place.is_file():
        raise ModelError("there is no such file", where=path, fix="Give --weights a .safetensors, .pt or .pth file.")
    return WEIGHT_READERS.get(place.suffix, _read_checkpoint)(place, key)


def _read_checkpoint(place: Path, key: str | None) -> FoundStateDict:
    """Read the state dict in a checkpoint of a training framework."""
    value, path = _load_pickle(str(place)), str(place)
    return _select_state_dict(value, path, key) if key is not None else _find_state_dict(value, path)


def _read_safetensors_or_shards(place: Path, key: str | None) -> FoundStateDict:
    is_shard = SHARD_PATTERN.match(place.name) is not None
    return FoundStateDict(_read_sibling_shards(place) if is_shard else _read_all_safetensors([place]))


WEIGHT_READERS: dict[str, Callable[[Path, str | None], FoundStateDict]] = {
    ".safetensors": _read_safetensors_or_shards,
    ".json": lambda place, key: FoundStateDict(_read_shards(place)),
    ".pt": _read_checkpoint,
    ".pth": _read_checkpoint,
    ".bin": _read_checkpoint,
    ".ckpt": _read_checkpoint,
}
"""Readers of weight files, by suffix. Each takes the file and the key of one of several state dicts. A file with any
other suffix is read as a checkpoint.
"""


# Shards


def _read_shards(place: Path) -> dict[str, Tensor]:
    """Read the shards that an index names, or all safetensors files in a folder."""
    index = place if place.is_file() else next(iter(sorted(place.glob(SHARD_INDEX_GLOB))), None)
    if index is None:
        files = sorted(place.glob("*.safetensors")) if place.is_dir() else []
    else:
        files = _list_indexed_shards(index)
    if not files:
        fix = "Give the folder with the .safetensors files, or their index."
        raise ModelError("there are no weights there", where=str(place), fix=fix)
    return _read_all_safetensors(files)


def _list_indexed_shards(index: Path) -> list[Path]:
    try:
        named = json.loads(index.read_text())["weight_map"].values()
        names = sorted({str(name) for name in named})
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise ModelError(
            f"not an index of shards: {describe_error(error)}", where=str(index), fix="Get it again."
        ) from error
    for name in names:  # a name with a path could point anywhere on the disk
        if Path(name).name != name or not (index.parent / name).is_file():
            raise ModelError(f"the shard {name!r} is not beside its index", where=str(index), fix="Get all of them.")
    return [index.parent / name for name in names]


def _read_sibling_shards(shard: Path) -> dict[str, Tensor]:
    """Read all shards of a set, given one of them."""
    match = SHARD_PATTERN.match(shard.name)
    assert match is not None
    count = int(match[2])
    files = [shard.with_name(f"{match[1]}-{i:05}-of-{count:05}.safetensors") for i in range(1, count + 1)]
    for file in files:
        if not file.is_file():
            raise ModelError(f"the shard {file.name} is missing", where=str(shard), fix="Put it beside the others.")
    return _read_all_safetensors(files)


def _read_all_safetensors(files: Iterable[Path]) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for file in files:
        try:
            tensors |= safetensors.torch.load_file(file)
        except safetensors.SafetensorError as error:
            raise ModelError(f"not a safetensors file: {error}", where=str(file), fix="Get the file again.") from error
    return tensors


# Pickles


def is_torchscript(path: str | Path) -> bool:
    """Whether a file was written by torch.jit.save: a zip archive with code or constants."""
    try:
        with zipfile.ZipFile(path) as archive:
            return any("/code/" in name or name.endswith("constants.pkl") for name in archive.namelist())
    except (OSError, zipfile.BadZipFile):
        return False


def make_torchscript_error(path: str) -> ModelError:
    """Return the error for a TorchScript file, with ways to use its weights."""
    return ModelError(
        "the file is a TorchScript program, not a file of weights",
        where=path,
        fix="Export the network to ONNX and give model.onnx; or take its weights, where you trust it: "
        "torch.save(torch.jit.load(file).state_dict(), 'weights.pt'), and name the network.",
    )


def _load_pickle(path: str) -> Any:
    if is_torchscript(path):
        raise make_torchscript_error(path)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return torch.load(path, map_location="cpu", weights_only=True)  # an arbitrary pickle could run code
    except Exception as error:
        # torch names the classes that weights_only rejected as "GLOBAL module.name".
        if named := re.findall(r"GLOBAL ([\w.]+)", str(error)):
            objects = ", ".join(dict.fromkeys(named))
            raise ModelError(
                f"the file holds Python objects ({objects}), and reading those can run any code",
                where=path,
                fix="If you trust it: torch.save(torch.load(file, weights_only=False).state_dict(), 'weights.pt').",
            ) from error
        why = "" if "weights_only" in str(error) else f": {describe_error(error)}"
        fix = "Save a state dict with torch.save or safetensors."
        raise ModelError(f"not a file of weights{why}", where=path, fix=fix) from error


def _is_state_dict(value: Any) -> bool:
    return isinstance(value, Mapping) and bool(value) and all(isinstance(part, Tensor) for part in value.values())


def _find_state_dict(value: Any, path: str) -> FoundStateDict:
    """Find the first state dict in a checkpoint, in the order of `STATE_DICT_KEYS`."""
    if _is_state_dict(value) or (isinstance(value, Mapping) and not value):
        return FoundStateDict(value)
    found = list(_iter_state_dicts(value))
    if not found:
        raise _make_no_state_dict_error(value, path)
    (key, state), *others = found
    return FoundStateDict(state, key, tuple(name for name, _ in others))


def _iter_state_dicts(value: Any, above: str = "") -> Iterator[tuple[str, Mapping[str, Tensor]]]:
    """Yield all state dicts inside a checkpoint with their keys, the most likely first."""
    if not isinstance(value, Mapping):
        return
    names = [str(name) for name in value]
    order = [key for key in STATE_DICT_KEYS if key in names] + [name for name in names if name not in STATE_DICT_KEYS]
    for name in order:
        part: Any = value.get(name)
        if _is_state_dict(part):
            yield above + name, part
        elif isinstance(part, Mapping) and name in STATE_DICT_KEYS:
            yield from _iter_state_dicts(part, f"{above}{name}.")


def _select_state_dict(value: Any, path: str, key: str) -> FoundStateDict:
    part = value
    for name in key.split("."):
        part = part.get(name) if isinstance(part, Mapping) else None
    inner = part if _is_state_dict(part) else next((state for _, state in _iter_state_dicts(part)), None)
    if inner is None:
        known = [name for name, _ in _iter_state_dicts(value)]
        fix = f"Use one of {', '.join(known)}." if known else "The file holds no state dict."
        raise ModelError(f"there are no weights under {key!r}", where=f"{path}, --weights-key", fix=fix)
    return FoundStateDict(inner, key)


def _make_no_state_dict_error(value: Any, path: str) -> ModelError:
    has = f" (it has {', '.join(str(name) for name in list(value)[:6])})" if isinstance(value, Mapping) else ""
    return ModelError(f"the file holds no state dict{has}", where=path, fix="Save model.state_dict().")


# Names


def _match_parameter_names(
    state: Mapping[str, Tensor], expected: Mapping[str, Tensor]
) -> tuple[dict[str, Tensor], list[str]]:
    """Rename tensors to the network's names: remove prefixes of torch.compile, DataParallel and training frameworks.

    The notes say if tensors without the prefix were left out.
    """
    if any(COMPILED_PREFIX in name for name in state) and not any(COMPILED_PREFIX in name for name in expected):
        state = {name.replace(COMPILED_PREFIX, ""): tensor for name, tensor in state.items()}
    prefix = _find_prefix(state, expected)
    if not prefix:
        return dict(state), []
    inside = {name.removeprefix(prefix): tensor for name, tensor in state.items() if name.startswith(prefix)}
    ignored = len(state) - len(inside)
    return inside, [f"weights: took those under {prefix!r}, and left {ignored} others out"] if ignored else []


def _find_prefix(state: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> str:
    """Return the prefix of all of the network's names in the file; empty if there is none."""
    if not expected or all(name in state for name in expected):
        return ""
    first = max(expected, key=len)
    for name in state:
        prefix = name.removesuffix(first) if name.endswith("." + first) else ""
        if prefix and all(prefix + other in state for other in expected):
            return prefix
    # No prefix fits every name: remove a common one, so that the error lists only names that really differ.
    common = next(iter(state), "").partition(".")[0] + "."
    return common if common in ("module.", "model.") and all(name.startswith(common) for name in state) else ""
