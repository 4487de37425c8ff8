"""Networks that nobody here wrote: torchvision's and timm's, with random weights."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import neuron_merging as nm
from neuron_merging.config import CompressConfig
from neuron_merging.pipeline import compress_analysis
from tests.conftest import import_or_fail, mark_long

TORCHVISION = ["resnet18", "mobilenet_v2", "shufflenet_v2_x0_5", "squeezenet1_1", "efficientnet_b0", "regnet_y_400mf"]
TIMM = ["ghostnet_050", "convnext_atto", "vit_tiny_patch16_224", "mixer_s32_224", "repvgg_a0"]


def torchvision_network(name: str) -> Callable[[], nn.Module]:
    return lambda: import_or_fail("torchvision.models").get_model(name, weights=None, num_classes=10)


def timm_network(name: str, **sizes: object) -> Callable[[], nn.Module]:
    return lambda: import_or_fail("timm").create_model(name, pretrained=False, num_classes=10, **sizes)


NETWORKS = {
    **{f"torchvision {name}": torchvision_network(name) for name in TORCHVISION},
    **{f"timm {name}": timm_network(name) for name in TIMM},
    "timm res2net50_14w_8s": timm_network("res2net50_14w_8s", layers=(1, 1, 1, 1)),
}


QUICK = {"torchvision resnet18", "torchvision squeezenet1_1"}


@pytest.mark.parametrize("name", mark_long(NETWORKS, QUICK))
@pytest.mark.filterwarnings("ignore")
def test_a_network_from_a_zoo_shrinks_and_is_verified(name: str, declare_vision_operators: None) -> None:
    model = NETWORKS[name]().eval()
    size = 224 if "224" in name else 64
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.running_mean.normal_(0, 0.1)
                module.running_var.uniform_(0.5, 1.5)
    analysis = nm.analyse(model, torch.randn(1, 3, size, size))
    settings = CompressConfig(ratio=0.5, scope="all", merger="cosine", criterion="l2")
    small = compress_analysis(analysis, settings, judge=False)  # weights at random have no answers to keep
    before, after = small.summary.parameters
    assert after < 0.8 * before
    assert small.summary.error is not None and small.summary.error < 1e-4
    assert all(refusal.why and refusal.operator for refusal in small.summary.refusals)
