"""Predictions and top-k accuracy on labelled batches."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from neuron_merging.errors import MergingError


@torch.no_grad()
def predict(model: nn.Module, batches: Iterable[Any]) -> tuple[Tensor, Tensor]:
    """Run a network on labelled batches, and return all outputs and labels on the CPU.

    Parameters
    ----------
    model
        The network. It is set to evaluation mode.
    batches
        Pairs of inputs and labels.

    Returns
    -------
    tuple[Tensor, Tensor]
        Outputs and labels of all batches, concatenated.

    Raises
    ------
    MergingError
        There is no batch.

    Examples
    --------
    >>> outputs, labels = predict(nn.Linear(4, 3), [(torch.zeros(2, 4), torch.tensor([0, 2]))])
    >>> outputs.shape, labels
    (torch.Size([2, 3]), tensor([0, 2]))
    """
    model.eval()
    outputs, labels = [], []
    for x, y in batches:
        outputs.append(model(x).cpu())
        labels.append(y.cpu())
    if not outputs:
        raise make_empty_data_error("predict()")
    return torch.cat(outputs), torch.cat(labels)


def accuracy(outputs: Tensor, labels: Tensor, top: int = 1) -> float:
    """Compute the top-k accuracy in percent: the share of samples whose label is among the k largest outputs.

    Parameters
    ----------
    outputs
        One row of class scores per sample.
    labels
        The correct classes.
    top
        The number k.

    Returns
    -------
    float
        The accuracy in percent.

    Raises
    ------
    MergingError
        There is no sample.

    Examples
    --------
    >>> accuracy(torch.tensor([[0.1, 0.7, 0.2], [0.5, 0.4, 0.1]]), torch.tensor([1, 1]))
    50.0
    """
    if not len(labels):
        raise make_empty_data_error("accuracy()")
    return 100 * _count_top_k_hits(outputs, labels, top) / len(labels)


@torch.no_grad()
def accuracies(model: nn.Module, batches: Iterable[Any], tops: Sequence[int] = (1, 5)) -> dict[int, float]:
    """Compute top-k accuracies in one pass, without storing the outputs.

    Parameters
    ----------
    model
        The network. It is set to evaluation mode.
    batches
        Pairs of inputs and labels.
    tops
        The numbers k.

    Returns
    -------
    dict[int, float]
        Accuracies in percent, by k.

    Raises
    ------
    MergingError
        There is no batch.

    Examples
    --------
    >>> network = nn.Linear(4, 3)
    >>> accuracies(network, [(torch.zeros(2, 4), torch.tensor([0, 2]))], tops=(3,))
    {3: 100.0}
    """
    model.eval()
    hits, total = dict.fromkeys(tops, 0), 0
    for x, y in batches:
        outputs = model(x)
        total += len(y)
        for top in tops:
            hits[top] += _count_top_k_hits(outputs, y, top)
    if not total:
        raise make_empty_data_error("accuracies()")
    return {top: 100 * count / total for top, count in hits.items()}


def make_empty_data_error(where: str) -> MergingError:
    return MergingError("there is nothing to predict", where=where, fix="Give at least one batch.")


def _count_top_k_hits(outputs: Tensor, labels: Tensor, top: int) -> int:
    if len(labels) and not 0 <= int(labels.min()) <= int(labels.max()) < outputs.shape[1]:
        what = f"the labels are {int(labels.min())} to {int(labels.max())}, the network has {outputs.shape[1]} outputs"
        raise MergingError(what, where="labels", fix="Give the data that it was trained on.")
    # Fewer than k classes: every prediction is then among the best k.
    best = outputs.topk(min(top, outputs.shape[1]), dim=1).indices
    return int((best == labels.to(best.device)[:, None]).any(1).sum())
