"""The commands `reproduce` (a table or figure of the paper) and `demo`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from neuron_merging.cli import console
from neuron_merging.cli.model_options import JsonFlag, TextList
from neuron_merging.errors import MergingError

if TYPE_CHECKING:
    from neuron_merging.reproduction.run import TargetOutcome

Flag = Annotated[bool, Parameter(negative=())]


def reproduce(
    what: str,
    /,
    *,
    weights: TextList = None,
    data: str | None = None,
    limit: int | None = None,
    download: Flag = False,
    device: str | None = None,
    methods: str | None = None,
    criteria: str | None = None,
    ratios: str | None = None,
    out: str | None = None,
    check: Flag = False,
    json: JsonFlag = False,
) -> None:
    """Recompute a table or figure of the paper and compare it with the published values.

    Parameters
    ----------
    what
        table1, table2, table3, table4, figure3, figure4, figure5 or all.
    weights
        A trained network as NETWORK=FILE (resnet-20=weights.safetensors); may be repeated, and several files of one
        network give mean and deviation. By default the paper's files are searched in the data folder.
    data
        The folder with the images and the paper's weights (default: $NEURON_MERGING_DATA).
    limit
        Use only the first N test images; nothing is judged against the paper then.
    download
        Download missing images.
    device
        The device, as cpu or cuda:1 (default: the accelerator, if there is one).
    methods
        Mergers to compare (default none,cosine): none,cosine,moments or none,cosine:threshold=0.2,bn=paper.
    criteria
        Criteria that choose the kept channels: l1,l2,l2-gm (default as in the paper).
    ratios
        Shares of channels to remove: 0.3,0.5 (default as in the paper).
    out
        The folder for CSV, pictures, the page and the cache (default reproduce/WHAT).
    check
        Fail if a figure differs from the paper's by more than a correct implementation would.
    """
    from neuron_merging.reproduction import run_setup

    if check and limit is not None:
        what = "figures of some test images cannot be checked against the paper's"
        raise MergingError(what, where="--check --limit", fix="Leave out one of them.")
    grid = {"methods": methods, "criteria": criteria, "ratios": ratios}
    chosen = run_setup.parse_options(
        what, weights=weights, data=data, limit=limit, download=download, device=device, out=out, **grid
    )
    console.print_message("loading")
    from neuron_merging.reproduction import run
    from neuron_merging.reproduction.run import reproduce_targets
    from neuron_merging.sweeps import results

    results.check_matplotlib("reproduce")
    try:
        outcomes = reproduce_targets(chosen)
    except KeyboardInterrupt:
        console.print_message("results so far are stored: the same command continues")
        raise
    files = run.save_outcomes(outcomes, chosen)
    if json:
        console.print_json(run.outcomes_to_json(outcomes, files))
    else:
        for outcome in outcomes:
            _print_outcome(outcome)
    console.print_message(f"written to {chosen.out / run.INDEX_PAGE}")
    if check:
        _check_agreement(outcomes)


def _print_outcome(outcome: TargetOutcome) -> None:
    from neuron_merging.reproduction.comparison import build_text_table

    if outcome.rows:
        console.print_table(outcome.target.title, *build_text_table(outcome.rows))
        words = {True: "holds", False: "does not hold", None: "not measured"}
        claims = [(verdict.claim, words[verdict.holds]) for verdict in outcome.verdicts]
        if claims:
            console.print_table("", ("The paper says", "here"), claims)
    for message in outcome.left_out:
        console.print_message(f"{outcome.target.name}: {message}")


def _check_agreement(outcomes: list[TargetOutcome]) -> None:
    from neuron_merging.errors import VerificationError

    rows = [row for outcome in outcomes for row in outcome.rows if row.agrees is not None]
    wrong = [row for row in rows if not row.agrees]
    console.print_message(f"{len(rows) - len(wrong)} of {len(rows)} figures agree with the paper's")
    if not rows:
        raise VerificationError("no figure to check", where="--check", fix="Select the paper's networks and methods.")
    if wrong:
        row = wrong[0]
        raise VerificationError(
            f"{len(wrong)} of {len(rows)} figures differ from the paper's, first {row.metric} of {row.title} "
            f"({row.criterion} {row.ratio:.0%} {row.method}): {row.ours:g} for {row.paper:g}",
            where=row.target,
            fix="Use the paper's weights and all test images; others do not agree.",
        )


def demo(*, out: str = "neuron-merging-demo") -> None:
    """Train a small network on scikit-learn's digits and compress it in three ways.

    Parameters
    ----------
    out
        The folder for the networks and the page.
    """
    from neuron_merging.reproduction import demo

    demo.run_demo(out)
