"""All kinds of blocks, by family."""

from . import (
    attention,
    convolutions,
    counting,
    elementwise,
    endings,
    linear,
    moving,
    norms,
    openings,
    pools,
    reductions,
    wiring,
    writing,
)

__all__ = [
    "attention",
    "convolutions",
    "counting",
    "elementwise",
    "endings",
    "linear",
    "moving",
    "norms",
    "openings",
    "pools",
    "reductions",
    "wiring",
    "writing",
]
