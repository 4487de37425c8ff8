"""Everything that the page shows, as values, and the settings as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from neuron_merging.checkpoint.recipe import RUN_ONLY_KEYS, Recipe
from neuron_merging.evaluation.fidelity import Fidelity
from neuron_merging.evaluation.summary import Summary
from neuron_merging.report.inline_images import ScalingImage
from neuron_merging.sweeps.group_sensitivity import Sensitivity
from neuron_merging.sweeps.results import Sweep

SettingTexts = tuple[tuple[str, str], ...]
OMITTED_DEFAULTS = {"round_to": 1, "seed": 0, "calibrate_images": 512, "output": "module", "uniform": False}
"""Values that are not worth a word."""


def describe_settings(recipe: Recipe | None) -> SettingTexts:
    """What a recipe asks for, leaving out what it leaves open.

    >>> describe_settings(Recipe(budget={"macs": "50%"}, criterion="l2", merger="moments"))
    (('budget', 'macs 50%'), ('scope', 'internal'), ('criterion', 'l2'), ('merger', 'moments'))
    """
    if recipe is None:
        return ()
    keys = msgspec.structs.asdict(recipe)
    given = {key: value for key, value in keys.items() if key not in RUN_ONLY_KEYS and value not in (None, [], {}, "")}
    return tuple(
        (key.replace("_", " "), _format_setting(value))
        for key, value in given.items()
        if OMITTED_DEFAULTS.get(key) != value
    )


def _format_setting(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_format_setting(part)}" for key, part in value.items())
    if isinstance(value, list):
        return ", ".join(map(_format_setting, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


@dataclass(frozen=True)
class LayerReport:
    """One group of channels.

    `merged` counts the removed channels that every reader took in; None where it is not known.
    `similarity` is, for each removed channel, its largest cosine similarity to a kept one.
    """

    name: str
    before: int
    kept: int
    merged: int | None
    error: float | None
    how: tuple[str, ...]
    heat: ScalingImage | None = None
    similarity: tuple[float, ...] = ()
    units: tuple[int, ...] = ()
    """The numbers of the kept channels."""
    saved: tuple[float, float] = (0.0, 0.0)
    """Shares of the network's parameters and multiply-accumulates that this cut alone saves."""

    @property
    def dropped(self) -> int:
        return self.before - self.kept - (self.merged or 0)

    @property
    def gone(self) -> tuple[int, ...]:
        """The numbers of the removed channels."""
        kept = set(self.units)
        return tuple(unit for unit in range(self.before) if unit not in kept)

    @property
    def numbers(self) -> str:
        """Which channels stay and which go."""
        return f"kept: {format_ranges(self.units)}; removed: {format_ranges(self.gone)}" if self.units else ""


def format_ranges(numbers: Sequence[int]) -> str:
    """Numbers in order, as people write them.

    >>> format_ranges([0, 1, 2, 5, 7, 8])
    '0–2, 5, 7–8'
    """
    found: list[list[int]] = []
    for number in numbers:
        if found and found[-1][-1] == number - 1:
            found[-1] = [found[-1][0], number]
        else:
            found.append([number])
    return ", ".join("–".join(map(str, run)) for run in found)


@dataclass(frozen=True)
class LatencyComparison:
    """Median seconds of a forward pass, by batch size: original and small."""

    seconds: Mapping[int, tuple[float, float]]
    threads: int


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
        Inputs that were made up, as addresses of pictures (`report.inline_images`).

    Examples
    --------
    >>> from neuron_merging.report import collect
    >>> analysis = nm.analyse(net, torch.zeros(1, 4))
    >>> found = collect(analysis, nm.compress(analysis), None, title="net", method="", load="")
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
