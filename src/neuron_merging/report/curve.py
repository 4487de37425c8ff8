"""curve: score against size, as the numbers of a drawing."""

from __future__ import annotations

import math
from dataclasses import dataclass

from neuron_merging.sweeping.outcome import SIZES, Sweep

WIDTH, HEIGHT = 640, 300
LEFT, RIGHT, TOP, BOTTOM = 58, 14, 12, 40
COLOURS = 6


@dataclass(frozen=True)
class Dot:
    """A network: where it lies in the drawing, and what is said of it."""

    x: float
    y: float
    said: str


@dataclass(frozen=True)
class Line:
    """One criterion and merger, from small to large."""

    name: str
    colour: int
    dots: tuple[Dot, ...]

    @property
    def path(self) -> str:
        return " ".join(f"{dot.x},{dot.y}" for dot in self.dots)


@dataclass(frozen=True)
class Curve:
    """Everything that is drawn."""

    lines: tuple[Line, ...]
    original: Dot | None
    across: tuple[tuple[float, str], ...]
    up: tuple[tuple[float, str], ...]
    width: int
    height: int
    x_title: str
    y_title: str


def curve_of(sweep: Sweep) -> Curve | None:
    """The drawing of a sweep; None where there is nothing to draw."""
    lines = sweep.curves()
    marks = [y for line in lines.values() for _, y, _ in line]
    if not marks:
        return None
    whole = sweep.original.mark
    marks += [] if whole is None else [whole]
    xs = [x for line in lines.values() for x, _, _ in line] + [1.0]
    across, up = _Scale(xs, LEFT, WIDTH - RIGHT), _Scale(marks, HEIGHT - BOTTOM, TOP)
    return Curve(
        lines=tuple(
            Line(name, i % COLOURS, tuple(Dot(across(x), up(y), f"{r.target}: {name}, {_said(y)}") for x, y, r in line))
            for i, (name, line) in enumerate(lines.items())
        ),
        original=None if whole is None else Dot(across(1.0), up(whole), f"original, {_said(whole)}"),
        across=tuple((across(value), f"{100 * value:.4g} %") for value in across.ticks()),
        up=tuple((up(value), f"{value:.4g}") for value in up.ticks()),
        width=WIDTH,
        height=HEIGHT,
        x_title=f"{SIZES[sweep.size]} left",
        y_title=sweep.metric,
    )


def _said(value: float) -> str:
    return f"{value:.4g}"


class _Scale:
    """From values to places, with some room at both ends."""

    def __init__(self, values: list[float], start: float, end: float) -> None:
        low, high = min(values), max(values)
        room = 0.06 * (high - low) or 0.5 * abs(high) or 1.0
        self._low, self._high, self._start, self._end = low - room, high + room, start, end

    def __call__(self, value: float) -> float:
        share = (value - self._low) / (self._high - self._low)
        return round(self._start + share * (self._end - self._start), 1)

    def ticks(self) -> list[float]:
        """Round values, about five."""
        step = (self._high - self._low) / 5
        power = 10 ** math.floor(math.log10(step))
        step = next(power * n for n in (1, 2, 5, 10) if power * n >= step)
        first = math.ceil(self._low / step)
        return [step * n for n in range(first, math.floor(self._high / step) + 1)]
