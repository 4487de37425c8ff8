"""The paper's networks: shapes, parameter counts, published weights, accuracy."""

import os
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from neuron_merging.models import NETWORKS, create_network, find_network
from tests.conftest import import_or_fail

DATA = os.environ.get("NEURON_MERGING_DATA")
IMAGES = 200
needs_data = pytest.mark.skipif(
    DATA is None, reason="NEURON_MERGING_DATA is unset: it names the folder of the checkpoints"
)

PARAMETERS = {
    "digit-net": 67_754,
    "lenet-300-100": 266_610,
    "vgg-11": 9_492_042,
    "vgg-13": 9_676_746,
    "vgg-16": 14_987_722,
    "vgg-19": 20_298_698,
    "resnet-20": 272_474,
    "resnet-32": 466_906,
    "resnet-44": 661_338,
    "resnet-56": 855_770,
    "resnet-110": 1_730_714,
    "wideresnet-16-2": 691_674,
    "wideresnet-28-10": 36_479_194,
    "wideresnet-40-4": 8_949_210,
    "vgg-16-imagenet": 138_365_992,
    "resnet-34-imagenet": 21_797_672,
}


def build_shapes(name: str, classes: int | None = None) -> nn.Module:
    """The network on the meta device: shapes without numbers, so that large ones are free."""
    with torch.device("meta"):
        return create_network(name, classes).eval()


def load(name: str, file: str) -> nn.Module:
    assert DATA is not None
    model = create_network(name)
    model.load_state_dict(load_file(Path(DATA) / file), strict=True)
    return model.eval()


def test_every_network_has_a_known_parameter_count() -> None:
    assert PARAMETERS.keys() == NETWORKS.keys()


@pytest.mark.parametrize("name", NETWORKS)
def test_parameter_count(name: str) -> None:
    assert sum(p.numel() for p in build_shapes(name).parameters()) == PARAMETERS[name]


@pytest.mark.parametrize("classes", [None, 7])
@pytest.mark.parametrize("name", NETWORKS)
def test_output_shape(name: str, classes: int | None) -> None:
    spec = NETWORKS[name]
    images = torch.empty(2, *spec.input_shape, device="meta")
    assert build_shapes(name, classes)(images).shape == (2, classes or spec.classes)


@pytest.mark.parametrize("name", ["lenet-300-100", "vgg-11", "resnet-20", "wideresnet-16-2"])
def test_a_step_of_training_reaches_every_parameter(name: str) -> None:
    model = create_network(name)
    model(torch.randn(4, *NETWORKS[name].input_shape)).square().sum().backward()
    weights = {name: p.grad for name, p in model.named_parameters() if p.ndim > 1}
    assert all(grad is not None and 0 < grad.abs().max() < torch.inf for grad in weights.values())


def test_convolutions_are_he_initialised_and_batch_norm_is_neutral() -> None:
    torch.manual_seed(0)
    block = create_network("resnet-20").get_submodule("layer3.0")
    weight = block.get_parameter("conv1.weight")  # 64 outputs, 3x3
    assert weight.std().item() == pytest.approx((2 / (64 * 9)) ** 0.5, rel=0.02)
    assert (block.get_parameter("bn1.weight") == 1).all()
    assert (block.get_parameter("bn1.bias") == 0).all()


def test_wideresnet_shortcut_sees_the_activated_input_only_where_the_shape_changes() -> None:
    torch.manual_seed(0)
    stage = create_network("wideresnet-16-2").eval().get_submodule("block1.layer")
    changing, keeping = stage.get_submodule("0"), stage.get_submodule("1")
    for block in (changing, keeping):
        nn.init.zeros_(block.get_parameter("conv2.weight"))  # silences the residual branch
    negative = -torch.rand(1, 16, 8, 8)
    assert (changing(negative) == 0).all()
    negative = -torch.rand(1, 32, 8, 8)
    assert torch.equal(keeping(negative), negative)


def test_any_wideresnet_is_found_by_its_depth_and_width() -> None:
    model = build_shapes("wideresnet-10-3", classes=5)
    assert model.get_submodule("fc").weight.shape == (5, 192)
    assert find_network("wideresnet-10-3").data == "cifar-10"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("resnet56", "resnet-56"),
        ("VGG16", "vgg-16"),
        ("?", "lenet-300-100, vgg-11, .*resnet-34-imagenet"),
        ("wideresnet-40-0", "wideresnet-40-4"),
        ("wideresnet-41-4", "6n \\+ 4"),
        ("wideresnet-4-4", "6n \\+ 4"),
    ],
)
def test_an_unknown_name_is_refused_with_what_to_write_instead(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        create_network(name)


def test_vgg_16_imagenet_has_the_layer_indices_of_torchvision() -> None:
    state = build_shapes("vgg-16-imagenet").state_dict()
    biases = [name for name in state if name.endswith(".bias")]
    convolutions = [0, 3, 7, 10, 14, 17, 20, 24, 27, 30, 34, 37, 40]
    assert biases == [
        *(f"features.{i + norm}.bias" for i in convolutions for norm in (0, 1)),
        *(f"classifier.{i}.bias" for i in (0, 3, 6)),
    ]


@pytest.fixture(scope="module")
def torchvision_models(declare_vision_operators: None) -> ModuleType:
    return import_or_fail("torchvision.models")


@pytest.mark.parametrize(("name", "theirs"), [("vgg-16-imagenet", "vgg16_bn"), ("resnet-34-imagenet", "resnet34")])
def test_torchvision_weights_fit(name: str, theirs: str, torchvision_models: ModuleType) -> None:
    with torch.device("meta"):
        published = torchvision_models.get_model(theirs).state_dict()
    ours = build_shapes(name).state_dict()
    assert {k: v.shape for k, v in ours.items()} == {k: v.shape for k, v in published.items()}


def test_resnet_34_computes_what_torchvision_computes(torchvision_models: ModuleType) -> None:
    torch.manual_seed(0)
    theirs, ours = torchvision_models.resnet34().eval(), create_network("resnet-34-imagenet").eval()
    ours.load_state_dict(theirs.state_dict())
    images = torch.randn(2, 3, 64, 64)
    torch.testing.assert_close(ours(images), theirs(images))


@pytest.fixture(scope="module")
def cifar10() -> tuple[Tensor, Tensor]:
    """The first CIFAR-10 test images, normalised, and their labels."""
    assert DATA is not None
    with np.load(Path(DATA) / "cifar10_test.npz") as file:
        images, labels = torch.from_numpy(file["x"][:IMAGES]), torch.from_numpy(file["y"][:IMAGES])
    mean, std = torch.tensor([0.4914, 0.4822, 0.4465]), torch.tensor([0.2023, 0.1994, 0.2010])
    return ((images / 255 - mean) / std).permute(0, 3, 1, 2), labels


@needs_data
@pytest.mark.parametrize(
    ("name", "file", "at_least"),
    [
        ("resnet-56", "paper_resnet56_cifar10.safetensors", 0.91),
        ("vgg-16", "vgg16_cifar10_8epochs.safetensors", 0.85),
    ],
)
def test_accuracy(name: str, file: str, at_least: float, cifar10: tuple[Tensor, Tensor]) -> None:
    images, labels = cifar10
    with torch.inference_mode():
        predicted = load(name, file)(images).argmax(1)
    assert (predicted == labels).double().mean() > at_least


@needs_data
def test_lenet_loads_the_papers_weights() -> None:
    model = load("lenet-300-100", "paper_lenet_300_100_fashionmnist.safetensors")
    assert model(torch.zeros(1, 1, 28, 28)).isfinite().all()
