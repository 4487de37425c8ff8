"""Measure seconds and memory per million parameters of every stage on large networks, each in its own process.

    python benchmarks/large.py [--networks llama-1b,vit-l,convnext-l,wide] [--mergers none,fast,default]

"fast" is the default merger with `effort="fast"`. Weights are random. Memory is the process's peak beyond what it holds
before there is a network, as a multiple of the weights; what torch's exporter and we import is there by then, since a
network of two layers comes first; the time of `torch.export` is counted apart, except in the
CPU seconds, which say what remains of the time where other processes run beside.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

MEMORY = 2.5
SECONDS = 600.0


class Rms(nn.Module):
    """An RMS norm written with elementary operators."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


class LlamaBlock(nn.Module):
    """Grouped-query attention with rotary positions, and a gated feed-forward."""

    def __init__(self, width: int, hidden: int, head: int, keys: int) -> None:
        super().__init__()
        self.head, self.one, self.two = head, Rms(width), Rms(width)
        self.q, self.o = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.k, self.v = nn.Linear(width, keys * head, bias=False), nn.Linear(width, keys * head, bias=False)
        self.gate, self.up = nn.Linear(width, hidden, bias=False), nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        y = self.one(x)
        q, k, v = (f(y).view(*y.shape[:2], -1, self.head).transpose(1, 2) for f in (self.q, self.k, self.v))
        q, k = (t * cos + torch.cat([-t.chunk(2, -1)[1], t.chunk(2, -1)[0]], -1) * sin for t in (q, k))
        read = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.o(read.transpose(1, 2).flatten(2))
        y = self.two(x)
        out: Tensor = x + self.down(F.silu(self.gate(y)) * self.up(y))
        return out


class Llama(nn.Module):
    def __init__(self, width: int, hidden: int, blocks: int, keys: int = 8, head: int = 64, words: int = 32000) -> None:
        super().__init__()
        self.words, self.norm, self.head = nn.Embedding(words, width), Rms(width), nn.Linear(width, words, bias=False)
        self.blocks = nn.ModuleList(LlamaBlock(width, hidden, head, keys) for _ in range(blocks))
        self.width = head

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens)
        angle = torch.arange(tokens.shape[1])[:, None] * 1e4 ** -(torch.arange(0, self.width, 2) / self.width)
        cos, sin = (torch.cat([f(angle)] * 2, -1).to(x.dtype) for f in (torch.cos, torch.sin))
        for block in self.blocks:
            x = block(x, cos, sin)
        out: Tensor = self.head(self.norm(x))
        return out


class Vit(nn.Module):
    """torch's transformer blocks behind patches of 16²."""

    def __init__(self, width: int, hidden: int, heads: int, blocks: int) -> None:
        super().__init__()
        self.patch, self.places = nn.Conv2d(3, width, 16, 16), nn.Parameter(0.02 * torch.randn(1, 197, width))
        self.token, self.head = nn.Parameter(torch.zeros(1, 1, width)), nn.Linear(width, 1000)
        layers = (
            nn.TransformerEncoderLayer(width, heads, hidden, 0.0, "gelu", batch_first=True, norm_first=True)
            for _ in range(blocks)
        )
        self.blocks, self.norm = nn.Sequential(*layers), nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.places
        out: Tensor = self.head(self.norm(self.blocks(x))[:, 0])
        return out


class ConvNextBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.mix, self.norm = nn.Conv2d(width, width, 7, padding=3, groups=width), nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.mix(x).permute(0, 2, 3, 1))
        return x + (self.scale * self.down(F.gelu(self.up(y)))).permute(0, 3, 1, 2)


class Last(nn.LayerNorm):
    """A layer norm over the channels of an image."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


def convnext(widths: tuple[int, ...], depths: tuple[int, ...]) -> nn.Module:
    parts: list[nn.Module] = [nn.Conv2d(3, widths[0], 4, 4), Last(widths[0])]
    for i, (width, depth) in enumerate(zip(widths, depths, strict=True)):
        parts += [] if i == 0 else [Last(widths[i - 1]), nn.Conv2d(widths[i - 1], width, 2, 2)]
        parts += [ConvNextBlock(width) for _ in range(depth)]
    return nn.Sequential(
        *parts, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.LayerNorm(widths[-1]), nn.Linear(width, 1000)
    )


def _words(length: int = 32) -> Tensor:
    return torch.randint(0, 32000, (1, length))


def _image() -> Tensor:
    return torch.randn(1, 3, 224, 224)


def _wide() -> nn.Module:
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(2048, 16, 8192, 0.0, batch_first=True), 2)


NETWORKS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Any]]] = {
    "llama-tiny": (lambda: Llama(256, 688, 4, keys=2), _words),
    "llama-0.3b": (lambda: Llama(1024, 2816, 22, keys=4), _words),
    "llama-1b": (lambda: Llama(2048, 5632, 22, keys=4), _words),
    "vit-b": (lambda: Vit(768, 3072, 12, 12), _image),
    "vit-l": (lambda: Vit(1024, 4096, 16, 24), _image),
    "convnext-t": (lambda: convnext((96, 192, 384, 768), (3, 3, 9, 3)), _image),
    "convnext-l": (lambda: convnext((192, 384, 768, 1536), (3, 3, 27, 3)), _image),
    "wide": (_wide, lambda: torch.randn(1, 16, 2048)),
}


class Exports:
    """Measure the time of torch.export, to subtract it from our own."""

    def __init__(self) -> None:
        self.seconds, self.count, self._export = 0.0, 0, torch.export.export

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        start = time.perf_counter()
        try:
            return self._export(*arguments, **options)
        finally:
            self.seconds, self.count = self.seconds + time.perf_counter() - start, self.count + 1


def peak() -> float:
    """Return the peak memory of this process in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def measure(name: str, merger: str) -> None:
    """Analyse and prune one network, and print one line."""
    import neuron_merging as nm

    two = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    nm.compress(two, torch.randn(1, 4), ratio=0.5, effort="fast")
    torch.manual_seed(0)
    exports = torch.export.export = Exports()  # type: ignore[assignment]
    idle = peak()
    build, example = NETWORKS[name]
    torch.set_default_dtype(torch.bfloat16 if name.startswith("llama") else torch.float32)
    model = build().eval()
    torch.set_default_dtype(torch.float32)
    inputs = example()
    size = sum(p.numel() for p in model.parameters())
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    start, used = time.perf_counter(), time.process_time()
    analysis = nm.analyse(model, inputs)
    analysed = time.perf_counter() - start - exports.seconds
    high = peak()
    options = {"default": {}, "fast": {"effort": "fast"}}.get(merger, {"merger": merger})
    small = nm.compress(analysis, ratio=0.5, **options)
    seconds = time.perf_counter() - start - exports.seconds
    million = size / 1e6
    after = small.summary.parameters[1]
    print(
        f"{name:11} {merger:8} {million:7.1f} M -> {after / 1e6:7.1f} M  "
        f"export {exports.count}x {exports.seconds:5.1f} s  "
        f"analysis {analysed:6.1f} s, all {seconds:6.1f} s ({1e3 * seconds / million:6.1f} ms/M), "
        f"CPU with export {time.process_time() - used:6.1f} s  "
        f"memory {(high - idle) / weights:.2f} and {(peak() - idle) / weights:.2f} times the weights "
        f"({(peak() - idle) / 1e6 / million:.2f} MB/M)  {small.summary.verified}"
    )
    good = seconds <= SECONDS and (peak() - idle) / weights <= MEMORY
    sys.exit(0 if good else 1)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--networks", default="llama-0.3b,vit-l,convnext-l,wide")
    parser.add_argument("--mergers", default="none,default")
    parser.add_argument("--one", action="store_true", help="in this process")
    args = parser.parse_args()
    pairs = [(network, merger) for network in args.networks.split(",") for merger in args.mergers.split(",")]
    if args.one:
        measure(*pairs[0])
    command = [sys.executable, __file__, "--one"]
    return max(subprocess.run([*command, "--networks", n, "--mergers", m], check=False).returncode for n, m in pairs)


if __name__ == "__main__":
    sys.exit(main())
