"""How alike the channels of a layer are."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from neuron_merging.channels.filters import filters_of
from neuron_merging.cutting.trial import analyse
from neuron_merging.errors import MergingError


def max_cosine(rows: Tensor) -> Tensor:
    """For every row the largest cosine to another row; a row of zeros is similar to none.

    Parameters
    ----------
    rows
        At least two.

    Returns
    -------
    Tensor
        One number per row.

    Raises
    ------
    MergingError
        There are fewer than two rows.

    Examples
    --------
    >>> max_cosine(torch.tensor([[1.0, 0.0], [2.0, 0.0], [0.0, 3.0]]))
    tensor([1., 1., 0.])
    """
    if len(rows) < 2:
        raise MergingError(f"{len(rows)} rows have no pair", where="max_cosine()", fix="Give at least two.")
    unit = rows / rows.norm(dim=1, keepdim=True).clamp(min=torch.finfo(rows.dtype).tiny)
    step, best = max(1, 2**24 // len(rows)), []
    for start in range(0, len(rows), step):
        cosine = unit[start : start + step] @ unit.T
        own = torch.arange(len(cosine), device=rows.device)
        cosine[own, own + start] = -torch.inf
        best.append(cosine.amax(1))
    return torch.cat(best)


@torch.no_grad()
def max_similarities(model: nn.Module, example_inputs: Any, scope: str = "internal") -> dict[str, Tensor]:
    """For every channel of every layer that can be cut, the largest cosine to another channel.

    Channels are rows as the paper takes them: flattened filters, with the bias where no norm follows.

    Parameters
    ----------
    model
        The network.
    example_inputs
        As for `analyse`.
    scope
        "internal", or "all" for residual streams too.

    Returns
    -------
    dict[str, Tensor]
        One number per channel, by the group's name.

    Raises
    ------
    ModelError
        The model cannot be captured.

    Examples
    --------
    >>> network = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> {name: len(values) for name, values in max_similarities(network, torch.zeros(1, 4)).items()}
    {'0': 8}
    """
    analysis = analyse(model, example_inputs)
    graph, groups = analysis.graph, analysis.channels.groups
    chosen = (g for g in groups if g.producers and g.size > 1 and (scope == "all" or not g.residual))
    return {group.name: max_cosine(filters_of(graph, group)) for group in chosen}
