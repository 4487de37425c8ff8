"""Tiny networks under the names of the paper's."""

from __future__ import annotations

import csv
from pathlib import Path

import safetensors.torch
import torch
from torch import Tensor, nn

from neuron_merging.cli import app
from neuron_merging.models import NetworkSpec
from neuron_merging.reproduction import experiments
from neuron_merging.reproduction.networks import ImageNetResNet, ResNet, WideResNet


class TinyVGG(nn.Module):
    """Eight narrow convolutions; on ImageNet the layers have other names."""

    def __init__(self, classes: int = 10, features: str = "feature") -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for i in range(8):
            pool = [nn.MaxPool2d(4 if i == 0 else 2)] if i < 3 else []
            layers += [nn.Conv2d(3 if i == 0 else 6, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(), *pool]
        setattr(self, features, nn.Sequential(*layers))
        self.features_name, self.classifier = features, nn.Linear(6, classes)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.classifier(getattr(self, self.features_name)(x).mean((2, 3)))
        return logits


def tiny_imagenet_vgg(classes: int = 1000) -> TinyVGG:
    return TinyVGG(classes, "features")


def tiny_imagenet_resnet(classes: int = 1000) -> nn.Module:
    class Shrunk(ImageNetResNet):
        def forward(self, images: Tensor) -> Tensor:
            return super().forward(images[..., ::4, ::4])

    return Shrunk((1, 1, 1, 1), classes)


class TinyLeNet(nn.Module):
    def __init__(self, classes: int = 10) -> None:
        super().__init__()
        self.ip1, self.ip2, self.ip3 = nn.Linear(784, 20), nn.Linear(20, 10), nn.Linear(10, classes)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.ip3(self.ip2(self.ip1(images.flatten(1)).relu()).relu())
        return logits


CIFAR, IMAGENET = (3, 32, 32), (3, 224, 224)
TINY = {
    "lenet-300-100": NetworkSpec(TinyLeNet, (1, 28, 28), 10, "fashion-mnist"),
    "vgg-16": NetworkSpec(TinyVGG, CIFAR, 10, "cifar-10"),
    "resnet-56": NetworkSpec(lambda classes=10: ResNet(8, classes), CIFAR, 10, "cifar-10"),
    "wideresnet-40-4": NetworkSpec(lambda classes=10: WideResNet(10, 1, classes), CIFAR, 10, "cifar-10"),
    "vgg-16-imagenet": NetworkSpec(tiny_imagenet_vgg, IMAGENET, 1000, "imagenet"),
    "resnet-34-imagenet": NetworkSpec(tiny_imagenet_resnet, IMAGENET, 1000, "imagenet"),
}
IMAGES = 12


def save_network(name: str, file: Path, seed: int) -> Path:
    """Weights that batch norms have seen data with, so that no layer is dead."""
    torch.manual_seed(seed)
    spec = TINY[name.removesuffix("-cifar-100")]
    model = spec.build(classes=100 if name.endswith("cifar-100") else spec.classes)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.normal_(module.bias, 0, 0.3)
            module.running_var.uniform_(0.5, 1.5)
    state = {key: value.contiguous() for key, value in model.state_dict().items()}
    if file.suffix == ".pth":
        torch.save(state, file)
    else:
        safetensors.torch.save_file(state, file)
    return file


def reproduce(*arguments: object) -> int:
    return app.main(["reproduce", *map(str, arguments)])


def read_csv(file: Path) -> list[dict[str, str]]:
    with file.open(newline="") as stream:
        return list(csv.DictReader(stream))


FEW = ("--criteria", "l1", "--ratios", "0.5")


# Caching

SMALL = ("table1", "--criteria", "l1", "--ratios", "0.5,0.6")


# Which networks, which methods

FILE = experiments.WEIGHT_FILES["resnet-56"][0]
