"""criteria: a score for every channel; the highest scores stay.

A criterion is a function of the matrix of channels, one row per channel (METHOD: a flattened
filter, with the bias as one more entry where no normalisation follows), to one score per row.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from neuron_merging.errors import MergingError

Criterion = Callable[[Tensor], Tensor]
"""From a group's filters, one row per channel, to one score per row; the highest stay."""
CRITERIA: dict[str, Criterion] = {}


def criterion(name: str) -> Callable[[Criterion], Criterion]:
    """Register a criterion under a name that `compress(criterion=...)` understands.

    Parameters
    ----------
    name
        The name; one that exists already is replaced.

    Returns
    -------
    Callable
        A decorator of functions that take the filters of a group, one row per channel, and return one score per
        row. The highest scores stay.

    Examples
    --------
    >>> @criterion("largest-entry")
    ... def largest_entry(rows):
    ...     return rows.abs().amax(1)
    >>> find_criterion("largest-entry")(torch.tensor([[1.0, -3.0], [2.0, 2.0]]))
    tensor([3., 2.])
    """

    def register(function: Criterion) -> Criterion:
        CRITERIA[name] = function
        return function

    return register


@criterion("l1")
def score_l1(rows: Tensor) -> Tensor:
    """Sum of absolute values (Li et al. 2017)."""
    return _compute_row_norms(rows, 1)


@criterion("l2")
def score_l2(rows: Tensor) -> Tensor:
    """Euclidean norm (He et al. 2018)."""
    return _compute_row_norms(rows, 2)


def _compute_row_norms(rows: Tensor, order: float) -> Tensor:
    norms: Tensor = torch.linalg.vector_norm(rows, ord=order, dim=1)
    return norms


@criterion("l2-gm")
def score_l2_gm(rows: Tensor) -> Tensor:
    """Sum of distances to all other channels: far from the geometric median stays (He et al. 2019)."""
    if rows.shape[0] == 0:
        return rows.new_zeros(0)
    centred = rows - rows.mean(0)
    squares = centred.square().sum(1)
    step = max(1, 2**24 // rows.shape[0])
    parts = []
    for start in range(0, rows.shape[0], step):
        chunk = slice(start, start + step)
        square = torch.addmm(squares[None, :] + squares[chunk, None], centred[chunk], centred.T, alpha=-2)
        parts.append(square.clamp_(min=0).sqrt_().sum(1))
    return torch.cat(parts)


@criterion("random")
def score_random(rows: Tensor) -> Tensor:
    """Uniform scores from torch's generator, which `compress(seed=...)` seeds."""
    return torch.rand(rows.shape[0], dtype=torch.float64, device="cpu").to(rows.device)


def score_channels(criterion: str | Criterion, rows: Tensor) -> Tensor:
    """Scores of the channels under a named criterion or a callable."""
    scores = find_criterion(criterion)(rows)
    if not isinstance(scores, Tensor) or scores.shape != rows.shape[:1]:
        shape = tuple(scores.shape) if isinstance(scores, Tensor) else type(scores).__name__
        raise MergingError(
            f"the criterion returned {shape} for {rows.shape[0]} channels",
            where=f"criterion={getattr(criterion, '__name__', criterion)}",
            fix="Return one score per row.",
        )
    if not bool(torch.isfinite(scores).all()):
        raise MergingError(
            "the criterion returned NaN or infinity",
            where=f"criterion={getattr(criterion, '__name__', criterion)}",
            fix="Return finite scores.",
        )
    return scores


def find_criterion(criterion: str | Criterion) -> Criterion:
    if callable(criterion):
        return lambda rows: criterion(rows.clone())
    if not isinstance(criterion, str) or criterion not in CRITERIA:
        raise MergingError(
            f"unknown criterion {criterion!r}",
            where="criterion=",
            fix=f"Use one of {', '.join(sorted(CRITERIA))}, expected-error, or give a function of the rows.",
        )
    return CRITERIA[criterion]
