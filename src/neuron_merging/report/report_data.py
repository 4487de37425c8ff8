"""Collect everything that the page shows in one value: measured figures, and the settings as text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import msgspec
from torch import Tensor

from neuron_merging.channels.analysis import Analysis
from neuron_merging.checkpoint.card import render_loading_code
from neuron_merging.checkpoint.compressed import Compressed
from neuron_merging.checkpoint.manifest import StoredFigures
from neuron_merging.checkpoint.recipe import RECIPE_KEYS, Recipe
from neuron_merging.errors import deprecated_members
from neuron_merging.evaluation.fidelity import Fidelity
from neuron_merging.evaluation.figures import (
    Figures,
    Int8Comparison,
    LatencyComparison,
    LayerReport,
    collect_figures,
    encode_images,
    measure_latency,
)
from neuron_merging.evaluation.summary import Summary
from neuron_merging.sweeps.group_sensitivity import Sensitivity, build_sensitivity_from_curves
from neuron_merging.sweeps.results import Sweep

SettingTexts = tuple[tuple[str, str], ...]
"""Pairs of a setting's name and its value."""


def describe_settings(recipe: Recipe | None) -> SettingTexts:
    """Return the settings of a recipe as text, without those that have their default value.

    >>> describe_settings(Recipe(budget={"macs": "50%"}, criterion="l2", merger="moments"))
    (('budget', 'macs 50%'), ('criterion', 'l2'), ('merger', 'moments'), ('scope', 'internal'))
    """
    if recipe is None:
        return ()
    return tuple(
        (key.name.replace("_", " "), _format_setting(getattr(recipe, key.name)))
        for key in RECIPE_KEYS.values()
        if not key.run_only and (key.always_reported or getattr(recipe, key.name) != key.default)
    )


def _format_setting(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_format_setting(part)}" for key, part in value.items())
    if isinstance(value, list):
        return ", ".join(map(_format_setting, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


@deprecated_members(asked="settings")
@dataclass(frozen=True)
class ReportData:
    """The data of the page about a compressed network. Fields that are None or empty were not measured.

    Attributes
    ----------
    title
        The page's title.
    method
        One sentence on what was done.
    summary
        Sizes and channels before and after, by group.
    bytes
        Bytes of all tensors before and after.
    layers
        The groups, with cosine similarities and a picture of the scaling matrix, if there is one.
    fidelity
        The fidelity of the outputs to the original's.
    latency
        Median seconds of a forward pass.
    load
        Code that loads the result.
    recipe
        The settings, as YAML.
    notes
        Further remarks.
    settings
        The settings, as pairs of name and value.
    sensitivity
        The sensitivity of each group, if it was measured.
    sweep
        The sweep in which this network is the best, if there was one.
    inputs
        Synthesised inputs, as data URLs of images (`evaluation.figures`).
    int8
        The float file and the int8 file, if there is one.

    Examples
    --------
    >>> from neuron_merging.report import collect_report_data
    >>> analysis = nm.analyse(net, torch.zeros(1, 4))
    >>> found = collect_report_data(analysis, nm.compress(analysis), None, title="net", method="", load="")
    >>> found.bytes
    (232, 120)
    """

    title: str
    method: str
    summary: Summary
    bytes: tuple[int, int]
    layers: tuple[LayerReport, ...]
    fidelity: Fidelity | None
    latency: LatencyComparison | None
    load: str
    recipe: str = ""
    notes: tuple[str, ...] = ()
    settings: SettingTexts = ()
    sensitivity: Sensitivity | None = None
    sweep: Sweep | None = None
    inputs: tuple[str, ...] = ()
    int8: Int8Comparison | None = None


def build_report_data(stored: StoredFigures, recipe: Recipe | None) -> ReportData:
    """Build the data of the page from the figures that a folder stores, without measuring again.

    Parameters
    ----------
    stored
        The figures in the folder.
    recipe
        The recipe of the folder, if it has one.

    Returns
    -------
    ReportData
        The data of the page.

    Examples
    --------
    >>> data = build_report_data(stored, recipe)  # doctest: +SKIP
    """
    # The folder may be a stranger's: its table is checked field by field, as any input.
    sweep = None if stored.sweep is None else msgspec.convert(stored.sweep, Sweep, strict=False)
    layers = stored.figures.layers
    # A stored page names no method, so this sentence is made from the figures.
    removed, total = sum(layer.before - layer.kept for layer in layers), sum(layer.before for layer in layers)
    return _join_report_data(
        stored.figures,
        title=stored.title,
        method=f"{removed:,} of {total:,} channels in {len(layers)} groups removed.",
        load=render_loading_code(recipe.model if recipe else None),
        recipe=recipe,
        notes=stored.notes,
        sensitivity=build_sensitivity_from_curves(stored.curves) if stored.curves else None,
        sweep=sweep,
    )


def _join_report_data(figures: Figures, *, recipe: Recipe | None, notes: tuple[str, ...], **texts: Any) -> ReportData:
    return ReportData(
        summary=figures.summary,
        bytes=figures.bytes,
        layers=figures.layers,
        fidelity=figures.fidelity,
        latency=figures.latency,
        inputs=figures.inputs,
        int8=figures.int8,
        recipe=recipe.to_yaml() if recipe else "",
        settings=describe_settings(recipe),
        notes=(*figures.summary.notes, *notes),
        **texts,
    )


def collect_report_data(
    analysis: Analysis,
    small: Compressed,
    fidelity: Fidelity | None,
    *,
    title: str,
    method: str,
    load: str,
    recipe: Recipe | None = None,
    notes: tuple[str, ...] = (),
    sensitivity: Sensitivity | None = None,
    sweep: Sweep | None = None,
    inputs: Tensor | None = None,
) -> ReportData:
    """Collect the figures of every group, and measure size and latency.

    If `small` has no merges, the figures that need the original's weights are left out.

    Parameters
    ----------
    analysis
        The analysis of the original network.
    small
        The compressed network.
    fidelity
        The fidelity of the outputs, if it was measured.
    title
        The page's title.
    method
        One sentence on what was done.
    load
        Code that loads the result.
    recipe
        The settings. Default: those that `compress` was given.
    notes
        Further remarks for the page.
    sensitivity
        The sensitivity of each group. Default: the loss curves of the budget search, if there was one.
    sweep
        The sweep in which this network is the best.
    inputs
        Synthesised images (n, c, h, w) to show. Default: those that were synthesised from the batch-norm statistics.

    Returns
    -------
    ReportData
        The data of the page.

    Examples
    --------
    >>> import torch, neuron_merging as nm
    >>> from torch import nn
    >>> analysis = nm.analyse(net, torch.zeros(1, 4))
    >>> found = collect_report_data(analysis, nm.compress(analysis), None, title="net", method="", load="")
    >>> [(layer.name, layer.before, layer.kept) for layer in found.layers]
    [('0', 8, 4)]
    """
    figures = small.figures or collect_figures(
        analysis, small.model, small.plan, small.summary, fidelity, small.merged.merges
    )
    images = figures.inputs if inputs is None else encode_images(inputs)
    figures = replace(figures, summary=small.summary, fidelity=fidelity, inputs=images)
    curves = sensitivity or (build_sensitivity_from_curves(small.curves) if small.curves else None)
    return _join_report_data(
        replace(figures, latency=measure_latency(analysis.model, small.model, analysis.inputs)),
        title=title,
        method=method,
        load=load,
        recipe=recipe or small.recipe,
        # The remarks are about settings that a recipe made from Python cannot express; a given recipe is complete.
        notes=(*(() if recipe else small.remarks), *notes),
        sensitivity=curves,
        sweep=sweep,
    )
