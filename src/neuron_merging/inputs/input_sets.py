"""The inputs of one compression: to fit on, to search on, held out.

`make_input_sets` makes them once, before anything is selected or fitted, and they are passed on as one value. What was
made for a network is kept with its analysis and on disk, so that later cuts of the same network share it. Inputs to fit
on and held-out inputs are never the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from torch import Tensor

from neuron_merging.channels.analysis import Analysis
from neuron_merging.graph.batch_size import get_forward_error
from neuron_merging.graph.example_inputs import infer_batch_size, slice_samples, take_samples
from neuron_merging.graph.macs import count_graph_macs
from neuron_merging.graph.pytree import flatten_inputs
from neuron_merging.inputs import synthetic
from neuron_merging.inputs.batchnorm_inversion import (
    NO_BATCH_NORMS,
    GeneratedInputs,
    InputBatch,
    find_stored_norms,
    invert_batch_norms,
)
from neuron_merging.inputs.text import encode_builtin_text, generate_text
from neuron_merging.inputs.user_batches import extract_inputs


@dataclass(frozen=True)
class SynthesisEffort:
    """How many inputs are remembered, in how many steps, and the multiply-accumulates that this may take."""

    inputs: int
    steps: int
    work: int


FIT_EFFORTS: dict[str, SynthesisEffort | None] = {
    "fast": None,
    "normal": SynthesisEffort(256, 40, 6 * 10**12),
    "best": SynthesisEffort(512, 80, 5 * 10**13),
}
"""To fit on, by name; the fast one remembers nothing."""
HELDOUT_EFFORTS: dict[str, SynthesisEffort | None] = {
    "fast": None,
    "normal": SynthesisEffort(64, 40, 2 * 10**12),
    "best": SynthesisEffort(128, 80, 10**13),
}
"""To judge by."""
MIN_INPUTS = 32
"""Inputs that are remembered even where they are dear: statistics of fewer are those of single inputs."""
TEXT_SLOWDOWN = 10
"""Text is written in as many passes as it has tokens, of small batches, which run at a fraction of the speed."""
PASSES_PER_STEP = 3
"""What a step costs in forward passes: forward, backward, and the statistics."""


def make_fit_inputs(
    analysis: Analysis, effort: str = "normal", seed: int = 0, samples: int | None = None
) -> GeneratedInputs:
    """Inputs that the network remembers, to fit on; or why there are none."""
    return _get_or_make(analysis, FIT_EFFORTS[effort], seed, samples, _synthesize_inputs)


def make_heldout_inputs(analysis: Analysis, effort: str = "normal", seed: int = 0) -> GeneratedInputs:
    """Others that it remembers, to judge by, or texts that it can read; or why there are none."""
    return _get_or_make(analysis, HELDOUT_EFFORTS[effort], seed + 1, None, _synthesize_or_read_text)


MAX_SEARCH_BATCHES = 8
"""Calibration batches that cuts are tried on."""
SEARCH_INPUT_RANGE = (16, 128)
"""Inputs of our own making that cuts are tried on, at least and at most."""
MAX_SEARCH_MACS = 2**40
"""Multiply-accumulates that a search may take on those beyond the least number."""
PASSES_PER_GROUP = 2
"""Forward passes of a search for each group: four sweeps of two other numbers each, half of the network in the mean."""
CALIBRATION_SOURCE = "calibration samples"

InputMaker = Callable[[Analysis, SynthesisEffort, int, int | None], GeneratedInputs]


def _get_or_make(
    analysis: Analysis, effort: SynthesisEffort | None, seed: int, samples: int | None, make: InputMaker
) -> GeneratedInputs:
    if effort is None:
        return GeneratedInputs(refusal="a fast merge makes none")
    key = (effort, seed, samples, make.__name__)
    if key not in analysis.input_cache:
        analysis.input_cache[key] = make(analysis, effort, seed, samples)
    found: GeneratedInputs = analysis.input_cache[key]
    return found


def find_largest_input_set(analysis: Analysis) -> tuple[InputBatch, ...]:
    """The most inputs that were synthesised for a network so far."""
    made = [own.batches for own in analysis.input_cache.values() if isinstance(own, GeneratedInputs)]
    return max(made, key=count_samples, default=())


def _synthesize_inputs(analysis: Analysis, effort: SynthesisEffort, seed: int, samples: int | None) -> GeneratedInputs:
    norms = find_stored_norms(analysis.graph)
    if not isinstance(norms, str):
        return invert_batch_norms(
            analysis, samples or _count_affordable_inputs(analysis, effort), steps=effort.steps, seed=seed
        )
    spoken = (
        generate_text(analysis, samples or effort.inputs, effort.work // TEXT_SLOWDOWN, seed)
        if norms == NO_BATCH_NORMS
        else None
    )
    return spoken if spoken is not None and spoken.batches else GeneratedInputs(refusal=norms)


def _synthesize_or_read_text(
    analysis: Analysis, effort: SynthesisEffort, seed: int, samples: int | None
) -> GeneratedInputs:
    made = _synthesize_inputs(analysis, effort, seed, samples)
    texts = None if made.batches else encode_builtin_text(analysis, samples or effort.inputs, effort.work, seed)
    return texts if texts is not None and texts.batches else made


def _count_affordable_inputs(analysis: Analysis, effort: SynthesisEffort) -> int:
    batch = infer_batch_size(analysis.inputs)
    if analysis.has_channels_along_batch:
        return 2 * batch  # one to fit on and one to try cuts on
    each = PASSES_PER_STEP * effort.steps * max(1, count_graph_macs(analysis.graph) // batch)
    return int(min(effort.inputs, max(MIN_INPUTS, effort.work // each)))


MIN_SPLIT_SIZE = 8
"""Samples of a batch that is not worth splitting."""


@dataclass(frozen=True)
class InputSet:
    """Batches that a network takes, and what they are, for people."""

    batches: tuple[InputBatch, ...]
    source: str
    guessed: bool = False
    """Whether nothing that the network knows of its data went into them."""

    def __str__(self) -> str:
        return f"{count_samples(self.batches):,} {self.source}"


def take_generated_or_fallback(made: GeneratedInputs, analysis: Analysis, count: int, seed: int) -> InputSet:
    """Inputs that the network remembers, as many as there are up to `count`; where there are none, others."""
    return (
        InputSet(_take_first_samples(made.batches, count), made.source)
        if made.batches
        else make_fallback_inputs(analysis, count, seed)
    )


def _take_first_samples(batches: Sequence[InputBatch], count: int) -> tuple[InputBatch, ...]:
    """As many samples, in batches as they are but for the last."""
    found: list[InputBatch] = []
    for batch in batches:
        left = count - sum(infer_batch_size(own) for own in found)
        if left > 0:
            found.append(take_samples(batch, left))
    return tuple(found)


def make_fallback_inputs(analysis: Analysis, count: int, seed: int) -> InputSet:
    """About `count` inputs that the network takes, and their source; the example where it takes nothing else."""
    kinds = _describe_inputs(analysis)
    made = (
        (_make_large_batches(analysis, count, seed) or _make_example_sized_batches(analysis, count, seed))
        if kinds
        else None
    )
    if made is None:
        return InputSet((analysis.inputs,), "example inputs", guessed=True)
    return InputSet(made, " and ".join(kinds), guessed=True)


def _make_large_batches(analysis: Analysis, count: int, seed: int) -> tuple[InputBatch, ...] | None:
    """In batches of a size of our own, if the network takes other sizes than the example's."""
    if analysis.has_channels_along_batch:
        return None
    made, size = _make_batches(analysis, count, seed), infer_batch_size(analysis.inputs)
    few = take_samples(made[0], size + 1) if count > size else _make_batches(analysis, size + 1, seed)[0]
    return None if get_forward_error(analysis.model, few) else made


def _make_example_sized_batches(analysis: Analysis, count: int, seed: int) -> tuple[InputBatch, ...] | None:
    """In batches of the example's size."""
    size = infer_batch_size(analysis.inputs)
    seeds = range(seed, seed + max(1, count // size))
    made = tuple(batch for own in seeds for batch in _make_batches(analysis, size, own))
    return None if get_forward_error(analysis.model, made[0]) else made


def split_batch_3_to_1(batch: InputBatch) -> tuple[InputBatch, InputBatch]:
    """The first three quarters of a batch, and the last; of a small one all, twice."""
    length = infer_batch_size(batch)
    if length < MIN_SPLIT_SIZE:
        return batch, batch
    return slice_samples(batch, slice(length - length // 4)), slice_samples(batch, slice(length - length // 4, None))


def split_batches_even_odd(batches: Sequence[InputBatch]) -> tuple[tuple[InputBatch, ...], tuple[InputBatch, ...]]:
    """Every other batch, and the rest; the halves of a single one."""
    if len(batches) != 1 or infer_batch_size(batches[0]) < 2:
        return tuple(batches[::2]), tuple(batches[1::2] or batches)
    half = -(-infer_batch_size(batches[0]) // 2)
    return (slice_samples(batches[0], slice(half)),), (slice_samples(batches[0], slice(half, None)),)


def _make_batches(analysis: Analysis, count: int, seed: int) -> tuple[InputBatch, ...]:
    return tuple(
        synthetic.synthesize_batches(analysis.inputs, count, seed, synthetic.find_token_inputs(analysis.graph))
    )


def _describe_inputs(analysis: Analysis) -> list[str]:
    """What is made up: other inputs are repeated from the example."""
    tokens = synthetic.find_token_inputs(analysis.graph)
    named = (_describe_input(value, i in tokens) for i, value in enumerate(flatten_inputs(analysis.inputs)))
    return list(dict.fromkeys(name for name in named if name))


def _describe_input(value: Any, token: bool) -> str:
    if token:
        return "random tokens"
    if synthetic.is_channels_last(value):
        return "synthetic images"
    if synthetic.is_signal(value):
        return {3: "synthetic series", 4: "synthetic images"}.get(value.ndim, "synthetic volumes")
    return "random numbers" if isinstance(value, Tensor) and value.ndim and synthetic.is_float_tensor(value) else ""


# All sets of one compression


@dataclass(frozen=True)
class InputRequest:
    """What a merging method asks to be synthesised: how much work, from which seed, and how many inputs to fit on."""

    effort: str = "normal"
    seed: int = 0
    samples: int | None = None


@dataclass(frozen=True)
class SearchInputs:
    """What candidate cuts are fitted on, and the probes that they are tried on.

    They differ, because few inputs explain themselves. Neither are held-out inputs, by which the result is judged: a
    cut that was chosen among many suits what it was chosen by.
    """

    fit: tuple[InputBatch, ...]
    probes: InputSet


@dataclass(frozen=True)
class InputSets:
    """The inputs of one compression.

    Attributes
    ----------
    fit
        Synthesised inputs that merges are fitted on; without batches where none were asked for or can be made.
    heldout
        Synthesised inputs that nothing is fitted on; likewise.
    search
        What candidate cuts are fitted and tried on, where a search takes place.
    """

    fit: GeneratedInputs
    heldout: GeneratedInputs
    search: SearchInputs | None = None


NOT_REQUESTED = GeneratedInputs(refusal="none were asked for")


def make_input_sets(
    analysis: Analysis,
    request: InputRequest,
    *,
    fit: bool = True,
    heldout: bool = True,
    search: bool = False,
    calibration: Iterable[Any] | None = None,
) -> InputSets:
    """Make the sets that are asked for; candidate cuts use the user's `calibration` batches too, if there are any."""
    own = make_fit_inputs(analysis, request.effort, request.seed, request.samples) if fit or search else NOT_REQUESTED
    held = make_heldout_inputs(analysis, request.effort, request.seed) if heldout else NOT_REQUESTED
    return InputSets(own, held, _make_search_inputs(analysis, request, own, calibration) if search else None)


def _make_search_inputs(
    analysis: Analysis, request: InputRequest, own: GeneratedInputs, calibration: Iterable[Any] | None
) -> SearchInputs:
    """Half of the inputs to fit on each, and calibration samples, three quarters and one quarter of each batch."""
    made = own if own.batches else make_heldout_inputs(analysis, request.effort, request.seed + 1)
    count = count_search_inputs(analysis)
    halves = (replace(made, batches=half) for half in split_batches_even_odd(made.batches))
    fit, probes = (take_generated_or_fallback(half, analysis, count, request.seed + i) for i, half in enumerate(halves))
    if calibration is None:
        return SearchInputs(fit.batches, probes)
    given = list(islice(extract_inputs(calibration, analysis), MAX_SEARCH_BATCHES))
    to_fit, to_try = zip(*(split_batch_3_to_1(batch) for batch in given), strict=True)
    if not made.batches:
        return SearchInputs(to_fit, InputSet(to_try, CALIBRATION_SOURCE))
    # A network is confident on what it was trained on: on few such samples nearly every cut looks harmless.
    source = f"{CALIBRATION_SOURCE} and {made.source}"
    return SearchInputs((*to_fit, *fit.batches), InputSet((*to_try, *probes.batches), source))


def count_search_inputs(analysis: Analysis) -> int:
    """How many inputs cuts are tried on: as many as are cheap."""
    if analysis.has_channels_along_batch:
        return infer_batch_size(analysis.inputs)
    least, most = SEARCH_INPUT_RANGE
    each = count_graph_macs(analysis.graph) // infer_batch_size(analysis.inputs)
    return max(least, min(most, MAX_SEARCH_MACS // max(1, each * PASSES_PER_GROUP * len(analysis.channels.groups))))


def count_samples(batches: Iterable[InputBatch]) -> int:
    """The number of samples in all batches."""
    return sum(map(infer_batch_size, batches))
