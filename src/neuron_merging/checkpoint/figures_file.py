"""figures.json: the figures of a folder's page and card, so that `report` recomputes nothing."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any

import msgspec

from neuron_merging.checkpoint.manifest import FIX_DAMAGED
from neuron_merging.errors import FolderError, describe_error
from neuron_merging.evaluation.figures import Figures
from neuron_merging.selection.budget import LossCurve

FIGURES_VERSION = 1
IMAGE_ADDRESS = re.compile(r"data:image/png;base64,[A-Za-z0-9+/]*=*")


class StoredFigures(msgspec.Struct, frozen=True, kw_only=True):
    """What figures.json holds.

    `curves` are the losses that the search for a budget measured, by group. `sweep` is the sweep whose best result
    this is, as plain values. The settings are not repeated here: recipe.yaml has them.
    """

    version: int = FIGURES_VERSION
    title: str
    figures: Figures
    notes: tuple[str, ...] = ()
    curves: dict[str, LossCurve] = {}
    sweep: dict[str, Any] | None = None


class _VersionField(msgspec.Struct):
    version: int


def encode_figures(stored: StoredFigures) -> bytes:
    """The text of figures.json."""
    return msgspec.json.encode(_name_nonfinite(msgspec.to_builtins(stored, str_keys=True)))


def _name_nonfinite(value: Any) -> Any:
    """The same with infinities and NaN as texts: JSON has no numbers for them."""
    if isinstance(value, dict):
        return {key: _name_nonfinite(own) for key, own in value.items()}
    if isinstance(value, list | tuple):
        return [_name_nonfinite(own) for own in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def decode_figures(text: bytes, where: str) -> StoredFigures:
    """The figures in a text, which may be a stranger's: every value is checked for its type."""
    try:
        version = msgspec.json.decode(text, type=_VersionField).version
        if version > FIGURES_VERSION:
            raise FolderError(
                f"the figures have format {version}, this neuron-merging reads up to {FIGURES_VERSION}",
                where=where,
                fix="Update neuron-merging: pip install -U neuron-merging.",
            )
        # not strict, for numbers that are no finite ones are texts
        stored = msgspec.convert(msgspec.json.decode(text), StoredFigures, strict=False, str_keys=True)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise FolderError(f"the figures are damaged: {describe_error(error)}", where=where, fix=FIX_DAMAGED) from error
    for address in _iterate_image_addresses(stored.figures):
        if not IMAGE_ADDRESS.fullmatch(address):
            raise FolderError("a picture is not stored in the file itself", where=where, fix=FIX_DAMAGED)
    return stored


def _iterate_image_addresses(figures: Figures) -> Iterator[str]:
    yield from figures.inputs
    yield from (layer.heat.image for layer in figures.layers if layer.heat is not None)
