"""Results of a sweep: rows, text table, CSV, and matplotlib plots of sweeps and sensitivities."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from neuron_merging.errors import MergingError
from neuron_merging.evaluation.summary import render_html_sentence, render_html_table
from neuron_merging.sweeps.group_sensitivity import CutLoss, Sensitivity, format_loss

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class SweepRow:
    """The result of one combination. None: not measured. `refused` is the error that prevented the compression."""

    target: str
    criterion: str
    merger: str
    parameters: int | None = None
    macs: int | None = None
    fidelity: float | None = None
    score: float | None = None
    seconds: float | None = None
    refused: str = ""

    @property
    def mark(self) -> float | None:
        """The value that rows are ranked by: the score, or the fidelity if there is none."""
        return self.fidelity if self.score is None else self.score


@dataclass(frozen=True, repr=False)
class Sweep:
    """The results of all combinations. `str()` gives a table.

    Attributes
    ----------
    original
        The row of the original network.
    rows
        One row per combination, in the order of the targets.
    metric
        The meaning of the score: "accuracy %" of labelled images, "score" of a function, else "fidelity".

    Examples
    --------
    >>> import torch, neuron_merging as nm
    >>> net = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))
    >>> found = nm.sweep(net, torch.zeros(1, 4), ratio=[0.25, 0.5], merger=["none", "moments"], jobs=1)
    >>> [(row.target, row.merger, row.parameters) for row in found.rows][:2]
    [('ratio 0.25', 'none', 86), ('ratio 0.25', 'moments', 86)]
    """

    original: SweepRow
    rows: tuple[SweepRow, ...]
    metric: str = "fidelity"

    @property
    def best(self) -> dict[str, SweepRow]:
        """The combination with the highest score of each target."""
        best_rows: dict[str, SweepRow] = {}
        for row in self.rows:
            if row.mark is not None and (row.target not in best_rows or row.mark > (best_rows[row.target].mark or 0.0)):
                best_rows[row.target] = row
        return best_rows

    @property
    def size(self) -> str:
        """The size on the x axis: "parameters" if all targets limit them, else "macs"."""
        return "parameters" if self.rows and all(row.target.startswith("params") for row in self.rows) else "macs"

    def curves(self) -> dict[str, list[tuple[float, float, SweepRow]]]:
        """Return, by criterion and merger, the points (remaining share of the size, score, row) from small to large."""
        # Names that all rows share would only lengthen the legend.
        several = {name: len({getattr(row, name) for row in self.rows}) > 1 for name in ("criterion", "merger")}
        found: dict[str, list[tuple[float, float, SweepRow]]] = {}
        original_size = getattr(self.original, self.size)
        for row in self.rows:
            if row.mark is not None:
                names = [getattr(row, name) for name in ("criterion", "merger") if several[name]]
                kind = "ratio" if row.target.startswith("ratio") and self._has_budgets_and_ratios else ""
                key = ", ".join(filter(None, [*names, kind])) or row.merger
                found.setdefault(key, []).append((getattr(row, self.size) / max(1, original_size), row.mark, row))
        return {key: sorted(line, key=lambda point: point[0]) for key, line in found.items()}

    @property
    def _has_budgets_and_ratios(self) -> bool:
        """Whether the targets contain both budgets and ratios."""
        return len({row.target.startswith("ratio") for row in self.rows}) > 1

    def pivot(self) -> tuple[list[str], list[tuple[str, list[SweepRow | None]]]]:
        """Return the targets and, for each criterion and merger, its row at each target."""
        targets = list(dict.fromkeys(row.target for row in self.rows))
        found: dict[str, dict[str, SweepRow]] = {}
        for row in self.rows:
            found.setdefault(f"{row.criterion}, {row.merger}", {})[row.target] = row
        return targets, [(name, [by_target.get(target) for target in targets]) for name, by_target in found.items()]

    def lines(self) -> list[dict[str, object]]:
        """Return one record per row, the original first, for CSV files."""
        return [_build_record(row, self.original) for row in (self.original, *self.rows)]

    @property
    def verdict(self) -> str:
        """The best combination of each target, by name."""
        found = [f"{target}: {row.criterion}, {row.merger} ({row.mark:.4g})" for target, row in self.best.items()]
        return f"best {self.metric}: {'; '.join(found)}" if found else "every combination was refused"

    def __repr__(self) -> str:
        return f"<Sweep: {len(self.rows)} combinations, {len(self.best)} targets reached, by {self.metric}>"

    def _repr_html_(self) -> str:
        """The table and the best combinations, for notebooks."""
        return render_html_sentence(self.verdict) + render_html_table(TABLE_HEADINGS, self.table())

    def __str__(self) -> str:
        return "\n".join("  ".join(cells) for cells in pad_columns([TABLE_HEADINGS, *self.table()]))

    def table(self) -> list[tuple[str, ...]]:
        """Return the rows as texts; a star marks the best row of each target."""
        best = {id(row) for row in self.best.values()}
        return [_format_row(row, self, id(row) in best) for row in (self.original, *self.rows)]


SIZE_TITLES = {"macs": "multiply-accumulates", "parameters": "parameters"}
TABLE_HEADINGS = ("target", "criterion", "merger", "parameters", "MACs", "fidelity", "score", "seconds")


def _build_record(row: SweepRow, original: SweepRow) -> dict[str, object]:
    shares = {
        "parameters share": row.parameters / max(1, original.parameters or 1) if row.parameters else None,
        "macs share": row.macs / max(1, original.macs or 1) if row.macs else None,
    }
    return {**msgspec.to_builtins(row), **shares}


def _format_row(row: SweepRow, sweep: Sweep, best: bool) -> tuple[str, ...]:
    names = (row.target, row.criterion, row.merger)
    if row.refused:
        return (*names, f"refused: {row.refused}", "", "", "", "")
    line = _build_record(row, sweep.original)
    sizes = [f"{line[key]:.1%}" if line[key] is not None else "" for key in ("parameters share", "macs share")]
    fidelity = "" if row.fidelity is None else f"{row.fidelity:.4f}"
    score = "" if row.score is None else f"{row.score:.2f}" if sweep.metric == "accuracy %" else f"{row.score:.4g}"
    star = ("*" if best else " ") if row is not sweep.original else ""
    marked = (fidelity, score + star) if row.score is not None else (fidelity + star, score)
    return (*names, *sizes, *marked, "" if row.seconds is None else f"{row.seconds:.1f}")


def pad_columns(lines: Sequence[Sequence[str]]) -> list[list[str]]:
    """Pad texts to equal width in each column."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return [[text.ljust(width) for text, width in zip(line, widths, strict=True)] for line in lines]


def format_csv(lines: Sequence[Mapping[str, object]]) -> bytes:
    """Format records with the same keys as CSV with a header; None becomes an empty cell.

    >>> format_csv([{"ratio": 0.5, "error": None}])
    b'ratio,error\\n0.5,\\n'
    """
    text = io.StringIO()
    writer = csv.DictWriter(text, list(lines[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows({key: "" if value is None else value for key, value in line.items()} for line in lines)
    return text.getvalue().encode()


LINE_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
"""The colour-blind safe palette of Okabe and Ito."""
GREY = "#595959"
SHADE_DECADES = 4
"""Powers of ten below the largest loss that differ in colour; smaller losses are white."""


def check_matplotlib(where: str) -> None:
    """Raise if matplotlib is missing, before hours of work are lost."""
    try:
        import matplotlib
    except ImportError as error:
        what = f"pictures need {error.name}"
        raise MergingError(what, where=where, fix="pip install 'neuron-merging[report]'") from error
    del matplotlib


def render_figure(figure: Figure, kind: str) -> bytes:
    """Render a figure as PNG or SVG; equal figures give equal bytes (fixed salt, no date)."""
    import matplotlib

    buffer = io.BytesIO()
    with matplotlib.rc_context({"svg.hashsalt": "neuron-merging"}):
        figure.savefig(buffer, format=kind, dpi=150, metadata={"Date": None} if kind == "svg" else {"Software": None})
    return buffer.getvalue()


def create_panels(columns: int, rows: int = 1, width: float = 5.4, height: float = 4.2) -> tuple[Figure, list[Axes]]:
    """Create an empty figure with a grid of panels."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width * columns, height * rows), layout="constrained", facecolor="white")
    return figure, list(figure.subplots(rows, columns, squeeze=False).flat)


def plot_sensitivity(found: Sensitivity) -> Figure:
    """Plot groups against ratios as a heatmap, darker for larger losses, with the values in the cells."""
    figure, (axes,) = create_panels(1, width=3.4 + 0.8 * len(found.ratios), height=1.4 + 0.22 * len(found.groups))
    axes.imshow(
        [[compute_shade(loss, found) for loss in g.losses] for g in found.groups], "OrRd", vmin=0, vmax=1, aspect="auto"
    )
    for row, group in enumerate(found.groups):
        for column, loss in enumerate(group.losses):
            colour = "white" if compute_shade(loss, found) > 0.6 else "black"
            axes.text(column, row, format_loss(loss), ha="center", va="center", fontsize=7, color=colour)
    axes.set_xticks(range(len(found.ratios)), [f"{ratio:.4g}" for ratio in found.ratios])
    axes.set_yticks(range(len(found.groups)), [group.name for group in found.groups], fontsize=7)
    axes.set(xlabel="share of the group's channels removed")
    axes.set_title(f"{found.unit}, one group cut{' and merged' if found.merged else ''}", fontsize=9)
    axes.spines[:].set_visible(False)
    return figure


def plot_sweep(found: Sweep) -> Figure:
    """Plot score against size, one line per criterion and merger."""
    figure, (axes,) = create_panels(1, width=6.4)
    size = found.size
    for i, (name, line) in enumerate(found.curves().items()):
        colour, dashes = LINE_COLOURS[i % len(LINE_COLOURS)], ("-", "--", ":")[i // len(LINE_COLOURS) % 3]
        style: dict[str, Any] = {"marker": "os^Dv"[i % 5], "color": colour, "linestyle": dashes}
        axes.plot([100 * x for x, _, _ in line], [y for _, y, _ in line], label=name, markersize=5, **style)
    if found.original.mark is not None:
        axes.plot([100], [found.original.mark], "*", color="black", markersize=12, label="original", zorder=3)
    axes.set(xlabel=f"{SIZE_TITLES[size]} left, %", ylabel=found.metric)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=8, frameon=False)
    return figure


def compute_shade(loss: CutLoss, found: Sensitivity) -> float:
    """Return the darkness of a loss, 0 to 1, on a logarithmic scale below the largest finite loss."""
    losses = [one.divergence for group in found.groups for one in group.losses]
    top = max((value for value in losses if math.isfinite(value)), default=1.0)
    if loss.divergence <= 0:
        return 0.0
    return min(1.0, max(0.0, 1 + math.log10(loss.divergence / top) / SHADE_DECADES)) if top > 0 else 1.0
