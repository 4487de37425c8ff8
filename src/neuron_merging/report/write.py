"""write: the page about a network that was compressed in Python."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from neuron_merging import atomic
from neuron_merging.channels.analysis import Analysis
from neuron_merging.cutting.trial import analyse
from neuron_merging.folder.card import loading
from neuron_merging.folder.store import Compressed
from neuron_merging.measuring.fidelity import compare, on_images, on_made_up_inputs, versions
from neuron_merging.measuring.verdict import verdict_of
from neuron_merging.report.collect import collect
from neuron_merging.report.page import render
from neuron_merging.statistics.parts import parts_of


def write(
    file: str | Path, small: Compressed, model: nn.Module | Analysis, example_inputs: Any = None, *, images: Any = None
) -> Path:
    """Compare `small` with what it was made from, and write the page: one HTML file that loads nothing.

    Parameters
    ----------
    file
        Where to.
    small
        What `compress` returned.
    model
        The original network, or its analysis.
    example_inputs
        As for `analyse`.
    images
        Labelled data, as `neuron_merging.data` gives it. Without, the networks are compared on synthetic inputs.

    Returns
    -------
    Path
        The file.

    Raises
    ------
    ModelError
        The model cannot be captured.
    MergingError
        The network returns no numbers to compare, or no row of class scores for each image.

    Examples
    --------
    >>> import tempfile, torch, neuron_merging as nm
    >>> net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> analysis = nm.analyse(net, torch.zeros(1, 4))
    >>> with tempfile.TemporaryDirectory() as place:
    ...     write(f"{place}/page.html", nm.compress(analysis), analysis).name
    'page.html'
    """
    return atomic.replace_file(file, page_of(small, model, example_inputs, images=images).encode())


def page_of(small: Compressed, model: nn.Module | Analysis, example_inputs: Any = None, *, images: Any = None) -> str:
    """The page as text, for those who put it elsewhere.

    Parameters
    ----------
    small
        What `compress` returned.
    model
        The original network, or its analysis.
    example_inputs
        As for `analyse`.
    images
        Labelled data; without, synthetic inputs.

    Returns
    -------
    str
        HTML.

    Raises
    ------
    ModelError
        The model cannot be captured.
    MergingError
        The networks cannot be compared on these data.

    Examples
    --------
    >>> import torch, neuron_merging as nm
    >>> net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> page_of(nm.compress(net, torch.zeros(1, 4)), net, torch.zeros(1, 4))[:15]
    '<!doctype html>'
    """
    analysis = analyse(model, example_inputs)
    original, known = analysis.model, small.summary.verdict
    batches, said = on_images(images) if images else on_made_up_inputs(analysis)
    fidelity = compare(versions(original, small.model, small.plan), batches, said, parts=parts_of(analysis.graph))
    if images or known is None:
        verdict = verdict_of(fidelity, data=bool(images), score=known.score if known else None)
        small = replace(small, summary=replace(small.summary, verdict=verdict))
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
