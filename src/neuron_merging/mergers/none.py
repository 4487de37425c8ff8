"""Plain pruning: removed channels are dropped and nothing makes up for them."""

from __future__ import annotations

from dataclasses import dataclass

from neuron_merging.task import Merge, Task


@dataclass(frozen=True)
class Prune:
    """Leave the consumers' remaining weights as they are."""

    def merge(self, task: Task) -> list[Merge]:
        return [Merge(site.group.name, c, "pruned") for site in task.sites() for c in site.group.consumers]
