"""Language models are distilled on their text after the merge, where that helps."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import neuron_merging as nm
from neuron_merging.calibration.output_divergence import find_token_logits
from neuron_merging.channels.analysis import Analysis
from neuron_merging.config import CompressConfig
from neuron_merging.pipeline.build_network import PrunedNetwork, merge_and_prune
from neuron_merging.pipeline.distill import distill_language_model
from neuron_merging.pipeline.prepared_inputs import PreparedInputs, prepare_inputs
from tests.conftest import import_or_fail

pytestmark = pytest.mark.filterwarnings("ignore")
SIZES = {"num_hidden_layers": 1, "num_attention_heads": 4, "hidden_size": 32, "intermediate_size": 64}
TOKENS = {"input_ids": torch.arange(32).view(2, 16)}
NOTE = "distilled from the original"
SETTINGS = CompressConfig(ratio=0.5)


def make_llama() -> nn.Module:
    """A Llama that is certain of what it writes, so that there is something to lose."""
    library = import_or_fail("transformers")
    torch.manual_seed(0)
    more = {"vocab_size": 50, "max_position_embeddings": 32, "initializer_range": 0.3, "tie_word_embeddings": True}
    return library.LlamaForCausalLM(library.LlamaConfig(**SIZES, **more, num_key_value_heads=2)).eval()


@pytest.fixture(scope="module")
def prepared() -> tuple[Analysis, PreparedInputs]:
    analysis = nm.analyse(make_llama(), TOKENS)
    return analysis, prepare_inputs(analysis, SETTINGS)


def cut_half(analysis: Analysis, inputs: PreparedInputs) -> PrunedNetwork:
    return merge_and_prune(analysis, {"model.layers.0.mlp.gate_proj": range(0, 64, 2)}, SETTINGS, inputs)


def test_the_divergence_on_held_out_text_falls_and_the_original_stays(
    prepared: tuple[Analysis, PreparedInputs],
) -> None:
    analysis, inputs = prepared
    before = {name: value.clone() for name, value in analysis.model.state_dict().items()}
    plain, *cuts = (cut_half(analysis, inputs) for _ in range(3))
    notes = [distill_language_model(analysis, cut, SETTINGS, inputs) for cut in cuts]
    assert len(notes[0]) == 1 and NOTE in notes[0][0] and notes[0] == notes[1]
    named = zip(*(cut.small.named_parameters() for cut in (plain, *cuts)), strict=True)
    for (name, old), (_, new), (_, again) in named:
        assert torch.equal(old, new) == ("embed_tokens" in name) and torch.equal(new, again)
    assert all(torch.equal(value, before[name]) for name, value in analysis.model.state_dict().items())


@pytest.mark.parametrize("more", [{"effort": "fast"}, {"merger": "none"}, {"merger": "cosine"}])
def test_without_time_or_a_fit_nothing_is_trained(
    prepared: tuple[Analysis, PreparedInputs], more: dict[str, Any]
) -> None:
    analysis, inputs = prepared
    assert not distill_language_model(analysis, cut_half(analysis, inputs), replace(SETTINGS, **more), inputs)


def test_no_text_serves_two_ends(prepared: tuple[Analysis, PreparedInputs]) -> None:
    sets = prepared[1].sets
    texts = [torch.cat([batch[0]["input_ids"] for batch in own.batches]) for own in (sets.fit, sets.heldout)]
    rows = [row for text in texts for row in text.tolist()]
    assert len({tuple(row) for row in rows}) == len(rows)


def test_text_of_the_user_is_trained_on_beside_its_own(prepared: tuple[Analysis, PreparedInputs]) -> None:
    analysis, inputs = prepared
    text = [{"input_ids": torch.randint(50, (4, 16), generator=torch.Generator().manual_seed(0))} for _ in range(8)]
    steps = [
        int(
            distill_language_model(analysis, cut_half(analysis, inputs), SETTINGS, own)[0]
            .split(" steps")[0]
            .split()[-1]
        )
        for own in (inputs, replace(inputs, calibration=text))
    ]
    assert steps[1] > steps[0]


def test_what_was_trained_comes_back_from_its_folder(tmp_path: Path) -> None:
    small = nm.compress(make_llama(), TOKENS, ratio=0.5, uniform=True)
    assert any(NOTE in note for note in small.summary.notes)
    small.save(tmp_path / "small")
    library = import_or_fail("transformers")
    for again in (nm.load(tmp_path / "small"), library.AutoModelForCausalLM.from_pretrained(tmp_path / "small")):
        torch.testing.assert_close(compute_logits(again.eval()), compute_logits(small.model))


def compute_logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        logits: Tensor = model(**TOKENS).logits
    return logits


class Capped(nn.Module):
    """Caps its scores, as Gemma 2 does."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(50, 8), nn.Linear(8, 50)

    def forward(self, text: Tensor) -> Tensor:
        scores: Tensor = self.head(self.embedding(text).cumsum(1))
        return 30 * torch.tanh(scores / 30)


def test_capped_scores_over_the_vocabulary_are_those_of_a_language_model() -> None:
    assert find_token_logits(nm.analyse(Capped(), TOKENS["input_ids"]).graph) == 0
    assert find_token_logits(nm.analyse(nn.Sequential(Capped(), nn.Tanh()), TOKENS["input_ids"]).graph) is None
