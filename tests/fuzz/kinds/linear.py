"""Products with parameters, in all the ways that people write them, and weights that are computed."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune, spectral_norm, weight_norm

from ..site import Block, Made, Site, kind, param

FLAT = ("tokens", "features")


def product(name: str, run: Callable[[Block, Tensor], Tensor], outputs_first: bool, *domains: str) -> None:
    """Register a product of the input with a matrix `w` and a vector `v`."""

    @kind(*(domains or FLAT), name=name)
    def make(site: Site) -> Made:
        out = site.other()
        shape = (out, site.width) if outputs_first else (site.width, out)
        return Block(run, w=param(*shape), v=param(out)), out


product("linear_functional", lambda b, x: F.linear(x, b.w, b.v), True)
product("linear_without_bias", lambda b, x: F.linear(x, b.w), True)
product("at", lambda b, x: x @ b.w, False)
product("at_transposed", lambda b, x: x @ b.w.t() + b.v, True)
product("matmul", lambda b, x: torch.matmul(x, b.w) + b.v, False)
product("mm", lambda b, x: torch.mm(x, b.w), False, "features")
product("addmm", lambda b, x: torch.addmm(b.v, x, b.w), False, "features")
product("addmm_scaled", lambda b, x: torch.addmm(b.v, x, b.w, beta=0.5, alpha=2), False, "features")
product("left_product", lambda b, x: (b.w @ x.t()).t(), True, "features")
product("einsum", lambda b, x: torch.einsum("...c,cd->...d", x, b.w), False)
product("einsum_turned", lambda b, x: torch.einsum("btc,dc->btd", x, b.w) + b.v, True, "tokens")
product("bmm_expanded", lambda b, x: torch.bmm(x, b.w.expand(x.shape[0], -1, -1)), False, "tokens")
product("baddbmm", lambda b, x: torch.baddbmm(b.v, x, b.w.expand(x.shape[0], -1, -1)), False, "tokens")
product("tensordot", lambda b, x: torch.tensordot(x, b.w, dims=([-1], [0])), False)
product("inner", lambda b, x: torch.inner(x, b.w), True)
product("weight_reshaped", lambda b, x: F.linear(x, b.w.reshape(-1).view(b.w.shape)), True)
product("einsum_image", lambda b, x: torch.einsum("bchw,dc->bdhw", x, b.w), True, "image")
product("weight_tensordot_image", lambda b, x: torch.tensordot(b.w, x, ([1], [1])).transpose(0, 1), True, "image")
product("linear_over_channels_last", lambda b, x: F.linear(x.movedim(1, -1), b.w, b.v).movedim(-1, 1), True, "image")
product("broadcast_sum", lambda b, x: (x.unsqueeze(-1) * b.w).sum(-2), False)

product("computed_scaled", lambda b, x: F.linear(x, b.w * 0.3, b.v), True)
product("computed_negative", lambda b, x: F.linear(x, -b.w, b.v), True)
product("computed_tanh", lambda b, x: F.linear(x, b.w.tanh()), True)
product("computed_sign", lambda b, x: F.linear(x, b.w.sign()), True)
product("computed_abs", lambda b, x: x @ b.w.abs(), False)
product("computed_quantised", lambda b, x: F.linear(x, (b.w * 8).round() / 8, b.v), True)
product("computed_rows_normalised", lambda b, x: F.linear(x, F.normalize(b.w, dim=1)), True)
product("computed_standardised", lambda b, x: F.linear(x, b.w - b.w.mean(1, keepdim=True)), True)
product("computed_softmax", lambda b, x: F.linear(x, b.w.softmax(1)), True)
product("computed_symmetric_scale", lambda b, x: F.linear(x, b.w * b.v[:, None].exp()), True)
product("computed_by_width", lambda b, x: F.linear(x, b.w * b.w.shape[1] ** -0.5), True)


@kind(*FLAT)
def linear(site: Site) -> Made:
    out = site.other()
    return site.mix(site.width, out), out


@kind(*FLAT)
def bilinear(site: Site) -> Made:
    out = site.other()
    return Block(lambda b, x: b.f(x, x.tanh()), f=nn.Bilinear(site.width, site.width, out)), out


@kind(*FLAT)
def low_rank(site: Site) -> Made:
    out = site.other()
    return Block(lambda b, x: x @ (b.u @ b.w), u=param(site.width, 3), w=param(3, out)), out


@kind(*FLAT)
def lora(site: Site) -> Made:
    out = site.other()
    adapter = Block(lambda b, x: (x @ b.a.t()) @ b.c.t() * 0.5, a=param(3, site.width), c=param(out, 3))
    return Block(lambda b, x: b.f(x) + b.adapter(x), f=nn.Linear(site.width, out), adapter=adapter), out


@kind(*FLAT)
def sliced_weight(site: Site) -> Made:
    """Two layers in one stored matrix."""
    out = site.other()

    def run(b: Block, x: Tensor) -> Tensor:
        return F.linear(x, b.w[:out]).relu() + F.linear(x, b.w[out:])

    return Block(run, w=param(2 * out, site.width)), out


@kind(*FLAT)
def tied_autoencoder(site: Site) -> Made:
    """A matrix on the way in, its transpose on the way out."""

    def run(b: Block, x: Tensor) -> Tensor:
        return F.linear(F.linear(x, b.w, b.v).relu(), b.w.t())

    return Block(run, w=param(10, site.width), v=param(10)), site.width


@kind(*FLAT)
def shared_linear(site: Site) -> Made:
    layer = nn.Linear(site.width, site.width)
    return Block(lambda b, x: b.f(b.f(x).relu()) + x, f=layer), site.width


@kind(*FLAT)
def tied_parameters(site: Site) -> Made:
    """Two layers that hold the same tensor."""
    one, two = nn.Linear(site.width, site.width), nn.Linear(site.width, site.width)
    two.weight = one.weight
    return nn.Sequential(one, nn.ReLU(), two), site.width


@kind(*FLAT)
def cosine_classifier(site: Site) -> Made:
    out = site.other()

    def run(b: Block, x: Tensor) -> Tensor:
        return F.normalize(x, dim=-1) @ F.normalize(b.w, dim=-1).t() * 5

    return Block(run, w=param(out, site.width)), out


@kind(*FLAT)
def mixture_of_experts(site: Site) -> Made:
    experts = nn.ModuleList(nn.Sequential(nn.Linear(site.width, 6), nn.GELU(), nn.Linear(6, site.width)) for _ in "ab")

    def run(b: Block, x: Tensor) -> Tensor:
        share = b.gate(x).softmax(-1)
        return sum(share[..., i, None] * expert(x) for i, expert in enumerate(b.experts))

    return Block(run, gate=nn.Linear(site.width, 2), experts=experts), site.width


@kind(*FLAT)
def stacked_experts(site: Site) -> Made:
    out = site.other()

    def run(b: Block, x: Tensor) -> Tensor:
        return torch.einsum("...c,ecd->...ed", x, b.w).relu().sum(-2)

    return Block(run, w=param(3, site.width, out)), out


# Weights that torch computes from others


def _wrapped(name: str, wrap: Callable[[nn.Module], nn.Module]) -> None:
    @kind(name=name)
    def make(site: Site) -> Made:
        out = site.other()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return wrap(site.mix(site.width, out)), out


class Doubled(nn.Module):
    def forward(self, w: Tensor) -> Tensor:
        return 2 * w


def _parametrized(layer: nn.Module) -> nn.Module:
    parametrize.register_parametrization(layer, "weight", Doubled())
    return layer


_wrapped("weight_norm_old", weight_norm)
_wrapped("weight_norm_new", parametrizations.weight_norm)
_wrapped("spectral_norm_old", spectral_norm)
_wrapped("spectral_norm_new", parametrizations.spectral_norm)
_wrapped("pruned_l1", lambda layer: prune.l1_unstructured(layer, "weight", 0.4))
_wrapped("pruned_filters", lambda layer: prune.ln_structured(layer, "weight", 0.4, n=2, dim=0))
_wrapped("parametrized", _parametrized)


@kind(*FLAT)
def orthogonal(site: Site) -> Made:
    return parametrizations.orthogonal(nn.Linear(site.width, site.width)), site.width
