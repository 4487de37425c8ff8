"""running: every cell measured that is not known yet, and kept as soon as it is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from neuron_merging import progress
from neuron_merging.sweeping.cells import Cache, Cell, Result
from neuron_merging.sweeping.pool import Pool

Job = tuple[Cell, Any]
"""A cell, and the task that measures it."""


def measured(
    jobs: Sequence[Job], cache: Cache | None, pool: Pool, work: Callable[[Any, Any], Result], shared: Any
) -> dict[str, Result]:
    """Results by the key of their cell; each is kept as soon as it is there."""
    known = {cell.key: cache.get(cell) for cell, _ in jobs} if cache else {}
    results = {key: found for key, found in known.items() if found is not None}
    missing = list({cell.key: (cell, task) for cell, task in jobs if cell.key not in results}.values())
    for done, (number, found) in enumerate(pool.each(_Keeping(work, cache), shared, missing)):
        cell = missing[number][0]
        results[cell.key] = found if cache is None else cache.get(cell) or cache.put(cell, found)
        progress.tell("cells", len(jobs) - len(missing) + done + 1, len(jobs))
    return results


@dataclass(frozen=True)
class _Keeping:
    """The work on a cell. Who does it keeps the result too, where the folder can be reached.

    So nothing is lost with a process that goes between its work and the answer, and what is done again by a cluster
    is read.
    """

    work: Callable[[Any, Any], Result]
    cache: Cache | None

    def __call__(self, shared: Any, job: Job) -> Result:
        cell, task = job
        if self.cache is None or not self.cache.folder.is_dir():
            return self.work(shared, task)
        return self.cache.get(cell) or self.cache.put(cell, self.work(shared, task))
