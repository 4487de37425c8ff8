"""Where merging makes the whole network worse than pruning, the layer stays pruned, and that is said."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import neuron_merging as nm
from neuron_merging.merging.protocol import MergeKind, ReasonCode


@torch.no_grad()
def network(strange: bool) -> nn.Sequential:
    """Batch norms whose statistics are those of the weights, or of far larger ones."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 16, 3), nn.BatchNorm2d(16), nn.ReLU(),
        nn.Conv2d(16, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 8),
    )  # fmt: skip
    for _ in range(30):
        model(torch.randn(32, 3, 16, 16))
    for norm in [layer for layer in model if isinstance(layer, nn.BatchNorm2d)] if strange else []:
        norm.running_var.fill_(1000.0)
    return model.eval()


def off(small: nn.Module, model: nn.Module, x: Tensor) -> float:
    with torch.no_grad():
        return float((small(x) - model(x)).square().mean() / model(x).var())


def test_statistics_that_do_not_belong_to_the_weights_are_found_out() -> None:
    model, x = network(strange=True), torch.randn(64, 3, 16, 16)
    mergers = (nm.Moments(source="dead-leaves"), "none")
    merged, pruned = (nm.compress(model, x[:1], merger=merger, criterion="l2") for merger in mergers)
    assert off(merged.model, model, x) < 1.1 * off(pruned.model, model, x) < 0.1
    worse = [
        merge for merge in merged.merged.merges if merge.reason is not None and merge.reason.why is ReasonCode.WORSE
    ]
    assert worse and all(merge.kind is MergeKind.PRUNED and merge.columns is None for merge in worse)
    assert "merged, the outputs were further off" in str(merged.summary)


def test_a_sound_network_keeps_all_its_merges() -> None:
    merges = nm.compress(network(strange=False), torch.randn(1, 3, 16, 16)).merged.merges
    assert {merge.kind for merge in merges} == {MergeKind.FITTED}


def test_calibration_is_judged_on_its_own_batches() -> None:
    model, x = network(strange=True), torch.randn(64, 3, 16, 16)
    merged, pruned = (nm.compress(model, x[:1], merger=m) for m in (nm.Calibrated([x]), "none"))
    assert off(merged.model, model, x) <= 1.001 * off(pruned.model, model, x)
