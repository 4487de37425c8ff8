"""Moving channels about: concatenation, splits, slices, shuffles, permutations, views."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..site import SPATIAL, Block, Made, Site, function, kind

ALONG_ONE = (*SPATIAL, "features")


def even(name: str, run: object, *domains: str, out: float = 1, times: int = 2) -> None:
    """Register a block that needs a width divisible by `times`, with the axis of the channels given."""

    @kind(*domains, name=name)
    def make(site: Site) -> Made:
        axis = site.axis
        fits = site.width % times == 0 and site.width * out <= 24
        return (Block(lambda b, x: run(x, axis)), int(site.width * out)) if fits else None


def _halves(x: Tensor, axis: int) -> tuple[Tensor, Tensor]:
    half = x.shape[axis] // 2
    return x.narrow(axis, 0, half), x.narrow(axis, half, x.shape[axis] - half)


def _shuffled(x: Tensor, axis: int) -> Tensor:
    if axis == -1:
        return x.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)
    return x.view(x.shape[0], 2, x.shape[1] // 2, *x.shape[2:]).transpose(1, 2).reshape(x.shape)


def _interleaved(x: Tensor, axis: int) -> Tensor:
    a, b = x.chunk(2, axis)
    position = axis % x.dim()
    return torch.stack([a, b], position + 1).flatten(position, position + 1)


def _rotary(x: Tensor, axis: int) -> Tensor:
    a, b = x.chunk(2, axis)
    return x * 0.8 + torch.cat([-b, a], axis) * 0.6


def _even_odd(x: Tensor, axis: int) -> Tensor:
    return torch.cat([x[:, ::2], x[:, 1::2].relu()], 1) if axis == 1 else x[..., ::2].repeat(1, 1, 2)


even("glu", lambda x, a: F.glu(x, a), out=0.5)
even("glu_by_chunk", lambda x, a: x.chunk(2, a)[0] * x.chunk(2, a)[1].sigmoid(), out=0.5)
even("simple_gate", lambda x, a: _halves(x, a)[0] * _halves(x, a)[1], out=0.5)
even("max_feature_map", lambda x, a: torch.maximum(*x.chunk(2, a)), out=0.5)
even("maxout", lambda x, a: x.unflatten(a, (-1, 2)).amax(a + 1 if a > 0 else a), *SPATIAL, "features", out=0.5)
even("half_activated", lambda x, a: torch.cat([_halves(x, a)[0].relu(), _halves(x, a)[1]], a))
even("swapped_halves", lambda x, a: torch.cat(x.chunk(2, a)[::-1], a))
even("split_with_sizes", lambda x, a: torch.cat(x.split([2, x.shape[a] - 2], a)[::-1], a))
even("split_in_twos", lambda x, a: torch.cat([p.tanh() for p in x.split(2, a)], a))
even("tensor_split", lambda x, a: sum(x.tensor_split(2, a)), out=0.5)
even("channel_shuffle", _shuffled)
even("interleaved", _interleaved)
even("rotary", _rotary)
even("even_odd", _even_odd)
even("shuffle_module", lambda x, a: F.channel_shuffle(x, 2), *SPATIAL)
even("first_half", lambda x, a: _halves(x, a)[0], out=0.5)
even("crelu", lambda x, a: torch.cat([x, -x], a).relu(), out=2, times=1)
even("repeated", lambda x, a: x.repeat(1, 2, *[1] * (x.dim() - 2)), *ALONG_ONE, out=2, times=1)
even("repeat_interleave", lambda x, a: x.repeat_interleave(2, a), out=2, times=1)
even("tiled_and_folded", lambda x, a: x.repeat_interleave(2, a).unflatten(a, (-1, 2)).sum(a + 1), *ALONG_ONE, times=1)
even("stacked_sum", lambda x, a: torch.stack([x, x.tanh()], 0).sum(0), times=1)
even("stack_unbind", lambda x, a: torch.stack(x.unbind(a), a), times=1)
even("unbind_first", lambda x, a: torch.stack([p * (1 + i) for i, p in enumerate(x.unbind(a))], a), times=1)
even("flip_channels", lambda x, a: x.flip(a), times=1)
even("roll_channels", lambda x, a: x.roll(1, a), times=1)
even("two_groups_view", lambda x, a: x.unflatten(a, (2, x.shape[a] // 2)).tanh().flatten(a, a + 1), *ALONG_ONE)
even("pairs_view", lambda x, a: x.unflatten(a, (-1, 2)).tanh().flatten(a, a + 1), *ALONG_ONE)
even("group_sum", lambda x, a: x.unflatten(a, (2, x.shape[a] // 2)).sum(a), *ALONG_ONE, out=0.5)
even("one_chunk", lambda x, a: x.chunk(1, a)[0].relu(), times=1)
even("one_split", lambda x, a: torch.cat(x.split(x.shape[a], a), a), times=1)
even("squeeze_unsqueeze", lambda x, a: x.unsqueeze(a).squeeze(a), times=1)


@kind()
def last_three(site: Site) -> Made:
    last = site.domain == "tokens"
    return Block(lambda b, x: x[..., -3:] if last else x[:, -3:]), 3


@kind()
def all_but_one(site: Site) -> Made:
    last = site.domain == "tokens"
    return Block(lambda b, x: x[..., 1:] if last else x[:, :-1]), site.width - 1


@kind()
def padded_channels(site: Site) -> Made:
    def run(b: Block, x: Tensor) -> Tensor:
        return (
            F.pad(x, (*[0, 0] * (x.dim() - 2), 1, 2)) if x.dim() != 3 or site.domain == "signal" else F.pad(x, (1, 2))
        )

    return (Block(run), site.width + 3) if site.width <= 16 else None


@kind()
def index_by_list(site: Site) -> Made:
    order = list(range(site.width))
    site.rng.shuffle(order)
    last = site.domain == "tokens"
    return Block(lambda b, x: x[..., order] if last else x[:, order]), site.width


@kind()
def index_select_buffer(site: Site) -> Made:
    axis, order = site.axis, torch.randperm(site.width)
    return Block(lambda b, x: x.index_select(axis, b.order), order=order), site.width


@kind()
def index_with_repeats(site: Site) -> Made:
    axis, order = site.axis, torch.randint(site.width, (site.width,))
    return Block(lambda b, x: x.index_select(axis, b.order), order=order), site.width


@kind()
def dense_block(site: Site) -> Made:
    axis = site.axis
    layer = site.mix(site.width, 4)
    fits = site.width <= 16
    return (Block(lambda b, x: torch.cat([x, b.f(x).relu()], axis), f=layer), site.width + 4) if fits else None


@kind()
def dense_two(site: Site) -> Made:
    if site.width > 12:
        return None
    axis, one, two = site.axis, site.mix(site.width, 4), site.mix(site.width + 4, 4)

    def run(b: Block, x: Tensor) -> Tensor:
        y = torch.cat([x, b.f(x).relu()], axis)
        return torch.cat([y, b.g(y).tanh()], axis)

    return Block(run, f=one, g=two), site.width + 8


@kind()
def inception(site: Site) -> Made:
    axis, outs = site.axis, [site.rng.choice([2, 3, 4]) for _ in range(3)]
    layers = nn.ModuleList(site.mix(site.width, out) for out in outs)
    return Block(lambda b, x: torch.cat([layer(x).relu() for layer in b.layers], axis), layers=layers), sum(outs)


@kind()
def concatenated_with_constant(site: Site) -> Made:
    axis = site.axis

    def run(b: Block, x: Tensor) -> Tensor:
        return torch.cat([x, torch.ones_like(x.narrow(axis, 0, 1))], axis)

    return (Block(run), site.width + 1) if site.width <= 20 else None


@kind("image")
def coordinates(site: Site) -> Made:
    def run(b: Block, x: Tensor) -> Tensor:
        line = torch.linspace(-1, 1, x.shape[-1], dtype=x.dtype).expand(x.shape[0], 1, *x.shape[2:])
        return torch.cat([x, line], 1)

    return (Block(run), site.width + 1) if site.width <= 20 else None


@kind("image")
def space_to_depth(site: Site) -> Made:
    def run(b: Block, x: Tensor) -> Tensor:
        parts = [x[:, :, i::2, j::2] for i in (0, 1) for j in (0, 1)]
        return torch.cat(parts, 1)

    fits = site.width <= 6 and site.size % 2 == 0
    return (Block(run), 4 * site.width, site.size // 2) if fits else None


@kind("image")
def windows(site: Site) -> Made:
    """Windows of two by two as tokens, a linear layer, and back."""

    def run(b: Block, x: Tensor) -> Tensor:
        n, c, h, w = x.shape
        y = x.view(n, c, h // 2, 2, w // 2, 2).permute(0, 2, 4, 3, 5, 1).reshape(-1, 4, c)
        y = b.f(y).relu()
        y = y.view(n, h // 2, w // 2, 2, 2, -1).permute(0, 5, 1, 3, 2, 4)
        return y.reshape(n, -1, h, w)

    out = site.other()
    return (Block(run, f=nn.Linear(site.width, out)), out) if site.size % 2 == 0 else None


@kind("image")
def channels_last_linear(site: Site) -> Made:
    out = site.other()
    return Block(lambda b, x: b.f(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2), f=nn.Linear(site.width, out)), out


@kind("image")
def flat_and_back(site: Site) -> Made:
    """All entries of a small picture as one vector."""

    def run(b: Block, x: Tensor) -> Tensor:
        y = F.adaptive_avg_pool2d(x, 3)
        return b.f(y.flatten(1)).relu().view(len(x), -1, 3, 3)

    out = site.rng.choice([2, 3, 4])
    return Block(run, f=nn.Linear(9 * site.width, 9 * out)), out, 3


@kind("tokens")
def flat_tokens(site: Site) -> Made:
    def run(b: Block, x: Tensor) -> Tensor:
        return x + b.f(x.flatten(1)).tanh().unsqueeze(1)

    return Block(run, f=nn.Linear(site.width * site.size, site.width)), site.width


@kind("signal")
def frames(site: Site) -> Made:
    """Overlapping windows of a signal, averaged."""
    return (Block(lambda b, x: x.unfold(2, 3, 1).mean(-1)), site.width, site.size - 2) if site.size >= 5 else None


function("expand_and_mean", lambda x: x.unsqueeze(0).expand(3, *x.shape).mean(0))
function("contiguous_double_transpose", lambda x: x.transpose(0, 1).contiguous().transpose(0, 1))
function("batch_flip", lambda x: x.flip(0))
function("split_batch", lambda x: torch.cat([x[:1], x[1:]], 0))
function("movedim", lambda x: x.movedim(1, 0).sigmoid().movedim(0, 1))
function("as_rows", lambda x: x.reshape(-1, x.shape[-1]).tanh().reshape(x.shape))
function("ellipsis_none", lambda x: x[..., None].mul(1.1).squeeze(-1))
