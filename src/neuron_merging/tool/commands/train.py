"""train: a network and images in, trained weights out."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from neuron_merging.errors import MergingError
from neuron_merging.folder import recipe as recipes
from neuron_merging.tool.commands import show
from neuron_merging.tool.commands.source import Json, Texts
from neuron_merging.tool.commands.training import Data, Numbers, Run, announce, own_data, resumable

if TYPE_CHECKING:
    from torch import nn


def train(
    network: str,
    /,
    *,
    out: str,
    data: Data | None = None,
    numbers: Numbers | None = None,
    run: Run | None = None,
    weights: str | None = None,
    arg: Texts = None,
    json: Json = False,
) -> None:
    """Train a network as the paper does, or with other numbers.

    Parameters
    ----------
    network
        A built-in network's name, package.module:factory, timm:NAME or torchvision:NAME.
    out
        The folder for model.safetensors, the checkpoint of the last epoch, log.csv and training.yaml.
    weights
        A state dict to start from: .safetensors, .pt or .pth.
    arg
        An argument of the network's factory, as NAME=VALUE; may be repeated.
    """
    from neuron_merging.training import processes, train
    from neuron_merging.training.settings import paper

    how = run or Run()
    team = processes.current(how.device)
    recipe = (numbers or Numbers()).over(paper(network))
    images, test = (data or Data()).open(own_data(network))
    settings = recipes.pairs(arg, "--arg") or {}
    if own_data(network):
        settings = {"classes": images.classes, **settings}
    model = _fresh(network, settings, weights, recipe.seed)
    about = {"network": network, "arg": settings, "weights": weights}
    announce(images, test, team)
    with resumable():
        done = train(model, images, recipe, test=test, out=out, resume=how.resume, about=about, processes=team)
    if team.rank == 0:
        score = done.log[-1].test_accuracy
        show.facts({"accuracy": score if json else f"{score:.2f} %", "epochs": len(done.log), "written": out}, json)


def _fresh(network: str, arg: dict[str, Any], weights: str | None, seed: int) -> nn.Module:
    """The network with the seed's first weights, or with those of a file."""
    import torch

    from neuron_merging.networks import sources
    from neuron_merging.networks.checkpoints import load_weights

    if os.path.isdir(network):
        fix = "neuron-merging finetune trains it."
        raise MergingError("this is a folder, perhaps of a compressed network", where=network, fix=fix)
    if network.endswith(".pt2"):
        raise MergingError("an exported program cannot be trained", where=network, fix="Name the network itself.")
    torch.manual_seed(seed)
    model = sources.build(network, arg)
    if weights is not None:
        load_weights(model, weights)
    return model
