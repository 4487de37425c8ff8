"""shades: sensitivities as a table with colours."""

from __future__ import annotations

from dataclasses import dataclass

from neuron_merging.sweeping.losses import Sensitivity, shown
from neuron_merging.sweeping.pictures import shade

STRONG = 0.55
"""Shades above which letters are white."""


@dataclass(frozen=True)
class Cell:
    """One loss: its text, and how dark its place is, from 0 to 1."""

    text: str
    shade: float
    title: str

    @property
    def dark(self) -> bool:
        return self.shade > STRONG


def shaded(found: Sensitivity) -> list[tuple[str, list[Cell]]]:
    """The lines of the table: a group, and a cell for each ratio."""
    return [
        (
            group.name,
            [
                Cell(shown(loss), round(shade(loss, found), 3), f"{loss.kept} of {group.channels} channels kept")
                for loss in group.losses
            ],
        )
        for group in found.groups
    ]
