"""VGG with batch norm: the paper's for 32x32 images, torchvision's for 224x224."""

import torch.nn.functional as F
from torch import Tensor, nn

from .convolution import convolution

_STAGE_WIDTHS = (64, 128, 256, 512, 512)
_STAGE_DEPTHS = {
    11: (1, 1, 2, 2, 2),
    13: (2, 2, 2, 2, 2),
    16: (2, 2, 3, 3, 3),
    19: (2, 2, 4, 4, 4),
}


def _stages(depth: int, *, bias: bool) -> nn.Sequential:
    """Five stages of convolution, batch norm and ReLU, with a max pool after each."""
    if depth not in _STAGE_DEPTHS:
        raise ValueError(f"there is no VGG-{depth}: the depth is one of {list(_STAGE_DEPTHS)}")
    layers: list[nn.Module] = []
    inputs = 3
    for width, convolutions in zip(_STAGE_WIDTHS, _STAGE_DEPTHS[depth], strict=True):
        for _ in range(convolutions):
            layers += [
                convolution(inputs, width, kernel=3, bias=bias),
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
        self.feature = _stages(depth, bias=False)[:-1]  # an average pool takes the last one's place
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
        self.features = _stages(depth, bias=True)
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
    """VGG-16 with batch norm for 224x224 images; torchvision's vgg16_bn weights load strictly."""
    return ImageNetVGG(16, classes)
