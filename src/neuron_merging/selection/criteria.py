"""Select the channels of a group: criteria score them; ratios and limits by layer pattern say how many are removed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from numbers import Real

import numpy as np
import torch
from torch import Tensor

from neuron_merging.channels.groups import Channels, Group, Mask, Scores, Units, is_unit
from neuron_merging.errors import MergingError, describe_error
from neuron_merging.graph.user_code import find_user_line

Criterion = Callable[[Tensor], Tensor]
"""Takes a group's filters, one row per channel; returns one score per row. The highest scores stay."""
CRITERIA: dict[str, Criterion] = {}
"""Registered criteria by name."""


def criterion(name: str) -> Callable[[Criterion], Criterion]:
    """Register a criterion under a name that `compress(criterion=...)` understands.

    Parameters
    ----------
    name
        The name; it replaces an existing criterion of this name.

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
    """Score by the sum of absolute values (Li et al. 2017)."""
    return _compute_row_norms(rows, 1)


@criterion("l2")
def score_l2(rows: Tensor) -> Tensor:
    """Score by the Euclidean norm (He et al. 2018)."""
    return _compute_row_norms(rows, 2)


def _compute_row_norms(rows: Tensor, order: float) -> Tensor:
    norms: Tensor = torch.linalg.vector_norm(rows, ord=order, dim=1)
    return norms


@criterion("l2-gm")
def score_l2_gm(rows: Tensor) -> Tensor:
    """Score by the sum of distances to all others: channels near the geometric median go first (He et al. 2019)."""
    if rows.shape[0] == 0:
        return rows.new_zeros(0)
    # |x − y|² = |x|² + |y|² − 2xy, in strips to bound the memory. Centring reduces the cancellation in this formula.
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
    """Draw uniform scores from torch's generator, which `compress(seed=...)` seeds."""
    return torch.rand(rows.shape[0], dtype=torch.float64, device="cpu").to(rows.device)


def score_channels(criterion: str | Criterion, rows: Tensor) -> Tensor:
    """Score the channels by a named criterion or a callable, and check the result."""
    score = find_criterion(criterion)
    try:
        scores = score(rows)
    except MergingError:
        raise
    except Exception as error:  # any exception of the user's code
        what, fix = f"the criterion raised {describe_error(error)}", "Fix the function; its argument is a matrix."
        raise MergingError(what, where=find_user_line(error) or "criterion=", fix=fix) from error
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
    """Return a criterion by name, or a callable that gets a copy of the rows, which it may change."""
    if callable(criterion):
        return lambda rows: criterion(rows.clone())
    if not isinstance(criterion, str) or criterion not in CRITERIA:
        raise MergingError(
            f"unknown criterion {criterion!r}",
            where="criterion=",
            fix=f"Use one of {', '.join(sorted(CRITERIA))}, expected-error, or give a function of the rows.",
        )
    return CRITERIA[criterion]


Ratio = float | Mapping[str, float]


def count_kept(size: int, ratio: float) -> int:
    """Return ⌊N(1 − ratio) + 1e-9⌋ kept channels, at least one; 1e-9 absorbs the rounding of 1 − ratio.

    >>> count_kept(16, 0.3), count_kept(10, 0.2), count_kept(3, 0.9)
    (11, 8, 1)
    """
    return max(1, math.floor(size * (1 - ratio) + 1e-9))


def keep_units_by_ratio(group: Group, scores: Scores, ratio: float, round_to: int = 1) -> Units:
    """Return the kept units in order: the best of each balance cell, and all locked ones."""
    cells = int(group.balance_cells.max()) + 1
    return keep_units_by_count(group, scores, cells * count_kept(group.size // cells, ratio), round_to)


def keep_units_by_count(group: Group, scores: Scores, count: int, round_to: int = 1) -> Units:
    """Return so many kept units in order: at least the locked ones and one per balance cell, equally many in each."""
    cells = int(group.balance_cells.max()) + 1
    size = group.size // cells
    locked = group.locked | _protect_last_of_axis(group, scores)
    number = max(1, count // cells, *(int(locked[group.balance_cells == c].sum()) for c in range(cells)))
    width = group.producers[0].rows.shape[1] if group.producers else 1
    # Multiples are meant in channels, of which a unit may have several.
    while number < size and number * cells * width % round_to:
        number += 1
    # Sort by cell, locked first, then by falling score; ties go to the lower index, so the result is deterministic.
    order = np.lexsort((np.arange(group.size), -scores, ~locked, group.balance_cells))
    return np.sort(order.reshape(cells, size)[:, :number].ravel())


def explain_unpruned(group: Group, ratio: float, round_to: int) -> str:
    """Explain why a group keeps all units although its ratio is positive."""
    if group.locked.all():
        return "none of them is prunable"
    size = group.size // (int(group.balance_cells.max()) + 1)
    if count_kept(size, ratio) == size:
        return f"ratio {ratio} is less than one of {size}"
    return f"round_to={round_to} leaves no smaller number" if round_to > 1 else "each is the last one of a narrow layer"


def _protect_last_of_axis(group: Group, scores: Scores) -> Mask:
    """Return a mask of the best unit of each layer that has fewer channels than the group, which must not lose all."""
    best = np.zeros(group.size, bool)
    for units in group.cuts.values():
        if is_unit(units).all() and len(np.unique(units)) < group.size:
            best[units[np.argmax(scores[units])]] = True
    return best


def matches_pattern(pattern: str, layer: str) -> bool:
    """Return whether a pattern names a layer or a module around it: `layer1` covers `layer1.0.conv1`."""
    return fnmatchcase(layer, pattern) or fnmatchcase(layer, pattern + ".*")


def _list_pattern_names(group: Group) -> tuple[str, ...]:
    """Return the names that a pattern may match: those of the layers, and of the group, for instance `*:heads`."""
    return (*group.layers, group.name)


def resolve_ratios(channels: Channels, ratio: Ratio, ignore: Sequence[str], scope: str) -> dict[str, float]:
    """Return the ratio of every participating group by name; later patterns win."""
    patterns = dict(ratio) if isinstance(ratio, Mapping) else {"*": ratio}
    _check_patterns(channels, patterns, ignore, explicit=isinstance(ratio, Mapping))
    result = {}
    for group in channels.groups:
        if any(matches_pattern(p, name) for p in ignore for name in _list_pattern_names(group)):
            continue
        if scope == "internal" and group.residual:
            continue
        chosen = [
            v for p, v in patterns.items() if any(matches_pattern(p, name) for name in _list_pattern_names(group))
        ]
        if chosen and chosen[-1] > 0:
            result[group.name] = chosen[-1]
    return result


def resolve_limits(channels: Channels, limits: Mapping[str, float] | None) -> dict[str, float]:
    """Return the largest share that each group may lose, by name; later patterns win."""
    limits = limits or {}
    _check_patterns(channels, limits, (), explicit=True, where="limits=")
    found = {}
    for group in channels.groups:
        chosen = [v for p, v in limits.items() if any(matches_pattern(p, name) for name in _list_pattern_names(group))]
        if chosen:
            found[group.name] = chosen[-1]
    return found


def compute_min_kept(group: Group, scores: Scores, limit: float, round_to: int = 1) -> tuple[int, int]:
    """Return the least number of units that a group must keep, and the step by which this number can change."""
    cells = int(group.balance_cells.max()) + 1
    width = group.producers[0].rows.shape[1] if group.producers else 1
    # The smallest change of units whose channels are a multiple of `round_to`, equally in every cell.
    step = cells * (round_to // math.gcd(round_to, cells * width))
    least = max(len(keep_units_by_count(group, scores, 1)), math.ceil(group.size * (1 - limit) - 1e-9))
    return min(group.size, -(-least // step) * step), step


def check_ratio(value: object, pattern: str = "") -> None:
    """Raise an error unless the value is a number in [0, 1)."""
    number = isinstance(value, Real) and not isinstance(value, bool)
    if not number or not 0 <= value < 1:  # type: ignore[operator]
        raise MergingError(
            f"ratio {value!r} is not a number in [0, 1)",
            where=f"ratio={pattern!r}" if pattern else "ratio=",
            fix="It is the share of channels to remove, for instance 0.5.",
        )


def _check_patterns(
    channels: Channels, patterns: Mapping[str, float], ignore: Sequence[str], explicit: bool, where: str = "ratio="
) -> None:
    prunable = [name for group in channels.groups for name in _list_pattern_names(group)]
    if not prunable:
        return  # a later error explains why nothing is prunable
    for pattern in patterns if explicit else ():
        if isinstance(pattern, str) and any(matches_pattern(pattern, layer) for layer in prunable):
            continue
        refused = [r for r in channels.refusals if isinstance(pattern, str) and matches_pattern(pattern, r.layer)]
        why = f"no layer matches {pattern!r}" if not refused else f"{pattern!r} cannot be pruned: {refused[0]}"
        raise MergingError(why, where=where, fix=f"Layers that can: {_format_names(prunable)}.")
    for pattern in ignore:
        if not any(matches_pattern(pattern, name) for name in (*channels.layers, *prunable)):
            raise MergingError(
                f"no layer matches {pattern!r}", where="ignore=", fix=f"Layers: {_format_names(channels.layers)}."
            )


def _format_names(names: Iterable[str]) -> str:
    listed = list(dict.fromkeys(names))
    return ", ".join(listed[:8]) + (f", … ({len(listed)} in all)" if len(listed) > 8 else "")
