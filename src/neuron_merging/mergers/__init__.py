"""mergers: one file per method; each folds removed channels into the layers that read them."""

from __future__ import annotations

from neuron_merging.capture import Graph
from neuron_merging.errors import MergingError
from neuron_merging.mergers.calibrated import Calibrated
from neuron_merging.mergers.cosine import Cosine
from neuron_merging.mergers.fold import Fold
from neuron_merging.mergers.linear import Linear
from neuron_merging.mergers.moments import Moments
from neuron_merging.mergers.none import Prune
from neuron_merging.task import Merge, Merger, Site, Task

MERGERS: dict[str, type[Merger]] = {
    "none": Prune, "cosine": Cosine, "linear": Linear, "fold": Fold, "moments": Moments,
}  # fmt: skip


def default(graph: Graph) -> Merger:
    """The best that needs no data."""
    return Moments()


def find(merger: str | Merger) -> Merger:
    """A merger by name with its defaults, or the object itself."""
    if isinstance(merger, str):
        if merger == "calibrated":
            raise MergingError("calibrated needs data", where="merger=", fix="Give calibration=batches.")
        if merger not in MERGERS:
            raise MergingError(f"unknown merger {merger!r}", where="merger=", fix=f"Use one of {', '.join(MERGERS)}.")
        return MERGERS[merger]()
    if isinstance(merger, type) or not callable(getattr(merger, "merge", None)):
        raise MergingError(
            f"{merger!r} is not a merger", where="merger=", fix="Give a name or an object with merge(task)."
        )
    return merger


__all__ = [
    "MERGERS", "Calibrated", "Cosine", "Fold", "Linear", "Merge", "Merger", "Moments", "Prune", "Site", "Task",
    "default", "find",
]  # fmt: skip
