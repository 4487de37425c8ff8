"""The pruned network equals the original with zeroed channels, on every network of the zoo."""

from __future__ import annotations

from torch import Tensor

from neuron_merging.config import CompressConfig
from neuron_merging.pipeline import compress_analysis
from tests.pruning.zeroing import distance, run, with_dead_channels, without_readers
from tests.zoo.pruning import CLOSE, graphs, prune, with_weights


@graphs(lambda case: not case.spans)
def test_equals_the_original_without_the_readers(name: str) -> None:
    done = prune(name)
    reference = without_readers(done.model, done.result.plan, done.case.reads, done.case.contracts)
    for seed in (1, 2):
        inputs = done.case.inputs(seed)
        assert distance(run(done.small, inputs), run(reference, inputs)) < CLOSE


@graphs(lambda case: case.dead)
def test_removing_dead_channels_changes_nothing(name: str) -> None:
    done = prune(name)
    case, plan = done.case, done.result.plan
    dead = with_dead_channels(case.build(), plan, case.reads)
    settings = CompressConfig(ratio=0.5, criterion=norm, merger="none", scope="all")
    again = compress_analysis(with_weights(done.analysis, dead), settings, verify=False, judge=False)
    assert [(g.name, g.kept) for g in again.plan.groups] == [(g.name, g.kept) for g in plan.groups]
    assert distance(run(again.model, case.inputs(2)), run(dead, case.inputs(2))) < CLOSE


def norm(rows: Tensor) -> Tensor:
    return rows.norm(dim=1)
