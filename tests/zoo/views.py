"""Operators that move data, and views of it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.zoo.registry import LINE, Fn, flat, op

op("flip channels", lambda: lambda x: x.flip(1))
op("slice space", lambda: lambda x: x[:, :, 1:6, ::2])
op("select space", lambda: lambda x: x[:, :, 0].unsqueeze(2) + x[..., :1])
op("narrow space", lambda: lambda x: x.narrow(2, 1, 4))
op("index space", lambda: lambda x: x[:, :, [0, 2, 5]])
op("index select space", lambda: lambda x: x.index_select(3, torch.tensor([6, 0])))
op("roll space", lambda: lambda x: x.roll((1, 2), dims=(2, 3)))
op("roll channels", lambda: lambda x: x.roll(1, dims=1), cut=("b.weight",))
op("unfold space", lambda: lambda x: x.unfold(2, 3, 1).mean(-1), LINE, cut=("b.weight",))
flat("flatten", lambda: nn.Sequential(nn.ReLU(), nn.Flatten()), 512)
flat("flatten then batch norm", lambda: nn.Sequential(nn.Flatten(), nn.BatchNorm1d(512), nn.ReLU()), 512)
flat("half of the flattened", lambda: lambda x: x.flatten(1).chunk(2, 1)[0], 256)
flat("flatten pooled", lambda: nn.Sequential(nn.MaxPool2d(4), nn.Flatten()), 32)
flat("view", lambda: lambda x: x.view(x.size(0), -1), 512)
flat("reshape", lambda: lambda x: x.reshape(x.shape[0], x.shape[1] * x.shape[2] * x.shape[3]), 512)
flat("permute then flatten", lambda: lambda x: x.permute(0, 2, 3, 1).flatten(1), 512)
flat("squeeze", lambda: lambda x: x.amax((2, 3), keepdim=True).squeeze(3).squeeze(-1), 8)
flat("mean", lambda: lambda x: x.mean((2, 3)), 8)
flat("sum", lambda: lambda x: x.sum(3).sum(2), 8)
flat("amax", lambda: lambda x: x.amax((-1, -2)), 8)
flat("amin and std", lambda: lambda x: x.amin((2, 3)) + x.std((2, 3)), 8)
flat("norm over space", lambda: lambda x: x.flatten(2).norm(dim=2), 8)
flat("logsumexp over space", lambda: lambda x: x.flatten(2).logsumexp(2), 8, dead=False)
flat("max over space", lambda: lambda x: x.flatten(2).max(2).values, 8)
op("cumsum over space", lambda: lambda x: x.cumsum(2))
op("mean as broadcast", lambda: lambda x: x - x.mean((2, 3), keepdim=True))
op("expand", lambda: lambda x: x.mean((2, 3), keepdim=True).expand(-1, -1, 6, 6))
op("expand as", lambda: lambda x: x * x.amax(3, keepdim=True).expand_as(x))
op("repeat space", lambda: lambda x: x.repeat(1, 1, 2, 1))
op("repeat channels", lambda: lambda x: x.repeat(1, 2, 1, 1), out=16)
op("repeat channels one by one", lambda: lambda x: x.repeat_interleave(2, 1), out=16)
op("pad zeros", lambda: lambda x: F.pad(x, (1, 2, 0, 1)))
op("pad ones", lambda: lambda x: F.pad(x, (1, 1), value=1.0), dead=False)
for _mode in ("reflect", "replicate", "circular"):
    op(f"pad {_mode}", lambda mode=_mode: lambda x: F.pad(x, (1, 1, 2, 0), mode=mode))
op("transpose", lambda: lambda x: x.transpose(1, 2).contiguous().transpose(2, 1).transpose(2, 3))
op("channels last", lambda: channels_last(), cut=("a.weight", "op.1.weight", "b.weight"))
op("unflatten", lambda: lambda x: x.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2))
op("split halves", lambda: lambda x: torch.cat(torch.split(x, x.shape[1] // 2, 1)[::-1], 1))
op("chunk", lambda: lambda x: x.chunk(2, 1)[0] * x.chunk(2, 1)[1].sigmoid(), mid=16)
op("chunk into four", lambda: lambda x: torch.cat(x.chunk(4, 1)[::-1], 1))
op("chunk unevenly", lambda: lambda x: torch.cat(x.chunk(3, 1)[::-1], 1), cut=("b.weight",))
op("tensor split", lambda: lambda x: torch.cat(x.tensor_split(2, 1)[::-1], 1))
op("slice by shape", lambda: lambda x: x[:, : x.shape[1] // 2] + x[:, x.shape[1] // 2 :].relu(), mid=16)
op("one half goes on", lambda: lambda x: x[:, : x.shape[1] // 2], mid=16)
op("stack", lambda: lambda x: torch.stack([x, x.relu()], 2).flatten(1, 2), out=16)
op("stack space", lambda: lambda x: torch.stack([x, -x], -1).sum(-1) + x)
op("einsum over space", lambda: lambda x: torch.einsum("bchw,bcvw->bchv", x, x), cut=("b.weight",))
flat("unfold patches", lambda: lambda x: F.unfold(x, 8).flatten(1), 512, cut=("b.weight",))

op("batch and channels in one", lambda: lambda x: x.flatten(0, 1).unsqueeze(1).tanh().view(x.shape))
op("channels twice", lambda: lambda x: x + x.flip(1))
op("channels in a ring", lambda: lambda x: x + x.roll(1, dims=1), cut=("b.weight",))
op("channels meet space", lambda: lambda x: x + x.transpose(1, 2), cut=("b.weight",))
op("multiplied by ones", lambda: lambda x: x * torch.ones_like(x))
op("added to zeros", lambda: lambda x: x + torch.zeros(x.shape))
op("in place on a half", lambda: lambda x: half_in_place(x.clone()), cut=("b.weight",))
op("written into zeros", lambda: lambda x: written_into_zeros(x), out=16, cut=("b.weight",))
op("convolution along channels", lambda: ChannelsAsSpace(3), cut=("b.weight",))
op("convolution along channels, one wide", lambda: ChannelsAsSpace(1), cut=("b.weight",))
flat("products of channels", lambda: lambda x: torch.bmm(x[:, :, 0], x[:, :, 1].mT).flatten(1), 64, cut=("b.weight",))
flat("two consumers", lambda: lambda x: torch.cat([x.flatten(1), x.permute(0, 2, 3, 1).flatten(1)], 1), 1024)
flat("blocks of space", lambda: lambda x: x.view(x.shape[0], -1, 4).amax(2).flatten(1), 128)


def channels_last() -> nn.Module:
    there, back = Fn(lambda x: x.permute(0, 2, 3, 1)), Fn(lambda x: x.permute(0, 3, 1, 2))
    return nn.Sequential(there, nn.Linear(8, 8), nn.ReLU(), back)


def half_in_place(x: Tensor) -> Tensor:
    x[:, : x.shape[1] // 2].mul_(2.0)
    return x


def written_into_zeros(x: Tensor) -> Tensor:
    b, c, h, w = x.shape
    wide = x.new_zeros(b, 2 * c, h, w)
    wide[:, :c] = x
    wide[:, c:] = x.relu()
    return wide


class ChannelsAsSpace(nn.Module):
    def __init__(self, kernel: int) -> None:
        super().__init__()
        self.along = nn.Conv3d(1, 1, (kernel, 1, 1), padding=(kernel // 2, 0, 0))

    def forward(self, x: Tensor) -> Tensor:
        return self.along(x.unsqueeze(1)).squeeze(1)
