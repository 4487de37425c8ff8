"""A zoo of small networks: every operator once at least, with channels flowing through it.

Add a case here: in the module of its subject, with `op` for an operator between two layers, `refuse` for one that
fixes channels, `case` above a module class, or `add`. Every test over `CASES` then runs on it: what shrinks, that the
result equals the original without the removed channels, that it trains, is stored, exported and rebuilt.
"""

from tests.zoo import (
    activations,
    attention,
    chains,
    concatenation,
    constants,
    contractions,
    dropped,
    filled,
    functional,
    gates,
    grouped,
    inputs,
    meeting,
    norms,
    parameters,
    pooling,
    recurrent,
    residual,
    shared,
    shuffles,
    views,
)
from tests.zoo.registry import CASES, Case

__all__ = [
    "CASES",
    "Case",
    "activations",
    "attention",
    "chains",
    "concatenation",
    "constants",
    "contractions",
    "dropped",
    "filled",
    "functional",
    "gates",
    "grouped",
    "inputs",
    "meeting",
    "norms",
    "parameters",
    "pooling",
    "recurrent",
    "residual",
    "shared",
    "shuffles",
    "views",
]
