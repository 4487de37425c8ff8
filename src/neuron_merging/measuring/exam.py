"""exam: what networks are compared on, and whether it fits them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn

from neuron_merging import progress
from neuron_merging.channels.analysis import Analysis
from neuron_merging.errors import MergingError, told
from neuron_merging.graph.copying import bare_copy
from neuron_merging.graph.usercode import place_of
from neuron_merging.measuring.fidelity import Batches, Fidelity, compare, made_up_inputs
from neuron_merging.statistics.parts import Part, parts_of
from neuron_merging.statistics.remembered import Batch

Metric = Callable[[nn.Module], Any]
"""The user's own score of a network: the higher, the better."""


@dataclass(frozen=True)
class Exam:
    """Batches of inputs, with labels where there are any; `data` says that they were not made up."""

    open: Callable[[], Batches]
    inputs: str
    data: bool
    labelled: bool = False
    length: int | None = None
    """How many batches there are, if that is known."""
    parts: tuple[Part, ...] = ()
    """Of the original's outputs, if those are known."""
    guessed: bool = False
    """Whether inputs were made up without anything that the network knows of its data."""

    def compare(self, networks: Mapping[str, nn.Module]) -> Fidelity:
        """Of the first network with the others."""
        return compare(networks, self._told(), self.inputs, made_up=not self.data, parts=self.parts)

    def accuracy(self, network: nn.Module) -> float:
        """As a share."""
        found = self.compare({"it": network}).scores[0].accuracy
        assert found is not None
        return found / 100

    def fidelity(self, original: nn.Module, network: nn.Module) -> float:
        """Of one network to the other; an error where there is none."""
        found = self.compare({"original": original, "it": network})
        if (value := found.scores[1].fidelity) is None:
            fix = "Give evaluate= a function that returns a score."
            raise MergingError(f"the answers cannot be compared: {found.why}", where="max_loss=", fix=fix)
        return value

    def inputs_only(self) -> Iterator[Batch]:
        return (batch for batch, _ in self.open())

    def _told(self) -> Batches:
        for done, pair in enumerate(self.open()):
            progress.tell(f"comparing on {self.inputs}", done, self.length or 0)
            yield pair


def without_data(analysis: Analysis, effort: str = "normal", seed: int = 0) -> Exam:
    """Inputs of our own making; not those that a merger with this seed was fitted on."""
    made = made_up_inputs(analysis, effort, seed)
    pairs = [(batch, None) for batch in made.batches]
    parts = parts_of(analysis.graph)
    return Exam(lambda: pairs, str(made), data=False, length=len(pairs), parts=parts, guessed=made.guessed)


@torch.no_grad()
def scored(metric: Metric, model: nn.Module) -> float:
    """What the user's function says of a network; one error for whatever goes wrong there."""
    try:
        found = metric(bare_copy(model).eval())
    except MergingError:
        raise
    except Exception as error:  # whatever the user's code raises is told as its own
        what = f"the metric raised {told(error)}"
        raise MergingError(what, where=place_of(error) or "evaluate=", fix="Mend it: it gets the network.") from error
    value = found.item() if isinstance(found, Tensor) and found.numel() == 1 else found
    if not isinstance(value, Real) or isinstance(value, bool) or not math.isfinite(value):
        what = f"the metric returned {_shown(found)}, not a number"
        raise MergingError(what, where="evaluate=", fix="Return one number, the higher the better.")
    return float(value) + 0.0  # no minus zero


def _shown(value: object) -> str:
    return repr(value) if isinstance(value, Real | str | None) else f"a {type(value).__name__}"
