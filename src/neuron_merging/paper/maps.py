"""maps: where a network looks: class activation maps of the original and of smaller networks.

The paper shows the last block's output resized as in class activation mapping, and does not say
how its channels become one picture. Here a place shows what it adds to the score of the image's
class: for a network that ends in pooling and a linear layer that is the sum of the channels,
weighted by the classifier, which is that method's own definition.
"""

from __future__ import annotations

from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from neuron_merging import measuring
from neuron_merging.data import FolderImages, Images
from neuron_merging.paper.checkpoint import Checkpoint
from neuron_merging.paper.scores import compressed
from neuron_merging.paper.settings import FAMILIES, Panel
from neuron_merging.paper.trials import Trial
from neuron_merging.sweeping.cells import Result

MOST = 10
"""Classes that are shown."""


def maps(checkpoint: Checkpoint, panel: Panel, trial: Trial) -> Result:
    """The maps of a trial, and how far they and the layer's output are from the original's."""
    layer = FAMILIES[checkpoint.network.family].maps
    x, labels = pictures(checkpoint)
    before = class_maps(checkpoint.model, layer, x, labels)
    if trial.method is None:
        return {"maps": before.tolist(), "correlation": 1.0, "error": 0.0}
    small = compressed(checkpoint, panel, trial)
    after = class_maps(small.model, layer, x, labels)
    errors = measuring.reconstruction_errors(checkpoint.model, small.model, [x], small.plan, [layer])
    return {"maps": after.tolist(), "correlation": correlation(before, after), "error": errors[layer]}


def chosen(checkpoint: Checkpoint) -> list[int]:
    """The first image of every class, of the first ten classes."""
    first: dict[int, int] = {}
    for place, label in enumerate(checkpoint.images.y.tolist()):
        first.setdefault(label, place)
    return [place for _, place in sorted(first.items())[:MOST]]


def pictures(checkpoint: Checkpoint) -> tuple[Tensor, Tensor]:
    """One normalised image per class, and the labels."""
    wanted = chosen(checkpoint)
    few = islice(checkpoint.images.batches(1, checkpoint.device), max(wanted) + 1)
    found = {place: pair for place, pair in enumerate(few) if place in wanted}
    x, y = zip(*(found[place] for place in wanted), strict=True)
    return torch.cat(x), torch.cat(y)


def class_maps(model: nn.Module, layer: str, x: Tensor, labels: Tensor) -> Tensor:
    """What each place of a layer's output adds to the score of the image's class."""
    seen: list[Any] = []
    handle = model.get_submodule(layer).register_forward_hook(lambda module, inputs, output: seen.append(output))
    try:
        with torch.enable_grad():
            outputs = model(x.clone().requires_grad_())
            scores = outputs.gather(1, labels[:, None]).sum()
            (gradient,) = torch.autograd.grad(scores, seen[0])
    finally:
        handle.remove()
    found: Tensor = (gradient * seen[0].detach()).sum(1)
    return found


def correlation(before: Tensor, after: Tensor) -> float:
    """Of the maps of each image, averaged over the images; a flat map is like none.

    >>> ramp = torch.arange(4.0).reshape(1, 2, 2)
    >>> round(correlation(ramp, 3 * ramp + 1), 6), round(correlation(ramp, -ramp), 6)
    (1.0, -1.0)
    """
    a, b = (maps.flatten(1) - maps.flatten(1).mean(1, keepdim=True) for maps in (before, after))
    return float(torch.nn.functional.cosine_similarity(a, b).mean())


def visible(x: Tensor, images: Images | FolderImages) -> list[Any]:
    """Normalised images as pixels of 0..1, height first and colours last."""
    mean, std = (torch.tensor(values).view(-1, 1, 1) for values in (images.mean, images.std))
    return [picture.permute(1, 2, 0).numpy() for picture in (x.cpu() * std + mean).clamp(0, 1)]
