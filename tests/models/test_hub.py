"""Networks of transformers as MODEL, and folders that transformers alone can read."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import neuron_merging as nm
from neuron_merging.cli import app
from neuron_merging.models import sources
from neuron_merging.models.pretrained_config import CONFIG_FILE, find_matching_config
from tests.conftest import import_or_fail, mark_long

pytestmark = pytest.mark.filterwarnings("ignore")
TOKENS = torch.arange(14).view(2, 7)
LLAMA = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 32, "intermediate_size": 64, "head_dim": 8}
ALONE = """
import sys, torch, transformers
model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1]).eval()
assert "neuron_merging" not in sys.modules
torch.save(model(torch.arange(14).view(2, 7)).logits.detach(), sys.argv[2])
"""


def llama() -> nn.Module:
    library = import_or_fail("transformers")
    torch.manual_seed(0)
    return library.LlamaForCausalLM(library.LlamaConfig(**LLAMA, vocab_size=50, num_key_value_heads=2)).eval()


SIZES = {"vocab_size": 50, "max_position_embeddings": 32, "hidden_size": 32, "num_hidden_layers": 1}
SIZES |= {"num_attention_heads": 4, "intermediate_size": 48, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
FAMILIES: dict[str, dict[str, int]] = {
    "gpt2": {},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "qwen2": {"num_key_value_heads": 2},
    "qwen3": {"num_key_value_heads": 2, "head_dim": 8},
    "gemma2": {"num_key_value_heads": 2, "head_dim": 8},
    "mistral": {"num_key_value_heads": 2},
    "gpt_neox": {},
    "phi": {},
    "phi3": {"num_key_value_heads": 2},
}


@pytest.mark.parametrize("family", mark_long(FAMILIES, {"phi3"}))
def test_language_models_come_back_and_write_with_their_cache(family: str, tmp_path: Path) -> None:
    library = import_or_fail("transformers")
    torch.manual_seed(0)
    config = library.AutoConfig.for_model(family, **SIZES, **FAMILIES[family])
    small = nm.compress(
        library.AutoModelForCausalLM.from_config(config).eval(), TOKENS, ratio=0.25, merger="none", uniform=True
    )
    small.save(tmp_path / "small")
    for again in (nm.load(tmp_path / "small"), library.AutoModelForCausalLM.from_pretrained(tmp_path / "small").eval()):
        assert torch.equal(again(TOKENS).logits, small.model(TOKENS).logits)
        fixed = {"attention_mask": torch.ones_like(TOKENS), "min_new_tokens": 6, "max_new_tokens": 6}
        with_cache, without = (again.generate(TOKENS, use_cache=own, do_sample=False, **fixed) for own in (True, False))
        assert torch.equal(with_cache, without)


@pytest.mark.long
def test_equal_widths_come_back_without_this_package(tmp_path: Path) -> None:
    small = nm.compress(llama(), TOKENS, ratio=0.5, merger="none")
    small.save(tmp_path / "small")
    config = json.loads((tmp_path / "small" / CONFIG_FILE).read_text())
    assert (config["intermediate_size"], config["num_attention_heads"], config["num_key_value_heads"]) == (32, 2, 1)
    out = tmp_path / "logits.pt"
    subprocess.run([sys.executable, "-c", ALONE, str(tmp_path / "small"), str(out)], check=True, capture_output=True)
    assert torch.equal(torch.load(out), small.model(TOKENS).logits)
    assert "from_pretrained" in (tmp_path / "small" / "README.md").read_text()


@pytest.mark.long
def test_other_widths_need_our_loader(tmp_path: Path) -> None:
    small = nm.compress(llama(), TOKENS, ratio={"model.layers.0.mlp.gate_proj": 0.5}, merger="none")
    assert find_matching_config(small.model, small.plan) is None
    small.save(tmp_path / "small")
    assert not (tmp_path / "small" / CONFIG_FILE).exists()
    assert "uniform=True" in (tmp_path / "small" / "README.md").read_text()
    again = nm.load(tmp_path / "small", build=llama)
    assert torch.equal(again(TOKENS).logits, small.model(TOKENS).logits)


@pytest.mark.long
def test_a_budget_for_layers_that_stay_alike_comes_back_too(tmp_path: Path) -> None:
    small = nm.compress(llama(), TOKENS[:1], budget={"params": 0.8}, uniform=True, ignore=["*:heads"], effort="fast")
    assert any(reader.kind == "fitted" for group in small.plan.groups for reader in group.readers)
    small.save(tmp_path / "small")
    again = type(small.model).from_pretrained(tmp_path / "small").eval()
    assert torch.equal(again(TOKENS).logits, small.model(TOKENS).logits)


@pytest.mark.long
def test_a_configuration_that_the_library_would_refuse_is_not_written() -> None:
    library = import_or_fail("transformers")
    config = library.LlamaConfig(**LLAMA, vocab_size=50)  # of four heads three will stay, in a width of 32
    small = nm.compress(library.LlamaForCausalLM(config).eval(), TOKENS, ratio={"*:heads": 0.25}, merger="none")
    assert small.model.model.layers[0].self_attn.q_proj.out_features == 24
    assert find_matching_config(small.model, small.plan) is None


@pytest.mark.long
def test_a_saved_network_by_name_from_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    llama().save_pretrained("trained")
    assert app.main(["compress", "hf:trained", "out", "--merger", "none", "--no-report"]) == 0
    assert json.loads(Path("out", CONFIG_FILE).read_text())["architectures"] == ["LlamaForCausalLM"]
    assert app.main(["verify", "out", "--trust"]) == 0
    # The folder holds the original's configuration: nothing that the recipe names is opened or fetched.
    assert type(nm.load("out")).__name__ == "LlamaForCausalLM"


def test_weights_that_were_loaded_are_not_called_random(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    llama().save_pretrained(tmp_path / "net")
    loaded = [
        [f"hf:{tmp_path / 'net'}"],
        ["timm:resnet18", "--arg", "pretrained=true"],
        ["timm:resnet18", "--arg", "checkpoint_path=net.pt"],
        ["torchvision:resnet18", "--arg", "weights=DEFAULT"],
        ["torchvision:resnet18", "--arg", "pretrained=true"],
    ]
    fresh = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    monkeypatch.setattr(sources, "_find_zoo_factory", lambda zoo, name: lambda **arg: fresh)
    for named in loaded:
        shape = [] if named[0].startswith("hf:") else ["--input", "1,4"]
        assert app.main(["inspect", *named, *shape, "--json"]) == 0
        assert "random" not in capsys.readouterr().err
    for zoo in ("timm", "torchvision"):
        assert app.main(["inspect", f"{zoo}:resnet18", "--input", "1,4", "--json"]) == 0
        assert "weights are random" in capsys.readouterr().err


def test_heads_by_task_and_no_code_from_elsewhere(tmp_path: Path) -> None:
    llama().save_pretrained(tmp_path / "trained")
    model = f"hf:{tmp_path / 'trained'}"
    found = sources.build_from_source(model, {"task": "sequence-classification"}, fresh=True)
    assert type(found).__name__ == "LlamaForSequenceClassification"
    with pytest.raises(nm.ModelError, match="no head for the task"):
        sources.build_from_source(model, {"task": "sequence-clasification"})
    assert "run code" in str(sources.describe_foreign_code(model, {"trust_remote_code": True}))


@pytest.mark.long
def test_a_width_that_the_configuration_leaves_open_is_written(tmp_path: Path) -> None:
    transformers = import_or_fail("transformers")
    config = transformers.GPT2Config(vocab_size=20, n_positions=16, n_embd=8, n_layer=2, n_head=2)
    model, x = transformers.GPT2LMHeadModel(config).eval(), {"input_ids": torch.arange(12).view(2, 6)}
    small = nm.compress(model, x, ratio={"*mlp*": 0.5}, merger="none")
    small.save(tmp_path / "small")
    again = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "small").eval()
    assert config.n_inner is None and again.config.n_inner == 16
    assert torch.equal(again(**x).logits, small.model(**x).logits)
