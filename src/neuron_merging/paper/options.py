"""options: what `reproduce` was asked for, checked before any work is done."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from neuron_merging import atomic
from neuron_merging.errors import MergingError
from neuron_merging.paper import settings
from neuron_merging.paper.methods import Method, parse
from neuron_merging.paper.settings import TARGETS, Panel, Target

ALL = "all"


@dataclass(frozen=True)
class Options:
    """The choices of one run; what is None or empty is as in the paper."""

    targets: tuple[Target, ...]
    out: Path
    weights: tuple[tuple[str, str], ...] = ()
    """Pairs of a network's name and a file."""
    data: str | None = None
    limit: int | None = None
    download: bool = False
    device: str | None = None
    methods: tuple[Method, ...] = tuple(Method(name) for name in settings.METHODS)

    @property
    def alone(self) -> bool:
        """Whether only one network is asked for."""
        return len(panel_names(self.targets)) == 1


def resolve(
    what: str,
    *,
    weights: list[str] | None = None,
    data: str | None = None,
    limit: int | None = None,
    download: bool = False,
    device: str | None = None,
    methods: str | None = None,
    criteria: str | None = None,
    ratios: str | None = None,
    out: str | None = None,
) -> Options:
    """The options of the command line, or an error that says which of them cannot be meant.

    >>> found = resolve("table1", limit=100, ratios="0.5")
    >>> found.targets[0].panels[0].ratios, str(found.out)
    ((0.5,), 'reproduce/table1')
    """
    targets = _targets(what)
    if limit is not None and limit < 1:
        raise MergingError(f"{limit} images", where="--limit", fix="Give at least 1.")
    place = Path(out or f"reproduce/{what}")
    atomic.check_writable(place.absolute() / "cache")
    if data is not None and not os.path.isdir(data):
        raise MergingError("there is no such folder", where=f"--data {data}", fix="Give the folder that has the data.")
    return Options(
        targets=tuple(_narrowed(target, _criteria(criteria), _ratios(ratios)) for target in targets),
        out=place,
        weights=_weights(weights or (), targets),
        data=data,
        limit=limit,
        download=download,
        device=device,
        methods=parse(methods) if methods is not None else Options.methods,
    )


def _targets(what: str) -> tuple[Target, ...]:
    if what == ALL:
        return tuple(TARGETS.values())
    if what not in TARGETS:
        raise MergingError(f"there is no {what!r} in the paper", where="WHAT", fix=_known({**TARGETS, ALL: None}))
    return (TARGETS[what],)


def _known(names: dict[str, object]) -> str:
    return f"Give one of {', '.join(names)}."


def _narrowed(target: Target, criteria: tuple[str, ...], ratios: tuple[float, ...]) -> Target:
    panels = tuple(replace(panel, ratios=ratios or panel.ratios) for panel in target.panels)
    return replace(target, panels=panels, criteria=criteria or target.criteria)


def _criteria(text: str | None) -> tuple[str, ...]:
    if text is None:
        return ()
    from neuron_merging.choosing.criteria import find

    found = tuple(dict.fromkeys(text.split(",")))
    for name in found:
        find(name)
    return found


def _ratios(text: str | None) -> tuple[float, ...]:
    found = []
    for part in text.split(",") if text is not None else ():
        try:
            found.append(float(part))
        except ValueError:
            found.append(0.0)
        if not 0 < found[-1] < 1:
            what = f"{part!r} is not a share between 0 and 1"
            raise MergingError(what, where="--ratios", fix="For instance --ratios 0.3,0.5.")
    return tuple(dict.fromkeys(found))


def _weights(entries: Sequence[str], targets: tuple[Target, ...]) -> tuple[tuple[str, str], ...]:
    """Pairs of network and file; a file that is named twice counts once."""
    found = [_weight(entry, targets) for entry in entries]
    return tuple({(name, os.path.realpath(file)): (name, file) for name, file in found}.values())


def _weight(entry: str, targets: tuple[Target, ...]) -> tuple[str, str]:
    """NETWORK=FILE, or FILE alone where only one network is asked for."""
    name, equals, file = ("", "", entry) if os.path.isfile(entry) else entry.partition("=")
    names = panel_names(targets)
    if not equals:
        if len(names) > 1:
            fix = f"Write NETWORK=FILE; the networks are {', '.join(names)}."
            raise MergingError(f"{entry!r} does not say which network it is for", where="--weights", fix=fix)
        name, file = names[0], entry
    if not os.path.isfile(file):
        fix = "Give a .safetensors, .pt or .pth file, as NETWORK=FILE."
        raise MergingError(f"there is no file {file!r}", where=f"--weights {entry}", fix=fix)
    name = _full_name(name, names)
    if not any(fits(name, panel, alone=len(names) == 1) for target in targets for panel in target.panels):
        fix = f"The networks are {', '.join(names)}, or others of their kind on the same data."
        raise MergingError(f"{name} has no place here", where=f"--weights {entry}", fix=fix)
    return settings.network(name).name, file


def panel_names(targets: tuple[Target, ...]) -> list[str]:
    """The networks of all tables and figures that are asked for."""
    return list(dict.fromkeys(panel.network for target in targets for panel in target.panels))


def _full_name(name: str, names: list[str]) -> str:
    """`lenet` is enough where only one network starts so."""
    meant = [known for known in names if known.startswith(f"{name}-")]
    return meant[0] if name not in names and len(meant) == 1 else name


def fits(name: str, panel: Panel, *, alone: bool) -> bool:
    """Whether a network is the panel's, or may take its place: one of its kind, and any where it is the only one."""
    given, own = settings.network(name), settings.network(panel.network)
    if name == panel.network:
        return True
    return given.family in panel.stands_for and (alone or (given.family, given.data) == (own.family, own.data))
