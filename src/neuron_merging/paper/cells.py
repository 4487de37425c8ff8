"""cells: one measurement of one of the paper's networks as a value."""

from __future__ import annotations

from neuron_merging.sweeping import cells


class Cell(cells.Cell, frozen=True, kw_only=True):
    """What is measured: kind of measurement, network, images, cut and merger."""

    kind: str
    device: str
    network: str
    weights: str
    images: str
    criterion: str = ""
    ratio: dict[str, float] = {}
    merger: str = ""
    material: str = ""
    """The sum of images that the merger itself looks at, or of its code if that is not ours."""
