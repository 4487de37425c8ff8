"""spoken: text of a language model's own.

A network that gives, for every place of a text, scores of the token that comes next, can write text itself: token by
token, each drawn from what it says. Such text is far more like what it was trained on than tokens at random.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_structure, tree_unflatten

from neuron_merging import progress
from neuron_merging.channels.analysis import Analysis
from neuron_merging.graph.execution import run
from neuron_merging.graph.macs import total_macs
from neuron_merging.graph.trees import flat
from neuron_merging.statistics import synthetic
from neuron_merging.statistics.remembered import Batch, Remembered

SPOKEN = "texts that the network wrote"
BATCH = 32
NONE = "the network is no language model that could write"


@torch.no_grad()
def speak(analysis: Analysis, count: int, work: int, seed: int) -> Remembered:
    """Texts of the example's length, as many as the work allows; or why there are none."""
    place = _place(analysis)
    if place is None:
        return Remembered(refusal=NONE)
    length = flat(analysis.inputs)[place].shape[1]
    each = length * max(1, total_macs(analysis.graph) // synthetic.batch_size(analysis.inputs))
    count = min(count, work // each)
    if count < 2:
        return Remembered(refusal="a text of its own would take the network too long")
    sizes = [min(BATCH, count - start) for start in range(0, count, BATCH)]
    pick = torch.Generator("cpu").manual_seed(seed)
    made = tuple(_text(analysis, place, size, pick) for size in progress.each(sizes, "writing texts"))
    return Remembered(made, source=SPOKEN)


def _place(analysis: Analysis) -> int | None:
    """The input of tokens, where the network gives scores of the next one at each place, and looks only back."""
    kinds = synthetic.tokens_of(analysis.graph)
    inputs = flat(analysis.inputs)
    if len(kinds) != 1 or analysis.channels_along_batch:
        return None
    ((place, count),) = kinds.items()
    value = inputs[place]
    scores = analysis.graph.shapes.get(analysis.graph.outputs[0].name, ()) if analysis.graph.outputs else ()
    fits = value.ndim == 2 and value.shape[1] > 1 and tuple(scores) == (*value.shape, count)
    return place if fits and _looks_back(analysis, place, count) else None


def _looks_back(analysis: Analysis, place: int, kinds: int) -> bool:
    """Whether another last token leaves all that was said before as it was."""
    other = list(flat(analysis.inputs))
    other[place] = other[place].clone()
    other[place][:, -1] = (other[place][:, -1] + 1) % kinds
    before, after = (_scores(analysis, _batch(analysis, values)) for values in (flat(analysis.inputs), other))
    return torch.allclose(before[:, :-1], after[:, :-1], atol=1e-4) and not torch.equal(before[:, -1], after[:, -1])


def _text(analysis: Analysis, place: int, size: int, pick: torch.Generator) -> Batch:
    """Token by token; the first is drawn from all alike, those that are still to come do not matter."""
    (start,) = synthetic.probes(analysis.inputs, size, 0, synthetic.tokens_of(analysis.graph), size=size)
    values = list(flat(start))
    text = values[place]
    kinds = synthetic.tokens_of(analysis.graph)[place]
    text[:, 0] = torch.randint(kinds, (size,), generator=pick, device="cpu").to(text)
    for at in range(1, text.shape[1]):
        said = _scores(analysis, _batch(analysis, values))[:, at - 1].float().softmax(-1).cpu()
        text[:, at] = torch.multinomial(torch.nan_to_num(said), 1, generator=pick)[:, 0].to(text)
    return _batch(analysis, values)


def _scores(analysis: Analysis, batch: Batch) -> Tensor:
    graph = analysis.graph_for(batch)
    found: Tensor = run(graph, flat(batch), graph.tensors)[0]
    return found


def _batch(analysis: Analysis, values: Sequence[Any]) -> Batch:
    return tuple(tree_unflatten(list(values), tree_structure(list(analysis.inputs))))
