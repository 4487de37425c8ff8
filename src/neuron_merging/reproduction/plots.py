"""Matplotlib figures of the reproduced results, in colours that colour-blind readers can tell apart."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from neuron_merging.reproduction.comparison import METRIC_HEADINGS, PaperRow
from neuron_merging.reproduction.experiments import METHOD_TITLES
from neuron_merging.reproduction.paper_values import ORIGINAL_METHOD
from neuron_merging.sweeps.results import GREY, LINE_COLOURS, create_panels

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

METHOD_LINES = {"none": "--", "cosine": "-"}
"""As in the paper: dashed for pruned, solid for merged networks."""
EXTRA_LINES = (":", "-.", (0, (5, 1, 1, 1, 1, 1)), (0, (1, 3)))
METHOD_MARKERS = {"none": "o", "cosine": "s"}
EXTRA_MARKERS = ("^", "D", "v", "P")
HATCHES = ("//", "", "..", "xx", "--", "\\\\")


# Accuracy or WARE against the ratio


def plot_comparison(rows: Sequence[PaperRow], metrics: Sequence[str]) -> Figure:
    """Draw one panel per network and metric: lines over ratios, or bars if there is one ratio."""
    pairs = [(title, metric) for metric in metrics for title in dict.fromkeys(row.title for row in rows)]
    figure, panels = create_panels(len(pairs) // len(metrics), len(metrics))
    for axes, (title, metric) in zip(panels, pairs, strict=True):
        panel_rows = [row for row in rows if row.title == title and row.metric == metric]
        ratios = {row.ratio for row in panel_rows if row.method != ORIGINAL_METHOD}
        (_plot_curves if len(ratios) > 1 else _plot_bars)(axes, panel_rows)
        axes.set(title=title, ylabel=METRIC_HEADINGS[metric])
        _style_axes(axes)
    return figure


def _plot_curves(axes: Axes, rows: Sequence[PaperRow]) -> None:
    ordered = sorted(rows, key=lambda row: row.ratio)
    for (criterion, method), line in _group_rows(ordered, "criterion", "method").items():
        if method == ORIGINAL_METHOD:
            continue
        colour, ratios = _pick_colour(rows, "criterion", criterion), [100 * row.ratio for row in line]
        style: dict[str, Any] = {
            "color": colour,
            "linestyle": _pick_line_style(rows, method),
            "marker": _pick_marker(rows, method),
        }
        axes.errorbar(ratios, [r.ours for r in line], [r.spread or 0 for r in line], markersize=5, **style)
        printed = [(100 * row.ratio, row.paper) for row in line if row.paper is not None]
        if printed:
            axes.plot(*zip(*printed, strict=True), "x", color=GREY, markersize=9, zorder=1)
    _plot_original(axes, rows)
    axes.set_xlabel("channels removed, %")
    _add_legend(axes, rows)


def _plot_original(axes: Axes, rows: Sequence[PaperRow]) -> None:
    for row in rows:
        if row.method == ORIGINAL_METHOD and row.metric != "ware":
            axes.plot([0], [row.ours], "*", color="black", markersize=12)


def _add_legend(axes: Axes, rows: Sequence[PaperRow], colours: str = "criterion", **where: Any) -> None:
    """Explain colours and line styles separately; one entry per combination would fill the plot."""
    from matplotlib.lines import Line2D

    cut = [row for row in rows if row.method != ORIGINAL_METHOD]
    keys = [
        Line2D(
            [], [], color=_pick_colour(rows, colours, value), linewidth=4, label=_format_legend_label(colours, value)
        )
        for value in dict.fromkeys(getattr(row, colours) for row in cut)
    ]
    for method in dict.fromkeys(row.method for row in cut):
        style: dict[str, Any] = {"linestyle": _pick_line_style(rows, method), "marker": _pick_marker(rows, method)}
        keys.append(Line2D([], [], color="black", label=METHOD_TITLES.get(method, method), **style))
    if any(row.paper is not None for row in cut):
        keys.append(Line2D([], [], color=GREY, linestyle="", marker="x", markersize=9, label="paper"))
    if any(row.method == ORIGINAL_METHOD and row.metric != "ware" for row in rows):
        keys.append(Line2D([], [], color="black", linestyle="", marker="*", markersize=12, label="original"))
    axes.legend(handles=keys, fontsize=8, handlelength=3, frameon=False, **where)


def _plot_bars(axes: Axes, rows: Sequence[PaperRow]) -> None:
    cut = [row for row in rows if row.method != ORIGINAL_METHOD]
    criteria, methods = (list(dict.fromkeys(getattr(row, key) for row in cut)) for key in ("criterion", "method"))
    width = 0.8 / max(1, len(methods))
    for row in cut:
        place, slot = criteria.index(row.criterion), methods.index(row.method)
        x = place + (slot - (len(methods) - 1) / 2) * width
        axes.bar(
            x, row.ours, 0.92 * width, yerr=row.spread, color=LINE_COLOURS[slot % len(LINE_COLOURS)], edgecolor="white",
            hatch=HATCHES[slot % len(HATCHES)], label=METHOD_TITLES.get(row.method, row.method) if not place else None,
        )  # fmt: skip
        axes.annotate(f"{row.ours:.4g}", (x, row.ours), (0, 2), textcoords="offset points", ha="center", fontsize=7)
        if row.paper is not None:
            axes.plot([x], [row.paper], "x", color="black", markersize=8, label="paper" if row is cut[0] else None)
    for row in rows:
        if row.method == ORIGINAL_METHOD and row.metric != "ware":
            axes.axhline(row.ours, color="black", linestyle=":", linewidth=1, label="original")
    axes.set_xticks(range(len(criteria)), criteria)
    axes.margins(y=0.12)
    axes.legend(fontsize=8, frameon=False, ncols=2, loc="upper center", bbox_to_anchor=(0.5, -0.08))


# Figure 5


def plot_similarity(layers: Mapping[str, Sequence[float]], rows: Sequence[PaperRow], title: str) -> Figure:
    """Draw a box plot of similarities by layer, and beside it accuracy against t."""
    figure, (boxes, sweep) = create_panels(2, width=7.2)
    style = {"color": LINE_COLOURS[0]}
    boxes.boxplot(
        list(layers.values()), tick_labels=list(layers), widths=0.6, boxprops=style, whiskerprops=style, capprops=style,
        medianprops={"color": LINE_COLOURS[1], "linewidth": 2}, flierprops={"marker": ".", "markersize": 4},
    )  # fmt: skip
    boxes.set(title=title, xlabel="layer: stage and block", ylabel="maximum cosine similarity")
    boxes.tick_params(axis="x", labelrotation=90, labelsize=8)
    _plot_threshold_sweep(sweep, [row for row in rows if row.metric == "accuracy"])
    for axes in (boxes, sweep):
        _style_axes(axes)
    return figure


def _plot_threshold_sweep(axes: Axes, rows: Sequence[PaperRow]) -> None:
    cut = [row for row in rows if row.method != ORIGINAL_METHOD]
    for (ratio, criterion, method), line in _group_rows(cut, "ratio", "criterion", "method").items():
        colour, style = _pick_colour(cut, "ratio", ratio), _pick_line_style(cut, method)
        if line[0].threshold is None:
            axes.axhline(line[0].ours, color=colour, linestyle=style)
            continue
        thresholds = [row.threshold or 0.0 for row in line]
        axes.plot(thresholds, [r.ours for r in line], color=colour, linestyle=style, marker=_pick_marker(cut, method))
        best = max(line, key=lambda row: row.ours)
        label = f"{criterion}: best t = {best.threshold:g}"
        axes.annotate(label, (best.threshold, best.ours), (0, 7), textcoords="offset points", ha="center", fontsize=8)
    axes.set(title="Accuracy against t", xlabel="threshold t", ylabel=METRIC_HEADINGS["accuracy"])
    axes.margins(y=0.15)
    _add_legend(axes, cut, "ratio", loc="center left", bbox_to_anchor=(1, 0.5))


# Figure 4


def plot_class_maps(images: Sequence[Any], maps: Mapping[str, Sequence[Any]], names: Sequence[str]) -> Figure:
    """Draw the images on top, and below them one row of maps per network, each map scaled to its range."""
    columns, lines = len(images), 1 + len(maps)
    figure, panels = create_panels(columns, lines, width=1.15, height=1.15)
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


# Styles


def _style_axes(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#dddddd", linewidth=0.8)
    axes.set_axisbelow(True)


def _group_rows(rows: Iterable[PaperRow], *keys: str) -> dict[tuple[Any, ...], list[PaperRow]]:
    found: dict[tuple[Any, ...], list[PaperRow]] = {}
    for row in rows:
        found.setdefault(tuple(getattr(row, key) for key in keys), []).append(row)
    return found


def _pick_colour(rows: Sequence[PaperRow], key: str, value: object) -> str:
    known = list(dict.fromkeys(getattr(row, key) for row in rows if row.method != ORIGINAL_METHOD))
    return LINE_COLOURS[known.index(value) % len(LINE_COLOURS)]


def _list_other_methods(rows: Sequence[PaperRow]) -> list[str]:
    return [
        method for method in dict.fromkeys(row.method for row in rows) if method not in (*METHOD_LINES, ORIGINAL_METHOD)
    ]


def _pick_line_style(rows: Sequence[PaperRow], method: str) -> Any:
    return METHOD_LINES.get(method) or EXTRA_LINES[_list_other_methods(rows).index(method) % len(EXTRA_LINES)]


def _pick_marker(rows: Sequence[PaperRow], method: str) -> str:
    return METHOD_MARKERS.get(method) or EXTRA_MARKERS[_list_other_methods(rows).index(method) % len(EXTRA_MARKERS)]


def _format_legend_label(key: str, value: object) -> str:
    return f"{value:.0%} removed" if key == "ratio" and isinstance(value, float) else str(value)
