"""Blocks on tokens: attention, transformer, mixer and recurrent layers."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..site import Block, Made, Site, kind, param

TOKENS = "tokens"


def heads_of(width: int) -> int:
    return 2 if width % 2 == 0 else 1


@kind(TOKENS)
def multihead(site: Site) -> Made:
    attention = nn.MultiheadAttention(site.width, heads_of(site.width), batch_first=True, bias=site.chance())
    weights = site.chance()
    return Block(lambda b, x: x + b.f(x, x, x, need_weights=weights)[0], f=attention), site.width


@kind(TOKENS)
def multihead_cross(site: Site) -> Made:
    """Queries from the tokens, keys and values of other widths."""
    attention = nn.MultiheadAttention(site.width, heads_of(site.width), kdim=5, vdim=7, batch_first=True)
    k, v = nn.Linear(site.width, 5), nn.Linear(site.width, 7)
    return Block(lambda b, x: x + b.f(x, b.k(x).relu(), b.v(x).relu())[0], f=attention, k=k, v=v), site.width


@kind(TOKENS)
def multihead_causal(site: Site) -> Made:
    attention = nn.MultiheadAttention(site.width, heads_of(site.width), batch_first=True)

    def run(b: Block, x: Tensor) -> Tensor:
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        return x + b.f(x, x, x, attn_mask=mask, need_weights=False)[0]

    return Block(run, f=attention), site.width


def split_heads(x: Tensor, heads: int) -> Tensor:
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def merge_heads(x: Tensor) -> Tensor:
    return x.transpose(1, 2).flatten(2)


def separate(site: Site, inner: int) -> dict[str, nn.Module]:
    parts = {name: nn.Linear(site.width, inner, bias=site.chance()) for name in "qkv"}
    return {**parts, "out": nn.Linear(inner, site.width)}


@kind(TOKENS)
def attention_separate(site: Site) -> Made:
    """Scores by hand, scaled by a constant of the code."""

    def run(b: Block, x: Tensor) -> Tensor:
        q, k, v = (split_heads(f(x), 2) for f in (b.q, b.k, b.v))
        return b.out(merge_heads((q @ k.transpose(-1, -2) * 0.5).softmax(-1) @ v))

    return Block(run, **separate(site, 8)), site.width


@kind(TOKENS)
def attention_scaled_by_size(site: Site) -> Made:
    def run(b: Block, x: Tensor) -> Tensor:
        q, k, v = (split_heads(f(x), 2) for f in (b.q, b.k, b.v))
        scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
        return b.out(merge_heads(scores.softmax(-1) @ v))

    return Block(run, **separate(site, 8)), site.width


def free_heads(x: Tensor, width: int) -> Tensor:
    """As many heads as there are."""
    return x.view(*x.shape[:-1], -1, width).transpose(1, 2)


@kind(TOKENS)
def heads_free(site: Site) -> Made:
    causal, plain = site.chance(), site.chance()

    def run(b: Block, x: Tensor) -> Tensor:
        q, k, v = (free_heads(f(x), 3) for f in (b.q, b.k, b.v))
        by_hand = (q @ k.mT * 0.6).softmax(-1) @ v
        y = by_hand if plain else F.scaled_dot_product_attention(q, k, v, is_causal=causal)
        return x + b.out(merge_heads(y))

    return Block(run, **separate(site, 12)), site.width


@kind(TOKENS)
def heads_free_values(site: Site) -> Made:
    """Heads can go, and channels of every head's values."""

    def run(b: Block, x: Tensor) -> Tensor:
        q, k = (free_heads(f(x), 2) for f in (b.q, b.k))
        v = b.v(x).view(*x.shape[:-1], q.shape[1], -1).transpose(1, 2)
        return x + b.out(merge_heads((q @ k.mT * 0.6).softmax(-1) @ v))

    return Block(run, **separate(site, 8)), site.width


@kind(TOKENS)
def heads_fused(site: Site) -> Made:
    inner, last = site.chance(), site.chance()

    def run(b: Block, x: Tensor) -> Tensor:
        if inner:
            q, k, v = b.qkv(x).view(*x.shape[:-1], 3, -1, 4).permute(2, 0, 3, 1, 4)
        else:
            parts = b.qkv(x).view(*x.shape[:-1], -1, 3, 4).transpose(1, 2)
            q, k, v = parts[..., 0, :], parts[..., 1, :], parts[..., 2, :]
        y = F.scaled_dot_product_attention(q, k, v)
        return x + b.out(merge_heads(y) if last else y.permute(0, 2, 1, 3).reshape(*x.shape[:-1], -1))

    return Block(run, qkv=nn.Linear(site.width, 36, bias=site.chance()), out=nn.Linear(12, site.width)), site.width


@kind(TOKENS)
def heads_chunked(site: Site) -> Made:
    def run(b: Block, x: Tensor) -> Tensor:
        q, k, v = (free_heads(part, 2) for part in b.qkv(x).chunk(3, -1))
        return x + b.out(merge_heads((q @ k.mT * 0.5).softmax(-1) @ v))

    return Block(run, qkv=nn.Linear(site.width, 18), out=nn.Linear(6, site.width)), site.width


@kind(TOKENS)
def heads_grouped(site: Site) -> Made:
    """Two heads of queries on each of keys and values, which are repeated in one of three ways."""
    way = 0 if site.chance() else 1 + int(site.chance())

    def repeated(x: Tensor) -> Tensor:
        if way == 0:
            return x.repeat_interleave(2, 1)
        b, _, n, d = x.shape
        return x[:, :, None].expand(-1, -1, 2, -1, -1).reshape(b, -1, n, d)

    def run(b: Block, x: Tensor) -> Tensor:
        q, k, v = (free_heads(f(x), 2) for f in (b.q, b.k, b.v))
        if way == 2:
            y = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        else:
            y = (q @ repeated(k).mT * 0.6).softmax(-1) @ repeated(v)
        return x + b.out(merge_heads(y))

    parts = {"q": nn.Linear(site.width, 12), "k": nn.Linear(site.width, 6), "v": nn.Linear(site.width, 6)}
    return Block(run, out=nn.Linear(12, site.width), **parts), site.width


@kind(TOKENS)
def heads_relative(site: Site) -> Made:
    """A learned bias for each head and distance, and rotary positions."""

    def turned(x: Tensor) -> Tensor:
        angle = torch.arange(x.shape[-2], dtype=x.dtype).unsqueeze(-1) * 0.3
        a, b = x.chunk(2, -1)
        return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)

    def run(b: Block, x: Tensor) -> Tensor:
        q, k, v = (free_heads(f(x), 4) for f in (b.q, b.k, b.v))
        at = torch.arange(x.shape[1])
        bias = b.bias((at[:, None] - at).abs()).permute(2, 0, 1)
        return x + b.out(merge_heads((turned(q) @ turned(k).mT * 0.5 + bias).softmax(-1) @ v))

    return Block(run, bias=nn.Embedding(site.size + 4, 3), **separate(site, 12)), site.width


@kind(TOKENS)
def heads_of_slopes(site: Site) -> Made:
    """A constant for each head."""

    def run(b: Block, x: Tensor) -> Tensor:
        q, k, v = (free_heads(f(x), 4) for f in (b.q, b.k, b.v))
        at = torch.arange(x.shape[1], dtype=x.dtype)
        slopes = torch.tensor([0.5, 0.25, 0.125], dtype=x.dtype).view(3, 1, 1) * (at[:, None] - at).abs()
        return x + b.out(merge_heads((q @ k.mT * 0.5 - slopes).softmax(-1) @ v))

    return Block(run, **separate(site, 12)), site.width


@kind(TOKENS)
def heads_that_are_returned(site: Site) -> Made:
    """Weights averaged over the heads are part of the result."""

    def run(b: Block, x: Tensor) -> Tensor:
        y, weights = b.f(x, x, x)
        return x + y + weights.sum(-1, keepdim=True)

    return Block(run, f=nn.MultiheadAttention(site.width, heads_of(site.width), batch_first=True)), site.width


@kind(TOKENS)
def attention_one_head(site: Site) -> Made:
    def run(b: Block, x: Tensor) -> Tensor:
        q, k, v = b.q(x), b.k(x).relu(), b.v(x)
        return x + b.out(torch.bmm((torch.bmm(q, k.transpose(1, 2)) * 0.3).softmax(-1), v))

    return Block(run, **separate(site, 6)), site.width


@kind(TOKENS)
def attention_sdpa(site: Site) -> Made:
    def run(b: Block, x: Tensor) -> Tensor:
        q, k, v = (split_heads(f(x), 2) for f in (b.q, b.k, b.v))
        return x + b.out(merge_heads(F.scaled_dot_product_attention(q, k, v)))

    return Block(run, **separate(site, 8)), site.width


@kind(TOKENS)
def attention_sdpa_fixed_scale(site: Site) -> Made:
    causal = site.chance()

    def run(b: Block, x: Tensor) -> Tensor:
        q, k, v = (split_heads(f(x), 2) for f in (b.q, b.k, b.v))
        return x + b.out(merge_heads(F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=0.4)))

    return Block(run, **separate(site, 8)), site.width


@kind(TOKENS)
def attention_fused(site: Site) -> Made:
    """One matrix for all three, taken apart as vision transformers do it."""

    def run(b: Block, x: Tensor) -> Tensor:
        n, t, _ = x.shape
        q, k, v = b.qkv(x).reshape(n, t, 3, 2, -1).permute(2, 0, 3, 1, 4).unbind(0)
        y = F.scaled_dot_product_attention(q, k, v)
        return x + b.out(y.transpose(1, 2).reshape(n, t, -1))

    return Block(run, qkv=nn.Linear(site.width, 24), out=nn.Linear(8, site.width)), site.width


@kind(TOKENS)
def attention_fused_chunk(site: Site) -> Made:
    def run(b: Block, x: Tensor) -> Tensor:
        q, k, v = (split_heads(part, 2) for part in b.qkv(x).chunk(3, -1))
        mask = torch.full((x.shape[1], x.shape[1]), -1e9, dtype=x.dtype).triu(1)
        return b.out(merge_heads((q @ k.mT * 0.4 + mask).softmax(-1) @ v))

    return Block(run, qkv=nn.Linear(site.width, 24), out=nn.Linear(8, site.width)), site.width


@kind(TOKENS)
def attention_masked(site: Site) -> Made:
    def run(b: Block, x: Tensor) -> Tensor:
        q, k, v = b.q(x), b.k(x), b.v(x)
        hidden = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        scores = (torch.einsum("bqc,bkc->bqk", q, k) * 0.4).masked_fill(hidden, torch.finfo(x.dtype).min)
        return x + b.out(torch.einsum("bqk,bkc->bqc", scores.softmax(-1), v))

    return Block(run, **separate(site, 6)), site.width


@kind(TOKENS)
def attention_shared_keys(site: Site) -> Made:
    """Several heads of queries on one of keys and values."""

    def run(b: Block, x: Tensor) -> Tensor:
        q, k, v = split_heads(b.q(x), 2), b.k(x).unsqueeze(1), b.v(x).unsqueeze(1)
        return x + b.out(merge_heads((q @ k.mT * 0.4).softmax(-1) @ v))

    parts = {"q": nn.Linear(site.width, 8), "k": nn.Linear(site.width, 4), "v": nn.Linear(site.width, 4)}
    return Block(run, out=nn.Linear(8, site.width), **parts), site.width


@kind(TOKENS)
def attention_linear(site: Site) -> Made:
    """Without a softmax over the pairs."""

    def run(b: Block, x: Tensor) -> Tensor:
        q, k, v = F.elu(b.q(x)) + 1, F.elu(b.k(x)) + 1, b.v(x)
        return x + b.out(q @ (k.mT @ v) * 0.1)

    return Block(run, **separate(site, 6)), site.width


@kind(TOKENS)
def attention_rotary(site: Site) -> Made:
    def turn(x: Tensor) -> Tensor:
        angle = torch.arange(x.shape[-2], dtype=x.dtype).unsqueeze(-1)
        a, b = x.chunk(2, -1)
        return x * angle.cos() + torch.cat([-b, a], -1) * angle.sin()

    def run(b: Block, x: Tensor) -> Tensor:
        q, k, v = (split_heads(f(x), 2) for f in (b.q, b.k, b.v))
        return x + b.out(merge_heads((turn(q) @ turn(k).mT * 0.4).softmax(-1) @ v))

    return Block(run, **separate(site, 8)), site.width


@kind(TOKENS)
def attention_normed_keys(site: Site) -> Made:
    def run(b: Block, x: Tensor) -> Tensor:
        q, k, v = (split_heads(f(x), 2) for f in (b.q, b.k, b.v))
        return x + b.out(merge_heads((b.nq(q) @ b.nk(k).mT * 0.4).softmax(-1) @ v))

    return Block(run, nq=nn.LayerNorm(4), nk=nn.LayerNorm(4), **separate(site, 8)), site.width


@kind(TOKENS)
def attention_pooling(site: Site) -> Made:
    """A learned query that reads all tokens."""

    def run(b: Block, x: Tensor) -> Tensor:
        share = (x @ b.query).softmax(1)
        return x + (share.unsqueeze(-1) * x).sum(1, keepdim=True)

    return Block(run, query=param(site.width)), site.width


@kind(TOKENS)
def encoder_layer(site: Site) -> Made:
    layer = nn.TransformerEncoderLayer(
        site.width, heads_of(site.width), 10, batch_first=True, norm_first=site.chance(), activation="gelu"
    )
    return layer, site.width


@kind(TOKENS)
def decoder_layer(site: Site) -> Made:
    layer = nn.TransformerDecoderLayer(site.width, heads_of(site.width), 10, batch_first=True)
    return Block(lambda b, x: b.f(x, x.tanh()), f=layer), site.width


@kind(TOKENS)
def transformer_by_hand(site: Site) -> Made:
    c = site.width

    def run(b: Block, x: Tensor) -> Tensor:
        q, k, v = (split_heads(f(b.one(x)), 2) for f in (b.q, b.k, b.v))
        x = x + b.out(merge_heads(F.scaled_dot_product_attention(q, k, v)))
        return x + b.down(F.gelu(b.up(b.two(x))))

    parts = {"one": nn.LayerNorm(c), "two": nn.LayerNorm(c), "up": nn.Linear(c, 12), "down": nn.Linear(12, c)}
    return Block(run, **parts, **separate(site, 8)), c


@kind(TOKENS)
def llama_block(site: Site) -> Made:
    c = site.width

    def run(b: Block, x: Tensor) -> Tensor:
        y = b.norm(x)
        return x + b.down(F.silu(b.gate(y)) * b.up(y))

    parts = {
        "gate": nn.Linear(c, 10, bias=False),
        "up": nn.Linear(c, 10, bias=False),
        "down": nn.Linear(10, c, bias=False),
    }
    return Block(run, norm=nn.RMSNorm(c), **parts), c


@kind(TOKENS)
def mixer(site: Site) -> Made:
    c, t = site.width, site.size

    def run(b: Block, x: Tensor) -> Tensor:
        x = x + b.tokens(b.one(x).transpose(1, 2)).transpose(1, 2)
        return x + b.channels(b.two(x))

    tokens = nn.Sequential(nn.Linear(t, 7), nn.GELU(), nn.Linear(7, t))
    channels = nn.Sequential(nn.Linear(c, 9), nn.GELU(), nn.Linear(9, c))
    return Block(run, tokens=tokens, channels=channels, one=nn.LayerNorm(c), two=nn.LayerNorm(c)), c


@kind(TOKENS)
def spatial_gating(site: Site) -> Made:
    """A gate that mixes the tokens of one half of the channels."""

    def run(b: Block, x: Tensor) -> Tensor:
        u, v = b.up(x).relu().chunk(2, -1)
        return x + b.down(u * b.f(v.transpose(1, 2)).transpose(1, 2))

    parts = {"up": nn.Linear(site.width, 12), "down": nn.Linear(6, site.width)}
    return Block(run, f=nn.Linear(site.size, site.size), **parts), site.width


@kind(TOKENS)
def token_convolution(site: Site) -> Made:
    layer = nn.Conv1d(site.width, site.width, 3, padding=1, groups=site.width)
    return Block(lambda b, x: x + b.f(x.transpose(1, 2)).transpose(1, 2), f=layer), site.width


@kind(TOKENS)
def class_token(site: Site) -> Made:
    def run(b: Block, x: Tensor) -> Tensor:
        y = torch.cat([b.token.expand(x.shape[0], -1, -1), x], 1)
        return y[:, 1:] + y[:, :1]

    return Block(run, token=param(1, 1, site.width)), site.width


@kind(TOKENS)
def learned_positions(site: Site) -> Made:
    return Block(lambda b, x: x + b.p[:, : x.shape[1]], p=param(1, site.size, site.width)), site.width


@kind(TOKENS)
def buffer_positions(site: Site) -> Made:
    return Block(lambda b, x: x + b.p[: x.shape[1]], p=torch.randn(site.size + 4, site.width)), site.width


@kind(TOKENS)
def embedded_positions(site: Site) -> Made:
    def run(b: Block, x: Tensor) -> Tensor:
        return x + b.f(torch.arange(x.shape[1]))

    return Block(run, f=nn.Embedding(site.size + 4, site.width)), site.width


@kind(TOKENS)
def tied_table(site: Site) -> Made:
    """A table that tokens choose rows from is a hidden layer's weight as well."""

    def run(b: Block, x: Tensor) -> Tensor:
        chosen = b.table(torch.arange(x.shape[1]) % 7)
        return b.out(F.linear(x, b.table.weight).relu()) + chosen

    return Block(run, table=nn.Embedding(7, site.width), out=nn.Linear(7, site.width)), site.width


@kind(TOKENS)
def chosen_by_argmax(site: Site) -> Made:
    """A code book: each token is replaced by a row."""

    def run(b: Block, x: Tensor) -> Tensor:
        return x + b.table(b.f(x).argmax(-1))

    return Block(run, f=nn.Linear(site.width, 5), table=nn.Embedding(5, site.width)), site.width


def _recurrent(name: str, make: type[nn.RNNBase], both: bool = False) -> None:
    @kind(TOKENS, name=name)
    def layer(site: Site) -> Made:
        f = make(site.width, 4, batch_first=True, bidirectional=both)
        return Block(lambda b, x: b.f(x)[0], f=f), 8 if both else 4


_recurrent("lstm", nn.LSTM)
_recurrent("gru_both_ways", nn.GRU, both=True)
_recurrent("rnn", nn.RNN)


@kind(TOKENS)
def state_space(site: Site) -> Made:
    """A recurrence with a factor for each channel, unrolled."""

    def run(b: Block, x: Tensor) -> Tensor:
        state, seen = torch.zeros_like(x[:, 0]), []
        for step in x.unbind(1):
            state = b.a.sigmoid() * state + step
            seen.append(state)
        return torch.stack(seen, 1)

    return Block(run, a=param(site.width)), site.width


@kind("image")
def image_attention(site: Site) -> Made:
    """Attention over the places of a picture."""

    def run(b: Block, x: Tensor) -> Tensor:
        q, k, v = (f(x).flatten(2) for f in (b.q, b.k, b.v))
        share = (q.transpose(1, 2) @ k * 0.3).softmax(-1)
        return x + b.scale * (v @ share.transpose(1, 2)).view_as(x)

    parts = {"q": nn.Conv2d(site.width, 6, 1), "k": nn.Conv2d(site.width, 6, 1), "scale": param()}
    return Block(run, v=nn.Conv2d(site.width, site.width, 1), **parts), site.width


@kind("image")
def channel_covariance_attention(site: Site) -> Made:
    """Attention over channels in place of places."""

    def run(b: Block, x: Tensor) -> Tensor:
        q, k, v = b.qkv(x).flatten(2).chunk(3, 1)
        share = (F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).transpose(1, 2)).softmax(-1)
        return x + (share @ v).view_as(x)

    return Block(run, qkv=nn.Conv2d(site.width, 3 * site.width, 1)), site.width
