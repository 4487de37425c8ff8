"""ResNet: the paper's for 32x32 images, torchvision's ResNet-34 for 224x224.

Both are built from the same layers; they differ in where a block applies ReLU.
"""

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor, nn

from .convolution import convolution


class _Block(nn.Module):
    """The layers of a residual block: two convolutions, and a shortcut that fits their output."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = convolution(inputs, outputs, kernel=3, stride=stride)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = convolution(outputs, outputs, kernel=3)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.downsample: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.downsample = nn.Sequential(
                convolution(inputs, outputs, kernel=1, stride=stride), nn.BatchNorm2d(outputs)
            )

    def residual_sum(self, x: Tensor) -> Tensor:
        """What the convolutions make of x, plus its shortcut."""
        inner = F.relu(self.bn1(self.conv1(x)))
        total: Tensor = self.bn2(self.conv2(inner)) + self.downsample(x)
        return total


class ReluFirstBlock(_Block):
    """The paper's block: ReLU on the input, none on the sum."""

    def forward(self, x: Tensor) -> Tensor:
        return self.residual_sum(F.relu(x))


class ReluLastBlock(_Block):
    """The ordinary block: ReLU on the sum."""

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.residual_sum(x))


def _stage(block: type[_Block], blocks: int, inputs: int, outputs: int, stride: int) -> nn.Sequential:
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
        self.conv1 = convolution(3, 16, kernel=3)
        self.bn1 = nn.BatchNorm2d(16)
        self.layer1 = _stage(ReluFirstBlock, blocks, 16, 16, stride=1)
        self.layer2 = _stage(ReluFirstBlock, blocks, 16, 32, stride=2)
        self.layer3 = _stage(ReluFirstBlock, blocks, 32, 64, stride=2)
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
        self.conv1 = convolution(3, 64, kernel=7, stride=2)
        self.bn1 = nn.BatchNorm2d(64)
        self.layer1 = _stage(ReluLastBlock, blocks[0], 64, 64, stride=1)
        self.layer2 = _stage(ReluLastBlock, blocks[1], 64, 128, stride=2)
        self.layer3 = _stage(ReluLastBlock, blocks[2], 128, 256, stride=2)
        self.layer4 = _stage(ReluLastBlock, blocks[3], 256, 512, stride=2)
        self.fc = nn.Linear(512, classes)

    def forward(self, images: Tensor) -> Tensor:
        x = F.relu(self.bn1(self.conv1(images)))
        x = F.max_pool2d(x, kernel_size=3, stride=2, padding=1)
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        x = F.adaptive_avg_pool2d(x, 1)
        logits: Tensor = self.fc(x.flatten(1))
        return logits


def resnet34_imagenet(classes: int = 1000) -> ImageNetResNet:
    """ResNet-34 for 224x224 images; torchvision's resnet34 weights load strictly."""
    return ImageNetResNet((3, 4, 6, 3), classes)
