"""Sums, gates and other ways of bringing branches together."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..site import SPATIAL, Block, Made, Site, kind, param

ACTIVATIONS = (nn.ReLU, nn.GELU, nn.Tanh, nn.Sigmoid, nn.SiLU, nn.LeakyReLU)


def bottleneck(site: Site, out: int = 0) -> nn.Module:
    hidden = site.other()
    norm = []
    if site.spatial and site.chance(0.4):
        norm = [{1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}[site.spatial](hidden)]
    act = site.rng.choice(ACTIVATIONS)()
    return nn.Sequential(site.mix(site.width, hidden), *norm, act, site.mix(hidden, out or site.width))


@kind()
def plain_branch(site: Site) -> Made:
    out = site.other()
    return bottleneck(site, out), out


@kind()
def residual(site: Site) -> Made:
    return Block(lambda b, x: x + b.f(x), f=bottleneck(site)), site.width


@kind()
def residual_then_relu(site: Site) -> Made:
    return Block(lambda b, x: F.relu(b.f(x) + x), f=bottleneck(site)), site.width


@kind()
def residual_inplace(site: Site) -> Made:
    def run(b: Block, x: Tensor) -> Tensor:
        y = b.f(x)
        y += x
        return y.relu_()

    return Block(run, f=bottleneck(site)), site.width


@kind()
def residual_preactivation(site: Site) -> Made:
    return Block(lambda b, x: x + b.f(F.relu(x)), f=bottleneck(site)), site.width


@kind()
def residual_projection(site: Site) -> Made:
    out = site.other()
    return Block(lambda b, x: b.p(x) + b.f(x), f=bottleneck(site, out), p=site.mix(site.width, out)), out


@kind()
def residual_weighted(site: Site) -> Made:
    return Block(lambda b, x: b.a * x + (1 - b.a) * b.f(x), f=bottleneck(site), a=param()), site.width


@kind()
def residual_layer_scale(site: Site) -> Made:
    scale = site.per_channel(site.width)
    return Block(lambda b, x: x + b.scale * b.f(x), f=bottleneck(site), scale=scale), site.width


@kind()
def residual_subtracted(site: Site) -> Made:
    return Block(lambda b, x: x - 0.5 * b.f(x), f=bottleneck(site)), site.width


@kind()
def residual_alpha(site: Site) -> Made:
    return Block(lambda b, x: torch.add(x, b.f(x), alpha=0.3), f=bottleneck(site)), site.width


@kind()
def residual_twice(site: Site) -> Made:
    def run(b: Block, x: Tensor) -> Tensor:
        y = x + b.f(x)
        return y + b.g(y) + x

    return Block(run, f=bottleneck(site), g=bottleneck(site)), site.width


@kind(*SPATIAL)
def residual_broadcast(site: Site) -> Made:
    """A sum with a vector of global means."""

    def run(b: Block, x: Tensor) -> Tensor:
        return x + b.f(x).mean(tuple(range(2, x.dim())), keepdim=True)

    return Block(run, f=bottleneck(site)), site.width


@kind()
def residual_one_channel(site: Site) -> Made:
    """One channel that is added to all."""
    return Block(lambda b, x: x + b.f(x), f=site.mix(site.width, 1)), site.width


@kind(*SPATIAL)
def residual_padded_shortcut(site: Site) -> Made:
    """A shortcut with zeros in place of the new channels."""

    def run(b: Block, x: Tensor) -> Tensor:
        return b.f(x) + F.pad(x, (*[0, 0] * (x.dim() - 2), 0, 4))

    return (Block(run, f=bottleneck(site, site.width + 4)), site.width + 4) if site.width <= 12 else None


@kind()
def product_of_branches(site: Site) -> Made:
    return Block(lambda b, x: b.f(x) * b.g(x).tanh(), f=bottleneck(site, 6), g=site.mix(site.width, 6)), 6


@kind()
def quotient_of_branches(site: Site) -> Made:
    def run(b: Block, x: Tensor) -> Tensor:
        return b.f(x) / (b.g(x).square() + 1)

    return Block(run, f=site.mix(site.width, 6), g=site.mix(site.width, 6)), 6


@kind()
def highway(site: Site) -> Made:
    def run(b: Block, x: Tensor) -> Tensor:
        gate = b.g(x).sigmoid()
        return gate * b.f(x) + (1 - gate) * x

    return Block(run, f=bottleneck(site), g=site.mix(site.width, site.width)), site.width


@kind()
def swiglu(site: Site) -> Made:
    hidden = site.other()

    def run(b: Block, x: Tensor) -> Tensor:
        return b.down(F.silu(b.gate(x)) * b.up(x))

    parts = {"gate": site.mix(site.width, hidden), "up": site.mix(site.width, hidden)}
    return Block(run, down=site.mix(hidden, site.width), **parts), site.width


@kind()
def geglu_fused(site: Site) -> Made:
    hidden, axis = site.other(), site.axis

    def run(b: Block, x: Tensor) -> Tensor:
        a, g = b.up(x).chunk(2, axis)
        return b.down(a * F.gelu(g))

    return Block(run, up=site.mix(site.width, 2 * hidden), down=site.mix(hidden, site.width)), site.width


@kind(*SPATIAL)
def squeeze_excitation(site: Site) -> Made:
    def run(b: Block, x: Tensor) -> Tensor:
        pooled = x.mean(tuple(range(2, x.dim())), keepdim=True)
        return x * b.up(b.down(pooled).relu()).sigmoid()

    down, up = site.mix(site.width, 4, kernel=1), site.mix(4, site.width, kernel=1)
    return Block(run, down=down, up=up), site.width


@kind(*SPATIAL)
def squeeze_excitation_linear(site: Site) -> Made:
    def run(b: Block, x: Tensor) -> Tensor:
        pooled = x.flatten(2).mean(-1)
        return x * b.f(pooled).view(*pooled.shape, *[1] * (x.dim() - 2))

    layers = nn.Sequential(nn.Linear(site.width, 4), nn.ReLU(), nn.Linear(4, site.width), nn.Hardsigmoid())
    return Block(run, f=layers), site.width


@kind("image")
def channel_attention_conv1d(site: Site) -> Made:
    """A filter over neighbouring channels."""

    def run(b: Block, x: Tensor) -> Tensor:
        pooled = x.mean((2, 3)).unsqueeze(1)
        return x * b.f(pooled).squeeze(1)[:, :, None, None].sigmoid()

    return Block(run, f=nn.Conv1d(1, 1, 3, padding=1, bias=False)), site.width


@kind("image")
def spatial_attention(site: Site) -> Made:
    def run(b: Block, x: Tensor) -> Tensor:
        y = b.g(x)
        both = torch.cat([y.mean(1, keepdim=True), y.amax(1, keepdim=True)], 1)
        return x * b.f(both).sigmoid()

    return Block(run, f=nn.Conv2d(2, 1, 3, padding=1), g=site.mix(site.width, 6)), site.width


@kind()
def three_consumers(site: Site) -> Made:
    def run(b: Block, x: Tensor) -> Tensor:
        y = b.f(x).relu()
        return b.p(y) + b.q(y).tanh() + b.r(-y)

    f = site.mix(site.width, 8)
    parts = {name: site.mix(8, site.width) for name in "pqr"}
    return Block(run, f=f, **parts), site.width


@kind()
def two_producers(site: Site) -> Made:
    out = site.other()
    return Block(
        lambda b, x: (b.f(x) + b.g(x.tanh())).relu(), f=site.mix(site.width, out), g=site.mix(site.width, out)
    ), out


@kind()
def film(site: Site) -> Made:
    """Scale and shift from a summary of the input."""

    def run(b: Block, x: Tensor) -> Tensor:
        dims = {5: (2, 3, 4), 4: (2, 3), 3: (2,) if site.domain == "signal" else (1,)}.get(x.dim())
        pooled = x.mean(dims) if dims else x
        scale, shift = b.f(pooled).chunk(2, -1)
        if site.domain == "tokens":
            return x * scale.unsqueeze(1) + shift.unsqueeze(1)
        shape = (*scale.shape, *[1] * (x.dim() - 2))
        return x * scale.view(shape) + shift.view(shape)

    return Block(run, f=nn.Linear(site.width, 2 * site.width)), site.width


@kind()
def unused_branch(site: Site) -> Made:
    def run(b: Block, x: Tensor) -> Tensor:
        b.g(x)
        return b.f(x)

    return Block(run, f=bottleneck(site), g=site.mix(site.width, 6)), site.width


@kind()
def ignored_layer(site: Site) -> Made:
    """A layer that is held and never called."""
    return Block(lambda b, x: b.f(x), f=bottleneck(site), g=nn.Linear(site.width, 6)), site.width


@kind("image")
def unet(site: Site) -> Made:
    def run(b: Block, x: Tensor) -> Tensor:
        low = b.down(x).relu()
        return b.out(torch.cat([x, F.interpolate(b.mid(low).relu(), size=x.shape[2:])], 1))

    if site.size < 4:
        return None
    down, mid = nn.Conv2d(site.width, 6, 3, 2, 1), nn.Conv2d(6, 5, 1)
    return Block(run, down=down, mid=mid, out=nn.Conv2d(site.width + 5, site.width, 1)), site.width


@kind()
def loop_of_layers(site: Site) -> Made:
    layers = nn.ModuleDict({name: bottleneck(site) for name in ("first", "second")})

    def run(b: Block, x: Tensor) -> Tensor:
        for layer in b.layers.values():
            x = x + layer(x)
        return x

    return Block(run, layers=layers), site.width


@kind()
def parameter_list(site: Site) -> Made:
    def run(b: Block, x: Tensor) -> Tensor:
        for scale in b.scales:
            x = (x * scale).tanh()
        return x

    scales = nn.ParameterList(site.per_channel(site.width) for _ in range(2))
    return Block(run, scales=scales), site.width
