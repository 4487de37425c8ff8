"""Linear layers and convolutions, one after the other."""

from __future__ import annotations

from torch import nn

from tests.zoo.registry import CUBE, FLAT, LINE, TOKENS, add, around_flat, around_image, op

op("linear", nn.ReLU, FLAT)
op("linear without bias", lambda: nn.Sequential(nn.ReLU(), nn.Linear(8, 8, bias=False)), FLAT)
add("linear on tokens", lambda: around_flat(nn.ReLU()), TOKENS)
add("linear unbatched", lambda: around_flat(nn.ReLU()), ((6,),))
op("conv1d", lambda: nn.Sequential(nn.ReLU(), nn.Conv1d(8, 8, 3, stride=2)), LINE, cut=("a.weight", "op.1.weight"))
op("conv2d", lambda: nn.Sequential(nn.ReLU(), nn.Conv2d(8, 8, 3, dilation=2)), cut=("a.weight", "op.1.weight"))
op("conv3d", lambda: nn.Sequential(nn.ReLU(), nn.Conv3d(8, 8, 3)), CUBE, cut=("a.weight", "op.1.weight"))
add("conv2d unbatched", lambda: around_image(nn.ReLU()), ((3, 8, 8),))
op("conv2d same", lambda: nn.Conv2d(8, 8, 3, padding="same"), cut=("a.weight", "op.weight"))
op("conv2d circular", lambda: nn.Conv2d(8, 8, 3, padding=1, padding_mode="circular"), cut=("a.weight", "op.weight"))
op("conv2d reflect", lambda: nn.Conv2d(8, 8, 3, padding=1, padding_mode="reflect"), cut=("a.weight", "op.weight"))
op("transposed 1d", lambda: nn.ConvTranspose1d(8, 10, 3, stride=2), LINE, out=10, cut=("a.weight", "op.weight"))
op("transposed 2d", lambda: nn.ConvTranspose2d(8, 10, 4, stride=2), out=10, cut=("a.weight", "op.weight"))
op("transposed 3d", lambda: nn.ConvTranspose3d(8, 10, 2, stride=2), CUBE, out=10, cut=("a.weight", "op.weight"))
