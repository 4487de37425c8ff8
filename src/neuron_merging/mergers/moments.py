"""Merge after the activation, without data: least squares on statistics of synthetic inputs.

Synthetic inputs alone would not do: deep in the network their statistics drift away from those of
real data. What a trained network carries pins them down: a batch norm knows the mean and variance
of its output, so it is fed the batch's own statistics; a layer norm behind inputs that cannot be
made up (tokens) is replaced by noise of the mean and variance that its parameters state.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from neuron_merging import synthetic
from neuron_merging.capture import Node
from neuron_merging.errors import MergingError
from neuron_merging.measure import Use, find_uses, measure
from neuron_merging.mergers.cosine import Cosine
from neuron_merging.mergers.fit import fitted
from neuron_merging.task import Merge, Task

LEAST = 128
WORK = 2**34
"""Multiply-accumulates that may be spent on more than the least number of synthetic inputs."""


@dataclass(frozen=True)
class Moments:
    """Fit what each consumer reads, by least squares over all kept channels and taps.

    `ridge` is the share of each channel's variance that counts as noise; `restore_variance` undoes
    the shrinking that comes with every fit. `samples` synthetic inputs are used; None takes as many
    as the narrowest layer needs for its fit, within a budget of work.
    """

    ridge: float = 0.01
    restore_variance: bool = True
    samples: int | None = None
    seed: int = 0

    def merge(self, task: Task) -> list[Merge]:
        uses = find_uses(task)
        norms = _Norms(self.seed, made_up=any(synthetic.is_numeric(value) for value in task.inputs))
        samples = _samples(task, uses) if self.samples is None else self.samples
        batches = synthetic.probes(task.inputs, samples, self.seed)
        try:
            found = measure(task, uses, batches, norm=norms.compute, seed=self.seed)
        except (RuntimeError, IndexError, ValueError, MergingError):
            # An input without a batch dimension, or one whose values must obey rules of their own.
            merges = Cosine().merge(task)
            return [replace(merge, how=f"{merge.how} (synthetic inputs do not run here)") for merge in merges]
        return fitted(task, uses, found, self.ridge, self.restore_variance)


def _samples(task: Task, uses: Sequence[Use]) -> int:
    """Enough inputs for eight rows per fitted weight in every layer, as long as they are cheap."""
    batch = next((len(v) for v in task.inputs if isinstance(v, Tensor) and v.ndim), 1)
    wanted = LEAST
    for use in uses:
        shape = next(iter(use.consumers))[1].node.shape
        outputs = task.graph.tensors[use.axis.tensor].shape[1 if use.axis.dim == 0 else 0]
        positions = max(1, math.prod(shape) // max(1, outputs * batch))
        wanted = max(wanted, 8 * len(use.kept(0)) // positions)
    return min(wanted, max(LEAST, WORK * batch // max(1, task.graph.macs())))


class _Norms:
    """Normalisation layers whose output follows their parameters, not the synthetic input."""

    def __init__(self, seed: int, made_up: bool) -> None:
        self.pick, self.made_up = torch.Generator().manual_seed(seed), made_up

    def compute(self, node: Node, args: dict[str, Any]) -> Any:
        if node.op == "batch_norm" and args["input"].numel() > args["input"].shape[1]:
            return F.batch_norm(args["input"], None, None, args["weight"], args["bias"], True, 0.0, args["eps"])
        if node.op == "layer_norm" and not self.made_up:
            return self._noise(args["input"], args.get("weight"), args.get("bias"))
        return node.compute(args)

    def _noise(self, like: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        value = torch.randn(like.shape, generator=self.pick).to(like)
        value = value * weight if weight is not None else value
        return value + bias if bias is not None else value
