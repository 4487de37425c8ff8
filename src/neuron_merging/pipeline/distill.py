"""Distill a smaller language model after its merge, on texts that the fit has not seen, if that helps."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain, zip_longest

from neuron_merging.calibration.output_divergence import find_token_logits
from neuron_merging.channels.analysis import Analysis
from neuron_merging.config import CompressConfig
from neuron_merging.graph.example_inputs import flatten_inputs
from neuron_merging.graph.macs import estimate_work
from neuron_merging.inputs.batchnorm_inversion import InputBatch
from neuron_merging.inputs.input_sets import FIT_EFFORTS, count_samples
from neuron_merging.inputs.text import find_text_input, split_texts
from neuron_merging.inputs.user_batches import extract_inputs
from neuron_merging.merging.distillation import Distillation, distill_vectors
from neuron_merging.pipeline.build_network import PrunedNetwork
from neuron_merging.pipeline.prepared_inputs import PreparedInputs

PASSES = 2
"""How often each text is trained on."""
WORK_PER_STEP = 4
"""Cost of a gradient step in forward passes: the original's, the smaller network's, and the way back."""


def distill_language_model(
    analysis: Analysis, cut: PrunedNetwork, settings: CompressConfig, inputs: PreparedInputs
) -> list[str]:
    """Train the scales and biases of a merged language model in place; return a note if that helped."""
    heldout, logits = inputs.sets.heldout, find_token_logits(analysis.graph)
    if not inputs.sets.training.batches or not heldout.batches or logits is None:
        return []
    texts, held = _list_texts(analysis, inputs), _split_all(analysis, heldout.batches)
    steps = _count_steps(analysis, texts, settings.input_effort)
    assert inputs.sets.original is not None
    found = distill_vectors(cut.small, inputs.sets.original, texts, held, frozenset([logits]), steps, settings.seed)
    return [_describe(found, f"{count_samples(held)} {heldout.source}")] if found.is_better else []


def _list_texts(analysis: Analysis, inputs: PreparedInputs) -> list[InputBatch]:
    """Return the texts to train on, in parts that fit into memory: self-generated ones and the user's by turns."""
    given = [] if inputs.calibration is None else extract_inputs(inputs.calibration, analysis)
    sources = [_split_all(analysis, batches) for batches in (inputs.sets.training.batches, given)]
    return [text for pair in zip_longest(*sources) for text in pair if text is not None]


def _split_all(analysis: Analysis, batches: Iterable[InputBatch]) -> list[InputBatch]:
    return list(chain.from_iterable(split_texts(analysis, batch) for batch in batches))


def _count_steps(analysis: Analysis, texts: Sequence[InputBatch], effort: str) -> int:
    """Return the number of gradient steps: `PASSES` over all texts, or fewer where that would take too long."""
    position = find_text_input(analysis)
    assert position is not None, "texts come from a language model"
    tokens = sum(flatten_inputs(text)[position].numel() for text in texts) / len(texts)
    work_per_token = estimate_work(analysis.graph) / flatten_inputs(analysis.inputs)[position].numel()
    affordable = FIT_EFFORTS[effort].work / (WORK_PER_STEP * work_per_token * tokens)
    return int(min(PASSES * len(texts), affordable))


def _describe(found: Distillation, heldout: str) -> str:
    change = f"from {found.before:.3f} to {found.after:.3f} nats per token"
    return f"scales and biases were trained in {found.steps} steps: on {heldout}, the divergence fell {change}"
