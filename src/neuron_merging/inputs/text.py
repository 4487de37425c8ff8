"""Text inputs for language models: text that the network generates itself, and sentences of Python's manual.

A causal language model generates text token by token from its own predictions; such text is far closer to the
training data than random tokens. Other models of transformers read sentences of Python's manual through their own
tokenizer. Those serve as held-out inputs only: fitted to them, a sentence encoder did better on such sentences and
worse on everyday ones.
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
NOT_A_LANGUAGE_MODEL = "the network is not a causal language model"


@torch.no_grad()
def generate_text(analysis: Analysis, count: int, work: int, seed: int) -> GeneratedInputs:
    """Texts of the example's length, as many as the work allows; or why there are none."""
    place = _find_token_input(analysis)
    if place is None:
        return GeneratedInputs(refusal=NOT_A_LANGUAGE_MODEL)
    length = flatten_inputs(analysis.inputs)[place].shape[1]
    each = length * max(1, count_graph_macs(analysis.graph) // infer_batch_size(analysis.inputs))
    count = min(count, work // each)
    if count < 2:
        return GeneratedInputs(refusal="generating text would take too long")
    sizes = [min(GENERATION_BATCH_SIZE, count - start) for start in range(0, count, GENERATION_BATCH_SIZE)]
    pick = torch.Generator("cpu").manual_seed(seed)
    made = tuple(
        _generate_batch(analysis, place, size, pick) for size in progress.track_progress(sizes, "writing texts")
    )
    return GeneratedInputs(made, source=SELF_GENERATED_TEXT)


def _find_token_input(analysis: Analysis) -> int | None:
    """The input of tokens, where the network gives scores of the next one at each place, and looks only back."""
    kinds = synthetic.find_token_inputs(analysis.graph)
    inputs = flatten_inputs(analysis.inputs)
    if len(kinds) != 1 or analysis.has_channels_along_batch:
        return None
    ((place, count),) = kinds.items()
    value = inputs[place]
    scores = analysis.graph.shapes.get(analysis.graph.outputs[0].name, ()) if analysis.graph.outputs else ()
    fits = value.ndim == 2 and value.shape[1] > 1 and tuple(scores) == (*value.shape, count)
    return place if fits and _is_causal(analysis, place, count) else None


def _is_causal(analysis: Analysis, place: int, kinds: int) -> bool:
    """Whether another last token leaves all that was said before as it was."""
    other = list(flatten_inputs(analysis.inputs))
    other[place] = other[place].clone()
    other[place][:, -1] = (other[place][:, -1] + 1) % kinds
    before, after = (
        _compute_logits(analysis, _unflatten_inputs(analysis, values))
        for values in (flatten_inputs(analysis.inputs), other)
    )
    return torch.allclose(before[:, :-1], after[:, :-1], atol=1e-4) and not torch.equal(before[:, -1], after[:, -1])


def _generate_batch(analysis: Analysis, place: int, size: int, pick: torch.Generator) -> InputBatch:
    """Token by token; the first is drawn from all alike, those that are still to come do not matter."""
    (start,) = synthetic.synthesize_batches(
        analysis.inputs, size, 0, synthetic.find_token_inputs(analysis.graph), size=size
    )
    values = list(flatten_inputs(start))
    text = values[place]
    kinds = synthetic.find_token_inputs(analysis.graph)[place]
    text[:, 0] = draw_tokens(text, (size,), pick, kinds)
    for at in range(1, text.shape[1]):
        said = _compute_logits(analysis, _unflatten_inputs(analysis, values))[:, at - 1].float().softmax(-1).cpu()
        text[:, at] = torch.multinomial(torch.nan_to_num(said), 1, generator=pick)[:, 0].to(text)
    return _unflatten_inputs(analysis, values)


def _compute_logits(analysis: Analysis, batch: InputBatch) -> Tensor:
    graph = analysis.graph_for(batch)
    found: Tensor = run_graph(graph, flatten_inputs(batch), graph.tensors)[0]
    return found


def _unflatten_inputs(analysis: Analysis, values: Sequence[Any]) -> InputBatch:
    return tuple(tree_unflatten(list(values), tree_structure(list(analysis.inputs))))


BUILTIN_TEXT = "texts from Python's manual"
BUILTIN_TEXT_BATCH_SIZE = 32
MAX_UNKNOWN_SHARE = 0.25
"""Share of tokens that a tokenizer may not know."""
INPUT_IDS, DECODER_INPUT_IDS = "input_ids", "decoder_input_ids"
SENTENCE_PATTERN = re.compile(r"[A-Z][\w ,;'\"()/%-]{30,250}[.!?]")
"""Prose: no code, no tables."""


def encode_builtin_text(analysis: Analysis, count: int, work: int, seed: int) -> GeneratedInputs:
    """Texts of the example's length, as many as the work allows; or why there are none.

    Texts of an even and of an odd seed have no sentence in common.
    """
    names, values = get_leaf_names(analysis.model, analysis.inputs), flatten_inputs(analysis.inputs)
    given = dict(zip(names, values, strict=False))
    length = _get_text_length(given.get(INPUT_IDS))
    if not length or analysis.has_channels_along_batch:
        return GeneratedInputs(refusal=f"the network takes no {INPUT_IDS}")
    tokenizer = _load_tokenizer(analysis.model)
    if tokenizer is None:
        return GeneratedInputs(refusal="there is no tokenizer beside the network")
    each = max(1, count_graph_macs(analysis.graph) // infer_batch_size(analysis.inputs))
    count = max(2, min(count, work // each))
    pick = torch.Generator("cpu").manual_seed(seed)
    mine = load_manual_sentences()[seed % 2 :: 2]
    coded = _tokenize_texts(tokenizer, [_shuffle_sentences(mine, length, pick) for _ in range(count)], length)
    if bool((coded[INPUT_IDS] == tokenizer.unk_token_id).double().mean() > MAX_UNKNOWN_SHARE):
        return GeneratedInputs(refusal="its tokenizer does not know English words")
    starts = range(0, count, BUILTIN_TEXT_BATCH_SIZE)
    parts = (
        {name: value[start : start + BUILTIN_TEXT_BATCH_SIZE] for name, value in coded.items()} for start in starts
    )
    made = (_replace_token_inputs(analysis, names, part) for part in parts)
    return GeneratedInputs(tuple(made), source=BUILTIN_TEXT)


def _shuffle_sentences(sentences: list[str], length: int, pick: torch.Generator) -> str:
    """The sentences in a new order, over and over, so that there are more words than tokens are wanted."""
    words: list[str] = []
    while len(words) <= length:
        words += " ".join(sentences[i] for i in torch.randperm(len(sentences), generator=pick)).split()
    return " ".join(words)


def _get_text_length(tokens: Any) -> int:
    """Of a text, where tokens are numbers by text and place."""
    plain = isinstance(tokens, Tensor) and tokens.ndim == 2 and not tokens.is_floating_point()
    return int(tokens.shape[1]) if plain else 0


def _load_tokenizer(model: Any) -> Any:
    """That of a network of transformers, from where it was loaded; nothing is fetched, and no code of its own runs."""
    place = getattr(getattr(model, "config", None), "name_or_path", "")
    library = sys.modules.get("transformers")
    if not place or library is None:
        return None
    try:
        with silence_logging(), silence_stdout():
            return library.AutoTokenizer.from_pretrained(place, local_files_only=True, trust_remote_code=False)
    except Exception:  # noqa: BLE001 (no file, no known kind, a missing package: there is none to use)
        return None


@cache
def load_manual_sentences() -> list[str]:
    """Those of the manual that are plain prose."""
    from pydoc_data.topics import topics  # large, and seldom needed

    pieces = re.split(r"(?<=[.!?])\s+", re.sub(r"\s+", " ", " ".join(topics.values())))
    return list(dict.fromkeys(piece for piece in pieces if SENTENCE_PATTERN.fullmatch(piece)))


def _tokenize_texts(tokenizer: Any, texts: list[str], length: int) -> dict[str, Tensor]:
    """Texts that are longer than this, cut: no place is left for padding."""
    rows = [tokenizer(text, truncation=True, max_length=length) for text in texts]
    coded = {name: torch.tensor([row[name] for row in rows]) for name in rows[0]}
    return {**coded, DECODER_INPUT_IDS: coded[INPUT_IDS].roll(1, 0)}


def _replace_token_inputs(analysis: Analysis, names: list[str], coded: Mapping[str, Tensor]) -> InputBatch:
    """The texts in place of the example's; other inputs are repeated from it."""
    count = len(coded[INPUT_IDS])
    (start,) = synthetic.synthesize_batches(analysis.inputs, count, 0, size=count)
    values = [
        coded[name].to(old) if name in coded else old for name, old in zip(names, flatten_inputs(start), strict=True)
    ]
    return tuple(tree_unflatten(values, tree_structure(list(analysis.inputs))))
