"""Compute the SVG coordinates of a sweep's chart (score against size) and the cells of the sensitivity heatmap."""

from __future__ import annotations

import math
from dataclasses import dataclass

from neuron_merging.sweeps.group_sensitivity import Sensitivity, format_loss
from neuron_merging.sweeps.results import SIZE_TITLES, Sweep, compute_shade

CHART_WIDTH, CHART_HEIGHT = 640, 300
MARGIN_LEFT, MARGIN_RIGHT, MARGIN_TOP, MARGIN_BOTTOM = 58, 14, 12, 40
"""Pixels; parts.html draws the grid lines inside these margins."""
COLOUR_COUNT = 6
"""Colours in style.css (classes c0 to c5)."""


@dataclass(frozen=True)
class ChartDot:
    """A network: its coordinates in the chart and its tooltip."""

    x: float
    y: float
    label: str


@dataclass(frozen=True)
class ChartLine:
    """The networks of one criterion and merger, from small to large."""

    name: str
    colour: int
    dots: tuple[ChartDot, ...]

    @property
    def path(self) -> str:
        return " ".join(f"{dot.x},{dot.y}" for dot in self.dots)


@dataclass(frozen=True)
class SweepChart:
    """Lines, axes and titles of the chart."""

    lines: tuple[ChartLine, ...]
    original: ChartDot | None
    across: tuple[tuple[float, str], ...]
    """Ticks of the x axis: coordinate and text."""
    up: tuple[tuple[float, str], ...]
    """Ticks of the y axis."""
    width: int
    height: int
    x_title: str
    y_title: str


def build_sweep_chart(sweep: Sweep) -> SweepChart | None:
    """Build the chart of a sweep; None if no network has a score."""
    lines = sweep.curves()
    marks = [y for line in lines.values() for _, y, _ in line]
    if not marks:
        return None
    original_mark = sweep.original.mark
    marks += [] if original_mark is None else [original_mark]
    # The original, at a share of 1, is always in sight.
    xs = [x for line in lines.values() for x, _, _ in line] + [1.0]
    across, up = (
        _AxisScale(xs, MARGIN_LEFT, CHART_WIDTH - MARGIN_RIGHT),
        _AxisScale(marks, CHART_HEIGHT - MARGIN_BOTTOM, MARGIN_TOP),
    )
    return SweepChart(
        lines=tuple(
            ChartLine(
                name,
                i % COLOUR_COUNT,
                tuple(ChartDot(across(x), up(y), f"{r.target}: {name}, {_format_score(y)}") for x, y, r in line),
            )
            for i, (name, line) in enumerate(lines.items())
        ),
        original=(
            None
            if original_mark is None
            else ChartDot(across(1.0), up(original_mark), f"original, {_format_score(original_mark)}")
        ),
        across=tuple((across(value), f"{100 * value:.4g} %") for value in across.ticks()),
        up=tuple((up(value), f"{value:.4g}") for value in up.ticks()),
        width=CHART_WIDTH,
        height=CHART_HEIGHT,
        x_title=f"{SIZE_TITLES[sweep.size]} left",
        y_title=sweep.metric,
    )


def _format_score(value: float) -> str:
    return f"{value:.4g}"


class _AxisScale:
    """Maps values to coordinates, with a margin of 6 % at both ends."""

    def __init__(self, values: list[float], start: float, end: float) -> None:
        low, high = min(values), max(values)
        # A single value has no range: use a margin relative to it.
        margin = 0.06 * (high - low) or 0.5 * abs(high) or 1.0
        self._low, self._high, self._start, self._end = low - margin, high + margin, start, end

    def __call__(self, value: float) -> float:
        share = (value - self._low) / (self._high - self._low)
        # To a tenth of a pixel: the page stays short, and rounding of the scores does not change it.
        return round(self._start + share * (self._end - self._start), 1)

    def ticks(self) -> list[float]:
        """Return about five round values, multiples of 1, 2 or 5 times a power of ten."""
        # The next larger round step, so there are at most five or six ticks.
        step = (self._high - self._low) / 5
        power = 10 ** math.floor(math.log10(step))
        step = next(power * n for n in (1, 2, 5, 10) if power * n >= step)
        first = math.ceil(self._low / step)
        return [step * n for n in range(first, math.floor(self._high / step) + 1)]


WHITE_TEXT_SHADE = 0.55
"""The shade, 0 to 1, above which the text is white to stay legible."""


@dataclass(frozen=True)
class HeatmapCell:
    """One loss: its text, and the darkness of its cell from 0 to 1."""

    text: str
    shade: float
    title: str

    @property
    def dark(self) -> bool:
        return self.shade > WHITE_TEXT_SHADE


def build_heatmap(sensitivity: Sensitivity) -> list[tuple[str, list[HeatmapCell]]]:
    """Build the rows of the table: a group, and a cell for each ratio."""
    return [
        (
            group.name,
            [
                HeatmapCell(
                    format_loss(loss),
                    round(compute_shade(loss, sensitivity), 3),
                    f"{loss.kept} of {group.channels} channels kept",
                )
                for loss in group.losses
            ],
        )
        for group in sensitivity.groups
    ]
