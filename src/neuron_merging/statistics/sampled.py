"""Statistics from batches that run through the graph."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from neuron_merging.channels.analysis import Analysis
from neuron_merging.channels.groups import Axis
from neuron_merging.channels.operators.table import row_of
from neuron_merging.channels.selection import Selection
from neuron_merging.errors import MergingError, told
from neuron_merging.graph.execution import run
from neuron_merging.graph.precision import working
from neuron_merging.graph.rebatching import objection
from neuron_merging.graph.trees import flat
from neuron_merging.graph.values import Node
from neuron_merging.statistics.regression import Known, Regression, Rows
from neuron_merging.statistics.together import Team, check_batches_of_all, gathered
from neuron_merging.statistics.uses import Use, read


def sampled(
    selection: Selection,
    uses: Sequence[Use],
    batches: Iterable[Sequence[Any]],
    *,
    norm: Callable[[Node, dict[str, Any]], Any] = Node.compute,
    seed: int = 0,
    plenty: float = 1,
    team: Team | None = None,
    rows: Mapping[Axis, int] | None = None,
) -> Iterator[tuple[Axis, list[Known]]]:
    """Run batches through the original network and collect every use's regression, given out one by one.

    `norm` computes the normalisation layers; a source without data may know better than to trust
    their input. The processes of a `team` run batches of their own, and all get what comes of them together.
    `rows` says how many there will be, where that is known.
    """
    found = {use.axis: [use.gatherer((rows or {}).get(use.axis)) for _ in range(use.blocks)] for use in uses}
    by_node = {name: use for use in uses for name in use.inputs}
    sample = sampler(seed, plenty)

    def call(node: Node, args: dict[str, Any]) -> Any:
        if node.name in by_node:
            use = by_node[node.name]
            observe(selection, use, node, read(use, node, args), found[use.axis], sample)
        return norm(node, args) if row_of(node).norm else node.compute(args)

    seen = 0
    for batch in batches:
        run(selection.analysis.graph_for(batch), flat(batch), selection.graph.tensors, call)
        seen += 1
    check_batches_of_all(seen, team)
    if not seen:
        raise MergingError(
            "there is no calibration batch",
            where="calibration=",
            fix="Give at least one; a generator has them only once.",
        )
    for use in uses:
        yield use.axis, _known(selection, use, found.pop(use.axis), team)


def _known(selection: Selection, use: Use, parts: Sequence[Regression | Rows], team: Team | None) -> list[Known]:
    matrices = use.matrices(selection.tensor(use.axis.tensor))
    joints = (gathered(part, team).joint() for part in parts)
    return [joint.with_outputs(m[:, use.kept(i)]) for i, (m, joint) in enumerate(zip(matrices, joints, strict=True))]


def refusal(analysis: Analysis, batch: Sequence[Any]) -> str:
    """What the network's own code, or its graph, says against a batch; nothing if it runs."""
    said = objection(analysis.model, batch)
    if said:
        return said
    try:
        analysis.graph_for(batch)
    except Exception as error:  # noqa: BLE001 (a capture runs the user's code, which may raise anything)
        return told(error)
    return ""


def observe(
    selection: Selection,
    use: Use,
    node: Node,
    value: Tensor,
    found: Sequence[Regression | Rows],
    sample: Callable[[int, int], Tensor],
) -> None:
    """Add one batch: kept columns are features, the removed ones' contribution is the target."""
    weight = selection.tensor(use.axis.tensor)
    places = use.places(node)
    taken = (working(rows) for rows in places.rows(value, places.pick(value, sample)))
    for block, (matrix, rows, regression) in enumerate(zip(use.matrices(weight), taken, found, strict=True)):
        kept, gone = (part(block).to(rows.device) for part in (use.kept, use.gone))
        features, target = rows[:, kept], rows[:, gone] @ matrix[:, gone].to(rows).T
        regression.add(features, target)


def sampler(seed: int, plenty: float = 1) -> Callable[[int, int], Tensor]:
    """Chooses at most so many, times `plenty`, of the available positions, at random."""
    pick = torch.Generator("cpu").manual_seed(seed)
    return lambda available, limit: torch.randperm(available, generator=pick, device="cpu")[
        : max(1, round(plenty * limit))
    ]
