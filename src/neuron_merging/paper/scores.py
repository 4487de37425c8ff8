"""scores: how well a network predicts before and after it was made smaller."""

from __future__ import annotations

import time

from torch import Tensor

from neuron_merging import measuring
from neuron_merging.folder.store import Compressed
from neuron_merging.paper.checkpoint import Checkpoint
from neuron_merging.paper.settings import Panel
from neuron_merging.paper.trials import Trial
from neuron_merging.pipeline import compress_analysed
from neuron_merging.settings import Settings
from neuron_merging.sweeping.cells import Result


def compressed(checkpoint: Checkpoint, panel: Panel, trial: Trial) -> Compressed:
    """The smaller network of a trial."""
    assert trial.merger is not None
    settings = Settings(
        ratio=checkpoint.ratio(panel, trial.ratio),
        criterion=trial.criterion,
        merger=trial.merger.merger(checkpoint.network),
        calibration=trial.merger.batches(checkpoint.network, checkpoint.root),
    )
    return compress_analysed(checkpoint.analysis, settings, judge=False)


def score(checkpoint: Checkpoint, panel: Panel, trial: Trial) -> Result:
    """Top-1 and top-5 accuracy, WARE and parameters, from one pass over the images."""
    before, labels = checkpoint.predictions
    if trial.method is None:
        size = measuring.count_parameters(checkpoint.model)
        return {**_accuracies(before, labels), "ware": 0.0, "parameters": size}
    clock = time.perf_counter()
    small = compressed(checkpoint, panel, trial)
    seconds = time.perf_counter() - clock
    after = measuring.predict(small.model, checkpoint.batches())[0]
    return {
        **_accuracies(after, labels),
        "ware": measuring.ware(before, after),
        "parameters": small.summary.parameters[1],
        "seconds": seconds,
    }


def _accuracies(outputs: Tensor, labels: Tensor) -> Result:
    return {"accuracy": measuring.accuracy(outputs, labels), "top5": measuring.accuracy(outputs, labels, top=5)}
