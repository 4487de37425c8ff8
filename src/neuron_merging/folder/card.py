"""The card of a folder: what it is and how to load it."""

from __future__ import annotations

import neuron_merging
from neuron_merging.folder.recipe import Recipe
from neuron_merging.measuring.summary import Summary
from neuron_merging.networks import sources


def card(kind: str, summary: Summary, recipe: Recipe | None, accuracy: tuple[float, float] | None) -> str:
    """The text of README.md; `kind` is the class of the network."""
    model = recipe.model if recipe else None
    rows = [("parameters", *summary.parameters), ("multiply-accumulates", *summary.macs)]
    table = [f"| {name} | {a:,} | {b:,} | {b / max(a, 1) - 1:+.1%} |" for name, a, b in rows]
    if accuracy:
        table.append("| accuracy | {:.2f} % | {:.2f} % | {:+.2f} |".format(*accuracy, accuracy[1] - accuracy[0]))
    groups = [f"| {g.name} | {g.before} | {g.after} | {'; '.join(g.said)} |" for g in summary.groups]
    settings = f" Ratio {recipe.ratio}, criterion {recipe.criterion}, merger {recipe.merger}." if recipe else ""
    parts = [
        f"# {model or kind}, compressed",
        "Channels were removed from a trained network and merged into the ones that stay, by neuron-merging "
        f"{neuron_merging.__version__}. `recipe.yaml` says with which settings, `plan.json` which channels stay."
        + settings,
        "\n".join(["| | before | after | change |", "|---|---:|---:|---:|", *table]),
        f"```python\n{loading(model)}\n```",
        "## Layers",
        "\n".join(["| group | channels before | after | how |", "|---|---:|---:|---|", *groups]),
    ]
    return "\n\n".join(parts) + "\n"


def loading(model: str | None) -> str:
    """The lines that load a folder whose recipe names this network."""
    call = 'nm.load("path/to/this/folder")'
    if not sources.rebuildable(model):
        call = 'nm.load("path/to/this/folder", build=lambda: ...)  # a fresh network of the original class'
    return f"import neuron_merging as nm\n\nmodel = {call}"
