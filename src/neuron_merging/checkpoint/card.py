"""Render the model card of a folder (README.md): what the network is, and how to load it."""

from __future__ import annotations

import html
import re
from dataclasses import dataclass

import neuron_merging
from neuron_merging.checkpoint.recipe import Recipe
from neuron_merging.evaluation.summary import Summary
from neuron_merging.evaluation.verdict import Verdict
from neuron_merging.models import sources


@dataclass(frozen=True)
class PretrainedLoading:
    """The class of transformers whose `from_pretrained` loads the folder, or the reasons why it cannot.

    `rebuilds` is whether the folder holds the original's configuration, from which `nm.load` builds the network.
    """

    network: str
    missing: tuple[str, ...] = ()
    rebuilds: bool = False


def render_card(
    title: str,
    summary: Summary,
    recipe: Recipe | None,
    accuracy: tuple[float, float] | None,
    pretrained: PretrainedLoading | None = None,
) -> str:
    """Render README.md; `title` is the name of the network. `pretrained` is None unless it comes from transformers."""
    model = recipe.model if recipe else None
    rows = [("parameters", *summary.parameters), ("multiply-accumulates", *summary.macs)]
    table = [f"| {name} | {a:,} | {b:,} | {b / max(a, 1) - 1:+.1%} |" for name, a, b in rows]
    if summary.verdict and summary.verdict.fidelity is not None:
        table.append(f"| fidelity | 1 | {summary.verdict.fidelity:.3f} | |")
    if accuracy:
        table.append("| accuracy | {:.2f} % | {:.2f} % | {:+.2f} |".format(*accuracy, accuracy[1] - accuracy[0]))
    groups = [
        f"| {escape_markdown(g.name)} | {g.before} | {g.after} | {escape_markdown('; '.join(g.descriptions))} |"
        for g in summary.groups
    ]
    # Escaped as a whole below: a recipe's texts may come from a stranger.
    chosen = f"{_describe_target(recipe)}, criterion {recipe.criterion}, merger {recipe.merger}." if recipe else ""
    settings = f" {escape_markdown(chosen)}" if chosen else ""
    parts = [
        f"# {escape_markdown(title)}, compressed",
        *_render_verdict(summary.verdict),
        "Channels were removed from a trained network and merged into the ones that stay, by neuron-merging "
        f"{neuron_merging.__version__}. `recipe.yaml` says with which settings, `plan.json` which channels stay."
        + settings,
        "\n".join(["| | before | after | change |", "|---|---:|---:|---:|", *table]),
        *([f"Fitted to: {escape_markdown(summary.statistics)}."] if summary.statistics else []),
        f"```python\n{render_loading_code(model, pretrained is not None and pretrained.rebuilds)}\n```",
        *([] if pretrained is None else [_render_from_pretrained(pretrained, recipe)]),
        "## Layers",
        "\n".join(["| group | channels before | after | how |", "|---|---:|---:|---|", *groups]),
    ]
    return "\n\n".join(parts) + "\n"


def _render_verdict(verdict: Verdict | None) -> list[str]:
    """Render the verdict as a sentence, or as a highlighted quote if it is a warning."""
    if verdict is None:
        return []
    text = escape_markdown(str(verdict)[:1].upper() + str(verdict)[1:])
    return [f"> **{text}**" if verdict.level == "warning" else f"{text}." if not text.endswith(".") else text]


def render_loading_code(model: str | None, rebuilds: bool = False) -> str:
    """Render the code that loads a folder whose recipe names this network, or that `rebuilds` it by itself."""
    call = 'nm.load("path/to/this/folder")'
    if not rebuilds and not sources.can_rebuild(model):
        call = 'nm.load("path/to/this/folder", build=lambda: ...)  # a fresh network of the original class'
    elif not rebuilds and sources.describe_foreign_code(model or "", {}):
        call = 'nm.load("path/to/this/folder", trust=True)  # runs code that recipe.yaml names; or give build='
    return f"import neuron_merging as nm\n\nmodel = {call}"


def _render_from_pretrained(loading: PretrainedLoading, recipe: Recipe | None) -> str:
    """Render how transformers loads the folder, or why it cannot."""
    if loading.missing:
        reasons = escape_markdown("; ".join(loading.missing))
        advice = "" if recipe and recipe.uniform else " `uniform=True` keeps to what a configuration can describe."
        return f"`from_pretrained` cannot read it: {reasons}.{advice}"
    code = f'import transformers\n\nmodel = transformers.{loading.network}.from_pretrained("path/to/this/folder")'
    return f"Or without neuron-merging:\n\n```python\n{code}\n```"


def escape_markdown(text: str) -> str:
    """Escape a text for one line or table cell of Markdown: no line breaks, no HTML, no formatting.

    >>> escape_markdown("layer1.0.conv1"), escape_markdown("a|b\\n<script>")
    ('layer1.0.conv1', 'a&#124;b &lt;script&gt;')
    """
    line = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    safe = html.escape(line, quote=False)
    # An underscore inside a word is plain text in Markdown, and layer names are full of them.
    return re.sub(r"[|`*\[\]\\~$!@]|(?<![^\W_])_|_(?![^\W_])", lambda found: f"&#{ord(found[0])};", safe)


def _describe_target(recipe: Recipe) -> str:
    """Describe the target of the compression: a loss, a budget or a ratio."""
    if recipe.max_loss is not None:
        return f"Smallest network that loses at most {recipe.max_loss}"
    if recipe.budget:
        return "Budget " + ", ".join(f"{key} {value}" for key, value in recipe.budget.items())
    return f"Ratio {recipe.ratio}"
