"""Shorten a failing case: leave out blocks and simplify its ends as long as the outcome stays the same."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from .network import Recipe
from .trial import Outcome, run_case

PLAIN = {"image": "picture", "signal": "wave", "volume": "scan", "features": "vector", "tokens": "sequence"}


def minimise_failure(outcome: Outcome) -> Outcome:
    """Return the outcome of the shortest recipe found that fails in the same way."""
    found = outcome
    while True:
        for shorter in iterate_simpler_recipes(found.recipe):
            tried = run_case(shorter, outcome.merger)
            if tried.kind == outcome.kind:
                found = tried
                break
        else:
            return found


def iterate_simpler_recipes(recipe: Recipe) -> Iterator[Recipe]:
    """Yield recipes that are simpler by one step."""
    for i in range(len(recipe.steps)):
        yield replace(recipe, steps=recipe.steps[:i] + recipe.steps[i + 1 :])
    if recipe.ending != "classes":
        yield replace(recipe, ending="classes")
    if recipe.opening != PLAIN[recipe.domain]:
        yield replace(recipe, opening=PLAIN[recipe.domain])
    if recipe.spice:
        yield replace(recipe, spice=False)
    if not recipe.double:
        yield replace(recipe, double=True)
