"""Text files for language models."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import neuron_merging as nm
from neuron_merging.cli import app
from neuron_merging.errors import MergingError
from neuron_merging.inputs.text import find_gguf, load_tokenizer
from neuron_merging.models import sources
from tests.conftest import import_or_fail


def _count_letters(text: str) -> dict[str, list[int]]:
    return {"input_ids": [len(word) for word in text.split()]}


def test_texts_are_cut_at_equal_distances(tmp_path: Path) -> None:
    file = tmp_path / "own.txt"
    file.write_text(" ".join("x" * (i // 10 % 30 + 1) for i in range(105)))
    found = nm.texts(file, _count_letters, length=10, count=5, batch=2)
    assert [len(batch["input_ids"]) for batch in found] == [2, 2, 1]
    assert torch.cat([batch["input_ids"] for batch in found])[:, 0].tolist() == [1, 3, 5, 7, 9]
    assert all(bool(batch["attention_mask"].all()) for batch in found)


def test_a_text_that_is_too_short_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "own.txt"
    file.write_text("a few words")
    with pytest.raises(MergingError, match="3 tokens"):
        nm.texts(file, _count_letters)
    with pytest.raises(MergingError, match="cannot be read"):
        nm.texts(tmp_path / "none.txt", _count_letters)


@pytest.mark.filterwarnings("ignore")
def test_a_tokenizer_of_special_tokens_alone_is_none(tmp_path: Path) -> None:
    """Transformers makes one for GPT-2 and others where a folder has no tokenizer; it encodes every text to nothing."""
    import_or_fail("transformers").GPT2Config(vocab_size=30, n_embd=8, n_layer=1, n_head=2).save_pretrained(tmp_path)
    with pytest.raises(MergingError, match="there is no tokenizer"):
        load_tokenizer(tmp_path)


def test_a_folder_with_one_gguf_file_names_it(tmp_path: Path) -> None:
    assert find_gguf(tmp_path) == (str(tmp_path), "")
    (tmp_path / "model.gguf").write_bytes(b"")
    assert find_gguf(tmp_path) == find_gguf(tmp_path / "model.gguf") == (str(tmp_path), "model.gguf")
    (tmp_path / "config.json").write_text("{}")
    assert find_gguf(tmp_path)[1] == ""


def test_a_gguf_file_is_a_network_by_its_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import_or_fail("transformers")
    (tmp_path / "model.gguf").write_bytes(b"")
    monkeypatch.setattr(sources, "_read_gguf", lambda library, folder, file: torch.nn.Linear(len(file), 1))
    for place in (tmp_path / "model.gguf", f"hf:{tmp_path}"):
        assert sources.build_from_source(str(place), {}).weight.shape == (1, len("model.gguf"))


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
def test_a_language_model_from_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    library, tokenizers = import_or_fail("transformers"), import_or_fail("tokenizers")
    monkeypatch.chdir(tmp_path)
    words = {name: i for i, name in enumerate(["<s>", *"abcdefghij"])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<s>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    library.PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>").save_pretrained("model")
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 32, "intermediate_size": 64}
    torch.manual_seed(0)
    config = library.LlamaConfig(**sizes, vocab_size=len(words), bos_token_id=0, max_position_embeddings=512)
    library.LlamaForCausalLM(config).save_pretrained("model")
    Path("own.txt").write_text("a b c d e f g h i j " * 800)
    flags = ["--budget", "params=80%", "--calibrate", "own.txt", "--eval", "own.txt", "--effort", "normal"]
    assert app.main(["compress", "hf:model", "small", *flags]) == 0
    printed = " ".join(" ".join(capsys.readouterr()).split())
    assert "nats per token" in printed and "perplexity" in printed and "self-generated" in printed
