"""result: what compress, apply and report do with a smaller network: measure, write, print."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import msgspec

from neuron_merging.folder.recipe import Recipe
from neuron_merging.tool.commands import show

if TYPE_CHECKING:
    from neuron_merging.channels.analysis import Analysis
    from neuron_merging.folder.exporting import Export
    from neuron_merging.folder.store import Compressed
    from neuron_merging.measuring.fidelity import Fidelity
    from neuron_merging.measuring.summary import Summary
    from neuron_merging.settings import Settings
    from neuron_merging.sweeping.outcome import Sweep


@dataclass(frozen=True)
class Result:
    """A smaller network and what it was made from."""

    analysis: Analysis
    small: Compressed


def finish(result: Result, chosen: Recipe, out: str) -> None:
    """Write and print; a warning comes first."""
    from neuron_merging.folder import store
    from neuron_merging.folder.exporting import is_export

    verdict, fidelity = result.small.summary.verdict, result.small.compared
    scores = verdict.accuracy if verdict else None
    if verdict and verdict.level == "warning":
        show.warn(str(verdict))
    folder = not is_export(out)
    page = written_page(result, chosen, fidelity) if chosen.report and folder and not chosen.dry_run else None
    file = None if folder or chosen.dry_run else _exported(result, out)
    if folder and not chosen.dry_run:
        store.save(
            result.small, out, recipe=chosen, accuracy=scores, overwrite=chosen.overwrite, page=page,
            inputs=chosen.keep_inputs,
        )  # fmt: skip
    if chosen.json:
        more = {"accuracy": scores, "fidelity": fidelity, "written": None if chosen.dry_run else out, "file": file}
        return show.json({**msgspec.to_builtins(result.small.summary), **more})
    summary(result.small.summary)
    marks(fidelity)
    if file is not None:
        show.facts(file.facts(), False)
    if verdict and verdict.level != "warning":
        show.conclude(str(verdict), calm=verdict.level == "good")
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
    open_ = settings.ratio is None and settings.budget is None and settings.max_loss is None
    ratio = settings.share if open_ else chosen.ratio
    return msgspec.structs.replace(chosen, merger=merger, ratio=ratio).anywhere()


# Measuring


def measured(result: Result, data: Any, name: str = "merged") -> tuple[Result, Fidelity]:
    """The original, the same cut without merging, and the small network on the same inputs; with the verdict."""
    from neuron_merging.data.exams import on_data
    from neuron_merging.measuring.exam import without_data
    from neuron_merging.measuring.fidelity import versions
    from neuron_merging.measuring.verdict import blamed, verdict_of

    small, analysis = result.small, result.analysis
    with show.working("comparing"):
        exam = without_data(analysis) if data is None else on_data(data, analysis)
        found = exam.compare(versions(analysis.model, small.model, small.plan, name))
        verdict = verdict_of(found, data=exam.data, guessed=exam.guessed)
        verdict = blamed(verdict, analysis, small.plan, exam.inputs_only())
    return replace(result, small=replace(small, summary=replace(small.summary, verdict=verdict))), found


def written_page(
    result: Result, chosen: Recipe, fidelity: Fidelity | None, notes: tuple[str, ...] = (), sweep: Sweep | None = None
) -> str:
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
            method=f"{removed:,} of {total:,} channels in {len(groups)} groups removed.",
            load=loading(chosen.model),
            recipe=chosen,
            notes=notes,
            sweep=sweep,
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
    marks = {"accuracy": "{:.2f} %", "fidelity": "{:.3f}", "same": "{:.2f} %", "agreement": "{:.3f}"}
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
