"""plots: the pictures, on white, in colours that do not depend on telling red from green."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from neuron_merging.paper.methods import TITLES
from neuron_merging.paper.printed import ORIGINAL
from neuron_merging.paper.rows import COLUMNS, Row
from neuron_merging.sweeping.pictures import COLOURS, GREY, sheet

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LINES = {"none": "--", "cosine": "-"}
"""As in the paper: dashed is pruned, solid is merged."""
MORE_LINES = (":", "-.", (0, (5, 1, 1, 1, 1, 1)), (0, (1, 3)))
MARKERS = {"none": "o", "cosine": "s"}
MORE_MARKERS = ("^", "D", "v", "P")
HATCHES = ("//", "", "..", "xx", "--", "\\\\")


# Accuracy or WARE against the ratio


def comparison(rows: Sequence[Row], metrics: Sequence[str]) -> Figure:
    """A panel for every network and metric: lines over ratios, or bars where there is one ratio."""
    pairs = [(title, metric) for metric in metrics for title in dict.fromkeys(row.title for row in rows)]
    figure, panels = sheet(len(pairs) // len(metrics), len(metrics))
    for axes, (title, metric) in zip(panels, pairs, strict=True):
        own = [row for row in rows if row.title == title and row.metric == metric]
        ratios = {row.ratio for row in own if row.method != ORIGINAL}
        (_curves if len(ratios) > 1 else _bars)(axes, own)
        axes.set(title=title, ylabel=COLUMNS[metric])
        _clean(axes)
    return figure


def _curves(axes: Axes, rows: Sequence[Row]) -> None:
    ordered = sorted(rows, key=lambda row: row.ratio)
    for (criterion, method), line in _grouped(ordered, "criterion", "method").items():
        if method == ORIGINAL:
            continue
        colour, ratios = _colour(rows, "criterion", criterion), [100 * row.ratio for row in line]
        style: dict[str, Any] = {"color": colour, "linestyle": _line(rows, method), "marker": _marker(rows, method)}
        axes.errorbar(ratios, [r.ours for r in line], [r.spread or 0 for r in line], markersize=5, **style)
        printed = [(100 * row.ratio, row.paper) for row in line if row.paper is not None]
        if printed:
            axes.plot(*zip(*printed, strict=True), "x", color=GREY, markersize=9, zorder=1)
    _baseline(axes, rows)
    axes.set_xlabel("channels removed, %")
    _keys(axes, rows)


def _baseline(axes: Axes, rows: Sequence[Row]) -> None:
    for row in rows:
        if row.method == ORIGINAL and row.metric != "ware":
            axes.plot([0], [row.ours], "*", color="black", markersize=12)


def _keys(axes: Axes, rows: Sequence[Row], colours: str = "criterion", **where: Any) -> None:
    """Colours and line styles are explained apart: their product would fill the picture."""
    from matplotlib.lines import Line2D

    cut = [row for row in rows if row.method != ORIGINAL]
    keys = [
        Line2D([], [], color=_colour(rows, colours, value), linewidth=4, label=_said(colours, value))
        for value in dict.fromkeys(getattr(row, colours) for row in cut)
    ]
    for method in dict.fromkeys(row.method for row in cut):
        style: dict[str, Any] = {"linestyle": _line(rows, method), "marker": _marker(rows, method)}
        keys.append(Line2D([], [], color="black", label=TITLES.get(method, method), **style))
    if any(row.paper is not None for row in cut):
        keys.append(Line2D([], [], color=GREY, linestyle="", marker="x", markersize=9, label="paper"))
    if any(row.method == ORIGINAL and row.metric != "ware" for row in rows):
        keys.append(Line2D([], [], color="black", linestyle="", marker="*", markersize=12, label="original"))
    axes.legend(handles=keys, fontsize=8, handlelength=3, frameon=False, **where)


def _bars(axes: Axes, rows: Sequence[Row]) -> None:
    cut = [row for row in rows if row.method != ORIGINAL]
    criteria, methods = (list(dict.fromkeys(getattr(row, key) for row in cut)) for key in ("criterion", "method"))
    width = 0.8 / max(1, len(methods))
    for row in cut:
        place, slot = criteria.index(row.criterion), methods.index(row.method)
        x = place + (slot - (len(methods) - 1) / 2) * width
        axes.bar(
            x, row.ours, 0.92 * width, yerr=row.spread, color=COLOURS[slot % len(COLOURS)], edgecolor="white",
            hatch=HATCHES[slot % len(HATCHES)], label=TITLES.get(row.method, row.method) if not place else None,
        )  # fmt: skip
        axes.annotate(f"{row.ours:.4g}", (x, row.ours), (0, 2), textcoords="offset points", ha="center", fontsize=7)
        if row.paper is not None:
            axes.plot([x], [row.paper], "x", color="black", markersize=8, label="paper" if row is cut[0] else None)
    for row in rows:
        if row.method == ORIGINAL and row.metric != "ware":
            axes.axhline(row.ours, color="black", linestyle=":", linewidth=1, label="original")
    axes.set_xticks(range(len(criteria)), criteria)
    axes.margins(y=0.12)
    axes.legend(fontsize=8, frameon=False, ncols=2, loc="upper center", bbox_to_anchor=(0.5, -0.08))


# Figure 5


def similarity(layers: Mapping[str, Sequence[float]], rows: Sequence[Row], title: str) -> Figure:
    """Box plot of similarities by layer; beside it accuracy against t."""
    figure, (boxes, sweep) = sheet(2, width=7.2)
    style = {"color": COLOURS[0]}
    boxes.boxplot(
        list(layers.values()), tick_labels=list(layers), widths=0.6, boxprops=style, whiskerprops=style, capprops=style,
        medianprops={"color": COLOURS[1], "linewidth": 2}, flierprops={"marker": ".", "markersize": 4},
    )  # fmt: skip
    boxes.set(title=title, xlabel="layer: stage and block", ylabel="maximum cosine similarity")
    boxes.tick_params(axis="x", labelrotation=90, labelsize=8)
    _sweep(sweep, [row for row in rows if row.metric == "accuracy"])
    for axes in (boxes, sweep):
        _clean(axes)
    return figure


def _sweep(axes: Axes, rows: Sequence[Row]) -> None:
    cut = [row for row in rows if row.method != ORIGINAL]
    for (ratio, criterion, method), line in _grouped(cut, "ratio", "criterion", "method").items():
        colour, style = _colour(cut, "ratio", ratio), _line(cut, method)
        if line[0].threshold is None:
            axes.axhline(line[0].ours, color=colour, linestyle=style)
            continue
        thresholds = [row.threshold or 0.0 for row in line]
        axes.plot(thresholds, [r.ours for r in line], color=colour, linestyle=style, marker=_marker(cut, method))
        best = max(line, key=lambda row: row.ours)
        label = f"{criterion}: best t = {best.threshold:g}"
        axes.annotate(label, (best.threshold, best.ours), (0, 7), textcoords="offset points", ha="center", fontsize=8)
    axes.set(title="Accuracy against t", xlabel="threshold t", ylabel=COLUMNS["accuracy"])
    axes.margins(y=0.15)
    _keys(axes, cut, "ratio", loc="center left", bbox_to_anchor=(1, 0.5))


# Figure 4


def heat_maps(images: Sequence[Any], maps: Mapping[str, Sequence[Any]], names: Sequence[str]) -> Figure:
    """The images on top, below them one row of maps per network, each scaled to its own range."""
    columns, lines = len(images), 1 + len(maps)
    figure, panels = sheet(columns, lines, width=1.15, height=1.15)
    for place, (picture, name) in enumerate(zip(images, names, strict=True)):
        panels[place].imshow(picture, cmap="gray")
        panels[place].set_title(name, fontsize=8)
    height, width = images[0].shape[:2]
    for line, (title, row) in enumerate(maps.items(), 1):
        panels[line * columns].set_ylabel(title, fontsize=8)
        for place, values in enumerate(row):
            panels[line * columns + place].imshow(
                values, cmap="viridis", interpolation="bilinear", extent=(0, width, height, 0)
            )
    panels[0].set_ylabel("image", fontsize=8)
    for axes in panels:
        axes.set(xticks=[], yticks=[])
    return figure


# What they share


def _clean(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#dddddd", linewidth=0.8)
    axes.set_axisbelow(True)


def _grouped(rows: Iterable[Row], *keys: str) -> dict[tuple[Any, ...], list[Row]]:
    found: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        found.setdefault(tuple(getattr(row, key) for key in keys), []).append(row)
    return found


def _colour(rows: Sequence[Row], key: str, value: object) -> str:
    known = list(dict.fromkeys(getattr(row, key) for row in rows if row.method != ORIGINAL))
    return COLOURS[known.index(value) % len(COLOURS)]


def _others(rows: Sequence[Row]) -> list[str]:
    return [method for method in dict.fromkeys(row.method for row in rows) if method not in (*LINES, ORIGINAL)]


def _line(rows: Sequence[Row], method: str) -> Any:
    return LINES.get(method) or MORE_LINES[_others(rows).index(method) % len(MORE_LINES)]


def _marker(rows: Sequence[Row], method: str) -> str:
    return MARKERS.get(method) or MORE_MARKERS[_others(rows).index(method) % len(MORE_MARKERS)]


def _said(key: str, value: object) -> str:
    return f"{value:.0%} removed" if key == "ratio" and isinstance(value, float) else str(value)
