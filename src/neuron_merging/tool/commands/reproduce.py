"""reproduce: a table or figure of the paper, computed again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from neuron_merging.tool.commands import show
from neuron_merging.tool.commands.source import Json, Texts

if TYPE_CHECKING:
    from neuron_merging.paper.run import Outcome

Flag = Annotated[bool, Parameter(negative=())]


def reproduce(
    what: str,
    /,
    *,
    weights: Texts = None,
    data: str | None = None,
    limit: int | None = None,
    download: Flag = False,
    device: str | None = None,
    methods: str | None = None,
    criteria: str | None = None,
    ratios: str | None = None,
    out: str | None = None,
    check: Flag = False,
    json: Json = False,
) -> None:
    """Compute a table or figure of the paper again and set ours beside what is printed.

    Parameters
    ----------
    what
        table1, table2, table3, table4, figure3, figure4, figure5 or all.
    weights
        A trained network as NETWORK=FILE (resnet-20=weights.safetensors); may be repeated, and several files of one
        network give mean and deviation. Otherwise the paper's files are looked for in the data folder.
    data
        The folder that has the images and the paper's weights (default: $NEURON_MERGING_DATA).
    limit
        Measure on the first so many test images only.
    download
        Fetch images that are not at hand.
    device
        Where to compute, as cpu or cuda:1; left out: the accelerator, if there is one.
    methods
        Mergers side by side (default none,cosine): none,cosine,moments or none,cosine:threshold=0.2,bn=paper.
    criteria
        Which channels stay: l1,l2,l2-gm (default as in the paper).
    ratios
        Shares of channels to remove: 0.3,0.5 (default as in the paper).
    out
        The folder for CSV, pictures, the page and the cache (default reproduce/WHAT).
    check
        Fail if a figure is not as close to the paper's as a right implementation comes with the paper's weights.
    """
    from neuron_merging.paper import options as wanted

    grid = {"methods": methods, "criteria": criteria, "ratios": ratios}
    chosen = wanted.resolve(
        what, weights=weights, data=data, limit=limit, download=download, device=device, out=out, **grid
    )
    show.say("loading")
    from neuron_merging.paper import output
    from neuron_merging.paper.run import run
    from neuron_merging.sweeping import pictures

    pictures.check("reproduce")
    try:
        outcomes = run(chosen)
    except KeyboardInterrupt:
        show.say("what was measured is kept: the same command goes on from there")
        raise
    files = output.save(outcomes, chosen)
    if json:
        show.json(output.document(outcomes, files))
    else:
        for outcome in outcomes:
            _print(outcome)
    show.say(f"written to {chosen.out / output.PAGE}")
    if check:
        _check(outcomes)


def _print(outcome: Outcome) -> None:
    from neuron_merging.paper.rows import grid

    if outcome.rows:
        show.table(outcome.target.title, *grid(outcome.rows))
        words = {True: "holds", False: "does not hold", None: "not measured"}
        claims = [(verdict.claim, words[verdict.holds]) for verdict in outcome.verdicts]
        show.table("", ("The paper says", "here"), claims)
    for message in outcome.left_out:
        show.say(f"{outcome.target.name}: {message}")


def _check(outcomes: list[Outcome]) -> None:
    from neuron_merging.errors import VerificationError

    rows = [row for outcome in outcomes for row in outcome.rows if row.agrees is not None]
    wrong = [row for row in rows if not row.agrees]
    show.say(f"{len(rows) - len(wrong)} of {len(rows)} figures agree with the paper's")
    if not rows:
        raise VerificationError("no figure to check", where="--check", fix="Ask for the paper's networks and methods.")
    if wrong:
        row = wrong[0]
        raise VerificationError(
            f"{len(wrong)} of {len(rows)} figures differ from the paper's, first {row.metric} of {row.title} "
            f"({row.criterion} {row.ratio:.0%} {row.method}): {row.ours:g} for {row.paper:g}",
            where=row.target,
            fix="Only the paper's own weights and all test images can agree.",
        )
