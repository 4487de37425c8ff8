"""trials: which cuts and mergers a table or figure compares."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from neuron_merging.paper.cells import Cell
from neuron_merging.paper.checkpoint import Checkpoint
from neuron_merging.paper.methods import Method
from neuron_merging.paper.printed import ORIGINAL
from neuron_merging.paper.settings import Panel, Target


@dataclass(frozen=True)
class Trial:
    """One way to make a network smaller; without a method it stays as it is."""

    criterion: str = ""
    ratio: float = 0.0
    method: Method | None = None
    threshold: float | None = None

    @property
    def label(self) -> str:
        return self.method.label if self.method else ORIGINAL

    @property
    def merger(self) -> Method | None:
        """The method at this trial's t."""
        return self.method.at(self.threshold) if self.method and self.threshold is not None else self.method

    def __str__(self) -> str:
        at = f" t={self.threshold:g}" if self.threshold is not None else ""
        return f"{self.criterion} {self.ratio:.0%} {self.label}{at}" if self.method else ORIGINAL


def trials(target: Target, panel: Panel, methods: Sequence[Method]) -> list[Trial]:
    """The original network, then every cut with every method."""
    return [Trial(), *_cuts(target, panel, methods)]


def _cuts(target: Target, panel: Panel, methods: Sequence[Method]) -> Iterator[Trial]:
    for ratio in panel.ratios:
        for criterion in target.criteria:
            for method in methods:
                free = method.name == "cosine" and "threshold" not in dict(method.options)
                swept = target.thresholds if free else ()
                for threshold in swept or (None,):
                    yield Trial(criterion, ratio, method, threshold)


def _material(checkpoint: Checkpoint, method: Method) -> str:
    return checkpoint.calibration_digest if method.needs_images else method.code


def cell(kind: str, checkpoint: Checkpoint, panel: Panel, trial: Trial) -> Cell:
    """The measurement of a trial on a checkpoint."""
    merger = trial.merger
    return Cell(
        kind=kind,
        device=checkpoint.device.type,
        network=checkpoint.network.architecture,
        weights=checkpoint.weights_digest,
        images=checkpoint.images_digest,
        criterion=trial.criterion,
        ratio=checkpoint.ratio(panel, trial.ratio) if merger else {},
        merger=merger.text(checkpoint.network) if merger else "",
        material=_material(checkpoint, merger) if merger else "",
    )
