"""Try compressions without data on small networks of ten kinds of input, and compare the verdict with the truth.

    python benchmarks/inputs.py [--kinds denoiser,tokens] [--seeds 3] [--cuts 0.25,0.5] [--effort normal] [--page FILE]
    python benchmarks/inputs.py --criteria [--kinds …] [--seeds 2]
    python benchmarks/inputs.py --samples 1,4,16,64,256 [--kinds …] [--cuts 0.5]
    python benchmarks/inputs.py --spread [--seeds 3] [--limit 10000]

Each kind has four networks (with and without batch norms, shallow and deep), trained for a few seconds on data made by
a formula. The example input is standard normal noise, as people give it who have no data at hand, or one real sample.
The truth is the relative squared error of the outputs on 512 fresh samples. A verdict is too kind if it says "good"
where that is above 0.3. `--criteria` compares channels chosen by l2 and by the expected error, in the networks without
norms. `--samples` fits to so many real samples alone, to synthesised inputs alone, and to both, and prints the relative
errors. `--spread` removes 40 % of the channels of ResNet-56 (in NEURON_MERGING_DATA) with several seeds and numbers of
threads, and prints the spread of its accuracy.
"""

from __future__ import annotations

import argparse
import math
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import neuron_merging as nm

CLASSES, TRAINING_SAMPLES, TEST_SAMPLES = 6, 2048, 512
TOO_FAR = 0.3
Batch = tuple[Tensor, ...]


# Data by formula: a class is a pattern, with a random phase and amplitude


def waves(y: Tensor, shape: tuple[int, ...], pick: torch.Generator) -> Tensor:
    """Return smooth waves in 0..1 whose frequencies depend on the class, with noise."""
    grids = torch.meshgrid(*(torch.linspace(0, 1, n) for n in shape), indexing="ij")
    total = torch.zeros(len(y), *shape)
    each = (-1, *(1 for _ in shape))
    for d, grid in enumerate(grids):
        frequency = 1.5 + ((y * (d + 1)) % CLASSES).float() + 0.2 * torch.randn(len(y), generator=pick)
        phase = 2 * math.pi * torch.rand(len(y), generator=pick)
        amplitude = 0.5 + torch.rand(len(y), generator=pick)
        total += amplitude.view(each) * torch.sin(2 * math.pi * frequency.view(each) * grid + phase.view(each))
    total += 0.2 * torch.randn(total.shape, generator=pick)
    return torch.sigmoid(total)


def colours(y: Tensor, pick: torch.Generator, size: int = 16) -> Tensor:
    grey = waves(y, (size, size), pick)[:, None]
    tint = 0.15 * torch.randn(len(y), 3, 1, 1, generator=pick)
    return (grey + tint).clamp(0, 1)


def table(y: Tensor, pick: torch.Generator) -> Tensor:
    """Return 20 correlated columns of very different sizes."""
    mix = torch.randn(6, 20, generator=torch.Generator().manual_seed(5))
    centres = torch.randn(CLASSES, 6, generator=torch.Generator().manual_seed(6))
    hidden = centres[y] + 0.5 * torch.randn(len(y), 6, generator=pick)
    return (hidden @ mix + 0.3 * torch.randn(len(y), 20, generator=pick)) * torch.logspace(-2, 3, 20) + torch.logspace(
        2, -1, 20
    )


def sensors(y: Tensor, pick: torch.Generator) -> Tensor:
    """Return 48 readings of nine quantities in units of their own, each a mixture of two waves."""
    units = torch.Generator().manual_seed(8)
    offset, factor = 10 * torch.randn(9, 1, generator=units), torch.randn(9, 1, generator=units).exp()
    one, other = (waves(k * y, (48,), pick)[:, None] - 0.5 for k in (1, 2))
    share = torch.linspace(0, 1, 9)[:, None]
    return offset + factor * (share * one + (1 - share) * other)


def words(y: Tensor, pick: torch.Generator) -> Tensor:
    """Return 24 tokens of 64, from a Markov chain that depends on the class."""
    chains = torch.randn(CLASSES, 64, 64, generator=torch.Generator().manual_seed(7)).mul(2).softmax(-1)
    text = torch.randint(64, (len(y), 24), generator=pick)
    for t in range(1, 24):
        text[:, t] = torch.multinomial(chains[y, text[:, t - 1]], 1, generator=pick)[:, 0]
    return text


# Networks


class Scaled(nn.Module):
    """Subtract and divide inside forward, then run a network."""

    def __init__(self, net: nn.Module, mean: float, deviation: float) -> None:
        super().__init__()
        self.net, self.mean, self.deviation = net, mean, deviation

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.net((x.float() - self.mean) / self.deviation)
        return y


class Reader(nn.Module):
    """Embed tokens and run a network over them."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.table, self.net = nn.Embedding(64, 16), net

    def forward(self, text: Tensor) -> Tensor:
        y: Tensor = self.net(self.table(text).transpose(1, 2))
        return y


class Both(nn.Module):
    """An image and a vector."""

    def __init__(self, image: nn.Module, vector: nn.Module) -> None:
        super().__init__()
        self.image, self.vector, self.last = image, vector, nn.Linear(2 * CLASSES, CLASSES)

    def forward(self, image: Tensor, vector: Tensor) -> Tensor:
        y: Tensor = self.last(torch.cat([self.image(image), self.vector(vector)], 1))
        return y


def convolutional(dims: int, channels: int, norm: bool, deep: bool, out: int = CLASSES) -> nn.Sequential:
    conv = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1]
    normal = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)[dims - 1]
    pool = (nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d)[dims - 1]
    layers: list[nn.Module] = []
    widths = (16, 24, 32, 32) if deep else (16, 32)
    for i, width in enumerate(widths):
        layers += [conv(channels, width, 3, padding=1, stride=1 if i % 2 == 0 else 2, bias=not norm)]
        layers += [normal(width)] * norm + [nn.ReLU()]
        channels = width
    return nn.Sequential(*layers, pool(1), nn.Flatten(), nn.Linear(channels, out))


def perceptron(features: int, norm: bool, deep: bool) -> nn.Sequential:
    layers: list[nn.Module] = []
    for width in (64, 64, 48) if deep else (64,):
        layers += [nn.Linear(features, width), *([nn.BatchNorm1d(width)] * norm), nn.ReLU()]
        features = width
    return nn.Sequential(*layers, nn.Linear(features, CLASSES))


def denoiser(norm: bool, deep: bool) -> nn.Sequential:
    layers: list[nn.Module] = [nn.Conv2d(1, 24, 3, padding=1), nn.ReLU()]
    for _ in range(4 if deep else 2):
        layers += [nn.Conv2d(24, 24, 3, padding=1, bias=not norm), *([nn.BatchNorm2d(24)] * norm), nn.ReLU()]
    return nn.Sequential(*layers, nn.Conv2d(24, 1, 3, padding=1))


@dataclass(frozen=True)
class Kind:
    """A kind of input: how samples are made from classes, and a network that takes them."""

    draw: Callable[[Tensor, torch.Generator], Batch]
    build: Callable[[bool, bool], nn.Module]
    noisy: bool = False
    """Whether the target is the noise in the last input, not the class."""


def noisy(y: Tensor, pick: torch.Generator) -> Batch:
    clean = waves(y, (16, 16), pick)[:, None]
    noise = 0.1 * torch.randn(clean.shape, generator=pick)
    return (clean + noise, noise)


KINDS = {
    "standardised images": Kind(
        lambda y, pick: ((colours(y, pick) - 0.5) / 0.25,), lambda norm, deep: convolutional(2, 3, norm, deep)
    ),
    "images 0..255, /255 inside": Kind(
        lambda y, pick: (255 * colours(y, pick),), lambda norm, deep: Scaled(convolutional(2, 3, norm, deep), 0, 255)
    ),
    "uint8 images": Kind(
        lambda y, pick: ((255 * colours(y, pick)).to(torch.uint8),),
        lambda norm, deep: Scaled(convolutional(2, 3, norm, deep), 127, 128),
    ),
    "dB spectrograms": Kind(
        lambda y, pick: (-80 + 80 * waves(y, (24, 16), pick)[:, None],),
        lambda norm, deep: (lambda net: net if norm else Scaled(net, -40, 20))(convolutional(2, 1, norm, deep)),
    ),
    "linear spectrograms": Kind(
        lambda y, pick: ((6 * waves(y, (24, 16), pick)[:, None]).exp(),),
        lambda norm, deep: (lambda net: net if norm else Scaled(net, 40, 80))(convolutional(2, 1, norm, deep)),
    ),
    "raw audio": Kind(
        lambda y, pick: (0.2 * (waves(3 * y, (256,), pick)[:, None] - 0.5),),
        lambda norm, deep: (lambda net: net if norm else Scaled(net, 0, 0.1))(convolutional(1, 1, norm, deep)),
    ),
    "tables": Kind(
        lambda y, pick: (table(y, pick),),
        lambda norm, deep: nn.Sequential(nn.BatchNorm1d(20), perceptron(20, norm, deep)),
    ),
    "time series": Kind(
        lambda y, pick: (
            20 + 5 * waves(y, (48,), pick)[:, None].repeat(1, 4, 1) * torch.tensor([1.0, 2, 3, 4])[:, None],
        ),
        lambda norm, deep: (lambda net: net if norm else Scaled(net, 26, 4))(convolutional(1, 4, norm, deep)),
    ),
    "sensors of nine units": Kind(
        lambda y, pick: (sensors(y, pick),),
        lambda norm, deep: (lambda net: net if norm else Scaled(net, 0, 10))(convolutional(1, 9, norm, deep)),
    ),
    "tokens": Kind(lambda y, pick: (words(y, pick),), lambda norm, deep: Reader(convolutional(1, 16, norm, deep))),
    "volumes": Kind(
        lambda y, pick: (1000 * waves(y, (8, 8, 8), pick)[:, None] - 500,),
        lambda norm, deep: (lambda net: net if norm else Scaled(net, 0, 250))(convolutional(3, 1, norm, deep)),
    ),
    "noisy images, denoiser": Kind(noisy, denoiser, noisy=True),
    "an image and a vector": Kind(
        lambda y, pick: (255 * colours(y, pick), table(y, pick)[:, :4]),
        lambda norm, deep: Both(
            Scaled(convolutional(2, 3, norm, deep), 127, 64),
            nn.Sequential(nn.BatchNorm1d(4), perceptron(4, norm, False)),
        ),
    ),
}


def sample(kind: Kind, count: int, seed: int) -> tuple[Batch, Tensor]:
    pick = torch.Generator().manual_seed(seed)
    y = torch.randint(CLASSES, (count,), generator=pick)
    values = kind.draw(y, pick)
    return (values[:-1], values[-1]) if kind.noisy else (values, y)


def train(kind: Kind, norm: bool, deep: bool, seed: int, steps: int = 250) -> nn.Module:
    torch.manual_seed(seed)
    model = kind.build(norm, deep)
    inputs, target = sample(kind, TRAINING_SAMPLES, 1000 + seed)
    optimiser = torch.optim.AdamW(model.parameters(), 3e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, 1e-2, total_steps=steps)
    for _ in range(steps):
        rows = torch.randint(TRAINING_SAMPLES, (64,))
        found = model(*(value[rows] for value in inputs))
        loss = F.mse_loss(found, target[rows]) if kind.noisy else F.cross_entropy(found, target[rows])
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        schedule.step()
    return model.eval()


@dataclass(frozen=True)
class Case:
    """One compression: what the verdict said, and the truth."""

    kind: str
    network: str
    example: str
    cut: float
    level: str
    fidelity: float | None
    error: float
    pruned: float
    seconds: float

    @property
    def too_kind(self) -> bool:
        return self.level == "good" and self.error > TOO_FAR


def relative_error(original: nn.Module, other: nn.Module, inputs: Batch) -> float:
    with torch.no_grad():
        want, got = original(*inputs), other(*inputs)
    return float((want - got).square().sum() / (want - want.mean(0)).square().sum())


def examples(kind: Kind, seed: int) -> Iterator[tuple[str, Batch]]:
    (real, _) = sample(kind, 16, 5000 + seed)
    dummy = tuple(torch.randn(v[:1].shape) if v.is_floating_point() else v[:1] for v in real)
    yield "noise", dummy
    yield "16 real samples", real


def cases(name: str, seeds: int, cuts: list[float], effort: str) -> Iterator[Case]:
    kind = KINDS[name]
    for seed in range(seeds):
        fresh, _ = sample(kind, TEST_SAMPLES, 9000 + seed)
        for norm in (True, False):
            for deep in (False, True):
                model = train(kind, norm, deep, seed)
                network = f"{'batch norms' if norm else 'no norms'}, {'deep' if deep else 'shallow'}"
                for example, given in examples(kind, seed):
                    analysis = nm.analyse(model, given)
                    for cut in cuts:
                        start = time.perf_counter()
                        small = nm.compress(analysis, ratio=cut, effort=effort)
                        seconds = time.perf_counter() - start
                        pruned = nm.compress(analysis, ratio=cut, merger="none", effort="fast").model
                        verdict = small.summary.verdict
                        assert verdict is not None
                        errors = (relative_error(model, other, fresh) for other in (small.model, pruned))
                        yield Case(name, network, example, cut, verdict.level, verdict.fidelity, *errors, seconds)


def tabulate(found: list[Case]) -> Iterator[str]:
    """Yield a table in Markdown, a row for each kind of input and example."""
    yield "| input | example | cases | error, median | worst | pruned, median | good | of these above 0.3 | unknown |"
    yield "|---|---|---:|---:|---:|---:|---:|---:|---:|"
    for name in dict.fromkeys(case.kind for case in found):
        for example in dict.fromkeys(case.example for case in found):
            own = [case for case in found if (case.kind, case.example) == (name, example)]
            errors, pruned = (sorted(getattr(case, key) for case in own) for key in ("error", "pruned"))
            good = [case for case in own if case.level == "good"]
            yield (
                f"| {name} | {example} | {len(own)} | {errors[len(own) // 2]:.3f} | {errors[-1]:.3f} "
                f"| {pruned[len(own) // 2]:.3f} | {len(good)} | {sum(case.too_kind for case in good)} "
                f"| {sum(case.level == 'unknown' for case in own)} |"
            )


def print_criteria(names: list[str], seeds: int, cuts: list[float]) -> None:
    """Print the mean error of each kind without norms, by criterion, and in how many cases the second one is better."""
    print("| input | l2, geometric mean | expected error | cases | where the expected error is better |")
    print("|---|---:|---:|---:|---:|")
    for name in names:
        errors: list[list[float]] = []
        for seed in range(seeds):
            fresh, _ = sample(KINDS[name], TEST_SAMPLES, 9000 + seed)
            for deep in (False, True):
                model = train(KINDS[name], False, deep, seed)
                analysis = nm.analyse(model, next(examples(KINDS[name], seed))[1])
                for cut in cuts:
                    small = (nm.compress(analysis, ratio=cut, criterion=own) for own in ("l2", "expected-error"))
                    errors.append([relative_error(model, own.model, fresh) for own in small])
        means = torch.tensor(errors).clamp_min(1e-9).log().mean(0).exp()
        better = sum(second < first for first, second in errors)
        print(f"| {name} | {means[0]:.4f} | {means[1]:.4f} | {len(errors)} | {better} |", flush=True)


SAMPLED_KINDS = ("standardised images", "dB spectrograms", "time series", "noisy images, denoiser")


def print_samples(names: list[str], counts: list[int], cuts: list[float], seeds: int) -> None:
    """Print the errors of fits to few real samples, to ours and to both: the mean over deep networks of several seeds.

    The channels are the same in all three, by l2, so that only the fits differ.
    """
    print("| input | cut | samples | alone | ours alone | both |\n|---|---:|---:|---:|---:|---:|")
    for name in names:
        kind = KINDS[name]
        for cut in cuts:
            errors: dict[int, list[tuple[float, ...]]] = {count: [] for count in counts}
            for seed in range(seeds):
                model, (fresh, _) = train(kind, True, True, seed), sample(kind, TEST_SAMPLES, 9000 + seed)
                real = sample(kind, max(counts), 5000 + seed)[0]
                analysis = nm.analyse(model, tuple(torch.randn(v[:1].shape) for v in real))
                own = nm.compress(analysis, ratio=cut, criterion="l2").model
                for count in counts:
                    batches = [tuple(value[:count] for value in real)]
                    alone = nm.compress(analysis, ratio=cut, criterion="l2", merger=nm.Calibrated(batches)).model
                    both = nm.compress(analysis, ratio=cut, criterion="l2", calibration=batches).model
                    errors[count].append(tuple(relative_error(model, net, fresh) for net in (alone, own, both)))
            for count, found in errors.items():
                means = torch.tensor(found).mean(0)
                print(f"| {name} | {cut:.0%} | {count} | " + " | ".join(f"{e:.4f}" for e in means) + " |", flush=True)


@torch.no_grad()
def print_spread(seeds: int, limit: int) -> None:
    from safetensors.torch import load_file

    from neuron_merging import models
    from neuron_merging.reproduction import datasets

    model = models.create_network("resnet-56").eval()
    model.load_state_dict(load_file(Path(os.environ["NEURON_MERGING_DATA"]) / "paper_resnet56_cifar10.safetensors"))
    test = datasets.load_dataset("cifar-10", "test").head(limit)
    scores = []
    for threads in (1, 2, 4):
        torch.set_num_threads(threads)
        for seed in range(seeds):
            analysis = nm.analyse(model, torch.randn(1, 3, 32, 32, generator=torch.Generator().manual_seed(0)))
            small = nm.compress(analysis, ratio=0.4, merger=nm.Moments(seed=seed), seed=seed).model
            hits = sum(int((small(x).argmax(1) == y).sum()) for x, y in test.batches(500))
            scores.append(100 * hits / len(test))
            print(f"{threads} threads, seed {seed}: {scores[-1]:.2f} %", flush=True)
    spread = torch.tensor(scores)
    print(f"mean {spread.mean():.2f} %, standard deviation {spread.std():.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", default="", help="parts of names, separated by commas; all by default")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--cuts", default="0.25,0.5")
    parser.add_argument("--effort", default="normal")
    parser.add_argument("--page", type=Path, help="write the table to a file, too")
    parser.add_argument("--spread", action="store_true", help="only the spread of ResNet-56 over seeds and threads")
    parser.add_argument("--criteria", action="store_true", help="only the comparison of criteria without norms")
    parser.add_argument("--limit", type=int, default=10_000, help="test images for --spread: fewer are too noisy")
    parser.add_argument("--samples", default="", help="only fits to so many samples, with and without ours")
    arguments = parser.parse_args()
    if arguments.spread:
        os.environ["NEURON_MERGING_CACHE"] = ""
        return print_spread(arguments.seeds, arguments.limit)
    wanted = [part for part in arguments.kinds.split(",") if part]
    names = [name for name in KINDS if not wanted or any(part in name for part in wanted)]
    cuts = [float(part) for part in arguments.cuts.split(",")]
    if arguments.criteria:
        os.environ["NEURON_MERGING_CACHE"] = ""
        return print_criteria(names, arguments.seeds, cuts)
    if arguments.samples:
        os.environ["NEURON_MERGING_CACHE"] = ""
        chosen = names if wanted else list(SAMPLED_KINDS)
        return print_samples(chosen, [int(part) for part in arguments.samples.split(",")], cuts, arguments.seeds)
    found: list[Case] = []
    with tempfile.TemporaryDirectory() as folder:
        os.environ["NEURON_MERGING_CACHE"] = folder
        for name in names:
            for case in cases(name, arguments.seeds, cuts, arguments.effort):
                found.append(case)
                mark = "  TOO KIND" if case.too_kind else ""
                known = "-" if case.fidelity is None else f"{case.fidelity:.3f}"
                print(
                    f"{case.kind}, {case.network}, {case.example}, {case.cut:g}: error {case.error:.3f}, pruned "
                    f"{case.pruned:.3f}, verdict {case.level} {known}, {case.seconds:.1f} s{mark}",
                    flush=True,
                )
    lines = list(tabulate(found))
    lines += ["", f"{len(found)} cases, {sum(case.too_kind for case in found)} too kind."]
    print("\n".join(lines))
    if arguments.page:
        arguments.page.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
