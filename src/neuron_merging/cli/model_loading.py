"""Load the MODEL argument of the command line: a network with weights and example inputs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from neuron_merging import models
from neuron_merging.checkpoint import load_folder
from neuron_merging.cli import console
from neuron_merging.data.images import Normalization
from neuron_merging.errors import MergingError, ModelError
from neuron_merging.graph.example_inputs import draw_example
from neuron_merging.graph.user_code import split_reference
from neuron_merging.models.sources import is_registered_network, make_transformers_inputs
from neuron_merging.models.state_dicts import load_weights
from neuron_merging.onnx.formats import FileFormat, find_format
from neuron_merging.onnx.network import OnnxNetwork
from neuron_merging.reproduction.datasets import DATASET_SPECS

MAX_INPUT_ELEMENTS, MAX_INPUT_DIMS = 1 << 28, 16
"""The largest example input: entries (1 GiB of float32) and dimensions. A typo in --input must not exhaust memory."""


def load_model(
    model: str,
    *,
    weights: str | None = None,
    weights_key: str | None = None,
    input: Sequence[str] = (),
    arg: Mapping[str, Any] | None = None,
    fresh: bool = False,
    trust: bool = False,
) -> tuple[nn.Module, tuple[Any, ...]]:
    """Return the network that MODEL names, with its weights, and example inputs for it.

    >>> network, (images,) = load_model("lenet-300-100")
    >>> images.shape
    torch.Size([1, 1, 28, 28])
    """
    form = find_format(model)
    if form is not None and weights is not None and not form.takes_weights:
        raise MergingError(
            f"an {form.suffix} file contains its own weights", where="--weights", fix="Leave --weights out."
        )
    if weights is None and weights_key is not None:
        raise MergingError("--weights-key needs a file of weights", where="--weights-key", fix="Give --weights too.")
    if form is not None:
        network, inputs = _load_model_file(form, model, input)
    else:
        network = load_folder.build_or_load_network(model, arg or {}, fresh=fresh, trust=trust)
        inputs = make_example_inputs(model, network, input)
    if weights is not None:
        for note in load_weights(network, weights, weights_key):
            console.print_message(note)
    return network, inputs


def _load_model_file(form: FileFormat, model: str, shapes: Sequence[str]) -> tuple[nn.Module, tuple[Any, ...]]:
    """Return the network of a file, with inputs of the given shapes or with those that the file stores."""
    typed = form.make_inputs if shapes else None
    network, inputs = form.read(model, typed(model, [parse_shape(text)[0] for text in shapes]) if typed else None)
    if shapes and typed is None:
        inputs = make_example_inputs(model, network, shapes)
    if inputs is None:
        raise ModelError("the file has no positional example inputs", where=model, fix="Give --input.")
    return network, inputs


def find_normalisation(model: str, network: nn.Module) -> Normalization | None:
    """Return the normalisation of a network's images, or None if it is unknown.

    >>> find_normalisation("lenet-300-100", nn.Identity())
    Normalization(mean=(0.5,), std=(0.5,))
    """
    zoo, name = split_reference(model)
    known: Any = getattr(network, "pretrained_cfg", None) if zoo == "timm" else None
    if known and "mean" in known and "std" in known:
        return Normalization(tuple(known["mean"]), tuple(known["std"]))
    if name:
        return Normalization.imagenet_default(3) if zoo == "torchvision" else None
    if Path(model).is_dir():
        recipe = load_folder.read_recipe(model)
        return (
            Normalization(tuple(recipe.mean), tuple(recipe.std))
            if recipe.mean
            else find_normalisation(recipe.model or ":?", network)
        )
    found = DATASET_SPECS.get(models.find_network(model).data or "") if is_registered_network(model) else None
    return Normalization(found.mean, found.std) if found else None


def make_example_inputs(model: str, network: nn.Module, shapes: Sequence[str] = ()) -> tuple[Any, ...]:
    """Return random inputs of the given shapes, or of the shapes that are known for the network."""
    # Every network of transformers has this attribute, and its config tells the sizes.
    if not shapes and hasattr(network, "main_input_name"):
        return (make_transformers_inputs(network),)
    specs = [parse_shape(text) for text in shapes] or _find_known_shapes(model, network)
    if not specs:
        raise ModelError(
            f"the input shape of {model} is unknown", where="--input", fix="Give its shape: --input 1,3,224,224"
        )
    # A fixed seed: all commands on one folder see the same example.
    generator = torch.Generator().manual_seed(0)
    # A network in half precision takes inputs in half precision.
    floating = next((p.dtype for p in network.parameters() if p.is_floating_point()), torch.float32)
    return tuple(draw_example(shape, dtype or floating, generator) for shape, dtype in specs)


def _find_known_shapes(model: str, network: nn.Module) -> list[tuple[tuple[int, ...], torch.dtype | None]]:
    zoo, name = split_reference(model)
    if zoo == "timm":
        return [((1, *network.pretrained_cfg["input_size"]), None)]  # type: ignore[index, list-item, misc]
    if zoo == "torchvision":
        return [((1, 3, 224, 224), None)]
    if Path(model).is_dir():
        return _find_folder_shapes(model, network)
    return [] if name else [((1, *models.find_network(model).input_shape), None)]


def _find_folder_shapes(folder: str, network: nn.Module) -> list[tuple[tuple[int, ...], torch.dtype | None]]:
    recipe = load_folder.read_recipe(folder)
    if isinstance(network, OnnxNetwork) and not recipe.input:
        return [(tuple(value.shape), value.dtype) for value in network.origin.inputs]
    return [parse_shape(text) for text in recipe.input] or _find_known_shapes(recipe.model or ":?", network)


def parse_shape(text: str) -> tuple[tuple[int, ...], torch.dtype | None]:
    """Parse `1,3,32,32`, or with a dtype `2,16:int64`."""
    sizes, _, name = text.partition(":")
    dtype = getattr(torch, name, None) if name else None
    try:
        shape = tuple(int(size) for size in sizes.split(","))
    except ValueError:
        shape = ()
    if not shape or min(shape) < 1 or len(shape) > MAX_INPUT_DIMS or (name and not isinstance(dtype, torch.dtype)):
        raise MergingError(f"{text[:80]!r} is not a shape", where="--input", fix="Write 1,3,32,32 or 2,16:int64.")
    if math.prod(shape) > MAX_INPUT_ELEMENTS:
        what = f"an input of shape {text[:80]} has more than {MAX_INPUT_ELEMENTS:,} entries"
        raise MergingError(what, where="--input", fix="Give a smaller one: one example is enough.")
    return shape, dtype
