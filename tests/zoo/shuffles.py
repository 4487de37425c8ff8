"""Channel and pixel shuffles."""

from __future__ import annotations

from torch import Tensor, nn

from tests.zoo.registry import op

op("pixel shuffle", lambda: nn.PixelShuffle(2), mid=16, out=4)
op("pixel shuffle into grouped", lambda: nn.Sequential(nn.PixelShuffle(2), nn.Conv2d(4, 4, 1, groups=2)), mid=16, out=4)
op("pixel unshuffle", lambda: nn.PixelUnshuffle(2), out=32)
op("channel shuffle", lambda: nn.ChannelShuffle(2))
op("channel shuffle between groups", lambda: shuffled(2), cut=("a.weight", "op.0.weight", "op.2.weight"))


def shuffled(groups: int) -> nn.Module:
    convolutions = [nn.Conv2d(8, 8, 1, groups=groups) for _ in range(2)]
    return nn.Sequential(convolutions[0], nn.ChannelShuffle(groups), convolutions[1])


def shuffle_by_hand(x: Tensor) -> Tensor:
    b, c, h, w = x.shape
    return x.view(b, 2, c // 2, h, w).transpose(1, 2).contiguous().view(b, c, h, w)


def shuffle_in_fours(x: Tensor) -> Tensor:
    b, c, h, w = x.shape
    return x.view(b, 4, c // 4, h, w).transpose(1, 2).reshape(b, c, h, w)


op("channel shuffle by hand", lambda: shuffle_by_hand)
op("channel shuffle by hand in fours", lambda: shuffle_in_fours, mid=16, out=16)
op("channel shuffle by hand in many", lambda: shuffle_in_fours)
