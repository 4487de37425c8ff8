"""Make text inputs for language models: self-generated text, and sentences of Python's manual.

A causal language model generates text token by token from its own predictions; such text is far closer to the
training data than random tokens. Other models of the transformers library get sentences of Python's manual, encoded by
their own tokenizer. These are only held-out inputs: a sentence encoder that was fitted to them got better on such
sentences and worse on everyday ones.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_structure, tree_unflatten

from neuron_merging import progress
from neuron_merging.channels.analysis import Analysis
from neuron_merging.graph.example_inputs import draw_tokens, infer_batch_size
from neuron_merging.graph.interpreter import run_graph
from neuron_merging.graph.macs import count_graph_macs
from neuron_merging.graph.process_state import silence_logging, silence_stdout
from neuron_merging.graph.pytree import flatten_inputs, get_leaf_names
from neuron_merging.inputs import synthetic
from neuron_merging.inputs.batchnorm_inversion import GeneratedInputs, InputBatch

SELF_GENERATED_TEXT = "self-generated texts"
GENERATION_BATCH_SIZE = 32
"""Texts that are generated at the same time."""
NOT_A_LANGUAGE_MODEL = "the network is not a causal language model"


@torch.no_grad()
def generate_text(analysis: Analysis, count: int, work: int, seed: int) -> GeneratedInputs:
    """Generate texts of the example's length, as many as the work allows; or state why there are none."""
    position = _find_token_input(analysis)
    if position is None:
        return GeneratedInputs(refusal=NOT_A_LANGUAGE_MODEL)
    length = flatten_inputs(analysis.inputs)[position].shape[1]
    each = length * max(1, count_graph_macs(analysis.graph) // infer_batch_size(analysis.inputs))
    count = min(count, work // each)
    if count < 2:
        return GeneratedInputs(refusal="generating text would take too long")
    count = analysis.round_up_samples(count)
    sizes = [min(GENERATION_BATCH_SIZE, count - start) for start in range(0, count, GENERATION_BATCH_SIZE)]
    generator = torch.Generator("cpu").manual_seed(seed)
    batches = tuple(
        _generate_batch(analysis, position, size, generator) for size in progress.track_progress(sizes, "writing texts")
    )
    parts = tuple(part for batch in batches for part in analysis.split_batch(batch))
    return GeneratedInputs(parts, source=SELF_GENERATED_TEXT)


def _find_token_input(analysis: Analysis) -> int | None:
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


def _generate_batch(analysis: Analysis, position: int, size: int, generator: torch.Generator) -> InputBatch:
    """Generate texts token by token, the first drawn uniformly from the vocabulary.

    The model always reads the full length: a causal model ignores the tokens that are not generated yet.
    """
    (start,) = synthetic.synthesize_batches(
        analysis.inputs, size, 0, synthetic.find_token_inputs(analysis.graph), size=size
    )
    values = list(flatten_inputs(start))
    text = values[position]
    kinds = synthetic.find_token_inputs(analysis.graph)[position]
    text[:, 0] = draw_tokens(text, (size,), generator, kinds)
    for at in range(1, text.shape[1]):
        probabilities = (
            _compute_logits(analysis, _unflatten_inputs(analysis, values))[:, at - 1].float().softmax(-1).cpu()
        )
        text[:, at] = torch.multinomial(torch.nan_to_num(probabilities), 1, generator=generator)[:, 0].to(text)
    return _unflatten_inputs(analysis, values)


def _compute_logits(analysis: Analysis, batch: InputBatch) -> Tensor:
    parts = ((analysis.graph_for(part), flatten_inputs(part)) for part in analysis.split_batch(batch))
    return torch.cat([run_graph(graph, values, graph.tensors)[0] for graph, values in parts])


def _unflatten_inputs(analysis: Analysis, values: Sequence[Any]) -> InputBatch:
    return tuple(tree_unflatten(list(values), tree_structure(list(analysis.inputs))))


BUILTIN_TEXT = "texts from Python's manual"
BUILTIN_TEXT_BATCH_SIZE = 32
MAX_UNKNOWN_SHARE = 0.25
"""Largest share of unknown tokens; a tokenizer with more is not one for English."""
INPUT_IDS, DECODER_INPUT_IDS = "input_ids", "decoder_input_ids"
SENTENCE_PATTERN = re.compile(r"[A-Z][\w ,;'\"()/%-]{30,250}[.!?]")
"""Sentences of prose, without code and tables."""


def encode_builtin_text(analysis: Analysis, count: int, work: int, seed: int) -> GeneratedInputs:
    """Encode built-in texts of the example's length, as many as the work allows; or state why there are none.

    Texts of an even and of an odd seed have no sentence in common.
    """
    names, values = get_leaf_names(analysis.model, analysis.inputs), flatten_inputs(analysis.inputs)
    given = dict(zip(names, values, strict=False))
    length = _get_text_length(given.get(INPUT_IDS))
    if not length:
        return GeneratedInputs(refusal=f"the network takes no {INPUT_IDS}")
    tokenizer = _load_tokenizer(analysis.model)
    if tokenizer is None:
        return GeneratedInputs(refusal="there is no tokenizer beside the network")
    each = max(1, count_graph_macs(analysis.graph) // infer_batch_size(analysis.inputs))
    count = max(2, min(count, work // each))
    generator = torch.Generator("cpu").manual_seed(seed)
    sentences = load_manual_sentences()[seed % 2 :: 2]
    coded = _tokenize_texts(tokenizer, [_shuffle_sentences(sentences, length, generator) for _ in range(count)], length)
    if bool((coded[INPUT_IDS] == tokenizer.unk_token_id).double().mean() > MAX_UNKNOWN_SHARE):
        return GeneratedInputs(refusal="its tokenizer does not know English words")
    starts = range(0, count, BUILTIN_TEXT_BATCH_SIZE)
    parts = (
        {name: value[start : start + BUILTIN_TEXT_BATCH_SIZE] for name, value in coded.items()} for start in starts
    )
    batches = (_replace_token_inputs(analysis, names, part) for part in parts)
    return GeneratedInputs(
        tuple(part for batch in batches for part in analysis.split_batch(batch)), source=BUILTIN_TEXT
    )


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


def _load_tokenizer(model: Any) -> Any:
    """Load the tokenizer of a transformers model from its local files; nothing is downloaded, no remote code runs."""
    position = getattr(getattr(model, "config", None), "name_or_path", "")
    library = sys.modules.get("transformers")
    if not position or library is None:
        return None
    try:
        with silence_logging(), silence_stdout():
            return library.AutoTokenizer.from_pretrained(position, local_files_only=True, trust_remote_code=False)
    except Exception:  # noqa: BLE001 (no file, no known kind, a missing package: there is none to use)
        return None


@cache
def load_manual_sentences() -> list[str]:
    """Return the sentences of Python's manual that are plain prose."""
    from pydoc_data.topics import topics  # large, and seldom needed

    pieces = re.split(r"(?<=[.!?])\s+", re.sub(r"\s+", " ", " ".join(topics.values())))
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
