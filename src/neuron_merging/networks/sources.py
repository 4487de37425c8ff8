"""Networks by name: built in, from a zoo, from the user's code or from an exported program."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from neuron_merging import networks
from neuron_merging.errors import ModelError, told
from neuron_merging.files.opening import is_file, open_file
from neuron_merging.graph.usercode import imported, imported_module, nearest_names, place_of
from neuron_merging.networks import hub, vision
from neuron_merging.networks.checkpoints import is_torchscript, torchscript

PRETRAINED = {"timm": "pretrained", "torchvision": "weights"}
"""The argument that would load weights, by the zoo that takes it."""
FETCHING = ("pretrained_", "checkpoint", "cache_dir", "weights_")
"""How further arguments of the zoos begin that make them open or fetch files."""


def build(model: str, arg: Mapping[str, Any], *, fresh: bool = False) -> nn.Module:
    """The network itself; `fresh` does without weights that would have to be fetched."""
    vision.watch()  # whatever it is, it may import torchvision
    zoo, _, name = model.partition(":")
    if model.endswith(".pt2"):
        return program(model).module()
    if is_file(model):
        return open_file(model)[0]
    if zoo == hub.PREFIX and name:
        return _call(hub.hub_factory(name), model, {**arg, "fresh": fresh})
    if zoo in PRETRAINED and name:
        settings = {k: v for k, v in arg.items() if not fresh or k != PRETRAINED[zoo]}
        return _call(_zoo(zoo, name), model, settings)
    if name:
        return _call(imported(zoo, name), model, arg)
    return _call(_builtin(model), model, arg)


def is_builtin(model: str) -> bool:
    """Whether it is one of our own networks."""
    try:
        networks.find(model)
    except ValueError:
        return False
    return True


def foreign_code(model: str, arg: Mapping[str, Any]) -> str | None:
    """What building a network would make Python do beyond our own code and the zoos'; None for those.

    >>> foreign_code("resnet-56", {}), foreign_code("timm:resnet18", {"num_classes": 10})
    (None, None)
    >>> foreign_code("os:system", {"command": "ls"})
    'import os and call system'
    """
    zoo, _, name = model.partition(":")
    if model.endswith(".pt2"):
        return f"open the exported program {model}, which can hold pickled objects"
    if is_file(model):
        return None
    if zoo == hub.PREFIX and name:
        return f"run code that lies beside {name}" if arg.get(hub.CODE) else f"have transformers open or fetch {name}"
    if zoo in PRETRAINED and name:
        fetching = [key for key in arg if key.startswith(FETCHING)]
        if ":" in name or fetching:
            return f"have {zoo} open or fetch files ({', '.join([name, *fetching])})"
        return None
    return f"import {zoo} and call {name}" if name else None


def is_untrained(model: str, arg: Mapping[str, Any]) -> bool:
    """Whether nothing but random weights can be in it."""
    zoo, _, name = model.partition(":")
    if zoo in PRETRAINED and name:
        return not arg.get(PRETRAINED[zoo])
    return not name and not _is_file(model)


def is_factory(model: str) -> bool:
    """Whether it is the user's own code that makes it."""
    zoo, _, name = model.partition(":")
    return bool(name) and zoo not in PRETRAINED


def rebuildable(model: str | None) -> bool:
    """Whether `build` can make it again without the user's help."""
    return model is not None and (not _is_file(model) or os.path.exists(model))


def _is_file(model: str) -> bool:
    return model.lower().endswith((".pt2", ".onnx")) or (os.sep in model and ":" not in model) or os.path.exists(model)


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
    if is_torchscript(name):
        raise torchscript(name)
    if name.endswith((".pt", ".pth", ".bin", ".ckpt", ".safetensors")):
        raise ModelError(
            "such a file holds weights, or a pickled module, which could run any code and is not opened",
            where=name,
            fix=f"Name the network and give a state dict beside it: package.module:factory --weights {name}",
        )
    if Path(name).suffix:
        given = (
            f"{Path(name).stem}:FUNCTION"
            if name.endswith(".py")
            else "an .onnx or .pt2 file, or package.module:factory"
        )
        raise ModelError("neither a network's name nor a file of a kind that is read", where=name, fix=f"Give {given}.")
    try:
        spec = networks.find(name)
    except ValueError as error:
        fix = "Or give package.module:factory, timm:NAME, torchvision:NAME, hf:NAME, a .pt2 or .onnx file, or a folder."
        raise ModelError(str(error), where="MODEL", fix=fix) from error
    return lambda **arg: spec.build(**{"classes": spec.classes, **arg})


def _zoo(zoo: str, name: str) -> Callable[..., Any]:
    library = imported_module(
        "timm" if zoo == "timm" else "torchvision.models", f"pip install {zoo}, to fit your torch."
    )
    known = library.list_models()
    if ":" not in name and name.partition(".")[0] not in known:
        raise ModelError(f"{zoo} has no network {name!r}", where="MODEL", fix=nearest_names(name, known))
    create = library.create_model if zoo == "timm" else library.get_model
    return lambda **arg: create(name, **arg)


def program(path: str) -> torch.export.ExportedProgram:
    if not os.path.isfile(path):
        raise ModelError("there is no such file", where=path, fix="Write it with torch.export.save.")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return torch.export.load(path)
    except Exception as error:
        what = f"not an exported program: {told(error)}"
        raise ModelError(what, where=path, fix="Write it with torch.export.save.") from error
