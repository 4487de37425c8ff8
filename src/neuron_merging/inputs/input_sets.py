"""The inputs of one compression: to fit on, to search on, held out.

`make_input_sets` makes them once, before anything is selected or fitted, and they are passed on as one value. They are
cached with the analysis and on disk, so that later cuts of the same network reuse them. Inputs to fit on and held-out
inputs are never the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from neuron_merging.channels.analysis import Analysis
from neuron_merging.graph.batch_size import get_forward_error
from neuron_merging.graph.copying import copy_without_hooks
from neuron_merging.graph.example_inputs import (
    call_model,
    clone_inputs,
    flatten_inputs,
    flatten_outputs,
    infer_batch_size,
    map_batched,
    slice_samples,
    split_keyword_inputs,
    take_samples,
)
from neuron_merging.graph.macs import estimate_work
from neuron_merging.graph.process_state import disable_fused_attention
from neuron_merging.inputs import synthetic
from neuron_merging.inputs.batchnorm_inversion import (
    PASSES_PER_STEP,
    GeneratedInputs,
    InputBatch,
    invert_batch_norms,
    mirror_batch,
)
from neuron_merging.inputs.input_scale import (
    add_channel_dim,
    is_channels_last,
    is_picture,
    is_signal,
    is_synthesizable,
    is_waveform,
)
from neuron_merging.inputs.scale_from_norms import NO_BATCH_NORMS, draw_batches, find_stored_norms
from neuron_merging.inputs.text import (
    NOT_A_LANGUAGE_MODEL,
    SELF_GENERATED_TEXT,
    encode_builtin_text,
    find_text_input,
    generate_text,
)
from neuron_merging.inputs.user_batches import extract_inputs


@dataclass(frozen=True)
class SynthesisEffort:
    """How many inputs to synthesise, at most and at least, the gradient steps, and the work that this may take.

    Mirrored copies count, and cost nothing: where a network takes them, half of the work is saved.
    """

    inputs: int
    least: int
    steps: int
    work: int
    """In units of `estimate_work`: one core of a CPU does 5·10¹⁰ to 10¹¹ a second. It decides how many inputs beyond
    the least number are made."""
    max_work: int
    """Work that even the least number of inputs may take: an expensive network gets fewer steps."""


MIN_STEPS = 3
"""Fewest gradient steps: the first ones change most."""
CHEAP_SHARE = 0.05
"""Share of an effort's work that twice as many steps may take: ten seconds at most by default."""
FIT_EFFORTS = {
    "fast": SynthesisEffort(64, 16, 6, 2 * 10**11, 12 * 10**11),
    "normal": SynthesisEffort(256, 48, 20, 12 * 10**12, 12 * 10**12),
    "best": SynthesisEffort(512, 64, 40, 5 * 10**13, 10**15),
}
"""Effort for inputs to fit on, by name. With the search and the fit, "fast" takes at most 30 seconds and "normal" at
most five minutes on two cores, for networks of up to 5 GMACs."""
HELDOUT_EFFORTS = {
    "fast": SynthesisEffort(16, 8, 6, 5 * 10**10, 6 * 10**11),
    "normal": SynthesisEffort(48, 16, 15, 10**12, 3 * 10**12),
    "best": SynthesisEffort(128, 32, 40, 10**13, 10**15),
}
"""Effort for held-out inputs, by name."""
TEXT_WORK_SHARE = 0.75
"""Share of the work that one pass of all texts may take. Writing them takes several times as long as a pass: each token
is a pass of its own with a small batch, which runs at a fraction of the speed."""
MAX_FIT_TOKENS = 16384
"""Tokens of self-generated text that layers are fitted to, at most."""
PASSES_PER_TEXT = 4
"""Passes of a held-out text: the original and several candidates, whose logits are too large to be kept."""


def make_fit_inputs(
    analysis: Analysis, effort: str = "normal", seed: int = 0, samples: int | None = None
) -> GeneratedInputs:
    """Generate inputs to fit on; the result states the reason if there are none."""
    return _get_or_make(analysis, FIT_EFFORTS[effort], seed, samples, _synthesize_mirrored_inputs)


def make_heldout_inputs(analysis: Analysis, effort: str = "normal", seed: int = 0) -> GeneratedInputs:
    """Generate held-out inputs, from another seed than those to fit on, or encode built-in text."""
    return _get_or_make(analysis, HELDOUT_EFFORTS[effort], seed + 1, None, _synthesize_or_read_text)


MAX_SEARCH_BATCHES = 8
"""Calibration batches that a search uses at most."""
SEARCH_INPUT_RANGES = {"fast": (4, 16), "normal": (16, 64), "best": (16, 128)}
"""Least and largest number of generated inputs that a search tries cuts on, by effort."""
MAX_SEARCH_WORK = 2**40
"""Work of a search up to which it uses more than the least number of inputs, in units of `estimate_work`."""
PASSES_PER_GROUP = 2
"""Estimated forward passes of a search for each group: its variations run only the operators downstream."""
MAX_TRIAL_WORK = {"fast": 2 * 10**12, "normal": 2**43, "best": 2**45}
"""Work that trial cuts of all groups may take, by effort: minutes on a CPU by default. Beyond it, costs of cuts are
estimated from gradients. Beyond that of "normal", layers are not fitted in sequence."""
CALIBRATION_SOURCE = "calibration samples"

InputMaker = Callable[[Analysis, SynthesisEffort, int, int | None], GeneratedInputs]


def _get_or_make(
    analysis: Analysis, effort: SynthesisEffort, seed: int, samples: int | None, make: InputMaker
) -> GeneratedInputs:
    key = (effort, seed, samples, make.__name__)
    if key not in analysis.input_cache:
        analysis.input_cache[key] = make(analysis, effort, seed, samples)
    found: GeneratedInputs = analysis.input_cache[key]
    return found


def find_largest_input_set(analysis: Analysis) -> tuple[InputBatch, ...]:
    """Return the largest set of inputs that was generated for a network so far."""
    generated = [own.batches for own in analysis.input_cache.values() if isinstance(own, GeneratedInputs)]
    return max(generated, key=count_samples, default=())


def _synthesize_mirrored_inputs(
    analysis: Analysis, effort: SynthesisEffort, seed: int, samples: int | None
) -> GeneratedInputs:
    return _synthesize_inputs(analysis, effort, seed, samples, mirror=samples is None)


def _synthesize_inputs(
    analysis: Analysis, effort: SynthesisEffort, seed: int, samples: int | None, mirror: bool = False
) -> GeneratedInputs:
    norms = find_stored_norms(analysis.graph)
    if not isinstance(norms, str):
        count, steps = _plan_descent(analysis, effort, samples)
        return invert_batch_norms(analysis, count, steps=steps, seed=seed, mirror=mirror)
    text = (
        generate_text(analysis, samples or effort.inputs, int(effort.work * TEXT_WORK_SHARE), seed)
        if norms == NO_BATCH_NORMS
        else None
    )
    if text is None or text.batches:
        return text or GeneratedInputs(refusal=norms)
    return GeneratedInputs(refusal=norms if text.refusal == NOT_A_LANGUAGE_MODEL else text.refusal)


def _synthesize_or_read_text(
    analysis: Analysis, effort: SynthesisEffort, seed: int, samples: int | None
) -> GeneratedInputs:
    """Synthesise held-out inputs or encode built-in text, which comes first for a language model.

    A fit to self-generated text is better on such text than on any that people write.
    """
    count = samples or effort.inputs
    if find_text_input(analysis) is not None:
        text = encode_builtin_text(analysis, count, effort.work // PASSES_PER_TEXT, seed)
        if text.batches:
            return text
    generated = _synthesize_inputs(analysis, effort, seed, samples)
    text = GeneratedInputs() if generated.batches else encode_builtin_text(analysis, count, effort.work, seed)
    return text if text.batches else generated


def _plan_descent(analysis: Analysis, effort: SynthesisEffort, samples: int | None = None) -> tuple[int, int]:
    """Return how many inputs to synthesise, and in how many steps: expensive networks get fewer of both.

    Small networks get twice as many steps, which cost little: the statistics match better, and large cuts gain.
    """
    work_per_step = PASSES_PER_STEP * max(1, estimate_work(analysis.graph) // infer_batch_size(analysis.inputs))
    affordable = effort.work // (effort.steps * work_per_step)
    count = analysis.round_up_samples(samples or int(min(effort.inputs, max(effort.least, affordable))))
    if samples is not None:
        return count, effort.steps
    work = count * work_per_step
    if 2 * effort.steps * work <= CHEAP_SHARE * effort.work:
        return count, 2 * effort.steps
    return count, int(min(effort.steps, max(MIN_STEPS, effort.max_work // work)))


def explain_fewer_steps(generated: GeneratedInputs, effort: str) -> list[str]:
    """Return a note if inputs were synthesised in fewer steps than usual, to keep the time that an effort promises."""
    usual = FIT_EFFORTS[effort].steps
    if not generated.batches or not 0 < generated.steps < usual:
        return []
    return [f"an expensive network: inputs were synthesised in {generated.steps} steps, usually {usual}"]


MIN_SPLIT_SIZE = 8
"""Batches with fewer samples are not split."""


@dataclass(frozen=True)
class InputSet:
    """Batches that a network takes, and what they are, for the summary."""

    batches: tuple[InputBatch, ...]
    source: str
    guessed: bool = False
    """Whether they are unrelated to the training data, such as noise or random tokens."""

    def __str__(self) -> str:
        return f"{count_samples(self.batches):,} {self.source}"


def take_generated_or_fallback(generated: GeneratedInputs, analysis: Analysis, count: int, seed: int) -> InputSet:
    """Take up to `count` generated inputs; where there are none, make fallback inputs."""
    return (
        InputSet(
            take_first_samples(generated.batches, analysis.round_up_samples(count)),
            generated.source,
            guessed=not generated.resembles_training,
        )
        if generated.batches
        else make_fallback_inputs(analysis, count, seed)
    )


def take_first_samples(batches: Iterable[InputBatch], count: int) -> tuple[InputBatch, ...]:
    """Take so many samples; only the last batch is cut."""
    found: list[InputBatch] = []
    for batch in batches:
        left = count - sum(infer_batch_size(own) for own in found)
        if left > 0:
            found.append(take_samples(batch, left))
    return tuple(found)


def take_fit_texts(texts: GeneratedInputs) -> tuple[InputBatch, ...]:
    """Take the self-generated texts that layers are fitted to: more make statistics dearer, and fits hardly better.

    Training after the fit reads them all.
    """
    if texts.source != SELF_GENERATED_TEXT or not texts.batches:
        return texts.batches
    values = [value for value in flatten_inputs(texts.batches[0]) if isinstance(value, Tensor)]
    tokens = max(value.shape[1] for value in values if value.ndim == 2)  # a mask may have more dimensions
    return take_first_samples(texts.batches, max(1, MAX_FIT_TOKENS // tokens))


def make_fallback_inputs(analysis: Analysis, count: int, seed: int) -> InputSet:
    """Make about `count` synthetic inputs that the network takes; return the example inputs if it takes no others."""
    kinds, size = _describe_inputs(analysis), infer_batch_size(analysis.inputs)
    generated = tuple(make_synthetic_batches(analysis, count, seed)) if kinds else ()
    if not generated or get_forward_error(analysis.model, take_samples(generated[0], size)):
        return InputSet((analysis.inputs,), "example inputs", guessed=True)
    return InputSet(generated, " and ".join(kinds), guessed=True)


def make_synthetic_batches(analysis: Analysis, count: int, seed: int) -> Iterator[InputBatch]:
    """Yield at least `count` inputs like the example, drawn in large batches and split if the batch size is fixed."""
    count = analysis.round_up_samples(count)
    size = analysis.round_up_samples(synthetic.choose_batch_size(analysis.inputs, count))
    for batch in draw_batches(analysis, count, seed, size):
        yield from analysis.split_batch(batch)


def mix_pairs(batches: Sequence[InputBatch]) -> tuple[InputBatch, ...]:
    """Return the mean of each input and its neighbour, as in mixup; none for fewer than two inputs of numbers.

    Their pixels are in range, but they match no statistics of the network: the descent that made the inputs did not see
    them.
    """
    values = flatten_inputs(batches[0]) if batches else []
    if count_samples(batches) < 2 or not any(isinstance(v, Tensor) and v.is_floating_point() for v in values):
        return ()
    # A network of batch size 1 has its neighbours in the next batch.
    neighbours = (
        [*batches[1:], batches[0]]
        if infer_batch_size(batches[0]) == 1
        else [map_batched(batch, lambda _, value: value.roll(1, 0)) for batch in batches]
    )
    return tuple(_mix_batches(*pair) for pair in zip(batches, neighbours, strict=True))


def _mix_batches(first: InputBatch, second: InputBatch) -> InputBatch:
    """Return the mean of two batches; whole numbers and what has no batch axis are those of the first."""
    others = flatten_inputs(second)

    def mix(i: int, value: Tensor) -> Tensor:
        return (value + others[i]) / 2 if value.is_floating_point() and value.shape == others[i].shape else value

    return map_batched(first, mix)


def split_batch_3_to_1(batch: InputBatch) -> tuple[InputBatch, InputBatch]:
    """Split a batch 3 to 1; a batch that is too small is returned twice."""
    length = infer_batch_size(batch)
    if length < MIN_SPLIT_SIZE:
        return batch, batch
    return slice_samples(batch, slice(length - length // 4)), slice_samples(batch, slice(length - length // 4, None))


def split_batches_3_to_1(batches: Iterable[InputBatch]) -> tuple[list[InputBatch], list[InputBatch]]:
    """Split batches 3 to 1: each of them, or every fourth apart if they are too small. A few small ones are in both."""
    given = list(batches)
    if len(given) >= MIN_SPLIT_SIZE and max(map(infer_batch_size, given)) < MIN_SPLIT_SIZE:
        return [batch for i, batch in enumerate(given) if i % 4 != 3], given[3::4]
    pairs = [split_batch_3_to_1(batch) for batch in given]
    return [fit for fit, _ in pairs], [held for _, held in pairs]


def split_batches_even_odd(batches: Sequence[InputBatch]) -> tuple[tuple[InputBatch, ...], tuple[InputBatch, ...]]:
    """Split batches into those at even and odd positions; a single batch is split in half."""
    if len(batches) != 1 or infer_batch_size(batches[0]) < 2:
        return tuple(batches[::2]), tuple(batches[1::2] or batches)
    half = -(-infer_batch_size(batches[0]) // 2)
    return (slice_samples(batches[0], slice(half)),), (slice_samples(batches[0], slice(half, None)),)


def split_single_batch(batches: Sequence[InputBatch], analysis: Analysis) -> tuple[InputBatch, ...]:
    """Split a single batch in half, if it is large enough and the network takes any batch size."""
    if len(batches) != 1 or infer_batch_size(batches[0]) < 2 * MIN_SPLIT_SIZE or analysis.fixed_batch_size is not None:
        return tuple(batches)
    first, second = split_batches_even_odd(batches)
    return *first, *second


def _describe_inputs(analysis: Analysis) -> list[str]:
    """Return descriptions of the synthetic inputs; other inputs are repeated from the example and not named."""
    tokens = synthetic.find_token_inputs(analysis.graph)
    values = [
        add_channel_dim(value, is_waveform(analysis.graph, name, value))
        for name, value in zip(analysis.graph.inputs, flatten_inputs(analysis.inputs), strict=True)
    ]
    named = (_describe_input(value, i in tokens) for i, value in enumerate(values))
    return list(dict.fromkeys(name for name in named if name))


def _describe_input(value: Any, token: bool) -> str:
    if token:
        return "random tokens"
    if is_channels_last(value):
        return "synthetic images"
    if is_signal(value):
        return {3: "synthetic series", 4: "synthetic images"}.get(value.ndim, "synthetic volumes")
    return "random numbers" if is_synthesizable(value) and value.ndim else ""


# All sets of one compression


@dataclass(frozen=True)
class InputRequest:
    """The inputs that a merging method needs: effort, seed, and the number of inputs to fit on (None: by effort)."""

    effort: str = "normal"
    seed: int = 0
    samples: int | None = None


@dataclass(frozen=True)
class SearchInputs:
    """The inputs that candidate cuts are fitted on, and the probes that they are tried on.

    They differ, because a fit looks too good on its own inputs if these are few. Neither are held-out inputs: a cut
    that was chosen among many looks too good on the inputs that it was chosen by.
    """

    fit: tuple[InputBatch, ...]
    probes: InputSet


MAX_KEPT_ENTRIES = 2**24
"""Output entries that are kept (64 MiB in float32). A language model's logits exceed that; they are recomputed."""


class OriginalOutputs:
    """The original's outputs, batch by batch. Each batch runs once; its outputs are kept while there is room."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._copy = copy_without_hooks(model).eval()
        self._kept: dict[tuple[int, ...], tuple[InputBatch, list[Tensor]]] = {}
        self._room = MAX_KEPT_ENTRIES

    @torch.no_grad()
    def compute(self, batch: InputBatch) -> list[Tensor]:
        """Return all output tensors for a batch."""
        # Keyed by identity: batches are made once and passed on. Keeping the batch keeps its ids valid.
        key = tuple(id(value) for value in flatten_inputs(batch))
        if key in self._kept:
            return self._kept[key][1]
        outputs = self.run(batch)
        size = sum(value.numel() for value in outputs)
        if size <= self._room:
            self._room -= size
            self._kept[key] = tuple(batch), outputs
        return outputs

    @torch.no_grad()
    def run(self, batch: InputBatch) -> list[Tensor]:
        """Return all output tensors for a batch that does not come again, and keep nothing."""
        with disable_fused_attention():
            return flatten_outputs(call_model(self._copy, clone_inputs(batch)))


NOT_REQUESTED = GeneratedInputs(refusal="no inputs were requested")


@dataclass(frozen=True)
class InputSets:
    """The inputs of one compression.

    Attributes
    ----------
    fit
        Generated inputs that merges are fitted on; without batches if none are needed or possible.
    heldout
        Generated inputs that nothing is fitted on; likewise.
    search
        The inputs that candidate cuts are fitted and tried on, if there is a search.
    original
        The original's outputs on held-out inputs. Choosing a fit, rejecting harmful merges and judging share them.
    """

    fit: GeneratedInputs
    heldout: GeneratedInputs
    search: SearchInputs | None = None
    original: OriginalOutputs | None = None


def make_input_sets(
    analysis: Analysis,
    request: InputRequest,
    *,
    fit: bool = True,
    heldout: bool = True,
    search: bool = False,
    calibration: Iterable[Any] | None = None,
) -> InputSets:
    """Make the requested sets. A search also uses the user's `calibration` batches, if there are any."""
    own = make_fit_inputs(analysis, request.effort, request.seed, request.samples) if fit or search else NOT_REQUESTED
    held = make_heldout_inputs(analysis, request.effort, request.seed) if heldout else NOT_REQUESTED
    to_search = _make_search_inputs(analysis, request, own, calibration) if search else None
    return InputSets(own, held, to_search, OriginalOutputs(analysis.model))


def _make_search_inputs(
    analysis: Analysis, request: InputRequest, own: GeneratedInputs, calibration: Iterable[Any] | None
) -> SearchInputs:
    """Split generated inputs in half for fit and probes, and each calibration batch 3 to 1."""
    generated = own if own.batches else make_heldout_inputs(analysis, request.effort, request.seed + 1)
    given = None if calibration is None else extract_inputs(calibration, analysis, MAX_SEARCH_BATCHES)
    to_fit, to_try = ([], []) if given is None else split_batches_3_to_1(given)
    if to_fit and not generated.batches:
        return SearchInputs(tuple(to_fit), InputSet(tuple(to_try), CALIBRATION_SOURCE))
    count = count_search_inputs(analysis, request.effort)
    halves = (replace(generated, batches=half) for half in split_batches_even_odd(generated.unmirrored))
    # Statistics of the fit take one pass, so all of its half is used. Every cut that is tried runs all probes.
    most = max(count, count_samples(generated.unmirrored))
    fit, probes = (
        take_generated_or_fallback(half, analysis, own, request.seed + i)
        for i, (half, own) in enumerate(zip(halves, (most, count), strict=True))
    )
    if generated.mirrored:
        fit = replace(fit, batches=(*fit.batches, *map(mirror_batch, fit.batches)))
    if not to_fit:
        return SearchInputs(fit.batches, probes)
    # A network is confident on its training data, so nearly every cut looks harmless on a few such samples.
    source = f"{CALIBRATION_SOURCE} and {generated.source}"
    return SearchInputs((*to_fit, *fit.batches), InputSet((*to_try, *probes.batches), source))


MAX_JOINED_SAMPLES = 512
"""Samples up to which synthesised inputs join the user's."""
JOINED_PRODUCT = 4096
"""The number of real samples times the number of synthesised inputs that join them. Few real samples leave wide layers
undetermined, and ours steady the fit; every real sample more makes that less necessary, while what ours get wrong stays
wrong. So all of ours join up to 16 samples, 64 join 64, and 16 join 256."""


def join_few_samples(analysis: Analysis, calibration: Iterable[Any], own: GeneratedInputs) -> Iterable[Any]:
    """Return the user's batches, followed by synthesised inputs if the user gave few samples."""
    if not own.resembles_training:
        return calibration
    given = max(1, count_samples(extract_inputs(calibration, analysis)))
    count = min(JOINED_PRODUCT // given, MAX_JOINED_SAMPLES - given)
    joined = take_first_samples(own.batches, analysis.round_up_samples(max(0, count)))
    return [*calibration, *(_to_user_batch(batch) for batch in joined)] if joined else calibration


MAX_ZOOMED_PICTURES, ZOOMS_PER_PICTURE = 128, 3
"""Pictures up to which zoomed copies join the user's, and the most copies of each."""


def add_zoomed_pictures(analysis: Analysis, calibration: Iterable[Any], seed: int = 0) -> Iterable[Any]:
    """Return the user's batches, followed by zoomed copies of few pictures.

    Without batch norms nothing can be synthesised that steadies a fit to few pictures. The original answers for zoomed
    ones as well as for the others.
    """
    values = flatten_inputs(analysis.inputs)
    if len(values) != 1 or not is_picture(values[0]) or not isinstance(find_stored_norms(analysis.graph), str):
        return calibration
    given = [flatten_inputs(batch)[0] for batch in extract_inputs(calibration, analysis)]
    room = MAX_ZOOMED_PICTURES - sum(map(len, given))
    if room <= 0 or len({value.shape[1:] for value in given}) != 1:
        return calibration
    pictures = torch.cat(given).repeat(ZOOMS_PER_PICTURE, 1, 1, 1)[: analysis.round_up_samples(room)]
    return [*calibration, (synthetic.zoom_pictures(pictures, seed),)]


def _to_user_batch(batch: InputBatch) -> tuple[Any, ...]:
    """Return a batch as a user would give it: positional inputs, then the tensors among the keyword inputs."""
    positional, named = split_keyword_inputs(batch)
    return (*positional, *(value for value in named.values() if isinstance(value, Tensor)))


def count_search_inputs(analysis: Analysis, effort: str = "normal") -> int:
    """Return the number of inputs that cuts are tried on: as many as `MAX_SEARCH_WORK` allows."""
    least, most = SEARCH_INPUT_RANGES[effort]
    return max(least, min(most, MAX_SEARCH_WORK // max(1, _estimate_search_work(analysis))))


def _estimate_search_work(analysis: Analysis) -> int:
    """Estimate the work of a search on one input."""
    work_per_input = estimate_work(analysis.graph) // infer_batch_size(analysis.inputs)
    return work_per_input * PASSES_PER_GROUP * len(analysis.channels.groups)


def is_search_expensive(analysis: Analysis, effort: str = "normal") -> bool:
    """Return whether trial cuts of all groups, on the least number of inputs, exceed `MAX_TRIAL_WORK`."""
    return _estimate_search_work(analysis) * SEARCH_INPUT_RANGES[effort][0] > MAX_TRIAL_WORK[effort]


WORK_PER_SECOND = 5 * 10**10
"""Work that one core of a CPU does in a second, in units of `estimate_work`: from ResNet-56 and EfficientNet-Lite0."""


def estimate_seconds(analysis: Analysis, effort: str, search: bool) -> float:
    """Estimate how long it takes to synthesise inputs from batch norms and to search for a cut, on this machine."""
    work = 0
    if not isinstance(find_stored_norms(analysis.graph), str):
        for own in (FIT_EFFORTS[effort], HELDOUT_EFFORTS[effort]):
            passes = PASSES_PER_STEP * math.prod(_plan_descent(analysis, own))
            work += passes * estimate_work(analysis.graph) // infer_batch_size(analysis.inputs)
    if search and not is_search_expensive(analysis, effort):
        work += count_search_inputs(analysis, effort) * _estimate_search_work(analysis)
    return work / WORK_PER_SECOND / max(1, torch.get_num_threads())


def count_samples(batches: Iterable[InputBatch]) -> int:
    """Count the samples in all batches."""
    return sum(map(infer_batch_size, batches))
