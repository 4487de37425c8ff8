"""Cases by number, as values that go to other processes."""

from __future__ import annotations

from dataclasses import dataclass, replace

from .network import Recipe, alone, draw
from .trial import Outcome, attempt


@dataclass(frozen=True)
class Task:
    """A case's number, and how it is to be run."""

    seed: int
    index: int
    deepest: int
    without: frozenset[str]
    mergers: tuple[str, ...]

    def recipe(self) -> Recipe:
        recipe = draw(self.seed, self.index, self.deepest) if self.deepest > 1 else alone(self.seed, self.index)
        return replace(recipe, steps=tuple(step for step in recipe.steps if step[0] not in self.without))


def outcomes_of(task: Task) -> list[Outcome]:
    return [attempt(task.recipe(), merger) for merger in task.mergers]
