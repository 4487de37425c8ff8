"""trials: which combinations of budgets, ratios, criteria and mergers are tried."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from neuron_merging.choosing.budget import parse_budget
from neuron_merging.errors import MergingError
from neuron_merging.folder.recipe import Recipe
from neuron_merging.mergers.interface import uses_data
from neuron_merging.settings import Settings

ORIGINAL = "original"


@dataclass(frozen=True)
class Trial:
    """One combination, in words and as settings; the original network has none."""

    target: str = ORIGINAL
    criterion: str = ""
    merger: str = ""
    settings: Settings | None = field(default=None, repr=False)
    recipe: Recipe | None = field(default=None, repr=False)
    """What the command line would call it, for the folder of the best."""

    def __str__(self) -> str:
        return " ".join(part for part in (self.target, self.criterion, self.merger) if part)


Goal = tuple[str, dict[str, Any]]
"""What a cut is to reach: its name, and the setting that asks for it."""


def goals(budget: object = None, ratio: object = None) -> list[Goal]:
    """Budgets and ratios, each of which may be several.

    >>> [name for name, _ in goals({"macs": ["90%", 0.5]}, 0.3)]
    ['macs 90%', 'macs 50%', 'ratio 0.3']
    """
    found: list[Goal] = []
    for one in _budgets(budget):
        found.append((", ".join(f"{key} {_said(value)}" for key, value in one.items()), {"budget": one}))
    for share in listed(ratio):
        name = f"ratio {share:g}" if isinstance(share, int | float) else "ratios by layer"
        found.append((name, {"ratio": share}))
    if not found:
        raise MergingError(
            "nothing to go through", where="budget=", fix='For instance budget={"macs": [0.9, 0.7, 0.5]}.'
        )
    return list({name: (name, asked) for name, asked in found}.values())


def _budgets(budget: object) -> Iterator[dict[str, Any]]:
    """A mapping with lists stands for every combination; a number alone is a share of the multiply-accumulates."""
    if isinstance(budget, Mapping):
        for values in itertools.product(*(listed(value) for value in budget.values())):
            yield dict(zip(budget, values, strict=True))
    else:
        for one in listed(budget):
            yield from _budgets(one if isinstance(one, Mapping) else {"macs": one})


def _said(value: object) -> str:
    return f"{100 * value:g}%" if isinstance(value, float) and value <= 1 else f"{value}"


def listed(value: Any) -> list[Any]:
    """One thing or several, as a list."""
    if value is None:
        return []
    return list(value) if isinstance(value, list | tuple) else [value]


def named(choice: Any) -> str:
    """What a criterion or merger is called in tables."""
    if choice is None or isinstance(choice, str):
        return choice or "default"
    return str(getattr(choice, "__name__", None) or choice)


def trials(wanted: Sequence[Goal], criteria: Sequence[Any], mergers: Sequence[Any], base: Settings) -> list[Trial]:
    """The original, then every combination, each checked."""
    found = [Trial()]
    for (name, asked), criterion, merger in itertools.product(wanted, criteria, mergers):
        options = {**asked, "budget": parse_budget(asked["budget"])} if "budget" in asked else dict(asked)
        settings = replace(base, criterion=criterion, merger=merger, **options)
        if merger is not None and not uses_data(settings.method()):
            settings = replace(settings, calibration=None)
        if settings.budget is None:
            settings = replace(settings, limits={})
        settings.check()
        found.append(Trial(name, named(criterion), named(merger), settings))
    return found
