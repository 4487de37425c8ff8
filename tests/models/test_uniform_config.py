"""`uniform=True` gives a config.json that from_pretrained reads, or an error that says why there is none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import neuron_merging as nm
from neuron_merging.models.pretrained_config import CONFIG_FILE, find_matching_config
from tests.conftest import import_or_fail

pytestmark = pytest.mark.filterwarnings("ignore")
TOKENS = {"input_ids": torch.arange(14).view(2, 7)}
TINY = {"vocab_size": 50, "num_hidden_layers": 2, "hidden_size": 24, "intermediate_size": 40, "num_attention_heads": 3}


def bert() -> nn.Module:
    library = import_or_fail("transformers")
    torch.manual_seed(0)
    return library.BertModel(library.BertConfig(**TINY, max_position_embeddings=16)).eval()


def llama(**more: Any) -> nn.Module:
    library = import_or_fail("transformers")
    torch.manual_seed(0)
    return library.LlamaForCausalLM(library.LlamaConfig(**{**TINY, **more})).eval()


def assert_comes_back(small: nm.Compressed, folder: Path, inputs: dict[str, torch.Tensor]) -> dict[str, Any]:
    small.save(folder)
    again = type(small.model).from_pretrained(folder).eval()
    assert torch.equal(again(**inputs)[0], small.model(**inputs)[0])
    config: dict[str, Any] = json.loads((folder / CONFIG_FILE).read_text())
    return config


def test_heads_that_bert_cannot_describe_stay_and_a_config_is_written(tmp_path: Path) -> None:
    small = nm.compress(bert(), TOKENS, budget={"params": 0.9}, uniform=True, effort="fast")
    config = assert_comes_back(small, tmp_path / "small", TOKENS)
    assert config["num_attention_heads"] == 3 and config["intermediate_size"] < 40
    assert any("cannot describe" in note and "heads" in note for note in small.summary.notes)


@pytest.mark.long
def test_a_ratio_keeps_to_what_the_configuration_can_say(tmp_path: Path) -> None:
    wide = llama(num_attention_heads=4, num_key_value_heads=4, head_dim=8, hidden_size=32)
    small = nm.compress(wide, TOKENS, ratio=0.25, uniform=True, merger="none")  # 3 of 4 heads do not divide 32
    config = assert_comes_back(small, tmp_path / "small", TOKENS)
    assert (config["num_attention_heads"], config["intermediate_size"]) == (4, 30)
    half = nm.compress(wide, TOKENS, ratio=0.5, uniform=True, merger="none")
    assert assert_comes_back(half, tmp_path / "half", TOKENS)["num_attention_heads"] == 2


@pytest.mark.long
def test_encoder_and_decoder_that_share_an_entry_keep_equal_widths(tmp_path: Path) -> None:
    library = import_or_fail("transformers")
    torch.manual_seed(0)
    config = library.T5Config(
        vocab_size=50, d_model=16, d_kv=4, d_ff=32, num_layers=1, num_heads=2, decoder_start_token_id=0
    )
    inputs = {**TOKENS, "decoder_input_ids": TOKENS["input_ids"]}
    model = library.T5ForConditionalGeneration(config).eval()
    small = nm.compress(model, inputs, ratio={"*wi": 0.5}, uniform=True, merger="none")
    assert assert_comes_back(small, tmp_path / "small", inputs)["d_ff"] == 16


def test_no_possible_configuration_is_an_error_with_its_reason() -> None:
    heads = {"ratio": {"*:heads": 0.4}, "merger": "none"}
    with pytest.raises(nm.MergingError, match=r"BertConfig cannot describe fewer encoder\.layer\.\*.*heads"):
        nm.compress(bert(), TOKENS, uniform=True, **heads)
    with pytest.raises(nm.MergingError, match="only some of the layers"):
        nm.compress(bert(), TOKENS, ratio={"encoder.layer.0.*dense": 0.5}, uniform=True, merger="none")


@pytest.mark.long
def test_the_card_gives_the_true_reason(tmp_path: Path) -> None:
    cases: dict[str, dict[str, Any]] = {
        "no entries of BertConfig describe encoder.layer.*.attention.self.query:heads with 2 of 3": {
            "ratio": {"*:heads": 0.3}
        },
        "the layers encoder.layer.*.intermediate.dense keep 20 to 40 channels": {
            "ratio": {"encoder.layer.0.intermediate.dense": 0.5}
        },
    }
    for number, (reason, settings) in enumerate(cases.items()):
        folder = tmp_path / str(number)
        nm.compress(bert(), TOKENS, merger="none", **settings).save(folder)
        text = (folder / "README.md").read_text().replace("&#42;", "*")
        assert not (folder / CONFIG_FILE).exists() and reason in text and "biases" not in text


def test_layers_one_by_one_where_the_class_reads_them(tmp_path: Path) -> None:
    library = import_or_fail("transformers")
    if not hasattr(library.PreTrainedConfig, "per_layer_config"):
        pytest.skip("this transformers describes no single layers")

    class LayeredConfig(library.PreTrainedConfig):
        model_type = "layered"

        def __init__(self, hidden_size: int = 8, intermediate_size: int = 16, **more: Any) -> None:
            self.hidden_size, self.intermediate_size = hidden_size, intermediate_size
            self.num_hidden_layers, self.vocab_size = 2, 50
            super().__init__(**more)

    class Layered(library.PreTrainedModel):
        config_class = LayeredConfig

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            own = [view.intermediate_size for view in config.per_layer_config]
            self.table = nn.Embedding(50, config.hidden_size)
            self.up = nn.ModuleList(nn.Linear(config.hidden_size, width) for width in own)
            self.down = nn.ModuleList(nn.Linear(width, config.hidden_size) for width in own)
            self.post_init()

        def forward(self, input_ids: torch.Tensor, attention_mask: Any = None) -> tuple[torch.Tensor]:
            x = self.table(input_ids)
            for up, down in zip(self.up, self.down, strict=True):
                x = x + down(up(x).relu())
            return (x,)

    torch.manual_seed(0)
    ratios = {"up.0": 0.5, "up.1": 0.25}
    small = nm.compress(Layered(LayeredConfig()).eval(), TOKENS, ratio=ratios, merger="none")
    config = assert_comes_back(small, tmp_path / "small", TOKENS)
    assert config["per_layer_config"] == {"0": {"intermediate_size": 8}, "1": {"intermediate_size": 12}}


@pytest.mark.long
def test_layers_one_by_one_are_not_written_where_the_class_ignores_them() -> None:
    small = nm.compress(llama(), TOKENS, ratio={"model.layers.0.mlp.gate_proj": 0.5}, merger="none")
    assert find_matching_config(small.model, small.plan) is None
