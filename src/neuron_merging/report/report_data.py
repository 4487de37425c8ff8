"""Everything that the page shows, as one value: figures that were measured, and the settings as text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import msgspec
from torch import Tensor

from neuron_merging.channels.analysis import Analysis
from neuron_merging.checkpoint.card import render_loading_code
from neuron_merging.checkpoint.figures_file import StoredFigures
from neuron_merging.checkpoint.model_folder import Compressed
from neuron_merging.checkpoint.recipe import RECIPE_KEYS, Recipe
from neuron_merging.evaluation.fidelity import Fidelity
from neuron_merging.evaluation.figures import (
    Figures,
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


def describe_settings(recipe: Recipe | None) -> SettingTexts:
    """What a recipe asks for, leaving out what it leaves open.

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


@dataclass(frozen=True)
class ReportData:
    """A compressed network, measured. What is None or empty could not be found out, and the page says so.

    Attributes
    ----------
    title
        The page's title.
    method
        One sentence on what was done.
    summary
        Before and after, group by group.
    bytes
        The size of all tensors before and after.
    layers
        Each group, with similarities and a picture of its scaling matrix where there is one.
    fidelity
        How alike the networks' answers are.
    latency
        Median seconds of a forward pass.
    load
        How to load the result.
    recipe
        The settings, as YAML.
    notes
        What else is worth knowing.
    asked
        The settings, as pairs of texts.
    sensitivity
        What each group is worth, if that was measured.
    sweep
        The sweep that it is the best of, if there was one.
    inputs
        Inputs that were made up, as addresses of pictures (`evaluation.figures`).

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
    asked: tuple[tuple[str, str], ...] = ()
    sensitivity: Sensitivity | None = None
    sweep: Sweep | None = None
    inputs: tuple[str, ...] = ()


def build_report_data(stored: StoredFigures, recipe: Recipe | None) -> ReportData:
    """Build the data of the page from what a folder stores; nothing is measured again.

    Parameters
    ----------
    stored
        The figures in the folder.
    recipe
        The recipe that the folder was made with, if it has one.

    Returns
    -------
    ReportData
        What the page shows.

    Examples
    --------
    >>> data = build_report_data(stored, recipe)  # doctest: +SKIP
    """
    sweep = None if stored.sweep is None else msgspec.convert(stored.sweep, Sweep, strict=False)
    layers = stored.figures.layers
    removed, total = sum(own.before - own.kept for own in layers), sum(own.before for own in layers)
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
        recipe=recipe.to_yaml() if recipe else "",
        asked=describe_settings(recipe),
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
    """Look at every group, and measure size and latency.

    Where it is not known how `small` was merged (it has no merges), what the original's weights would tell is left out.

    Parameters
    ----------
    analysis
        The original.
    small
        What became of it.
    fidelity
        How alike their answers are, if that was measured.
    title
        The page's title.
    method
        One sentence on what was done.
    load
        How to load the result.
    recipe
        The settings; left out, those that `compress` was given.
    notes
        What else the page should say.
    sensitivity
        What each group is worth; left out, what the search for a budget has found out, if there was one.
    sweep
        The sweep that it is the best of.
    inputs
        Images (n, c, h, w) that were made up, to be shown; left out, those that the network was asked to remember.

    Returns
    -------
    ReportData
        Everything that the page shows.

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
    shown = figures.inputs if inputs is None else encode_images(inputs)
    figures = replace(figures, summary=small.summary, fidelity=fidelity, inputs=shown)
    curves = sensitivity or (build_sensitivity_from_curves(small.curves) if small.curves else None)
    return _join_report_data(
        replace(figures, latency=measure_latency(analysis.model, small.model, analysis.inputs)),
        title=title,
        method=method,
        load=load,
        recipe=recipe or small.recipe,
        notes=(*(() if recipe else small.remarks), *notes),
        sensitivity=curves,
        sweep=sweep,
    )
