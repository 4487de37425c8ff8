"""asked: settings in words, for a page that shows them in plain sight."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from neuron_merging.folder.recipe import HOW_IT_RAN, Recipe

Asked = tuple[tuple[str, str], ...]
OTHERWISE = {"round_to": 1, "seed": 0, "calibrate_images": 512, "output": "module", "uniform": False}
"""Values that are not worth a word."""


def asked(recipe: Recipe | None) -> Asked:
    """What a recipe asks for, leaving out what it leaves open.

    >>> asked(Recipe(budget={"macs": "50%"}, criterion="l2", merger="moments"))
    (('budget', 'macs 50%'), ('scope', 'internal'), ('criterion', 'l2'), ('merger', 'moments'))
    """
    if recipe is None:
        return ()
    keys = msgspec.structs.asdict(recipe)
    given = {key: value for key, value in keys.items() if key not in HOW_IT_RAN and value not in (None, [], {}, "")}
    return tuple((key.replace("_", " "), _said(value)) for key, value in given.items() if OTHERWISE.get(key) != value)


def _said(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_said(part)}" for key, part in value.items())
    if isinstance(value, list):
        return ", ".join(map(_said, value))
    return f"{value:g}" if isinstance(value, float) else str(value)
