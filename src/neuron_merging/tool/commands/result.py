"""result: what compress, apply and report do with a smaller network: measure, write, print."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from neuron_merging.folder.recipe import Recipe
from neuron_merging.tool.commands import show

if TYPE_CHECKING:
    from neuron_merging.channels.analysis import Analysis
    from neuron_merging.data import FolderImages, Images
    from neuron_merging.folder.exporting import Export
    from neuron_merging.folder.store import Compressed
    from neuron_merging.measuring.fidelity import Fidelity
    from neuron_merging.measuring.summary import Summary
    from neuron_merging.settings import Settings


@dataclass(frozen=True)
class Result:
    """A smaller network and what it was made from."""

    analysis: Analysis
    small: Compressed


def finish(result: Result, chosen: Recipe, out: str, images: Images | FolderImages | None = None) -> None:
    """Measure, write and print."""
    from neuron_merging.folder import store
    from neuron_merging.folder.exporting import is_export

    fidelity = measured(result, images) if images or chosen.report else None
    scores = accuracies(fidelity) if images else None
    folder = not is_export(out)
    page = written_page(result, chosen, fidelity) if chosen.report and folder and not chosen.dry_run else None
    file = None if folder or chosen.dry_run else _exported(result, out)
    if folder and not chosen.dry_run:
        store.save(result.small, out, recipe=chosen, accuracy=scores, overwrite=chosen.overwrite, page=page)
    if chosen.json:
        more = {"accuracy": scores, "fidelity": fidelity, "written": None if chosen.dry_run else out, "file": file}
        return show.json({**msgspec.to_builtins(result.small.summary), **more})
    summary(result.small.summary)
    marks(fidelity)
    if file is not None:
        show.facts(file.facts(), False)
    show.say("nothing written (dry run)" if chosen.dry_run else f"written to {out}")


def _exported(result: Result, out: str) -> Export:
    """The small network as a file for other programs, compared with the module."""
    from neuron_merging.folder.exporting import export

    with show.working(f"writing {out}"):
        return export(result.small.model, result.analysis.inputs, out)


def resolved(chosen: Recipe, settings: Settings) -> Recipe:
    """The recipe with what was left open filled in, and paths that hold from any folder."""
    from neuron_merging.mergers import MERGERS

    names: dict[type, str] = {kind: name for name, kind in MERGERS.items()}
    merger = chosen.merger or names[type(settings.method())]
    ratio = settings.share if chosen.ratio is None and not chosen.budget and not chosen.layer else chosen.ratio
    return msgspec.structs.replace(chosen, merger=merger, ratio=ratio).anywhere()


# Measuring


def measured(result: Result, images: Images | FolderImages | None, name: str = "merged") -> Fidelity:
    """The original, the same cut without merging, and the small network, on the same inputs."""
    from neuron_merging.measuring import fidelity as fidelities

    networks = fidelities.versions(result.analysis.model, result.small.model, result.small.plan, name)
    with show.aside():
        if images:
            batches, inputs = fidelities.on_images(images)
        else:
            macs = result.small.summary.macs[0]
            batches, inputs = fidelities.on_synthetic_inputs(result.analysis.model, result.analysis.inputs, macs)
    total = -(-len(images) // fidelities.BATCH) if images else None
    with show.aside():
        return fidelities.compare(networks, show.progress(batches, f"comparing on {inputs}", total), inputs)


def accuracies(fidelity: Fidelity | None) -> tuple[float, float] | None:
    """In percent, before and after."""
    if fidelity is None:
        return None
    before, after = fidelity.scores[0].accuracy, fidelity.scores[-1].accuracy
    return None if before is None or after is None else (before, after)


def written_page(result: Result, chosen: Recipe, fidelity: Fidelity | None, notes: tuple[str, ...] = ()) -> str:
    """The page about a result."""
    from neuron_merging import report
    from neuron_merging.folder.card import loading

    groups = result.small.plan.groups
    removed, total = sum(g.size - len(g.kept) for g in groups), sum(g.size for g in groups)
    with show.working("measuring the latency and writing the page"):
        findings = report.collect(
            result.analysis,
            result.small,
            fidelity,
            title=chosen.model or type(result.analysis.model).__name__,
            method=f"{removed:,} of {total:,} channels in {len(groups)} groups removed. Merger: {chosen.merger}.",
            load=loading(chosen.model),
            recipe=chosen.to_yaml(),
            notes=notes,
        )
        return report.render(findings)


# Printing


def summary(found: Summary) -> None:
    """The before/after table, the groups, and what was kept whole."""
    sizes = {"parameters": found.parameters, "MACs": found.macs}
    rows = [(k, f"{a:,}", f"{b:,}", f"{b / max(a, 1) - 1:+.1%}") for k, (a, b) in sizes.items()]
    show.table("", ("", "before", "after", "change"), rows)
    groups = [(g.name, g.before, g.after, "; ".join(g.said)) for g in found.groups]
    show.table("Channels", ("group", "before", "after", "how"), groups)
    refusals(found.refusals)
    for note in found.notes:
        show.say(f"note: {note}")


def marks(fidelity: Fidelity | None) -> None:
    """How the networks compare, on data or on synthetic inputs."""
    if fidelity is None:
        return
    marks = {"accuracy": "{:.2f} %", "same": "{:.2f} %", "agreement": "{:.3f}"}
    titles = {"same": "same answer as the original", "agreement": "agreement of outputs"}
    shown = {key: form for key, form in marks.items() if getattr(fidelity.scores[0], key) is not None}
    rows = [
        (score.network, *(form.format(getattr(score, key)) for key, form in shown.items())) for score in fidelity.scores
    ]
    show.table(f"On {fidelity.inputs}", ("", *(titles.get(key, key) for key in shown)), rows)


def refusals(found: Iterable[Any]) -> None:
    """What cannot be removed, with reason and source line."""
    rows = [(r.layer, r.channels, f"{r.operator} {r.why}", r.place) for r in found]
    if rows:
        show.table("Kept whole", ("layer", "channels", "why", "where"), rows)
