"""Read and write figures.json: the figures of a folder's page and card, so that `report` does not measure again."""

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
"""Format of figures.json. A reader refuses a larger number."""
IMAGE_ADDRESS = re.compile(r"data:image/png;base64,[A-Za-z0-9+/]*=*")
"""Pictures must be inline: an address from an untrusted file could make the page load anything."""


class StoredFigures(msgspec.Struct, frozen=True, kw_only=True):
    """The content of figures.json.

    `curves` are the losses that the search for a budget measured, by group. `sweep` is the sweep whose best result
    this is, as plain values. The settings are in recipe.yaml.
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
    """Encode figures as the text of figures.json."""
    return msgspec.json.encode(_name_nonfinite(msgspec.to_builtins(stored, str_keys=True)))


def _name_nonfinite(value: Any) -> Any:
    """Replace infinities and NaN by texts: JSON cannot represent them as numbers."""
    if isinstance(value, dict):
        return {key: _name_nonfinite(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_name_nonfinite(part) for part in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def decode_figures(text: bytes, where: str) -> StoredFigures:
    """Decode figures.json from an untrusted source: the type of every value is checked."""
    try:
        version = msgspec.json.decode(text, type=_VersionField).version
        if version > FIGURES_VERSION:
            raise FolderError(
                f"the figures have format {version}, this neuron-merging reads up to {FIGURES_VERSION}",
                where=where,
                fix="Install a newer neuron-merging.",
            )
        # Not strict, because infinities and NaN are stored as texts.
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
