"""A folder of a transformers network is whole: tokenizer, generation config, sentence-transformers' files."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from torch import nn

import neuron_merging as nm
from neuron_merging.checkpoint.load_folder import verify_folder
from neuron_merging.checkpoint.manifest import BUFFERS_FILE, read_manifest
from neuron_merging.checkpoint.save_folder import save_finetuned
from neuron_merging.models import companion_files
from neuron_merging.models.sources import ORIGINAL_CONFIG_FILE, build_from_config
from neuron_merging.models.state_dicts import read_safetensors
from tests.conftest import import_or_fail

pytestmark = pytest.mark.filterwarnings("ignore")
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "cat", "sat"]
TINY = {"num_hidden_layers": 1, "hidden_size": 8, "intermediate_size": 12, "num_attention_heads": 2}


@pytest.fixture
def trained(tmp_path: Path) -> Path:
    """A network with its tokenizer and the files of sentence-transformers, as one downloads it."""
    library = import_or_fail("transformers")
    torch.manual_seed(0)
    folder = tmp_path / "trained"
    library.BertModel(library.BertConfig(vocab_size=8, max_position_embeddings=16, **TINY)).save_pretrained(folder)
    (folder / "vocab.txt").write_text("\n".join(WORDS))
    library.BertTokenizer(vocab={word: i for i, word in enumerate(WORDS)}).save_pretrained(folder)
    (folder / "generation_config.json").write_text("{}")
    (folder / "modules.json").write_text(json.dumps([{"path": ""}, {"path": "1_Pooling"}, {"path": "../outside"}]))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text('{"pooling_mode_mean_tokens": true}')
    (folder / "1_Pooling" / "pytorch_model.bin").write_bytes(b"pickle")
    (folder / "modeling_own.py").write_text("raise SystemExit")
    return folder


def compressed(trained: Path) -> nm.Compressed:
    model = import_or_fail("transformers").AutoModel.from_pretrained(trained).eval()
    tokens = {"input_ids": torch.arange(6).view(1, 6)}
    return nm.compress(model, tokens, ratio={"*intermediate*": 0.5}, merger="none")


def test_tokenizer_and_modules_come_with_the_network(trained: Path, tmp_path: Path) -> None:
    library, small = import_or_fail("transformers"), tmp_path / "small"
    compressed(trained).save(small)
    before, after = (library.AutoTokenizer.from_pretrained(folder) for folder in (trained, small))
    assert after("the cat sat")["input_ids"] == before("the cat sat")["input_ids"] == [2, 5, 6, 7, 3]
    assert {"generation_config.json", "modules.json", "1_Pooling"} < {file.name for file in small.iterdir()}
    assert [file.name for file in (small / "1_Pooling").iterdir()] == ["config.json"]
    assert not (small / "modeling_own.py").exists()
    assert "1_Pooling/config.json" in verify_folder(small).files
    (small / "1_Pooling" / "config.json").write_text("{}")
    with pytest.raises(nm.FolderError, match="changed"):
        verify_folder(small)


def test_a_folder_rebuilds_its_network_without_the_originals_folder(trained: Path, tmp_path: Path) -> None:
    """Also where no configuration describes the pruned network, and where nothing names the original."""
    small, folder = compressed(trained), tmp_path / "small"
    small.save(folder)
    shutil.rmtree(trained)
    loaded, tokens = nm.load(folder), {"input_ids": torch.arange(6).view(1, 6)}
    assert type(loaded) is type(small.model)
    assert torch.equal(loaded(**tokens).pooler_output, small.model(**tokens).pooler_output)
    assert 'nm.load("path/to/this/folder")' in (folder / "README.md").read_text()


def test_a_network_that_was_pruned_before_has_no_original_config(trained: Path, tmp_path: Path) -> None:
    tokens = {"input_ids": torch.arange(6).view(1, 6)}
    again = nm.compress(compressed(trained).model, tokens, ratio={"*intermediate*": 0.5}, merger="none")
    again.save(tmp_path / "again")
    assert not (tmp_path / "again" / ORIGINAL_CONFIG_FILE).exists()


def test_the_tokenizer_in_a_gguf_file_comes_with_the_network(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library, small, place = import_or_fail("transformers"), compressed(trained), tmp_path / "files"
    place.mkdir()
    (place / "model.gguf").write_bytes(b"")
    small.model.config.name_or_path = str(place)
    tokenizer = library.AutoTokenizer.from_pretrained(trained)
    monkeypatch.setattr(companion_files, "load_tokenizer", lambda folder: tokenizer)
    small.save(tmp_path / "small")
    found = library.AutoTokenizer.from_pretrained(tmp_path / "small")
    assert found("the cat sat")["input_ids"] == [2, 5, 6, 7, 3]
    assert not (tmp_path / "small" / "model.gguf").exists()


def test_a_config_fetches_no_code() -> None:
    library = import_or_fail("transformers")
    config = {**library.BertConfig(vocab_size=8, **TINY).to_dict(), "architectures": ["BertModel"]}
    hostile = {"attn_implementation": "someone/kernels", "auto_map": {"AutoModel": "someone/repo--own.Own"}}
    found = build_from_config(json.dumps({**config, **hostile}))
    assert type(found) is library.BertModel and "/" not in found.config._attn_implementation


@pytest.mark.parametrize(
    "text", ["{", "{}", '{"architectures": ["pipeline"], "model_type": "bert"}', '{"architectures": ["BertModel"]}']
)
def test_a_config_that_names_no_network_is_refused(text: str) -> None:
    import_or_fail("transformers")
    with pytest.raises(nm.ModelError):
        build_from_config(text)


@pytest.mark.long
def test_loading_finds_no_unexpected_keys(trained: Path, tmp_path: Path) -> None:
    small = compressed(trained)
    small.save(tmp_path / "small")
    _, info = type(small.model).from_pretrained(tmp_path / "small", output_loading_info=True)
    assert not info["unexpected_keys"] and not info["missing_keys"]
    stored = read_safetensors(tmp_path / "small" / BUFFERS_FILE)
    assert set(stored) == set(read_manifest(tmp_path / "small").transient) != set()


@pytest.mark.long
def test_a_folder_with_subfolders_is_replaced_only_if_they_are_ours(trained: Path, tmp_path: Path) -> None:
    small, folder = compressed(trained), tmp_path / "small"
    small.save(folder)
    small.save(folder, overwrite=True)
    (folder / "1_Pooling" / "notes.txt").write_text("mine")
    with pytest.raises(nm.MergingError, match=r"1_Pooling/notes\.txt"):
        small.save(folder, overwrite=True)


@pytest.mark.long
def test_fine_tuning_keeps_configuration_and_tokenizer(trained: Path, tmp_path: Path) -> None:
    small = compressed(trained)
    small.save(tmp_path / "small")
    save_finetuned(tmp_path / "small", small.model, tmp_path / "tuned", accuracy=(1.0, 2.0), data="it", more={})
    verify_folder(tmp_path / "tuned")
    again = type(small.model).from_pretrained(tmp_path / "tuned").eval()
    tokens = import_or_fail("transformers").AutoTokenizer.from_pretrained(tmp_path / "tuned")(
        "the cat", return_tensors="pt"
    )
    assert torch.equal(again(**tokens)[0], small.model(**tokens)[0])


def test_plain_folders_keep_the_format_that_older_versions_read(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    nm.compress(net, torch.zeros(1, 4)).save(tmp_path / "small")
    assert read_manifest(tmp_path / "small").version == 1
