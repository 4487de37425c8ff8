"""Networks with channels that are redundant by construction: dead filters, and multiples of other filters."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from random import Random

import torch
from torch import Tensor, nn

import neuron_merging as nm

from .kinds.norms import BATCH
from .site import Site
from .trial import compute_lost_variance

HOMOGENEOUS = (nn.ReLU, lambda: nn.LeakyReLU(0.1))
ZERO_AT_ZERO = (*HOMOGENEOUS, nn.Tanh, nn.SiLU, nn.GELU, nn.ELU)
DEAD_LOSS, TWIN_LOSS = 1e-9, 0.02
"""Largest acceptable shares of the output's variance that are lost."""


@dataclass(frozen=True)
class Planted:
    """A network in which half of the hidden channels are redundant."""

    model: nn.Module
    example: Tensor


def plant_network(seed: int, twins: bool) -> Planted:
    """Two hidden layers; the second half of each one's channels is dead, or repeats the first half at half the size."""
    rng = Random(f"planted:{seed}:{twins}")
    torch.manual_seed(seed)
    domain = rng.choice(["image", "signal", "features"])
    site, widths = Site(domain, 3, 8, rng), [3, 2 * rng.choice([3, 4, 6]), 2 * rng.choice([3, 4, 6])]
    layers: list[nn.Module] = []
    for c, out in pairwise(widths):
        layer = site.mix(c, out, bias=True)
        _make_half_redundant(layer, twins)
        norm = [_match_norm(BATCH[domain](out), twins)] if rng.random() < 0.4 else []
        layers += [layer, *norm, rng.choice(HOMOGENEOUS if twins else ZERO_AT_ZERO)()]
    head = site.mix(widths[-1], 3)
    shape = (64, 3, *[8] * site.spatial)
    return Planted(nn.Sequential(*layers, head).double().eval(), torch.randn(shape, dtype=torch.float64))


@torch.no_grad()
def _make_half_redundant(layer: nn.Module, twins: bool) -> None:
    half = len(layer.weight) // 2
    norms = layer.weight[:half].flatten(1).norm(dim=1)
    layer.weight[:half] /= norms.view(-1, *[1] * (layer.weight.dim() - 1))
    for parameter in layer.parameters():
        parameter[half:] = 0.5 * parameter[:half] if twins else 0.0


@torch.no_grad()
def _match_norm(norm: nn.Module, twins: bool) -> nn.Module:
    """Set norm parameters such that the second half stays dead, or a multiple of the first."""
    half = norm.num_features // 2
    norm.running_mean.normal_(0, 0.2)
    norm.running_var.uniform_(0.3, 2)
    norm.weight.uniform_(0.5, 1.5)
    norm.bias.normal_(0, 0.2)
    norm.running_mean[half:] = 0.5 * norm.running_mean[:half] if twins else 0.0
    norm.bias[half:] = norm.bias[:half] if twins else 0.0
    if twins:
        norm.weight[half:] = norm.weight[:half]
        norm.running_var[half:] = 0.25 * (norm.running_var[:half] + norm.eps) - norm.eps
    return norm


def measure_loss(planted: Planted, merger: str | None) -> float:
    """Return the share of the output's variance that is lost when half of the channels are removed."""
    small = nm.compress(planted.model, planted.example, ratio=0.5, merger=merger).model
    fresh = torch.randn_like(planted.example)
    with torch.no_grad():
        return compute_lost_variance([small(fresh)], [planted.model(fresh)])
