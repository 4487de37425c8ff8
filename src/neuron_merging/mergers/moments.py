"""Merge after the activation, without data: least squares on statistics that the network implies.

They are measured on inputs that the network remembers (`statistics.remembered`), where it has batch norms to remember
them by, or on text that it writes itself (`statistics.spoken`). Else, where a closed form reaches
(`statistics.gaussian`: vectors, from a prior on the input or from a layer norm), that is the source, and feature maps
are measured on synthetic inputs. Those alone would not do: deep in a network their statistics drift away from those of
real data. What a trained network carries pins them down: a batch norm knows the mean and variance of its output, so it
is fed the batch's own statistics; a layer norm behind inputs that cannot be made up (tokens) is replaced by noise of
the mean and variance that its parameters state. Of what reads nothing but tokens, half of the say is given to tokens at
random that run through the network as it is.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from neuron_merging.channels.groups import Axis
from neuron_merging.channels.operators.table import row_of
from neuron_merging.channels.selection import Selection
from neuron_merging.errors import MergingError
from neuron_merging.graph.macs import total_macs
from neuron_merging.graph.trees import flat
from neuron_merging.graph.values import Graph, Node
from neuron_merging.mergers._fit import by_weights, fitted, not_stored
from neuron_merging.mergers._sequential import divergence, fit_in_sequence
from neuron_merging.mergers.interface import Merged, Reason, Why, merger
from neuron_merging.statistics import gaussian, synthetic
from neuron_merging.statistics.made import EFFORTS, recall, witnesses
from neuron_merging.statistics.regression import Joint, Known, halfway
from neuron_merging.statistics.remembered import Remembered
from neuron_merging.statistics.sampled import refusal, sampled
from neuron_merging.statistics.uses import WIDEST, Use, find_uses

Statistics = dict[Axis, list[Known]]
Each = Iterator[tuple[Axis, list[Known]]]
"""Statistics of one layer after the other, of which only one need be held."""
CLOSED, SYNTHETIC, TOKENS = PARTS = ("statistics in closed form", "synthetic inputs", "random tokens")
"""Sources beyond what the network remembers, in the order in which they are told."""
MARGIN = 0.9
"""What the divergence on witnesses must fall to for a fit in sequence: on such inputs it looks better than it is."""
SOURCES = ("auto", "closed-form", "dead-leaves", "remembered")
LEAST = 128
DEAD = 1e-10
WORK = 2**34
"""Multiply-accumulates that may be spent on more than the least number of synthetic inputs."""


@merger("moments")
@dataclass(frozen=True)
class Moments:
    """Fit what each consumer reads, by least squares over all kept channels and taps, without data. The default.

    Parameters
    ----------
    ridge
        The share of each channel's variance that counts as noise.
    smoothness
        The distance, in pixels, over which signals are taken to be correlated.
    restore_variance
        Undo the shrinking that comes with every fit.
    samples
        How many synthetic inputs are used where inputs must be made up; None takes as many as the narrowest layer
        needs for its fit, within a budget of work.
    seed
        For the inputs that are made up.
    source
        Where statistics come from. "auto" is inputs that the network remembers (or text that it writes), if there are
        any; else the closed form for vectors and dead leaves for maps, half and half with random tokens where it reads
        nothing else. "remembered", "closed-form" and "dead-leaves" are each of them alone.
    effort
        "fast" remembers nothing, which takes seconds; "normal" makes up to 256 inputs that the network remembers,
        "best" 512 in twice the steps.

    Raises
    ------
    MergingError
        An option that is no number, or outside its range.

    Examples
    --------
    >>> import neuron_merging as nm
    >>> net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    >>> small = nm.compress(net, torch.zeros(1, 4), ratio=0.5, merger=Moments(ridge=0.001))
    >>> str(small.plan.groups[0].readers[0].kind)
    'fitted'
    """

    ridge: float = 0.01
    smoothness: float = 1.0
    restore_variance: bool = True
    samples: int | None = None
    seed: int = 0
    source: str = "auto"
    effort: str = "normal"

    def __post_init__(self) -> None:
        for name, known in (("source", SOURCES), ("effort", tuple(EFFORTS))):
            if getattr(self, name) not in known:
                what = f"{name} {getattr(self, name)!r} is not known"
                raise MergingError(what, where=f"Moments({name}=)", fix=f"Use one of {', '.join(known)}.")
        for name, least in (("ridge", 0.0), ("smoothness", 1e-6)):
            value = getattr(self, name)
            if not isinstance(value, (int, float)) or not least <= value < math.inf:
                raise MergingError(f"{name} {value!r} is not a number of at least {least}", where=f"Moments({name}=)")
        for name, least in (("samples", 1), ("seed", 0)):
            value = getattr(self, name)
            if (value is not None or name == "seed") and not _is_count(value, least):
                what = f"{name} {value!r} is not a whole number of at least {least}"
                raise MergingError(what, where=f"Moments({name}=)", fix=f"For instance {name}=128.")

    def merge(self, selection: Selection) -> Merged:
        """Fit every consumer of which statistics are known; the others by their weights."""
        uses = find_uses(selection)
        made = self.remembered(selection)
        known, merges = self._by_memory(selection, uses, made) if made.batches else self._by(selection, uses)
        rest = [use for use in uses if use not in known]
        why = self._unusable(selection) if any(use.fits for use in rest) else None
        return merges + by_weights(selection, rest, why) + not_stored(selection)

    def _by(self, selection: Selection, uses: Sequence[Use]) -> tuple[list[Use], Merged]:
        """Every layer at once, by whatever is known of what it reads."""
        used: dict[Axis, set[str]] = {}
        found = self._known(selection, [use for use in uses if use.fits], used)
        merges = fitted(selection, uses, found, self.ridge, self.restore_variance)
        sources = sorted({part for parts in used.values() for part in parts}, key=PARTS.index)
        return [use for use in uses if use.axis in used], replace(merges, sources=tuple(sources))

    def _by_memory(self, selection: Selection, uses: Sequence[Use], made: Remembered) -> tuple[list[Use], Merged]:
        """At once, or in sequence where that does clearly better on other inputs that the network remembers."""
        usable, batches = [use for use in uses if use.fits], made.batches
        judges = witnesses(selection.analysis, self._effort, self.seed).batches
        options: dict[str, Any] = {"ridge": self.ridge, "restore": self.restore_variance}
        known = sampled(selection, usable, batches, seed=self.seed)
        at_once = fitted(selection, usable, known, **options)
        in_turn = fit_in_sequence(selection, usable, batches, seed=self.seed, beside=True, **options)
        errors = [divergence(selection, usable, merged, judges) for merged in (at_once, in_turn)]
        best = in_turn if errors[1] < MARGIN * errors[0] else at_once
        return usable, replace(best, sources=(made.source,))

    def statistics(self, selection: Selection, uses: Sequence[Use]) -> Statistics:
        """What each of these layers reads, as far as it can be known without data."""
        usable = [use for use in uses if use.fits]
        made = self.remembered(selection).batches
        if made:
            return dict(sampled(selection, usable, made, seed=self.seed))
        return dict(self._known(selection, usable, {}))

    def _known(self, selection: Selection, usable: Sequence[Use], used: dict[Axis, set[str]]) -> Each:
        """Without what it remembers, layer by layer; which sources were `used` is written down.

        In closed form, else measured on synthetic inputs; half way from there to tokens at random, where those know it.
        """
        tokens = dict(self._on_tokens(selection, usable))
        closed, measured = self._closed(selection, usable), self._measured(selection, usable, used)
        for part, found in ((CLOSED, closed), (SYNTHETIC, measured)):
            for axis, joints in found:
                other = tokens.pop(axis, None)
                used[axis] = {part} if other is None else {part, TOKENS}
                yield axis, joints if other is None else [halfway(*pair) for pair in zip(joints, other, strict=True)]
        for axis, joints in tokens.items():
            used[axis] = {TOKENS}
            yield axis, joints

    def _measured(self, selection: Selection, usable: Sequence[Use], known: Mapping[Axis, Any]) -> Each:
        """What is not known when it comes to that."""
        rest = [use for use in usable if use.axis not in known]
        if self.source in ("auto", "dead-leaves"):
            yield from self._sampled(selection, rest)

    def _on_tokens(self, selection: Selection, uses: Sequence[Use]) -> Each:
        """Where tokens are all that a network reads: what it makes of tokens at random, as it is."""
        plain = self.source == "auto" and self.effort != "fast" and not _has_numbers(selection)
        reads = plain and synthetic.tokens_of(selection.graph)
        return self._sampled(selection, uses, noise=False) if reads else iter(())

    def is_sure(self, selection: Selection) -> bool:
        """Whether channels can be chosen by what layers read: where that is remembered, or stated in closed form.

        Synthetic images are too far from real ones for that.
        """
        closed = self.source in ("auto", "closed-form") and self.effort != "fast"
        convolves = any(row_of(node).convolves for node in selection.graph.nodes)
        return bool(self.remembered(selection).batches) or (closed and not convolves)

    def remembered(self, selection: Selection) -> Remembered:
        """Inputs that the network remembers, if this source takes any; or why there are none."""
        if self.source not in ("auto", "remembered"):
            return Remembered(refusal=f"the source is {self.source}")
        return recall(selection.analysis, self._effort, self.seed, self.samples)

    @property
    def _effort(self) -> str:
        return "normal" if self.source == "remembered" and self.effort == "fast" else self.effort

    def _closed(self, selection: Selection, uses: Sequence[Use]) -> Each:
        """Layers whose input has statistics in closed form."""
        if self.source not in ("auto", "closed-form"):
            return
        inputs = zip(selection.graph.inputs, flat(selection.inputs), strict=True)
        tensors = {name: value for name, value in inputs if name is not None and isinstance(value, Tensor)}
        narrow = [use for use in uses if len(use.consumers) == 1 and use.width <= WIDEST]
        single = [use for use in narrow if row_of(use.consumers[0][1].node).layer == "linear"]
        maps = _from_maps(selection.graph)
        vectors: dict[str, list[Use]] = {}
        for use in single:
            if use.consumers[0][1].input not in maps:
                vectors.setdefault(use.consumers[0][1].input, []).append(use)
        if not vectors:
            return
        priors = {name: gaussian.prior(value, self.smoothness) for name, value in tensors.items() if value.ndim}
        given = {name: prior for name, prior in priors.items() if prior is not None}
        for name, known in gaussian.propagate(selection.graph, given, vectors):
            for use in vectors[name] if known.mean.ndim == 1 else ():
                yield use.axis, [_joint(selection, use, known)]

    def _sampled(self, selection: Selection, uses: Sequence[Use], noise: bool = True) -> Each:
        """Layers whose input is measured on synthetic inputs, if the network takes any."""
        if not uses or self._unusable(selection) is not None:
            return iter(())
        norms = _Norms(self.seed, made_up=_has_numbers(selection) or not noise)
        samples = _samples(selection, uses) if self.samples is None else self.samples
        batches = self._probes(selection, samples)
        share = _length(selection, samples) / samples  # all batches together have enough rows
        # To choose channels, when all of them stay, and to go half way to another source takes covariances.
        alone = (use for use in uses if _has_numbers(selection) and not use.stays.all())
        rows = {use.axis: samples * _positions(selection, use) for use in alone}
        return sampled(selection, uses, batches, norm=norms.compute, seed=self.seed, plenty=share, rows=rows)

    def _probes(self, selection: Selection, samples: int) -> Iterator[tuple[Any, ...]]:
        tokens, size = synthetic.tokens_of(selection.graph), _length(selection, samples)
        whole = -(-samples // size) * size if selection.analysis.one_size_only else samples
        return synthetic.probes(selection.inputs, whole, self.seed, tokens, size)

    def _unusable(self, selection: Selection) -> Reason | None:
        """Why nothing can be measured on made-up inputs: there are none, or the network's own code refuses them."""
        normed = any(row_of(node).norm == "layer" for node in selection.graph.nodes)
        if not (_has_numbers(selection) or synthetic.tokens_of(selection.graph) or normed):
            return Reason(Why.NO_INPUTS, "they have to be numbers, or tokens of a table")
        samples = synthetic.batch_size(selection.inputs) + (not selection.analysis.one_size_only)
        said = refusal(selection.analysis, next(self._probes(selection, samples)))
        return Reason(Why.NO_INPUTS, said) if said else None

    def inputs(self, selection: Selection, samples: int) -> Iterable[Sequence[Any]]:
        """Some of the inputs that the fit was made on."""
        if self.remembered(selection).batches:
            return witnesses(selection.analysis, self._effort, self.seed).batches
        return self._probes(selection, samples) if self._unusable(selection) is None else ()


def _is_count(value: object, least: int) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool) and least <= int(value) < 2**63


def _has_numbers(selection: Selection) -> bool:
    return any(synthetic.is_numeric(value) for value in flat(selection.inputs))


def _from_maps(graph: Graph) -> set[str]:
    """The values that are computed from feature maps; a layer norm on the way states its output anyhow."""
    found: set[str] = set()
    for node in graph.nodes:
        reads_maps = row_of(node).convolves or any(ref.name in found for ref in node.refs())
        if reads_maps and not row_of(node).spans:
            found.add(node.name)
    return found


def _joint(selection: Selection, use: Use, known: gaussian.Statistics) -> Joint:
    (weight,) = use.matrices(selection.tensor(use.axis.tensor).to(known.mean))
    return Joint.of(known.mean, known.cov, weight, use.kept(0).to(known.mean.device))


def _samples(selection: Selection, uses: Sequence[Use]) -> int:
    """Enough inputs for eight rows per fitted weight in every layer, as long as they are cheap."""
    batch = synthetic.batch_size(selection.inputs)
    wanted = max([LEAST, *(8 * len(use.kept(0)) // _positions(selection, use) for use in uses)])
    return min(wanted, max(LEAST, WORK * batch // max(1, total_macs(selection.graph))))


def _length(selection: Selection, samples: int) -> int:
    """How many of so many inputs make a batch; as many as the example has, where the network takes no others."""
    if selection.analysis.one_size_only:
        return synthetic.batch_size(selection.inputs)
    return synthetic.batch_length(selection.inputs, samples)


def _positions(selection: Selection, use: Use) -> int:
    """Where a layer puts something out, in one sample."""
    shape = next(iter(use.consumers))[1].node.shape
    outputs = selection.graph.tensors[use.axis.tensor].shape[1 if use.axis.dim == 0 else 0]
    return max(1, math.prod(shape) // max(1, outputs * synthetic.batch_size(selection.inputs)))


def _with_own_statistics(node: Node, args: dict[str, Any]) -> Tensor:
    """A batch norm of the batch's mean and variance; channels that are constant take the stored ones.

    Rounding would be blown up to the scale of a signal, and what a constant comes to be is in the parameters.
    """
    value, eps, usual = args["input"], args["eps"], args["running_var"]
    own, mean, gain = torch.native_batch_norm(value, args["weight"], args["bias"], None, None, True, 0.0, eps)
    if usual is None:
        return own
    dead = gain.double() ** -2 - eps <= DEAD * (mean.double().square() + usual.double()) + 1e-6 * eps
    shape = [-1, *(1 for _ in value.shape[2:])]
    return torch.where(dead.view(shape), node.compute(args), own) if bool(dead.any()) else own


class _Norms:
    """Normalisation layers whose output follows their parameters, not the synthetic input."""

    def __init__(self, seed: int, made_up: bool) -> None:
        self.pick, self.made_up = torch.Generator("cpu").manual_seed(seed), made_up

    def compute(self, node: Node, args: dict[str, Any]) -> Any:
        if row_of(node).norm == "batch" and args["input"].numel() > args["input"].shape[1]:
            return _with_own_statistics(node, args)
        if row_of(node).norm == "layer" and not self.made_up:
            return self._noise(args["input"], args.get("weight"), args.get("bias"))
        return node.compute(args)

    def _noise(self, like: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        value = torch.randn(like.shape, generator=self.pick, **synthetic.PLAIN).to(like)
        value = value * weight if weight is not None else value
        return value + bias if bias is not None else value
