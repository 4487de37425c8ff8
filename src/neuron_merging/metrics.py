"""metrics: what a network costs, and how far two networks are apart."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from neuron_merging.capture import as_inputs


def count_parameters(model: nn.Module) -> int:
    """Trainable and frozen parameters, shared ones once."""
    return sum(p.numel() for p in model.parameters())


def count_macs(model: nn.Module, example_inputs: Any) -> int:
    """Multiply-accumulates of one forward pass, counted by torch's flop counter (two flops each)."""
    was_training = model.training
    model.eval()
    try:
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            model(*as_inputs(example_inputs))
    finally:
        model.train(was_training)
    return int(counter.get_total_flops()) // 2


def ware(original: Tensor, changed: Tensor) -> float:
    """Weighted average reconstruction error (equation 8, all weights one).

    >>> ware(torch.tensor([[1.0, 2.0]]), torch.tensor([[1.5, 1.0]]))
    0.5
    """
    return float(((changed - original).abs() / original.abs()).double().mean())


@torch.no_grad()
def predict(model: nn.Module, batches: Iterable[Any]) -> tuple[Tensor, Tensor]:
    """All outputs and all labels of (input, label) batches."""
    model.eval()
    outputs, labels = [], []
    for x, y in batches:
        outputs.append(model(x).cpu())
        labels.append(y.cpu())
    return torch.cat(outputs), torch.cat(labels)


def accuracy(outputs: Tensor, labels: Tensor, top: int = 1) -> float:
    """Share of samples, in percent, whose label is among the `top` largest outputs."""
    best = outputs.topk(top, dim=1).indices
    return float((best == labels[:, None]).any(1).double().mean() * 100)
