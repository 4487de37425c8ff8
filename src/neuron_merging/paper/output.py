"""output: the files of a run: CSV, PNG, SVG and one page that shows them all."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from neuron_merging.atomic import replace_file
from neuron_merging.paper.options import Options
from neuron_merging.paper.rows import pivots
from neuron_merging.paper.run import Outcome
from neuron_merging.report.templates import environment
from neuron_merging.sweeping.lines import as_csv
from neuron_merging.sweeping.pictures import image

PAGE = "index.html"


def save(outcomes: Sequence[Outcome], options: Options) -> list[Path]:
    """Write everything into the run's folder; the page comes last."""
    written = {}
    parts = []
    for outcome in outcomes:
        pictures = {name: image(figure, "png") for name, figure in outcome.pictures.items()}
        for name, figure in outcome.pictures.items():
            written[f"{name}.png"] = pictures[name]
            written[f"{name}.svg"] = image(figure, "svg")
        if outcome.rows:
            written[f"{outcome.target.name}.csv"] = as_csv([asdict(row) for row in outcome.rows])
        if outcome.similarities:
            written[f"{outcome.target.name}-similarity.csv"] = as_csv(outcome.similarities)
        parts.append(_part(outcome, pictures))
    written[PAGE] = _page(parts, options).encode()
    options.out.mkdir(parents=True, exist_ok=True)
    for name, content in written.items():
        replace_file(options.out / name, content)
    return [options.out / name for name in written]


def _part(outcome: Outcome, pictures: dict[str, bytes]) -> dict[str, Any]:
    return {
        "name": outcome.target.name,
        "title": outcome.target.title,
        "pivots": pivots(outcome.rows),
        "verdicts": outcome.verdicts if outcome.rows else (),
        "sources": ", ".join(dict.fromkeys(row.source for row in outcome.rows if row.source)),
        "subjects": outcome.subjects,
        "left_out": outcome.left_out,
        "pictures": {name: base64.b64encode(content).decode() for name, content in pictures.items()},
    }


def _page(parts: list[dict[str, Any]], options: Options) -> str:
    return (
        environment("neuron_merging.paper")
        .get_template("reproduce.html")
        .render(
            title=parts[0]["title"] if len(parts) == 1 else "The paper's figures, computed again",
            torch=torch.__version__,
            methods=", ".join(method.label for method in options.methods),
            parts=parts,
        )
    )


def document(outcomes: Sequence[Outcome], files: Sequence[Path]) -> dict[str, Any]:
    """A run as JSON."""
    return {
        "targets": [
            {
                "name": outcome.target.name,
                "title": outcome.target.title,
                "rows": outcome.rows,
                "claims": outcome.verdicts if outcome.rows else (),
                "networks": outcome.subjects,
                "left out": outcome.left_out,
            }
            for outcome in outcomes
        ],
        "files": [str(file) for file in files],
    }
