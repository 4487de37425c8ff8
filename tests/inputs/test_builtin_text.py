"""Built-in text for language models whose tokenizer is found beside them."""

from __future__ import annotations

import string
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import neuron_merging as nm
from neuron_merging.inputs import input_sets, text
from neuron_merging.inputs.input_sets import make_fit_inputs, make_heldout_inputs
from neuron_merging.inputs.text import BUILTIN_TEXT, SELF_GENERATED_TEXT, encode_builtin_text, load_manual_sentences
from tests.conftest import import_or_fail

pytestmark = pytest.mark.filterwarnings("ignore")
SIZES = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
LENGTH = 12


def saved_encoder(folder: Path) -> Path:
    """A small encoder and a tokenizer that knows letters."""
    library = import_or_fail("transformers")
    letters = [*string.ascii_lowercase, *string.digits, *string.punctuation]
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *letters, *(f"##{letter}" for letter in letters)]
    (folder / "vocab.txt").write_text("\n".join(vocabulary))
    library.BertTokenizerFast(vocab=str(folder / "vocab.txt")).save_pretrained(folder)
    library.BertModel(library.BertConfig(**SIZES, vocab_size=len(vocabulary))).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved_encoder(tmp_path_factory.mktemp("encoder"))


@pytest.fixture(scope="module")
def analysis(folder: Path) -> nm.Analysis:
    return nm.analyse(loaded(folder), example())


def loaded(folder: Path) -> nn.Module:
    model: nn.Module = import_or_fail("transformers").BertModel.from_pretrained(folder).eval()
    return model


def example(count: int = 2) -> dict[str, torch.Tensor]:
    tokens = torch.full((count, LENGTH), 7)
    return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}


def test_texts_are_what_the_tokenizer_makes_of_sentences(folder: Path, analysis: nm.Analysis) -> None:
    found = encode_builtin_text(analysis, 40, 10**12, seed=0)
    assert found.source == BUILTIN_TEXT and [len(batch[-1]["input_ids"]) for batch in found.batches] == [32, 8]
    (named, *_) = found.batches[0][-1:]
    assert named["input_ids"].shape == (32, LENGTH) and bool(named["attention_mask"].all())
    tokenizer = import_or_fail("transformers").AutoTokenizer.from_pretrained(folder)
    said = tokenizer.decode(named["input_ids"][0], skip_special_tokens=True).replace(" ", "")
    assert any(sentence.lower().replace(" ", "").startswith(said[:8]) for sentence in load_manual_sentences())


def test_what_is_fitted_on_and_what_is_judged_on_have_no_sentence_in_common() -> None:
    every = load_manual_sentences()
    assert len(every) > 500 and not set(every[::2]) & set(every[1::2])


@pytest.mark.long
def test_encoders_are_judged_on_them_and_not_fitted_to_them(
    analysis: nm.Analysis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(input_sets, "SEARCH_INPUT_RANGES", dict.fromkeys(input_sets.SEARCH_INPUT_RANGES, (4, 8)))
    assert not make_fit_inputs(analysis).batches and make_heldout_inputs(analysis).source == BUILTIN_TEXT
    small = nm.compress(analysis, ratio=0.5)
    assert BUILTIN_TEXT in str(small.summary.verdict) and BUILTIN_TEXT not in small.summary.statistics
    assert nm.compress(analysis, budget={"params": 0.9}).summary.parameters[1] < small.summary.parameters[0]


@pytest.mark.long
def test_language_models_are_fitted_to_their_own_text_and_judged_on_these(tmp_path: Path) -> None:
    library = import_or_fail("transformers")
    size = len(library.AutoTokenizer.from_pretrained(saved_encoder(tmp_path)))
    config = library.LlamaConfig(**SIZES, vocab_size=size, max_position_embeddings=32)
    library.LlamaForCausalLM(config).save_pretrained(tmp_path)
    model = library.LlamaForCausalLM.from_pretrained(tmp_path).eval()
    summary = nm.compress(model, {"input_ids": example()["input_ids"]}, ratio=0.5).summary
    assert SELF_GENERATED_TEXT in summary.statistics and BUILTIN_TEXT not in summary.statistics
    assert BUILTIN_TEXT in str(summary.verdict) and SELF_GENERATED_TEXT not in str(summary.verdict)


def test_the_same_seed_gives_the_same_texts(analysis: nm.Analysis) -> None:
    one, two, other = (encode_builtin_text(analysis, 4, 10**12, seed).batches[0][-1]["input_ids"] for seed in (0, 0, 2))
    assert torch.equal(one, two) and not torch.equal(one, other)


def test_longer_than_all_sentences_together(analysis: nm.Analysis, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("neuron_merging.inputs.text.load_manual_sentences", lambda: ["Ab cd.", "Ef gh."])
    (batch,) = encode_builtin_text(analysis, 2, 10**12, seed=0).batches
    assert batch[-1]["input_ids"].shape == (2, LENGTH)


def test_passages_come_from_the_manual_and_from_source_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """Running text of two kinds, none of it in both halves."""
    even, odd = (text._draw_passages(8, 16, seed) for seed in (0, 1))
    assert not set(even) & set(odd) and text._draw_passages(8, 16, 0) == even
    assert all(own in text.load_manual() for own in even[::2])
    assert all(own in text.load_library_sources() for own in even[1::2])
    assert len(text._draw_passages(2, 10**6, 0)[0]) >= 10**6
    monkeypatch.setattr(text, "load_library_sources", lambda: "")
    assert all(own in text.load_manual() for own in text._draw_passages(4, 16, 0))


@pytest.mark.parametrize("fault", ["no tokenizer", "no place", "no tokens"])
def test_none_without_tokenizer_or_tokens(tmp_path: Path, fault: str) -> None:
    folder = saved_encoder(tmp_path)
    model: Any = loaded(folder)
    given: Any = example()
    if fault == "no tokenizer":
        for file in folder.glob("*token*"):
            file.unlink()
        (folder / "vocab.txt").unlink()
    elif fault == "no place":
        model.config.name_or_path = ""
    else:
        model, given = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), torch.zeros(1, 4)
    found = encode_builtin_text(nm.analyse(model, given), 4, 10**12, seed=0)
    assert not found.batches and found.refusal
