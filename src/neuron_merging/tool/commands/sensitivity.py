"""sensitivity: what each group of channels is worth to the network's answers."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
from cyclopts import Parameter

from neuron_merging.errors import MergingError
from neuron_merging.tool.commands import show
from neuron_merging.tool.commands import source as sources
from neuron_merging.tool.commands.source import Json, Source, Texts

if TYPE_CHECKING:
    from neuron_merging.sweeping import Sensitivity

KINDS = (".png", ".svg", ".csv", ".json")
Flag = Annotated[bool, Parameter(negative=())]


def sensitivity(
    model: str,
    /,
    *,
    ratios: str | None = None,
    criterion: str | None = None,
    calibrate: str | None = None,
    calibrate_images: int | None = None,
    scope: str | None = None,
    ignore: Texts = None,
    seed: int | None = None,
    effort: str | None = None,
    no_merge: Flag = False,
    exact: Flag = False,
    to: Texts = None,
    source: Source | None = None,
    json: Json = False,
) -> None:
    """Measure what a cut of one group alone does to the answers of the whole network.

    Parameters
    ----------
    model
        As for compress.
    ratios
        Shares of a group's channels to remove (default 0.25,0.5,0.75,0.875).
    criterion, calibrate, calibrate_images, scope, ignore, seed, effort
        As for compress.
    no_merge
        Remove channels and do not make up for them.
    exact
        Measure every ratio of every group; otherwise every second of the first layers' is inferred, marked ≈.
    to
        Write a picture or a table too, as NAME.png, .svg, .csv or .json; may be repeated.
    """
    flags = {"criterion": criterion, "calibrate": calibrate, "calibrate_images": calibrate_images, "scope": scope}
    chosen = sources.recipe(model, source, **flags, ignore=ignore, seed=seed, effort=effort)
    shares = None if ratios is None else sources.shares(ratios, "--ratios")
    _check_files(to or ())
    show.say("loading")
    from neuron_merging.pipeline import analyse
    from neuron_merging.settings import from_recipe
    from neuron_merging.sweeping.losses import RATIOS, checked, sensitivity_analysed

    settings = from_recipe(chosen)
    at = checked(shares or RATIOS)
    network, inputs = sources.network(chosen, source)
    settings = sources.with_data(settings, chosen, network, inputs)
    with show.working("trying cuts"):
        found = sensitivity_analysed(analyse(network, inputs), settings, at, merge=not no_merge, exact=exact)
    for file in to or ():
        _write(file, found)
    show.json(found) if json else _print(found)


def _check_files(files: list[str] | tuple[str, ...]) -> None:
    """Refuse what cannot be written, before any work is done."""
    from neuron_merging import atomic
    from neuron_merging.sweeping import pictures

    for file in files:
        if Path(file).suffix not in KINDS:
            raise MergingError(
                f"{file!r} is no kind of file for this", where="--to", fix=f"End it in {', '.join(KINDS)}."
            )
        if Path(file).suffix in (".png", ".svg"):
            pictures.check("--to")
        atomic.check_file(file)


def _write(file: str, found: Sensitivity) -> None:
    from neuron_merging.atomic import replace_file
    from neuron_merging.sweeping import pictures
    from neuron_merging.sweeping.lines import as_csv

    kind = Path(file).suffix[1:]
    if kind == "csv":
        content = as_csv(found.lines())
    elif kind == "json":
        content = msgspec.json.format(msgspec.json.encode(found), indent=1)
    else:
        content = pictures.image(pictures.sensitivity_map(found), kind)
    show.say(f"written to {replace_file(file, content)}")


def _print(found: Sensitivity) -> None:
    from neuron_merging.sweeping.losses import shown

    rows = [
        (g.name, g.channels, f"{g.macs:.1%}", f"{g.parameters:.1%}", *(shown(loss) for loss in g.losses))
        for g in found.groups
    ]
    headings = ("group", "channels", "MACs", "parameters", *(f"{ratio:.4g} removed" for ratio in found.ratios))
    merged = "cut and merged" if found.merged else "cut, not merged"
    show.table(f"{found.unit} on {found.inputs}, one group {merged}", headings, rows)
    show.say(f"{found.passes:.1f} forward passes of these inputs")
