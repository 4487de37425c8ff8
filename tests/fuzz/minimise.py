"""Shorten a failure: leave out blocks, plainer ends, as long as the outcome stays."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from .network import Recipe
from .trial import Outcome, attempt

PLAIN = {"image": "picture", "signal": "wave", "volume": "scan", "features": "vector", "tokens": "sequence"}


def minimal(outcome: Outcome) -> Outcome:
    """The shortest recipe found that ends alike."""
    found = outcome
    while True:
        for shorter in simpler(found.recipe):
            tried = attempt(shorter, outcome.merger)
            if tried.kind == outcome.kind:
                found = tried
                break
        else:
            return found


def simpler(recipe: Recipe) -> Iterator[Recipe]:
    """Recipes with one thing less."""
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
