"""models: the MODEL of the command line, from a name to a network with example inputs.

MODEL is a built-in network's name, `package.module:factory`, `timm:NAME`, `torchvision:NAME`, an
exported program (`.pt2`), or a folder that `store.save` wrote.
"""

from __future__ import annotations

import difflib
import io
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from importlib import import_module
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn

from neuron_merging import networks
from neuron_merging.capture import Graph, capture, place_of
from neuron_merging.errors import MergingError, told

PRETRAINED = {"timm": "pretrained", "torchvision": "weights"}
"""The argument that would load weights, by the zoo that takes it."""
WRAPPERS = ("state_dict", "model_state_dict", "model")


class ModelError(MergingError):
    """The network could not be built, its weights not loaded, or it could not be captured."""


def resolve(
    model: str,
    *,
    weights: str | None = None,
    input: Sequence[str] = (),
    arg: Mapping[str, Any] | None = None,
    fresh: bool = False,
) -> tuple[nn.Module, tuple[Any, ...]]:
    """The network that MODEL names, with its weights, and example inputs for it.

    >>> network, (images,) = resolve("lenet-300-100")
    >>> images.shape
    torch.Size([1, 1, 28, 28])
    """
    network = build(model, arg or {}, fresh=fresh)
    if weights is not None:
        fit(network, read_weights(weights), weights)
    return network, example_inputs(model, network, input)


def captured(network: nn.Module, inputs: Any) -> Graph:
    """`capture`, whose failures are those of the model."""
    try:
        with redirect_stderr(io.StringIO()), redirect_stdout(io.StringIO()):  # torch prints half-made graphs
            return capture(network, inputs)
    except MergingError as error:
        raise ModelError(error.what, where=error.where, fix=error.fix) from error


# Building


def build(model: str, arg: Mapping[str, Any], *, fresh: bool = False) -> nn.Module:
    """The network itself; `fresh` does without weights that would have to be fetched."""
    zoo, _, name = model.partition(":")
    if model.endswith(".pt2"):
        return _program(model).module()
    if Path(model).is_dir():
        return _folder(model)
    if zoo in PRETRAINED and name:
        settings = {k: v for k, v in arg.items() if not fresh or k != PRETRAINED[zoo]}
        return _call(_zoo(zoo, name), model, settings)
    if name:
        return _call(imported(zoo, name), model, arg)
    return _call(_builtin(model), model, arg)


def is_untrained(model: str, arg: Mapping[str, Any]) -> bool:
    """Whether nothing but random weights can be in it."""
    zoo, _, name = model.partition(":")
    if zoo in PRETRAINED and name:
        return not arg.get(PRETRAINED[zoo])
    return not name and not _is_file(model)


def rebuildable(model: str | None) -> bool:
    """Whether `build` can make it again without the user's help."""
    return model is not None and (not _is_file(model) or os.path.exists(model))


def _is_file(model: str) -> bool:
    return model.endswith(".pt2") or (os.sep in model and ":" not in model) or os.path.exists(model)


def _call(make: Callable[..., Any], model: str, arg: Mapping[str, Any]) -> nn.Module:
    try:
        network = make if isinstance(make, nn.Module) else make(**arg)
    except (Exception, SystemExit) as error:
        raise ModelError(
            f"{model} could not be built: {type(error).__name__}: {error}",
            where=place_of(error),
            fix="Check its arguments (--arg NAME=VALUE).",
        ) from error
    if not isinstance(network, nn.Module):
        kind = type(network).__name__
        raise ModelError(f"{model} gives a {kind}, not a torch.nn.Module", fix="Name a class or function that does.")
    return network


def _builtin(name: str) -> Callable[..., Any]:
    if name.endswith((".pt", ".pth", ".bin", ".ckpt", ".safetensors")):
        raise ModelError(
            "such a file holds weights, or a pickled module, which could run any code and is not opened",
            where=name,
            fix=f"Name the network and give a state dict beside it: package.module:factory --weights {name}",
        )
    try:
        spec = networks.find(name)
    except ValueError as error:
        fix = "Or give package.module:factory, timm:NAME, torchvision:NAME, a .pt2 file or a folder."
        raise ModelError(str(error), where="MODEL", fix=fix) from error
    return lambda **arg: spec.build(**{"classes": spec.classes, **arg})


def imported(module: str, name: str, where: str = "MODEL") -> Any:
    """The class or function `module:name`, from the current folder or from what is installed."""
    found = _imported(module, f"Is it installed, or in the current folder ({os.getcwd()})?", where)
    try:
        for part in name.split("."):
            found = getattr(found, part)
    except AttributeError as error:
        fix = _nearest(name, [n for n in dir(found) if not n.startswith("_")])
        raise ModelError(f"{module} has no {name}", where=where, fix=fix) from error
    if not callable(found):
        raise ModelError(f"{module}:{name} cannot be called", where=where, fix="Name a class or function.")
    return found


def _imported(module: str, fix: str, named: str = "MODEL") -> Any:
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        return import_module(module)
    except (Exception, SystemExit) as error:
        what = f"{module} cannot be imported: {type(error).__name__}: {error}"
        where = named if isinstance(error, ModuleNotFoundError) else place_of(error)
        raise ModelError(what, where=where, fix=fix) from error


def _zoo(zoo: str, name: str) -> Callable[..., Any]:
    library = _imported("timm" if zoo == "timm" else "torchvision.models", f"pip install {zoo}, to fit your torch.")
    known = library.list_models()
    if ":" not in name and name.partition(".")[0] not in known:
        raise ModelError(f"{zoo} has no network {name!r}", where="MODEL", fix=_nearest(name, known))
    create = library.create_model if zoo == "timm" else library.get_model
    return lambda **arg: create(name, **arg)


def _program(path: str) -> torch.export.ExportedProgram:
    if not os.path.isfile(path):
        raise ModelError("there is no such file", where=path, fix="Write it with torch.export.save.")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return torch.export.load(path)
    except Exception as error:
        what = f"not an exported program: {told(error)}"
        raise ModelError(what, where=path, fix="Write it with torch.export.save.") from error


def _folder(path: str) -> nn.Module:
    from neuron_merging import store

    return store.load(path)


# Weights


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
    if faults:
        rest = f"; and {len(faults) - 6} more" if len(faults) > 6 else ""
        raise ModelError(
            f"the weights do not fit the network: {'; '.join(faults[:6])}{rest}",
            where=where,
            fix="Build the network with the arguments that it was trained with (--arg NAME=VALUE).",
        )
    network.load_state_dict(dict(state), strict=True, assign=assign)


def _beside(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    return f" (nearest: {close[0]})" if close else ""


def _nearest(name: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(name, known, n=5, cutoff=0.4)
    return f"The nearest names: {', '.join(close or known[:8])}."


# Example inputs


def example_inputs(model: str, network: nn.Module, shapes: Sequence[str] = ()) -> tuple[Any, ...]:
    """Random inputs of the given shapes, or of those that the network is known to take."""
    if not shapes and model.endswith(".pt2"):
        return _program_inputs(model)
    found = [_parse(text) for text in shapes] or _known_shapes(model, network)
    if not found:
        raise ModelError(f"nothing says what {model} takes", where="--input", fix="Give its shape: --input 1,3,224,224")
    generator = torch.Generator().manual_seed(0)
    floating = next((p.dtype for p in network.parameters() if p.is_floating_point()), torch.float32)
    return tuple(_random(shape, dtype or floating, generator) for shape, dtype in found)


def _program_inputs(path: str) -> tuple[Any, ...]:
    given = _program(path).example_inputs
    if given is None or given[1]:
        raise ModelError("the program has no positional example inputs", where=path, fix="Give --input.")
    return tuple(given[0])


def _known_shapes(model: str, network: nn.Module) -> list[tuple[tuple[int, ...], torch.dtype | None]]:
    zoo, _, name = model.partition(":")
    if zoo == "timm":
        return [((1, *network.pretrained_cfg["input_size"]), None)]  # type: ignore[index, list-item, misc]
    if zoo == "torchvision":
        return [((1, 3, 224, 224), None)]
    if Path(model).is_dir():
        return _folder_shapes(model, network)
    return [] if name else [((1, *networks.find(model).input_shape), None)]


def _folder_shapes(folder: str, network: nn.Module) -> list[tuple[tuple[int, ...], torch.dtype | None]]:
    from neuron_merging import store

    recipe = store.recipe_of(folder)
    return [_parse(text) for text in recipe.input] or _known_shapes(recipe.model or ":?", network)


def _parse(text: str) -> tuple[tuple[int, ...], torch.dtype | None]:
    """`1,3,32,32`, or with a type `2,16:int64`."""
    sizes, _, name = text.partition(":")
    dtype = getattr(torch, name, None) if name else None
    try:
        shape = tuple(int(size) for size in sizes.split(","))
    except ValueError:
        shape = ()
    if not shape or min(shape) < 1 or (name and not isinstance(dtype, torch.dtype)):
        raise MergingError(f"{text!r} is not a shape", where="--input", fix="Write 1,3,32,32 or 2,16:int64.")
    return shape, dtype


def _random(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    if dtype.is_floating_point:
        return torch.randn(shape, generator=generator).to(dtype)
    return torch.randint(2, shape, generator=generator).to(dtype)
