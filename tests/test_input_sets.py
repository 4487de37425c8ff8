"""The inputs to fit on, to search on and to judge on are different."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import neuron_merging as nm
from neuron_merging.config import CompressConfig
from neuron_merging.inputs import input_sets
from neuron_merging.inputs.batchnorm_inversion import GeneratedInputs
from neuron_merging.inputs.input_sets import count_samples, split_batches_even_odd, take_fit_texts
from neuron_merging.inputs.text import SELF_GENERATED_TEXT
from neuron_merging.pipeline import compress, prepare_inputs, select_channels


def network() -> nm.Analysis:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3), nn.Flatten())
    net(torch.randn(64, 3, 8, 8))  # in training mode: the norm sees something
    return nm.analyse(net.eval(), torch.randn(1, 3, 8, 8))


def rows(batches: object) -> set[bytes]:
    found: set[bytes] = set()
    for (batch,) in batches:  # type: ignore[attr-defined]
        found |= {row.numpy().tobytes() for row in batch}
    return found


@pytest.mark.parametrize("given", [None, [torch.randn(32, 3, 8, 8, generator=torch.Generator().manual_seed(1))]])
def test_nothing_is_fitted_on_tried_on_and_judged_by_the_same(given: list[Tensor] | None) -> None:
    known, settings = network(), CompressConfig(calibration=given)
    search = prepare_inputs(known, settings, search=True).sets.search
    eval_set = prepare_inputs(known, CompressConfig()).eval_set
    assert search is not None and eval_set is not None
    parts = [rows(search.fit), rows(search.probes.batches), rows(eval_set.iterate_inputs())]
    assert all(parts) and all(not one & other for one, other in combinations(parts, 2))


def test_halves() -> None:
    two = [(torch.zeros(3),), (torch.ones(2),)]
    assert [[len(batch) for (batch,) in half] for half in split_batches_even_odd(two)] == [[3], [2]]
    assert [[batch.tolist() for (batch,) in half] for half in split_batches_even_odd([(torch.arange(3),)])] == [
        [[0, 1]],
        [[2]],
    ]
    one = [(torch.zeros(1),)]
    assert split_batches_even_odd(one) == ((one[0],), (one[0],)) and split_batches_even_odd([]) == ((), ())


def test_inputs_are_made_once_and_before_anything_is_selected(monkeypatch: pytest.MonkeyPatch) -> None:
    """One set to fit on and one to hold out; search, merging and judging share them."""
    stages: list[str] = []
    watched = (
        (input_sets, "invert_batch_norms"),
        (select_channels, "rank_channels"),
        (compress, "judge_network"),
    )
    for module, name in watched:
        real = getattr(module, name)

        def note(*given: object, _name: str = name, _real: Any = real, **options: object) -> Any:
            stages.append(_name)
            return _real(*given, **options)

        monkeypatch.setattr(module, name, note)
    nm.compress(network(), budget={"macs": 0.6})
    assert stages == ["invert_batch_norms", "invert_batch_norms", "rank_channels", "judge_network"]


def test_the_original_runs_once_on_each_heldout_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Choosing between two fits, rejecting harmful merges and the verdict read the same outputs."""
    known, real = network(), input_sets.call_model
    runs: list[object] = []
    monkeypatch.setattr(input_sets, "call_model", lambda model, batch: runs.append(batch) or real(model, batch))
    nm.compress(known, ratio=0.5)
    assert len(runs) == len(input_sets.make_heldout_inputs(known).batches) > 0


def test_layers_are_fitted_to_some_of_the_texts_and_to_all_other_inputs() -> None:
    batches = tuple((torch.zeros(4, 512, dtype=torch.long),) for _ in range(10))
    texts = take_fit_texts(GeneratedInputs(batches, source=SELF_GENERATED_TEXT))
    assert count_samples(texts) == input_sets.MAX_FIT_TOKENS // 512
    assert take_fit_texts(GeneratedInputs(batches, source="images")) is batches
    assert take_fit_texts(GeneratedInputs(refusal="there is no text")) == ()
