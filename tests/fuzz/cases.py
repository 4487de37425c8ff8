"""Cases by number, as values that can be sent to worker processes."""

from __future__ import annotations

from dataclasses import dataclass, replace

from .network import Recipe, draw_recipe, make_single_block_recipe
from .trial import Outcome, run_case


@dataclass(frozen=True)
class Task:
    """The number of a case, and the settings to run it with."""

    seed: int
    index: int
    deepest: int
    without: frozenset[str]
    mergers: tuple[str, ...]

    def recipe(self) -> Recipe:
        recipe = (
            draw_recipe(self.seed, self.index, self.deepest)
            if self.deepest > 1
            else make_single_block_recipe(self.seed, self.index)
        )
        return replace(recipe, steps=tuple(step for step in recipe.steps if step[0] not in self.without))


def run_task(task: Task) -> list[Outcome]:
    return [run_case(task.recipe(), merger) for merger in task.mergers]
