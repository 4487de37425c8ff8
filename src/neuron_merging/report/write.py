"""write: the page about a network that was compressed in Python."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from neuron_merging import atomic
from neuron_merging.channels.analysis import Analysis
from neuron_merging.cutting.trial import analyse
from neuron_merging.folder.card import loading
from neuron_merging.folder.store import Compressed
from neuron_merging.measuring.fidelity import compare, on_images, on_synthetic_inputs, versions
from neuron_merging.report.collect import collect
from neuron_merging.report.page import render


def write(
    file: str | Path, small: Compressed, model: nn.Module | Analysis, example_inputs: Any = None, *, images: Any = None
) -> Path:
    """Compare `small` with the model (or the analysis) that it was made from, and write the page; its path.

    `images` has labelled data, as the functions of `neuron_merging.data` give it. Without, the networks
    are compared on synthetic inputs.

    >>> write("page.html", small, model, x)                         # doctest: +SKIP
    """
    return atomic.replace_file(file, page_of(small, model, example_inputs, images=images).encode())


def page_of(small: Compressed, model: nn.Module | Analysis, example_inputs: Any = None, *, images: Any = None) -> str:
    """The page as text."""
    analysis = analyse(model, example_inputs)
    original, macs = analysis.model, small.summary.macs[0]
    batches, said = on_images(images) if images else on_synthetic_inputs(original, analysis.inputs, macs)
    fidelity = compare(versions(original, small.model, small.plan), batches, said)
    removed = sum(group.removed for group in small.summary.groups)
    found = collect(
        analysis,
        small,
        fidelity,
        title=type(original).__name__,
        method=f"{removed:,} channels in {len(small.plan.groups)} groups removed.",
        load=loading(None),
    )
    return render(found)
