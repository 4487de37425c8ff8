"""texts: sentences of Python's own manual, as a network's own tokenizer reads them.

Tokens at random look like no text, and statistics on them are worse than none. But a network of transformers knows
where it was loaded from, and there its tokenizer lies; and every Python brings a thousand plain English sentences
along. They are good to judge by. To fit on they are too few and too much of one kind: a sentence encoder that was
fitted to them did better on such sentences, and worse on those of everyday life, than one that never saw any.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_structure, tree_unflatten

from neuron_merging.channels.analysis import Analysis
from neuron_merging.graph.macs import total_macs
from neuron_merging.graph.quiet import hushed, quiet
from neuron_merging.graph.trees import flat, leaf_names
from neuron_merging.statistics import synthetic
from neuron_merging.statistics.remembered import Batch, Remembered

TEXTS = "texts from Python's manual"
BATCH = 32
UNKNOWN = 0.25
"""Share of tokens that a tokenizer may not know."""
TOKENS, DECODED = "input_ids", "decoder_input_ids"
SENTENCE = re.compile(r"[A-Z][\w ,;'\"()/%-]{30,250}[.!?]")
"""Prose: no code, no tables."""


def read_out(analysis: Analysis, count: int, work: int, seed: int) -> Remembered:
    """Texts of the example's length, as many as the work allows; or why there are none.

    Texts of an even and of an odd seed have no sentence in common.
    """
    names, values = leaf_names(analysis.model, analysis.inputs), flat(analysis.inputs)
    given = dict(zip(names, values, strict=False))
    length = _length(given.get(TOKENS))
    if not length or analysis.channels_along_batch:
        return Remembered(refusal=f"the network takes no {TOKENS}")
    tokenizer = _tokenizer(analysis.model)
    if tokenizer is None:
        return Remembered(refusal="there is no tokenizer where the network was loaded from")
    each = max(1, total_macs(analysis.graph) // synthetic.batch_size(analysis.inputs))
    count = max(2, min(count, work // each))
    pick = torch.Generator("cpu").manual_seed(seed)
    mine = sentences()[seed % 2 :: 2]
    coded = _coded(tokenizer, [_text(mine, length, pick) for _ in range(count)], length)
    if bool((coded[TOKENS] == tokenizer.unk_token_id).double().mean() > UNKNOWN):
        return Remembered(refusal="its tokenizer does not know English words")
    starts = range(0, count, BATCH)
    parts = ({name: value[start : start + BATCH] for name, value in coded.items()} for start in starts)
    made = (_batch(analysis, names, part) for part in parts)
    return Remembered(tuple(made), source=TEXTS)


def _text(sentences: list[str], length: int, pick: torch.Generator) -> str:
    """The sentences in a new order, over and over, so that there are more words than tokens are wanted."""
    words: list[str] = []
    while len(words) <= length:
        words += " ".join(sentences[i] for i in torch.randperm(len(sentences), generator=pick)).split()
    return " ".join(words)


def _length(tokens: Any) -> int:
    """Of a text, where tokens are numbers by text and place."""
    plain = isinstance(tokens, Tensor) and tokens.ndim == 2 and not tokens.is_floating_point()
    return int(tokens.shape[1]) if plain else 0


def _tokenizer(model: Any) -> Any:
    """That of a network of transformers, from where it was loaded; nothing is fetched, and no code of its own runs."""
    place = getattr(getattr(model, "config", None), "name_or_path", "")
    library = sys.modules.get("transformers")
    if not place or library is None:
        return None
    try:
        with quiet(), hushed():
            return library.AutoTokenizer.from_pretrained(place, local_files_only=True, trust_remote_code=False)
    except Exception:  # noqa: BLE001 (no file, no known kind, a missing package: there is none to use)
        return None


@cache
def sentences() -> list[str]:
    """Those of the manual that are plain prose."""
    from pydoc_data.topics import topics  # large, and seldom needed

    pieces = re.split(r"(?<=[.!?])\s+", re.sub(r"\s+", " ", " ".join(topics.values())))
    return list(dict.fromkeys(piece for piece in pieces if SENTENCE.fullmatch(piece)))


def _coded(tokenizer: Any, texts: list[str], length: int) -> dict[str, Tensor]:
    """Texts that are longer than this, cut: no place is left for padding."""
    rows = [tokenizer(text, truncation=True, max_length=length) for text in texts]
    coded = {name: torch.tensor([row[name] for row in rows]) for name in rows[0]}
    return {**coded, DECODED: coded[TOKENS].roll(1, 0)}


def _batch(analysis: Analysis, names: list[str], coded: Mapping[str, Tensor]) -> Batch:
    """The texts in place of the example's; other inputs are repeated from it."""
    count = len(coded[TOKENS])
    (start,) = synthetic.probes(analysis.inputs, count, 0, size=count)
    values = [coded[name].to(old) if name in coded else old for name, old in zip(names, flat(start), strict=True)]
    return tuple(tree_unflatten(values, tree_structure(list(analysis.inputs))))
