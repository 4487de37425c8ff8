"""The paper's networks: LeNet-300-100, VGG, ResNet and WideResNet, with the layer names of its checkpoints.

Also the VGG-16 and ResNet-34 of torchvision, and the DigitNet of the demo.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial

import torch.nn.functional as F
from torch import Tensor, nn

from neuron_merging.models import NetworkSpec, register_networks


def make_convolution(inputs: int, outputs: int, kernel: int, stride: int = 1, *, bias: bool = False) -> nn.Conv2d:
    """Make a square convolution with "same" padding and He initialisation.

    >>> make_convolution(3, 16, kernel=3)
    Conv2d(3, 16, kernel_size=(3, 3), stride=(1, 1), padding=(1, 1), bias=False)
    """
    layer = nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, bias=bias)
    # As in torchvision's ResNet and VGG.
    nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)
    return layer


class LeNet300100(nn.Module):
    """784-300-100-classes with ReLU; takes images of any shape with 784 entries.

    >>> import torch
    >>> LeNet300100()(torch.zeros(2, 1, 28, 28)).shape
    torch.Size([2, 10])
    """

    def __init__(self, classes: int = 10) -> None:
        super().__init__()
        self.ip1 = nn.Linear(28 * 28, 300)
        self.ip2 = nn.Linear(300, 100)
        self.ip3 = nn.Linear(100, classes)

    def forward(self, images: Tensor) -> Tensor:
        x = F.relu(self.ip1(images.flatten(1)))
        x = F.relu(self.ip2(x))
        logits: Tensor = self.ip3(x)
        return logits


class DigitNet(nn.Sequential):
    """Four convolutions with batch norm for 8 × 8 digits."""

    def __init__(self, classes: int = 10) -> None:
        super().__init__()
        for i, (width, pool) in enumerate([(32, False), (32, True), (64, False), (64, True)]):
            into = 1 if i == 0 else (32, 32, 64)[i - 1]
            self.add_module(f"conv{i + 1}", nn.Conv2d(into, width, 3, padding=1, bias=False))
            self.add_module(f"bn{i + 1}", nn.BatchNorm2d(width))
            self.add_module(f"relu{i + 1}", nn.ReLU())
            if pool:
                self.add_module(f"pool{i + 1}", nn.MaxPool2d(2))
        self.add_module("flatten", nn.Flatten())
        self.add_module("fc", nn.Linear(64 * 4, classes))


_STAGE_WIDTHS = (64, 128, 256, 512, 512)
_STAGE_DEPTHS = {
    11: (1, 1, 2, 2, 2),
    13: (2, 2, 2, 2, 2),
    16: (2, 2, 3, 3, 3),
    19: (2, 2, 4, 4, 4),
}


def _build_vgg_stages(depth: int, *, bias: bool) -> nn.Sequential:
    """Build five stages of convolution, batch norm and ReLU, with a max pool after each."""
    if depth not in _STAGE_DEPTHS:
        raise ValueError(f"there is no VGG-{depth}: the depth is one of {list(_STAGE_DEPTHS)}")
    layers: list[nn.Module] = []
    inputs = 3
    for width, convolutions in zip(_STAGE_WIDTHS, _STAGE_DEPTHS[depth], strict=True):
        for _ in range(convolutions):
            layers += [
                make_convolution(inputs, width, kernel=3, bias=bias),
                nn.BatchNorm2d(width),
                nn.ReLU(inplace=True),
            ]
            inputs = width
        layers.append(nn.MaxPool2d(2))
    return nn.Sequential(*layers)


class VGG(nn.Module):
    """VGG-11, 13, 16 or 19 for 32x32 images, with the paper's layer names.

    >>> import torch
    >>> VGG(16)(torch.zeros(2, 3, 32, 32)).shape
    torch.Size([2, 10])
    """

    def __init__(self, depth: int, classes: int = 10) -> None:
        super().__init__()
        self.feature = _build_vgg_stages(depth, bias=False)[
            :-1
        ]  # forward() has an average pool instead of the last max pool
        self.classifier = nn.Sequential(
            nn.Linear(512, 512),
            nn.BatchNorm1d(512),
            nn.ReLU(inplace=True),
            nn.Linear(512, classes),
        )

    def forward(self, images: Tensor) -> Tensor:
        x = F.avg_pool2d(self.feature(images), 2)
        logits: Tensor = self.classifier(x.flatten(1))
        return logits


class ImageNetVGG(nn.Module):
    """VGG-11, 13, 16 or 19 for 224x224 images, with the layer names of torchvision's vgg*_bn."""

    def __init__(self, depth: int, classes: int = 1000) -> None:
        super().__init__()
        self.features = _build_vgg_stages(depth, bias=True)
        self.avgpool = nn.AdaptiveAvgPool2d(7)
        self.classifier = nn.Sequential(
            nn.Linear(512 * 7 * 7, 4096),
            nn.ReLU(inplace=True),
            nn.Dropout(),
            nn.Linear(4096, 4096),
            nn.ReLU(inplace=True),
            nn.Dropout(),
            nn.Linear(4096, classes),
        )

    def forward(self, images: Tensor) -> Tensor:
        x = self.avgpool(self.features(images))
        logits: Tensor = self.classifier(x.flatten(1))
        return logits


def vgg16_imagenet(classes: int = 1000) -> ImageNetVGG:
    """Build VGG-16 with batch norm for 224x224 images; torchvision's vgg16_bn weights load strictly."""
    return ImageNetVGG(16, classes)


class _ResidualBlock(nn.Module):
    """The layers of a residual block: two convolutions, and a shortcut of the same output shape."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = make_convolution(inputs, outputs, kernel=3, stride=stride)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = make_convolution(outputs, outputs, kernel=3)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.downsample: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.downsample = nn.Sequential(
                make_convolution(inputs, outputs, kernel=1, stride=stride), nn.BatchNorm2d(outputs)
            )

    def residual_sum(self, x: Tensor) -> Tensor:
        """Return the convolutions' output plus the shortcut."""
        inner = F.relu(self.bn1(self.conv1(x)))
        total: Tensor = self.bn2(self.conv2(inner)) + self.downsample(x)
        return total


class ReluFirstBlock(_ResidualBlock):
    """The paper's block: ReLU on the input instead of on the sum."""

    def forward(self, x: Tensor) -> Tensor:
        return self.residual_sum(F.relu(x))


class ReluLastBlock(_ResidualBlock):
    """The ordinary block: ReLU on the sum."""

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.residual_sum(x))


def _build_resnet_stage(
    block: type[_ResidualBlock], blocks: int, inputs: int, outputs: int, stride: int
) -> nn.Sequential:
    first = block(inputs, outputs, stride)
    return nn.Sequential(first, *(block(outputs, outputs, 1) for _ in range(blocks - 1)))


class ResNet(nn.Module):
    """ResNet of depth 6n + 2 for 32x32 images, in the paper's order of operations.

    >>> import torch
    >>> ResNet(56)(torch.zeros(2, 3, 32, 32)).shape
    torch.Size([2, 10])
    """

    def __init__(self, depth: int, classes: int = 10) -> None:
        super().__init__()
        blocks, rest = divmod(depth - 2, 6)
        if rest or blocks < 1:
            raise ValueError(f"there is no ResNet-{depth}: the depth must be 6n + 2 (20, 32, ...)")
        self.conv1 = make_convolution(3, 16, kernel=3)
        self.bn1 = nn.BatchNorm2d(16)
        self.layer1 = _build_resnet_stage(ReluFirstBlock, blocks, 16, 16, stride=1)
        self.layer2 = _build_resnet_stage(ReluFirstBlock, blocks, 16, 32, stride=2)
        self.layer3 = _build_resnet_stage(ReluFirstBlock, blocks, 32, 64, stride=2)
        self.fc = nn.Linear(64, classes)

    def forward(self, images: Tensor) -> Tensor:
        x = self.bn1(self.conv1(images))
        x = self.layer3(self.layer2(self.layer1(x)))
        x = F.adaptive_avg_pool2d(F.relu(x), 1)
        logits: Tensor = self.fc(x.flatten(1))
        return logits


class ImageNetResNet(nn.Module):
    """ResNet of ordinary blocks for 224x224 images, with torchvision's layer names."""

    def __init__(self, blocks: Sequence[int], classes: int = 1000) -> None:
        super().__init__()
        self.conv1 = make_convolution(3, 64, kernel=7, stride=2)
        self.bn1 = nn.BatchNorm2d(64)
        self.layer1 = _build_resnet_stage(ReluLastBlock, blocks[0], 64, 64, stride=1)
        self.layer2 = _build_resnet_stage(ReluLastBlock, blocks[1], 64, 128, stride=2)
        self.layer3 = _build_resnet_stage(ReluLastBlock, blocks[2], 128, 256, stride=2)
        self.layer4 = _build_resnet_stage(ReluLastBlock, blocks[3], 256, 512, stride=2)
        self.fc = nn.Linear(512, classes)

    def forward(self, images: Tensor) -> Tensor:
        x = F.relu(self.bn1(self.conv1(images)))
        x = F.max_pool2d(x, kernel_size=3, stride=2, padding=1)
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        x = F.adaptive_avg_pool2d(x, 1)
        logits: Tensor = self.fc(x.flatten(1))
        return logits


def resnet34_imagenet(classes: int = 1000) -> ImageNetResNet:
    """Build ResNet-34 for 224x224 images; torchvision's resnet34 weights load strictly."""
    return ImageNetResNet((3, 4, 6, 3), classes)


class WideBlock(nn.Module):
    """Pre-activation block: batch norm and ReLU before each convolution.

    If the shape changes, the shortcut reads the activated input, otherwise the input itself.
    """

    def __init__(self, inputs: int, outputs: int, stride: int, dropout: float) -> None:
        super().__init__()
        self.bn1 = nn.BatchNorm2d(inputs)
        self.conv1 = make_convolution(inputs, outputs, kernel=3, stride=stride)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.dropout = nn.Dropout(dropout)
        self.conv2 = make_convolution(outputs, outputs, kernel=3)
        self.convShortcut = None  # the name in the paper's checkpoints
        if stride != 1 or inputs != outputs:
            self.convShortcut = make_convolution(inputs, outputs, kernel=1, stride=stride)

    def forward(self, x: Tensor) -> Tensor:
        activated = F.relu(self.bn1(x))
        shortcut = x if self.convShortcut is None else self.convShortcut(activated)
        inner = F.relu(self.bn2(self.conv1(activated)))
        total: Tensor = self.conv2(self.dropout(inner)) + shortcut
        return total


def _build_wide_stage(blocks: int, inputs: int, outputs: int, stride: int, dropout: float) -> nn.Sequential:
    first = WideBlock(inputs, outputs, stride, dropout)
    rest = (WideBlock(outputs, outputs, 1, dropout) for _ in range(blocks - 1))
    # The extra level is in the names of the paper's checkpoints: block1.layer.0.
    return nn.Sequential(OrderedDict(layer=nn.Sequential(first, *rest)))


class WideResNet(nn.Module):
    """WideResNet of depth 6n + 4, `width` times as wide as a ResNet; the paper's layer names.

    >>> import torch
    >>> WideResNet(40, 4)(torch.zeros(2, 3, 32, 32)).shape
    torch.Size([2, 10])
    """

    def __init__(self, depth: int, width: int, classes: int = 10, dropout: float = 0.0) -> None:
        super().__init__()
        blocks, rest = divmod(depth - 4, 6)
        if rest or blocks < 1:
            raise ValueError(f"there is no WideResNet-{depth}: the depth must be 6n + 4 (10, 16, 22, ...)")
        self.conv1 = make_convolution(3, 16, kernel=3)
        self.block1 = _build_wide_stage(blocks, 16, 16 * width, stride=1, dropout=dropout)
        self.block2 = _build_wide_stage(blocks, 16 * width, 32 * width, stride=2, dropout=dropout)
        self.block3 = _build_wide_stage(blocks, 32 * width, 64 * width, stride=2, dropout=dropout)
        self.bn1 = nn.BatchNorm2d(64 * width)
        self.fc = nn.Linear(64 * width, classes)

    def forward(self, images: Tensor) -> Tensor:
        x = self.block3(self.block2(self.block1(self.conv1(images))))
        x = F.adaptive_avg_pool2d(F.relu(self.bn1(x)), 1)
        logits: Tensor = self.fc(x.flatten(1))
        return logits


CIFAR_INPUT_SHAPE = (3, 32, 32)
"""Channels, height and width of CIFAR-10 and CIFAR-100."""


def _make_cifar_spec(build: Callable[..., nn.Module]) -> NetworkSpec:
    return NetworkSpec(build, CIFAR_INPUT_SHAPE, 10, "cifar-10")


def _make_imagenet_spec(build: Callable[..., nn.Module]) -> NetworkSpec:
    return NetworkSpec(build, (3, 224, 224), 1000, "imagenet")


PAPER_NETWORKS: dict[str, NetworkSpec] = {
    "digit-net": NetworkSpec(DigitNet, (1, 8, 8), 10, "digits"),
    "lenet-300-100": NetworkSpec(LeNet300100, (1, 28, 28), 10, "fashion-mnist"),
    **{f"vgg-{depth}": _make_cifar_spec(partial(VGG, depth)) for depth in (11, 13, 16, 19)},
    **{f"resnet-{depth}": _make_cifar_spec(partial(ResNet, depth)) for depth in (20, 32, 44, 56, 110)},
    **{
        f"wideresnet-{depth}-{width}": _make_cifar_spec(partial(WideResNet, depth, width))
        for depth, width in ((40, 4), (16, 2), (28, 10))
    },
    "vgg-16-imagenet": _make_imagenet_spec(vgg16_imagenet),
    "resnet-34-imagenet": _make_imagenet_spec(resnet34_imagenet),
}
WIDERESNET_PATTERN = "wideresnet-D-K with D = 6n + 4"


def _match_wideresnet(name: str) -> NetworkSpec | None:
    wide = re.fullmatch(
        r"wideresnet-(\d{2,3})-([1-9]\d?)", name
    )  # two digits of width: larger networks do not fit into memory
    if wide is None or int(wide[1]) < 10 or int(wide[1]) % 6 != 4:
        return None
    return _make_cifar_spec(partial(WideResNet, int(wide[1]), int(wide[2])))


def register() -> None:
    """Register the paper's networks by name."""
    register_networks(PAPER_NETWORKS, {WIDERESNET_PATTERN: _match_wideresnet})
