"""Compress a network that labels pixels: an encoder and a decoder with skip connections.

    pip install scikit-learn

Its weights are trained here in seconds: it finds the strokes of digits in noise.
"""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

import neuron_merging as nm


def block(before: int, after: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(before, after, 3, padding=1, bias=False), nn.BatchNorm2d(after), nn.ReLU())


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.bottom = block(1, 16), block(16, 32), block(32, 32)
        self.up, self.last, self.head = block(64, 32), block(48, 16), nn.Conv2d(16, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        a = self.first(x)
        b = self.second(F.max_pool2d(a, 2))
        c = self.bottom(F.max_pool2d(b, 2))
        b = self.up(torch.cat([F.interpolate(c, scale_factor=2.0), b], 1))
        result: Tensor = self.head(self.last(torch.cat([F.interpolate(b, scale_factor=2.0), a], 1)))
        return result


def draw_samples() -> tuple[Tensor, Tensor]:
    """Return noisy digits of 16 × 16 pixels, and where their strokes are."""
    torch.manual_seed(0)
    clean = torch.from_numpy(load_digits().images).float()[:, None] / 16
    clean = F.interpolate(clean, size=(16, 16), mode="bilinear")
    return clean + 0.3 * torch.randn_like(clean), (clean > 0.5).float()


def intersection_over_union(model: nn.Module, x: Tensor, mask: Tensor) -> float:
    with torch.no_grad():
        found = model.eval()(x) > 0
    both, either = (found & (mask > 0)).sum(), (found | (mask > 0)).sum()
    return float(both / either)


def main() -> tuple[float, float]:
    x, mask = draw_samples()
    model = UNet()
    optimiser = torch.optim.Adam(model.parameters(), 3e-3)
    for batch in torch.randperm(1400).repeat(4).split(50):
        optimiser.zero_grad()
        F.binary_cross_entropy_with_logits(model(x[batch]), mask[batch]).backward()
        optimiser.step()

    small = nm.compress(model, x[:1], budget={"macs": 0.5})
    print(small.summary)
    before, after = (intersection_over_union(net, x[1400:], mask[1400:]) for net in (model, small.model))
    print(f"intersection over union {before:.3f} → {after:.3f} with half of the multiply-accumulates")
    return before, after


if __name__ == "__main__":
    main()
