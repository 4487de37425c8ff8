"""Make text inputs for language models: self-generated text, and built-in text of Python's manual and library.

A causal language model generates text token by token from its own predictions; such text is far closer to the
training data than random tokens. A language model whose tokenizer is known is judged on passages of Python's manual and
library, because it looks too good on text of its own if it was fitted to that; a sentence encoder is judged on
sentences of the manual. They are only held-out inputs: a sentence encoder that was fitted to them got better on such
sentences and worse on everyday ones.
"""

from __future__ import annotations

import math
import os
import re
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_structure, tree_unflatten

from neuron_merging import progress
from neuron_merging.channels.analysis import Analysis
from neuron_merging.errors import MergingError
from neuron_merging.graph.copying import copy_without_hooks
from neuron_merging.graph.example_inputs import (
    draw_tokens,
    flatten_inputs,
    get_leaf_names,
    infer_batch_size,
    repeat_entries,
    slice_samples,
)
from neuron_merging.graph.half_precision import is_bfloat16_fast
from neuron_merging.graph.interpreter import run_graph
from neuron_merging.graph.macs import count_graph_macs
from neuron_merging.graph.process_state import (
    disable_fused_attention,
    restore_rng,
    reuse_freed_memory,
    seed_rng,
    silence_logging,
    silence_stdout,
)
from neuron_merging.graph.user_code import import_module_or_raise
from neuron_merging.inputs import synthetic
from neuron_merging.inputs.batchnorm_inversion import GeneratedInputs, InputBatch

SELF_GENERATED_TEXT = "self-generated texts"
NOT_A_LANGUAGE_MODEL = "the network is not a causal language model"
MIN_TEXT_TOKENS, MAX_TEXT_TOKENS = 1024, 65536
"""Tokens that a model with a key/value cache generates at least, even where it is expensive, and at most."""
TEXT_LENGTH = 256
"""Tokens per text. Fits to texts of 128 tokens were worse on long texts, with as many tokens altogether."""
TEMPERATURES = 1.0, 1.2
"""Temperatures of the texts that begin with any token of the vocabulary, and of those that begin with a common one.
Texts of both together cover more of what a user may read or write than texts of one. Texts that begin with the token
that begins a text cover less: hardly any of SmolLM2's are code."""
MAX_BATCH_LOGITS = 2**24
"""Entries of the logits of one batch (64 MiB in float32): the vocabulary may be large."""
SHORT_LENGTH = 32
"""Tokens of the texts that common tokens are drawn from."""
GENERATION_BATCH_SIZE, TEXT_BATCH_SIZE = 64, 32
"""Texts that are generated at the same time, and texts of a batch, at most."""
MIN_BFLOAT16_MACS = 10**11
"""Multiply-accumulates of all texts from which networks read and write them in bfloat16: below, float32 takes seconds.
"""
MAX_BFLOAT16_DIVERGENCE = 0.02
"""Divergence in nats per token that bfloat16 may cause."""


@torch.no_grad()
def generate_text(analysis: Analysis, count: int, work: int, seed: int) -> GeneratedInputs:
    """Generate texts, as many as the work allows; or state why there are none.

    A model of the transformers library generates with its key/value cache, which takes one pass per text; any other
    model takes a pass per token. Half of the texts start with any token of the vocabulary. The others start with tokens
    of these texts, so with common ones.
    """
    position = find_text_input(analysis)
    if position is None:
        return GeneratedInputs(refusal=NOT_A_LANGUAGE_MODEL)
    length = _choose_text_length(analysis, position)
    generates = _has_cached_generation(analysis)
    example_length = flatten_inputs(analysis.inputs)[position].shape[1]
    macs_per_text = count_graph_macs(analysis.graph) // infer_batch_size(analysis.inputs) * length // example_length
    affordable = work // max(1, macs_per_text * (1 if generates else length))
    if generates:
        affordable = min(max(affordable, MIN_TEXT_TOKENS // length), max(2, MAX_TEXT_TOKENS // length))
    count = min(count, affordable)
    if count < 2:
        return GeneratedInputs(refusal="generating text would take too long: the model has no key/value cache")
    writer = _TextWriter(analysis, position, length, torch.Generator("cpu").manual_seed(seed), generates)
    texts = writer.write(analysis.round_up_samples(count))
    rows = _split_rows(texts, _choose_batch_size(analysis, length))
    batches = (_make_batch(analysis, position, part) for part in rows)
    parts = tuple(part for batch in batches for part in analysis.split_batch(batch))
    return GeneratedInputs(parts, source=SELF_GENERATED_TEXT)


def _choose_batch_size(analysis: Analysis, length: int) -> int:
    """Return how many texts of this length run at once through a causal language model."""
    (vocabulary,) = synthetic.find_token_inputs(analysis.graph).values()
    return analysis.round_up_samples(max(1, min(TEXT_BATCH_SIZE, MAX_BATCH_LOGITS // (length * vocabulary))))


def split_texts(analysis: Analysis, batch: InputBatch) -> Iterator[InputBatch]:
    """Yield parts of a batch of texts whose scores over the vocabulary fit into memory; other batches as they are."""
    position, count = find_text_input(analysis), infer_batch_size(batch)
    if position is None or analysis.fixed_batch_size is not None or count < 2:
        yield batch
        return
    size = _choose_batch_size(analysis, flatten_inputs(batch)[position].shape[1])
    for start in range(0, count, size):
        yield slice_samples(batch, slice(start, start + size))


def _split_rows(texts: Tensor, size: int) -> list[Tensor]:
    return [texts[start : start + size] for start in range(0, len(texts), size)]


def _choose_text_length(analysis: Analysis, position: int) -> int:
    """Return the example's length, or `TEXT_LENGTH` where that is longer and the network takes it."""
    text = flatten_inputs(analysis.inputs)[position]
    if text.shape[1] >= TEXT_LENGTH or not _has_cached_generation(analysis):
        return int(text.shape[1])
    config = getattr(analysis.model, "config", None)
    longest = getattr(config, "max_position_embeddings", None) or TEXT_LENGTH
    return min(TEXT_LENGTH, int(longest))


def _has_cached_generation(analysis: Analysis) -> bool:
    """Return whether the model is one of the transformers library that generates text with a key/value cache."""
    can_generate = getattr(analysis.model, "can_generate", None)
    return callable(can_generate) and callable(getattr(analysis.model, "generate", None)) and bool(can_generate())


class _TextWriter:
    """Samples texts from a language model."""

    def __init__(
        self,
        analysis: Analysis,
        position: int,
        length: int,
        generator: torch.Generator,
        generates: bool,
    ) -> None:
        self.analysis, self.position, self.length, self.generator = analysis, position, length, generator
        self.example = flatten_inputs(analysis.inputs)[position]
        self.vocabulary = synthetic.find_token_inputs(analysis.graph)[position]
        self._write_batch = self._generate_with_cache if generates else self._sample_token_by_token
        self.bfloat16 = reads_text_in_bfloat16(analysis)

    @reuse_freed_memory()
    def write(self, count: int) -> Tensor:
        """Return `count` texts, one per row: by turns from any token of the vocabulary, and from a common token."""
        first = draw_tokens(self.example, ((count + 1) // 2, 1), self.generator, self.vocabulary)
        few = first[:GENERATION_BATCH_SIZE]
        short = self._write_batch(few, torch.ones(len(few)), min(self.length, SHORT_LENGTH))
        both = [first, self._draw_tokens_of(short, count // 2)]
        # By turns, because later stages may take only some of the texts.
        rows = [(own[i], TEMPERATURES[k]) for i in range(len(first)) for k, own in enumerate(both) if i < len(own)]
        beginnings, temperatures = torch.stack([row for row, _ in rows]), torch.tensor([t for _, t in rows])
        starts = progress.track_progress(range(0, count, GENERATION_BATCH_SIZE), "writing texts")
        ends = ((start, start + GENERATION_BATCH_SIZE) for start in starts)
        return torch.cat([self._write_batch(beginnings[a:b], temperatures[a:b], self.length) for a, b in ends])

    def _draw_tokens_of(self, texts: Tensor, count: int) -> Tensor:
        written = texts[:, 1:].flatten()
        index = torch.randint(len(written), (count, 1), generator=self.generator, device="cpu")
        return written[index.to(written.device)]

    @cached_property
    def _model(self) -> Any:
        own = self.analysis.model.parameters() if self.bfloat16 else ()
        halves = {id(p): nn.Parameter(p.detach().to(torch.bfloat16), requires_grad=False) for p in own}
        return copy_without_hooks(self.analysis.model, halves).eval()

    def _generate_with_cache(self, beginnings: Tensor, temperatures: Tensor, length: int) -> Tensor:
        """Generate with the key/value cache. Settings that a model brings along, such as a penalty, are overruled."""
        model, autocast = self._model, torch.autocast("cpu", torch.bfloat16, enabled=self.bfloat16)
        ends = _list_end_tokens(model, self.vocabulary)
        seed = int(torch.randint(2**31, (), generator=self.generator, device="cpu"))
        # For one token at a time, torch's fused kernel takes longer than matrix products do.
        plain = sdpa_kernel(SDPBackend.MATH)
        with restore_rng(), silence_logging(), silence_stdout(), disable_fused_attention(), plain, autocast:
            seed_rng(seed)
            found: Tensor = model.generate(
                beginnings,
                attention_mask=torch.ones_like(beginnings),
                # No token ends a text: all texts have the same length.
                max_new_tokens=length - 1, eos_token_id=None,
                do_sample=False, temperature=1.0, top_k=50, top_p=1.0, repetition_penalty=1.0, num_beams=1,
                logits_processor=[_TokenSampler(temperatures, ends)], use_cache=True,
            )  # fmt: skip
        return found.to(self.example)

    def _sample_token_by_token(self, beginnings: Tensor, temperatures: Tensor, length: int) -> Tensor:
        """Run the whole length for each token: a causal model ignores the tokens that are not generated yet."""
        text = draw_tokens(self.example, (len(beginnings), self.length), self.generator, self.vocabulary)
        text[:, :1] = beginnings
        for at in range(1, length):
            logits = _compute_logits(self.analysis, _make_batch(self.analysis, self.position, text))[:, at - 1]
            probabilities = torch.nan_to_num((logits.float().cpu() / temperatures[:, None]).softmax(-1))
            text[:, at] = torch.multinomial(probabilities, 1, generator=self.generator)[:, 0].to(text)
        return text[:, :length]


def _list_end_tokens(model: Any, vocabulary: int) -> list[int]:
    """Return the tokens that end a text; a configuration may name one that the vocabulary does not have."""
    found = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    tokens = () if found is None else found if isinstance(found, Iterable) else (found,)
    return [int(token) for token in tokens if 0 <= int(token) < vocabulary]


@dataclass(frozen=True)
class _TokenSampler:
    """Draws the next token of each text at its own temperature; `generate` then finds no other token possible.

    `generate` itself knows one temperature for all, and draws from a large vocabulary more slowly than it runs a small
    network.
    """

    temperatures: Tensor
    end_tokens: Sequence[int]

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        # In place where that is possible: memory of the vocabulary's size is slower to get than to fill.
        weights = scores.float().div_(self.temperatures[:, None].to(scores.device))
        weights[:, self.end_tokens] = -math.inf
        sums = weights.sub_(weights.amax(1, keepdim=True)).exp_().nan_to_num_().cumsum_(1)
        # Where the sum passes a random number is each token with its probability.
        drawn = torch.searchsorted(sums, sums[:, -1:] * torch.rand(len(sums), 1, device=sums.device))
        return sums.fill_(-math.inf).scatter_(1, drawn.clamp(max=sums.shape[1] - 1), 0.0)


def _make_batch(analysis: Analysis, position: int, texts: Tensor) -> InputBatch:
    """Return the example inputs with these texts; inputs of the text's length are repeated to the new one."""
    values, old = list(flatten_inputs(analysis.inputs)), flatten_inputs(analysis.inputs)[position].shape
    for i, value in enumerate(values):
        if isinstance(value, Tensor) and value.shape[:1] == old[:1]:
            shape = [len(texts), *(texts.shape[1] if size == old[1] else size for size in value.shape[1:])]
            values[i] = repeat_entries(value, shape)
    values[position] = texts
    return _unflatten_inputs(analysis, values)


def find_text_input(analysis: Analysis) -> int | None:
    """Return the position of the token input of a causal language model; None for other networks."""
    if "text input" not in analysis.input_cache:
        analysis.input_cache["text input"] = _find_causal_token_input(analysis)
    found: int | None = analysis.input_cache["text input"]
    return found


@torch.no_grad()
def _find_causal_token_input(analysis: Analysis) -> int | None:
    """Return the position of the token input of a causal language model; None for other networks.

    Such a model returns scores over the vocabulary for each token, and these depend on earlier tokens only.
    """
    kinds = synthetic.find_token_inputs(analysis.graph)
    inputs = flatten_inputs(analysis.inputs)
    if len(kinds) != 1:
        return None
    ((position, count),) = kinds.items()
    value = inputs[position]
    scores = analysis.graph.shapes.get(analysis.graph.outputs[0].name, ()) if analysis.graph.outputs else ()
    fits = value.ndim == 2 and value.shape[1] > 1 and tuple(scores) == (*value.shape, count)
    return position if fits and _is_causal(analysis, position, count) else None


def _is_causal(analysis: Analysis, position: int, kinds: int) -> bool:
    """Return whether a change of the last token changes only the scores at the last position."""
    other = list(flatten_inputs(analysis.inputs))
    other[position] = other[position].clone()
    # Any other token will do: the next one of the vocabulary.
    other[position][:, -1] = (other[position][:, -1] + 1) % kinds
    before, after = (
        _compute_logits(analysis, _unflatten_inputs(analysis, values))
        for values in (flatten_inputs(analysis.inputs), other)
    )
    return torch.allclose(before[:, :-1], after[:, :-1], atol=1e-4) and not torch.equal(before[:, -1], after[:, -1])


def reads_text_in_bfloat16(analysis: Analysis) -> bool:
    """Return whether a language model reads and writes text in bfloat16, which some CPUs multiply much faster.

    The statistics of what its layers read are still summed in float32.
    """
    if "bfloat16" not in analysis.input_cache:
        analysis.input_cache["bfloat16"] = _is_bfloat16_exact_enough(analysis)
    found: bool = analysis.input_cache["bfloat16"]
    return found


@torch.no_grad()
def _is_bfloat16_exact_enough(analysis: Analysis) -> bool:
    position = find_text_input(analysis)
    if position is None or not is_bfloat16_fast(analysis.graph.tensors.values()):
        return False
    example = flatten_inputs(analysis.inputs)[position]
    if count_graph_macs(analysis.graph) * MAX_TEXT_TOKENS < MIN_BFLOAT16_MACS * example.numel():
        return False
    (vocabulary,) = synthetic.find_token_inputs(analysis.graph).values()
    tokens = draw_tokens(example, tuple(example.shape), torch.Generator("cpu").manual_seed(0), vocabulary)
    batch = next(split_texts(analysis, _make_batch(analysis, position, tokens)))
    exact = _compute_logits(analysis, batch).log_softmax(-1)
    with torch.autocast("cpu", torch.bfloat16):
        rounded = _compute_logits(analysis, batch).float().log_softmax(-1)
    divergence = (exact.exp() * (exact - rounded)).sum(-1).mean()
    return bool(divergence <= MAX_BFLOAT16_DIVERGENCE)


def _compute_logits(analysis: Analysis, batch: InputBatch) -> Tensor:
    parts = ((analysis.graph_for(part), flatten_inputs(part)) for part in analysis.split_batch(batch))
    return torch.cat([run_graph(graph, values, graph.tensors)[0] for graph, values in parts])


def _unflatten_inputs(analysis: Analysis, values: Sequence[Any]) -> InputBatch:
    return tuple(tree_unflatten(list(values), tree_structure(list(analysis.inputs))))


BUILTIN_TEXT = "texts from Python's manual"
RUNNING_TEXT = "texts from Python's manual and library"
CHARACTERS_PER_TOKEN = 24
"""Characters of a passage for each token of a text: enough, even where tokens stand for whole words and indents."""
LIBRARY_PACKAGES = ("asyncio", "email", "http", "json", "logging", "multiprocessing", "unittest", "urllib")
"""Packages of Python's library whose sources are read."""
MAX_UNKNOWN_SHARE = 0.25
"""Largest share of unknown tokens; a tokenizer with more is not one for English."""
INPUT_IDS, DECODER_INPUT_IDS = "input_ids", "decoder_input_ids"
SENTENCE_PATTERN = re.compile(r"[A-Z][\w ,;'\"()/%-]{30,250}[.!?]")
"""Sentences of prose, without code and tables."""


def encode_builtin_text(analysis: Analysis, count: int, work: int, seed: int) -> GeneratedInputs:
    """Encode built-in texts of the example's length, as many as the work allows; or state why there are none.

    Texts of an even and of an odd seed have no sentence or passage in common.
    """
    names, values = get_leaf_names(analysis.model, analysis.inputs), flatten_inputs(analysis.inputs)
    given = dict(zip(names, values, strict=False))
    length = _get_text_length(given.get(INPUT_IDS))
    if not length:
        return GeneratedInputs(refusal=f"the network takes no {INPUT_IDS}")
    tokenizer = _load_own_tokenizer(analysis.model)
    if tokenizer is None:
        return GeneratedInputs(refusal="there is no tokenizer beside the network")
    each = max(1, count_graph_macs(analysis.graph) // infer_batch_size(analysis.inputs))
    count = max(2, min(count, work // each))
    source, drawn = (
        (BUILTIN_TEXT, _draw_sentences) if find_text_input(analysis) is None else (RUNNING_TEXT, _draw_passages)
    )
    coded = _tokenize_texts(tokenizer, drawn(count, length, seed), length)
    unknown = -1 if tokenizer.unk_token_id is None else tokenizer.unk_token_id
    if bool((coded[INPUT_IDS] == unknown).double().mean() > MAX_UNKNOWN_SHARE):
        return GeneratedInputs(refusal="its tokenizer does not know English words")
    known = max(synthetic.find_token_inputs(analysis.graph).values(), default=sys.maxsize)
    if int(coded[INPUT_IDS].max()) >= known:
        return GeneratedInputs(refusal="its tokenizer has more tokens than the network knows")
    size = TEXT_BATCH_SIZE if find_text_input(analysis) is None else _choose_batch_size(analysis, length)
    parts = ({name: value[start : start + size] for name, value in coded.items()} for start in range(0, count, size))
    batches = (_replace_token_inputs(analysis, names, part) for part in parts)
    return GeneratedInputs(tuple(part for batch in batches for part in analysis.split_batch(batch)), source=source)


def _draw_sentences(count: int, length: int, seed: int) -> list[str]:
    """Draw texts of shuffled sentences."""
    generator, sentences = torch.Generator("cpu").manual_seed(seed), load_manual_sentences()[seed % 2 :: 2]
    return [_shuffle_sentences(sentences, length, generator) for _ in range(count)]


def _draw_passages(count: int, length: int, seed: int) -> list[str]:
    """Draw passages of running text, by turns from the manual and from source code.

    A language model predicts from what it has read before, and shuffled sentences would not show if it lost that.
    """
    generator, size = torch.Generator("cpu").manual_seed(seed), CHARACTERS_PER_TOKEN * length
    kinds = []
    for text in filter(None, (load_manual(), load_library_sources())):
        text *= 1 + size // len(text)
        parts = [text[start : start + size] for start in range(0, max(1, len(text) - size), size)]
        own = parts[seed % 2 :: 2] or parts
        kinds.append([own[i] for i in torch.randperm(len(own), generator=generator)])
    return [kinds[i % len(kinds)][i // len(kinds) % len(kinds[i % len(kinds)])] for i in range(count)]


def _shuffle_sentences(sentences: list[str], length: int, generator: torch.Generator) -> str:
    """Join shuffled sentences, repeatedly, until there are more words than tokens are needed."""
    words: list[str] = []
    while len(words) <= length:
        words += " ".join(sentences[i] for i in torch.randperm(len(sentences), generator=generator)).split()
    return " ".join(words)


def _get_text_length(tokens: Any) -> int:
    """Return the number of tokens per text of an integer input (texts × tokens); 0 for other inputs."""
    plain = isinstance(tokens, Tensor) and tokens.ndim == 2 and not tokens.is_floating_point()
    return int(tokens.shape[1]) if plain else 0


def _load_own_tokenizer(model: Any) -> Any:
    """Load the tokenizer of a transformers model from its local files; None if there is none."""
    place = getattr(getattr(model, "config", None), "name_or_path", "")
    if not place or "transformers" not in sys.modules:
        return None
    try:
        return load_tokenizer(place)
    except MergingError:
        return None


def load_tokenizer(place: str | Path) -> Any:
    """Load a tokenizer of transformers from a folder, a .gguf file, or a name in the local cache.

    Nothing is downloaded, and no code that lies beside it runs.
    """
    library = import_module_or_raise("transformers", "pip install 'neuron-merging[zoo]'.")
    folder, gguf = find_gguf(place)
    more = {"gguf_file": gguf} if gguf else {}
    try:
        with silence_logging(), silence_stdout():
            found = library.AutoTokenizer.from_pretrained(
                folder, local_files_only=True, trust_remote_code=False, **more
            )
        # Without any file, transformers makes tokenizers of some families that know only special tokens.
        if len(found) <= len(set(found.all_special_ids)):
            raise ValueError("no vocabulary")
    except Exception as error:
        what = f"there is no tokenizer at {place}: {type(error).__name__}"
        raise MergingError(
            what, where=str(place), fix="Put tokenizer.json beside the network, or give batches of tokens."
        ) from error
    return found


def find_gguf(place: str | Path) -> tuple[str, str]:
    """Return the folder and the name of a .gguf file: the file itself, or the only one of a folder without a config.

    The name is empty for anything else.
    """
    path = Path(place).expanduser()
    if path.suffix == ".gguf" and path.is_file():
        return os.fspath(path.parent), path.name
    found = sorted(path.glob("*.gguf")) if path.is_dir() and not (path / "config.json").exists() else []
    return (os.fspath(path), found[0].name) if len(found) == 1 else (os.fspath(place), "")


def load_manual(separator: str = "\n\n") -> str:
    """Return the topics of Python's manual that come with Python."""
    from pydoc_data.topics import topics  # large, and seldom needed

    return separator.join(topics.values())


@cache
def load_library_sources() -> str:
    """Return sources of Python's library; an empty text where they are not installed."""
    library = Path(sysconfig.get_paths()["stdlib"])
    files = [file for package in LIBRARY_PACKAGES for file in sorted((library / package).glob("*.py"))]
    return "\n".join(file.read_text(encoding="utf-8", errors="replace") for file in files)


@cache
def load_manual_sentences() -> list[str]:
    """Return the sentences of Python's manual that are plain prose."""
    pieces = re.split(r"(?<=[.!?])\s+", re.sub(r"\s+", " ", load_manual(" ")))
    return list(dict.fromkeys(piece for piece in pieces if SENTENCE_PATTERN.fullmatch(piece)))


def _tokenize_texts(tokenizer: Any, texts: list[str], length: int) -> dict[str, Tensor]:
    """Encode texts and cut them to this length; they are longer, so there is no padding."""
    rows = [tokenizer(text, truncation=True, max_length=length) for text in texts]
    coded = {name: torch.tensor([row[name] for row in rows]) for name in rows[0]}
    return {**coded, DECODER_INPUT_IDS: coded[INPUT_IDS].roll(1, 0)}


def _replace_token_inputs(analysis: Analysis, names: list[str], coded: Mapping[str, Tensor]) -> InputBatch:
    """Return the example inputs with these texts as tokens; other inputs are repeated."""
    count = len(coded[INPUT_IDS])
    (start,) = synthetic.synthesize_batches(analysis.inputs, count, 0, size=count)
    values = [
        coded[name].to(old) if name in coded else old for name, old in zip(names, flatten_inputs(start), strict=True)
    ]
    return tuple(tree_unflatten(values, tree_structure(list(analysis.inputs))))
