"""source: the flags that name a network, and the network that they name."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from itertools import islice
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from cyclopts import Parameter

from neuron_merging.errors import MergingError
from neuron_merging.folder import recipe as recipes
from neuron_merging.folder.recipe import Recipe
from neuron_merging.tool.commands import show

if TYPE_CHECKING:
    from torch import nn

Many = Parameter(negative=(), consume_multiple=False)
Texts = Annotated[list[str] | None, Many]
Switch = Annotated[bool | None, Parameter(negative=())]
"""On, or not given: a recipe may say otherwise."""
Folder = Annotated[str, Parameter(help="A folder that compress wrote.")]
Json = Annotated[bool, Parameter(name="--json", negative=(), help="Print JSON in place of tables.")]


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class Source:
    """What goes with MODEL.

    Parameters
    ----------
    weights
        A state dict for the network: .safetensors, .pt or .pth.
    input
        Shape of an example input, as 1,3,32,32 or 2,16:int64; repeated for several inputs.
    arg
        An argument of the network's factory, as NAME=VALUE; may be repeated.
    """

    weights: str | None = None
    input: Texts = None
    arg: Texts = None

    def flags(self) -> dict[str, Any]:
        """As keys of a recipe; None where the flag was not given."""
        return {**asdict(self), "arg": recipes.pairs(self.arg, "--arg")}


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
    """

    model: str | None = None
    input: Texts = None
    arg: Texts = None


def recipe(model: str, source: Source | None, **more: Any) -> Recipe:
    """The recipe that a network's flags amount to."""
    return recipes.resolve(None, {"model": model, **(source or Source()).flags(), **more})


def network(chosen: Recipe) -> tuple[nn.Module, tuple[Any, ...]]:
    """The network of a recipe and example inputs."""
    from neuron_merging.networks.sources import is_untrained
    from neuron_merging.tool import models

    assert chosen.model is not None
    with show.aside():
        found, inputs = models.resolve(chosen.model, weights=chosen.weights, input=chosen.input, arg=chosen.arg)
    if chosen.weights is None and is_untrained(chosen.model, chosen.arg):
        show.say("no --weights were given: the network's weights are random")
    return found, inputs


def reopen(
    out: str, rebuild: Rebuild | None, weights: str | None = None
) -> tuple[nn.Module, nn.Module, tuple[Any, ...]]:
    """The small network of a folder, the original (with weights if given), and example inputs."""
    show.say("loading")
    from neuron_merging.folder import store
    from neuron_merging.tool import models

    asked = rebuild or Rebuild()
    flags = {"model": asked.model, "weights": weights, "input": asked.input, "arg": recipes.pairs(asked.arg, "--arg")}
    given = {k: v for k, v in flags.items() if v is not None}
    chosen = msgspec.structs.replace(store.recipe_of(out), **{"weights": None, **given})
    name = asked.model
    assert chosen.model is not None or name is None
    with show.aside():
        small = store.load(out, build=(lambda: store.build_network(name, chosen.arg)) if name else None)
        base, inputs = models.resolve(
            chosen.model or "", weights=weights, input=chosen.input, arg=chosen.arg, fresh=name is None
        )
    return small, base, inputs


def check_target(chosen: Recipe, out: str) -> None:
    """Refuse an OUT that may not be written to, before any work is done."""
    from neuron_merging.folder import store

    store.check_target(out, chosen.overwrite)
    source, target = os.path.realpath(chosen.model or ""), os.path.realpath(out)
    if os.path.exists(source) and os.path.commonpath([source, target]) == target:
        raise MergingError(
            "the result would replace the network that it is made from", where=out, fix="Give another OUT."
        )


def check_images(net: nn.Module, data: str | None, batches: Iterable[Any]) -> None:
    """Refuse images that the network does not take, before any work is done."""
    from neuron_merging.cutting.verify import run_small
    from neuron_merging.errors import VerificationError

    for batch in islice(batches, 1):
        try:
            with show.aside():
                run_small(net, (batch[:2],))
        except VerificationError as error:
            what = f"the network does not take a batch of {tuple(batch[:2].shape)}: {error.__cause__}"
            raise MergingError(what, where=str(data), fix="Give the data that it was trained on.") from error
