"""Wide residual networks (Zagoruyko & Komodakis, 2016) for 32x32 images."""

from collections import OrderedDict

import torch.nn.functional as F
from torch import Tensor, nn

from .convolution import convolution


class WideBlock(nn.Module):
    """Batch norm and ReLU come before each convolution.

    Where the shape changes, the shortcut starts from the activated input, otherwise from the input.
    """

    def __init__(self, inputs: int, outputs: int, stride: int, dropout: float) -> None:
        super().__init__()
        self.bn1 = nn.BatchNorm2d(inputs)
        self.conv1 = convolution(inputs, outputs, kernel=3, stride=stride)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.dropout = nn.Dropout(dropout)
        self.conv2 = convolution(outputs, outputs, kernel=3)
        self.convShortcut = None  # the name in the paper's checkpoints
        if stride != 1 or inputs != outputs:
            self.convShortcut = convolution(inputs, outputs, kernel=1, stride=stride)

    def forward(self, x: Tensor) -> Tensor:
        activated = F.relu(self.bn1(x))
        shortcut = x if self.convShortcut is None else self.convShortcut(activated)
        inner = F.relu(self.bn2(self.conv1(activated)))
        total: Tensor = self.conv2(self.dropout(inner)) + shortcut
        return total


def _stage(blocks: int, inputs: int, outputs: int, stride: int, dropout: float) -> nn.Sequential:
    first = WideBlock(inputs, outputs, stride, dropout)
    rest = (WideBlock(outputs, outputs, 1, dropout) for _ in range(blocks - 1))
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
        self.conv1 = convolution(3, 16, kernel=3)
        self.block1 = _stage(blocks, 16, 16 * width, stride=1, dropout=dropout)
        self.block2 = _stage(blocks, 16 * width, 32 * width, stride=2, dropout=dropout)
        self.block3 = _stage(blocks, 32 * width, 64 * width, stride=2, dropout=dropout)
        self.bn1 = nn.BatchNorm2d(64 * width)
        self.fc = nn.Linear(64 * width, classes)

    def forward(self, images: Tensor) -> Tensor:
        x = self.block3(self.block2(self.block1(self.conv1(images))))
        x = F.adaptive_avg_pool2d(F.relu(self.bn1(x)), 1)
        logits: Tensor = self.fc(x.flatten(1))
        return logits
