"""pictures: figures on white, in colours that do not depend on telling red from green."""

from __future__ import annotations

import io
import math
from typing import TYPE_CHECKING, Any

from neuron_merging.errors import MergingError
from neuron_merging.sweeping.losses import Loss, Sensitivity, shown
from neuron_merging.sweeping.outcome import SIZES, Sweep

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
GREY = "#595959"
DECADES = 4
"""Powers of ten below the largest loss that are told apart by colour."""


def check(where: str) -> None:
    """Pictures need an extra that may not be there: say so before hours of work."""
    try:
        import matplotlib
    except ImportError as error:
        what = f"pictures need {error.name}"
        raise MergingError(what, where=where, fix="pip install 'neuron-merging[report]'") from error
    del matplotlib


def image(figure: Figure, kind: str) -> bytes:
    """A figure as PNG or SVG; equal figures give equal bytes."""
    import matplotlib

    buffer = io.BytesIO()
    with matplotlib.rc_context({"svg.hashsalt": "neuron-merging"}):
        figure.savefig(buffer, format=kind, dpi=150, metadata={"Date": None} if kind == "svg" else {"Software": None})
    return buffer.getvalue()


def sheet(columns: int, rows: int = 1, width: float = 5.4, height: float = 4.2) -> tuple[Figure, list[Axes]]:
    """An empty figure with panels."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width * columns, height * rows), layout="constrained", facecolor="white")
    return figure, list(figure.subplots(rows, columns, squeeze=False).flat)


def sensitivity_map(found: Sensitivity) -> Figure:
    """Groups by ratios, darker where more is lost, with the figures in the cells."""
    figure, (axes,) = sheet(1, width=3.4 + 0.8 * len(found.ratios), height=1.4 + 0.22 * len(found.groups))
    axes.imshow(
        [[shade(loss, found) for loss in g.losses] for g in found.groups], "OrRd", vmin=0, vmax=1, aspect="auto"
    )
    for row, group in enumerate(found.groups):
        for column, loss in enumerate(group.losses):
            colour = "white" if shade(loss, found) > 0.6 else "black"
            axes.text(column, row, shown(loss), ha="center", va="center", fontsize=7, color=colour)
    axes.set_xticks(range(len(found.ratios)), [f"{ratio:.4g}" for ratio in found.ratios])
    axes.set_yticks(range(len(found.groups)), [group.name for group in found.groups], fontsize=7)
    axes.set(xlabel="share of the group's channels removed")
    axes.set_title(f"{found.unit}, one group cut{' and merged' if found.merged else ''}", fontsize=9)
    axes.spines[:].set_visible(False)
    return figure


def curve(found: Sweep) -> Figure:
    """Score against size: a line for each criterion and merger, over what the targets limit."""
    figure, (axes,) = sheet(1, width=6.4)
    size = found.size
    for i, (name, line) in enumerate(found.curves().items()):
        colour, dashes = COLOURS[i % len(COLOURS)], ("-", "--", ":")[i // len(COLOURS) % 3]
        style: dict[str, Any] = {"marker": "os^Dv"[i % 5], "color": colour, "linestyle": dashes}
        axes.plot([100 * x for x, _, _ in line], [y for _, y, _ in line], label=name, markersize=5, **style)
    if found.original.mark is not None:
        axes.plot([100], [found.original.mark], "*", color="black", markersize=12, label="original", zorder=3)
    axes.set(xlabel=f"{SIZES[size]} left, %", ylabel=found.metric)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=8, frameon=False)
    return figure


def shade(loss: Loss, found: Sensitivity) -> float:
    """Between 0 and 1, in powers of ten below the largest loss of all that is a number."""
    losses = [one.divergence for group in found.groups for one in group.losses]
    top = max((value for value in losses if math.isfinite(value)), default=1.0)
    if loss.divergence <= 0:
        return 0.0
    return min(1.0, max(0.0, 1 + math.log10(loss.divergence / top) / DECADES)) if top > 0 else 1.0
