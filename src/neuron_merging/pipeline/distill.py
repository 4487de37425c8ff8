"""Distill a smaller network after its merge, on what it was fitted to, if that helps on other inputs.

A language model is distilled on texts, and a network that reads pictures on changed copies of the user's.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain

import torch
from torch import Tensor

from neuron_merging.calibration.output_divergence import find_output_parts, find_token_logits
from neuron_merging.channels.analysis import Analysis
from neuron_merging.config import CompressConfig
from neuron_merging.graph.example_inputs import flatten_inputs, infer_batch_size, slice_samples
from neuron_merging.graph.macs import estimate_work
from neuron_merging.inputs.augmentation import augment_pictures
from neuron_merging.inputs.batchnorm_inversion import InputBatch, mirror_batch
from neuron_merging.inputs.input_scale import is_picture
from neuron_merging.inputs.input_sets import count_samples, take_first_samples
from neuron_merging.inputs.text import find_text_input, reads_text_in_bfloat16, split_texts
from neuron_merging.inputs.user_batches import extract_inputs
from neuron_merging.merging.distillation import Distillation, distill
from neuron_merging.merging.protocol import StatisticsSource, uses_data
from neuron_merging.pipeline.build_network import PrunedNetwork
from neuron_merging.pipeline.prepared_inputs import PreparedInputs

TOKENS_PER_STEP = 256
"""Tokens of one gradient step, at least: texts may be short."""
PASSES = 2
"""How often each text is trained on."""
MAX_REPEATS = 4
"""How often each text of the user may come for each time that a self-generated one comes: there are fewer of them."""
MAX_WORK = {"fast": 0, "normal": 4 * 10**13, "best": 2 * 10**14}
"""Work that training on text may take in bfloat16, by effort, in units of `estimate_work`: minutes on a CPU by default.
"""
WORK_PER_STEP = 4
"""Cost of a gradient step in forward passes: the original's, the smaller network's, and the way back."""
FLOAT32_SLOWDOWN = 3
"""How much longer a gradient step takes in float32 than in bfloat16 on a CPU that multiplies both."""
MAX_PICTURE_WORK = {"fast": 0, "normal": 0, "best": 14 * 10**12}
"""The same for a network that reads pictures: about seven minutes of one core with the best effort. In fewer steps the
error falls, and scores hardly rise."""
MAX_PICTURE_STEPS = 3000
MIN_PICTURE_STEPS = 100
"""Fewer steps are not worth it: the first ones take the network away from the optimum of the fit."""
PICTURES_PER_STEP = 8
MIN_PICTURES, MAX_PICTURES = 12, 1024
"""Pictures to train on, at least and at most. One in four is held out."""


def distill_network(
    analysis: Analysis, cut: PrunedNetwork, settings: CompressConfig, inputs: PreparedInputs
) -> list[str]:
    """Train a merged network in place, if there is something to train it on; return a note if that helped."""
    if find_token_logits(analysis.graph) is not None:
        return distill_language_model(analysis, cut, settings, inputs)
    return distill_on_pictures(analysis, cut, settings, inputs)


def distill_on_pictures(
    analysis: Analysis, cut: PrunedNetwork, settings: CompressConfig, inputs: PreparedInputs
) -> list[str]:
    """Train all weights of a merged network in place on changed copies of the user's pictures; return a note if that
    helped.

    Few pictures are enough, because the original says what the outputs for any change of them are.
    """
    method = settings.method()
    alone = getattr(method, "processes", None) is None
    if inputs.given is None or not uses_data(method) or not alone:
        return []
    pictures = _join_pictures(analysis, inputs.given)
    size = analysis.fixed_batch_size or PICTURES_PER_STEP
    steps = _count_picture_steps(analysis, settings.input_effort, size)
    if pictures is None or not steps:
        return []
    held = torch.arange(len(pictures)) % 4 == 3
    whole = analysis.fixed_batch_size is None
    # Mirrored, because the fit has seen the pictures themselves.
    heldout = [mirror_batch((part,)) for part in torch.split(pictures[held], size) if whole or len(part) == size]
    assert inputs.sets.original is not None
    found = distill(
        cut.small,
        inputs.sets.original,
        _augment_without_end(pictures[~held], size, settings.seed),
        heldout,
        frozenset(),
        steps,
        settings.seed,
        parts=find_output_parts(analysis.graph),
        all_weights=True,
    )
    if not found.is_better:
        return []
    change = f"from {found.before:.2g} to {found.after:.2g} of their variance"
    what = f"distilled from the original on {int((~held).sum())} of the pictures in {found.steps} steps"
    return [f"{what}: on {count_samples(heldout)} others, mirrored, the error of the outputs fell {change}"]


def _join_pictures(analysis: Analysis, given: Iterable[object]) -> Tensor | None:
    """Return the user's pictures as one tensor; None if they are too few, of several sizes, or no pictures."""
    values = flatten_inputs(analysis.inputs)
    if len(values) != 1 or not is_picture(values[0]):
        return None
    batches = [flatten_inputs(batch)[0] for batch in take_first_samples(extract_inputs(given, analysis), MAX_PICTURES)]
    if len({batch.shape[1:] for batch in batches}) != 1 or sum(map(len, batches)) < MIN_PICTURES:
        return None
    return torch.cat(batches)


def _count_picture_steps(analysis: Analysis, effort: str, size: int) -> int:
    work = WORK_PER_STEP * size * estimate_work(analysis.graph) / infer_batch_size(analysis.inputs)
    steps = int(min(MAX_PICTURE_STEPS, MAX_PICTURE_WORK[effort] / work))
    return steps if steps >= MIN_PICTURE_STEPS else 0


def _augment_without_end(pictures: Tensor, size: int, seed: int) -> Iterator[InputBatch]:
    """Yield batches of changed pictures, each of the given ones as often as the others."""
    generator = torch.Generator("cpu").manual_seed(seed)
    waiting = torch.zeros(0, dtype=torch.int64, device="cpu")
    while True:
        while len(waiting) < size:
            waiting = torch.cat([waiting, torch.randperm(len(pictures), generator=generator, device="cpu")])
        chosen, waiting = waiting[:size], waiting[size:]
        yield (augment_pictures(pictures[chosen], generator),)


def distill_language_model(
    analysis: Analysis, cut: PrunedNetwork, settings: CompressConfig, inputs: PreparedInputs
) -> list[str]:
    """Train a merged language model in place; return a note if that helped."""
    method = settings.method()
    # Several processes have different batches, and each would train other values.
    alone = getattr(method, "processes", None) is None
    heldout, logits = inputs.sets.heldout, find_token_logits(analysis.graph)
    if not alone or not isinstance(method, StatisticsSource) or not heldout.batches or logits is None:
        return []
    texts, held = _list_texts(analysis, inputs), _split_all(analysis, heldout.batches)
    steps = _count_steps(analysis, texts, settings.input_effort) if texts else 0
    if not steps:
        return []
    assert inputs.sets.original is not None
    bfloat16 = reads_text_in_bfloat16(analysis)
    found = distill(cut.small, inputs.sets.original, texts, held, frozenset([logits]), steps, settings.seed, bfloat16)
    return [_describe(found, f"{count_samples(held)} {heldout.source}")] if found.is_better else []


def _list_texts(analysis: Analysis, inputs: PreparedInputs) -> list[InputBatch]:
    """Return the texts of each step: self-generated ones, and the user's so often that they have half of the say."""
    if find_text_input(analysis) is None:
        return []
    given = [] if inputs.calibration is None else extract_inputs(inputs.calibration, analysis)
    own, others = (_split_all(analysis, batches) for batches in (inputs.sets.fit.batches, given))
    return own + others * min(MAX_REPEATS, max(1, len(own) // max(1, len(others))))


def _split_all(analysis: Analysis, batches: Iterable[InputBatch]) -> list[InputBatch]:
    """Split batches into parts of about `TOKENS_PER_STEP`, whose scores over the vocabulary fit into memory."""
    found = []
    for batch in chain.from_iterable(split_texts(analysis, batch) for batch in batches):
        count = infer_batch_size(batch)
        size = max(1, TOKENS_PER_STEP * count // _count_tokens(analysis, batch))
        fixed = analysis.fixed_batch_size is not None
        found += [batch] if fixed else [slice_samples(batch, slice(i, i + size)) for i in range(0, count, size)]
    return found


def _count_tokens(analysis: Analysis, batch: InputBatch) -> int:
    position = find_text_input(analysis)
    assert position is not None, "texts come from a language model"
    return int(flatten_inputs(batch)[position].numel())


def _count_steps(analysis: Analysis, texts: Sequence[InputBatch], effort: str) -> int:
    """Return the number of gradient steps: `PASSES` over all texts, or fewer where that would take too long."""
    tokens = sum(_count_tokens(analysis, text) for text in texts) / len(texts)
    work_per_token = estimate_work(analysis.graph) / _count_tokens(analysis, analysis.inputs)
    slowdown = 1 if reads_text_in_bfloat16(analysis) else FLOAT32_SLOWDOWN
    return int(min(PASSES * len(texts), MAX_WORK[effort] / (WORK_PER_STEP * work_per_token * tokens * slowdown)))


def _describe(found: Distillation, heldout: str) -> str:
    change = f"from {found.before:.3f} to {found.after:.3f} nats per token"
    return f"distilled from the original in {found.steps} steps: on {heldout}, the divergence fell {change}"
