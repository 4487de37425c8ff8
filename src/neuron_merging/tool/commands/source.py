"""source: the flags that name a network, and the network that they name."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from cyclopts import Parameter

from neuron_merging.errors import MergingError
from neuron_merging.folder import recipe as recipes
from neuron_merging.folder.recipe import Recipe
from neuron_merging.tool.commands import show

if TYPE_CHECKING:
    from torch import Tensor, nn

    from neuron_merging.settings import Settings

Many = Parameter(negative=(), consume_multiple=False)
Texts = Annotated[list[str] | None, Many]
Switch = Annotated[bool | None, Parameter(negative=())]
"""On, or not given: a recipe may say otherwise."""
Trust = Annotated[bool, Parameter(negative=())]
Folder = Annotated[str, Parameter(help="A folder that compress wrote.")]
LOOKED_AT = 16
"""Images of which it is seen whether they fit the network."""
Json = Annotated[bool, Parameter(name="--json", negative=(), help="Print JSON in place of tables.")]


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class Source:
    """What goes with MODEL.

    Parameters
    ----------
    weights
        The network's weights: .safetensors (with all its shards, or a folder of them), .pt or .pth; the state dict is
        found in what trainers write around it.
    weights_key
        Which of several state dicts in that file, as ema or ema.module.
    input
        Shape of an example input, as 1,3,32,32 or 2,16:int64; repeated for several inputs.
    arg
        An argument of the network's factory, as NAME=VALUE; may be repeated.
    trust
        Import what a folder or a recipe file names as package.module:name: it can do anything.
    """

    weights: str | None = None
    weights_key: str | None = None
    input: Texts = None
    arg: Texts = None
    trust: Trust = False

    def flags(self) -> dict[str, Any]:
        """As keys of a recipe; None where the flag was not given."""
        named = {"weights": self.weights, "weights_key": self.weights_key, "input": self.input}
        return {**named, "arg": recipes.pairs(self.arg, "--arg")}


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class Rebuild:
    """What a folder's network is rebuilt with.

    Parameters
    ----------
    model
        The network to rebuild it with, if the folder's recipe names none.
    input
        Another shape of the example input, for instance with another batch size.
    arg
        An argument of the network's factory, as NAME=VALUE; may be repeated.
    trust
        Import what the folder names as package.module:name: it can do anything.
    """

    model: str | None = None
    input: Texts = None
    arg: Texts = None
    trust: Trust = False


def recipe(model: str, source: Source | None, **more: Any) -> Recipe:
    """The recipe that a network's flags amount to."""
    return recipes.resolve(None, {"model": model, **(source or Source()).flags(), **more})


def shares(text: str, flag: str) -> list[float]:
    """Numbers after commas.

    >>> shares("0.25,0.5", "--ratios")
    [0.25, 0.5]
    """
    try:
        return [float(part) for part in text.split(",")]
    except ValueError as error:
        raise MergingError(f"{text!r} is no list of numbers", where=flag, fix=f"Write {flag} 0.25,0.5.") from error


def network(chosen: Recipe, source: Source | None = None) -> tuple[nn.Module, tuple[Any, ...]]:
    """The network of a recipe, whose MODEL the user typed, and example inputs."""
    from neuron_merging.networks.sources import is_factory, is_untrained
    from neuron_merging.tool import models

    assert chosen.model is not None
    with show.aside():
        found, inputs = models.resolve(
            chosen.model,
            weights=chosen.weights,
            weights_key=chosen.weights_key,
            input=chosen.input,
            arg=chosen.arg,
            trust=(source or Source()).trust,
        )
    if chosen.weights is None and is_untrained(chosen.model, chosen.arg):
        show.say("no --weights were given: the network's weights are random")
    elif chosen.weights is None and is_factory(chosen.model):
        show.say(f"no --weights were given: they are random, unless {chosen.model} loads some itself")
    return found, inputs


def reopen(
    out: str, rebuild: Rebuild | None, weights: str | None = None
) -> tuple[nn.Module, nn.Module, tuple[Any, ...]]:
    """The small network of a folder, the original (with weights if given), and example inputs."""
    show.say("loading")
    from neuron_merging.folder import store
    from neuron_merging.folder.trust import check_arguments, check_trusted
    from neuron_merging.tool import models

    asked = rebuild or Rebuild()
    flags = {"model": asked.model, "weights": weights, "input": asked.input, "arg": recipes.pairs(asked.arg, "--arg")}
    given = {k: v for k, v in flags.items() if v is not None}
    chosen = msgspec.structs.replace(store.recipe_of(out), **{"weights": None, **given})
    name, trust = asked.model, asked.trust
    assert chosen.model is not None or name is None
    if name is None:
        check_trusted(chosen, out, trust, keys=("model",))
    elif asked.arg is None:
        check_arguments(name, chosen.arg, out, trust)
    with show.aside():
        build = (lambda: store.build_network(name, chosen.arg, trust=trust)) if name else None
        small = store.load(out, build=build, trust=trust)
        base, inputs = models.resolve(
            chosen.model or "", weights=weights, input=chosen.input, arg=chosen.arg, fresh=name is None, trust=trust
        )
    return small, base, inputs


def check_target(chosen: Recipe, out: str) -> None:
    """Refuse an OUT that may not be written to, before any work is done."""
    from neuron_merging.folder import store
    from neuron_merging.folder.exporting import is_export

    if chosen.output == "graph" and not is_export(out):
        fix = "Name it small.onnx or small.pt2."
        raise MergingError("a graph has no class that a folder could be read back with", where=out, fix=fix)
    if is_export(out):
        store.check_new(out, chosen.overwrite)
    else:
        store.check_target(out, chosen.overwrite)
    source, target = os.path.realpath(chosen.model or ""), os.path.realpath(out)
    if os.path.exists(source) and os.path.commonpath([source, target]) == target:
        raise MergingError(
            "the result would replace the network that it is made from", where=out, fix="Give another OUT."
        )


def with_data(settings: Settings, chosen: Recipe, net: nn.Module, inputs: tuple[Any, ...]) -> Settings:
    """The settings with images as the network takes them; refused, before any work, if they cannot be meant for it."""
    from neuron_merging.tool import models

    norm = models.normalisation(chosen.model or ":?", net)
    if norm is None and _left_open(settings):
        show.say("note: pixels are normalised as ImageNet's; --mean and --std say otherwise")
    settings = settings.fitted_to(inputs, norm)
    _check_batches(net, chosen.calibrate, settings.calibration)
    _check_images(net, chosen.eval, settings.images)
    return settings


def _left_open(settings: Settings) -> bool:
    """Whether nothing says how pixels are normalised."""
    from neuron_merging.data import Arrays, FolderImages

    given = [data for data in (settings.calibration, settings.images) if isinstance(data, Arrays | FolderImages)]
    pixels = [data for data in given if isinstance(data, FolderImages) or data.holds_pixels]
    return any(not data.mean for data in pixels)


def _check_images(net: nn.Module, data: str | None, images: Any) -> None:
    from neuron_merging.data.images import Batched

    if isinstance(images, Batched):
        x, y = next(images.batches(LOOKED_AT))
        _check(net, data, x, y if images.labelled else None, images.classes)


def _check_batches(net: nn.Module, data: str | None, batches: Any) -> None:
    """What statistics are measured on; a function of the user's is not called yet."""
    if isinstance(batches, list):
        _check(net, data, batches[0][:LOOKED_AT])


def _check(net: nn.Module, data: str | None, x: Tensor, labels: Tensor | None = None, classes: int = 0) -> None:
    from neuron_merging.measuring.suitability import check_data

    with show.aside():
        notes = check_data(net, (x,), labels, classes, where=str(data))
    for note in notes:
        show.say(f"note: {note}")
