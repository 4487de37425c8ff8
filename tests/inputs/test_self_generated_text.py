"""Text that a language model samples from its own outputs."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import neuron_merging as nm
from neuron_merging.inputs.input_sets import make_fit_inputs
from neuron_merging.inputs.text import SELF_GENERATED_TEXT, generate_text
from tests.conftest import import_or_fail

LETTERS = 11


class Counts(nn.Module):
    """Says that 4 comes after 3, and so on; `back` keeps it from looking ahead."""

    def __init__(self, back: bool = True) -> None:
        super().__init__()
        self.table = nn.Embedding(LETTERS, LETTERS)
        self.up, self.down = nn.Linear(LETTERS, 24), nn.Linear(24, LETTERS)
        self.back = back
        with torch.no_grad():
            self.table.weight.copy_(20 * torch.eye(LETTERS).roll(1, 1))
            self.down.weight.mul_(0.01)

    def forward(self, text: Tensor) -> Tensor:
        x = self.table(text)
        seen = F.pad(x.cumsum(1) if self.back else x.flip(1).cumsum(1).flip(1), (0, 0))
        y: Tensor = x + 1e-3 * seen + self.down(torch.relu(self.up(x)))
        return y


def test_the_text_is_what_the_network_says() -> None:
    made = generate_text(nm.analyse(Counts().eval(), torch.zeros(2, 6, dtype=torch.long)), 40, 10**9, seed=0)
    assert made.source == SELF_GENERATED_TEXT and [len(batch[0]) for batch in made.batches] == [32, 8]
    text = torch.cat([batch[0] for batch in made.batches])
    assert torch.equal(text[:, 1:], (text[:, :-1] + 1) % LETTERS)
    assert len(text[:, 0].unique()) > 5


def test_it_depends_on_the_seed_alone() -> None:
    analysis = nm.analyse(Counts().eval(), torch.zeros(2, 6, dtype=torch.long))
    first, again, other = (generate_text(analysis, 8, 10**9, seed).batches[0][0] for seed in (0, 0, 1))
    assert torch.equal(first, again) and not torch.equal(first, other)


@pytest.mark.parametrize("work", [0, 50])
def test_a_network_that_is_too_slow_does_not_write(work: int) -> None:
    analysis = nm.analyse(Counts().eval(), torch.zeros(2, 6, dtype=torch.long))
    assert "too long" in generate_text(analysis, 8, work, 0).refusal


def test_what_looks_ahead_or_gives_no_scores_does_not_write() -> None:
    text = torch.zeros(2, 6, dtype=torch.long)
    encoder = nn.Sequential(nn.Embedding(LETTERS, 8), nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
    for model in (Counts(back=False), encoder):
        assert not make_fit_inputs(nm.analyse(model.eval(), text)).batches


def test_the_merge_is_made_on_it_and_says_so() -> None:
    verdict = nm.compress(Counts().eval(), torch.zeros(2, 6, dtype=torch.long), ratio=0.5).summary.verdict
    assert verdict is not None and SELF_GENERATED_TEXT in str(verdict)
    # A model that was fitted to its own text looks too good on such text.
    assert (
        verdict.level == "caution"
        and "on its own text only" in str(verdict)
        and "Text that people write loses more" in str(verdict)
    )


def test_the_summary_says_why_there_is_no_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("neuron_merging.inputs.input_sets.TEXT_WORK_SHARE", 0.0)
    small = nm.compress(Counts().eval(), torch.zeros(2, 6, dtype=torch.long), ratio=0.5)
    assert any("no self-generated text" in note and "too long" in note for note in small.summary.notes)


def _llama(**more: int) -> nn.Module:
    library = import_or_fail("transformers")
    torch.manual_seed(0)
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 32, "intermediate_size": 64}
    config = library.LlamaConfig(**sizes, num_key_value_heads=2, vocab_size=50, bos_token_id=7, eos_token_id=8, **more)
    return library.LlamaForCausalLM(config).eval()


@pytest.mark.filterwarnings("ignore")
def test_a_model_with_a_cache_writes_whatever_it_costs() -> None:
    analysis = nm.analyse(_llama(max_position_embeddings=32), {"input_ids": torch.zeros(1, 16, dtype=torch.long)})
    made = generate_text(analysis, 256, work=0, seed=0)
    text = torch.cat([batch[0]["input_ids"] for batch in made.batches])
    assert text.shape == (32, 32)  # at least 1,024 tokens, of the longest text that the model takes
    assert len(text[:, 0].unique()) > 4
    again = generate_text(analysis, 256, work=0, seed=0)
    assert torch.equal(again.batches[0][0]["input_ids"], made.batches[0][0]["input_ids"])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("tied", [False, True])
def test_text_in_bfloat16_leaves_the_model_as_it_is(tied: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("neuron_merging.inputs.text.MIN_BFLOAT16_MACS", 0)
    monkeypatch.setattr("neuron_merging.inputs.text.is_bfloat16_fast", lambda tensors: True)
    model = _llama(max_position_embeddings=32, tie_word_embeddings=tied)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    seen = []
    model.model.layers[0].mlp.register_forward_hook(lambda *_: seen.append("hook"))
    analysis = nm.analyse(model, {"input_ids": torch.zeros(1, 16, dtype=torch.long)})
    seen.clear()
    text = torch.cat([batch[0]["input_ids"] for batch in generate_text(analysis, 256, work=0, seed=0).batches])
    assert text.dtype == torch.long and text.shape == (32, 32) and len(text.unique()) > 10
    after = model.state_dict()
    assert all(after[name].dtype == value.dtype and torch.equal(after[name], value) for name, value in before.items())
    assert not seen


@pytest.mark.filterwarnings("ignore")
def test_a_penalty_of_the_model_does_not_change_its_text() -> None:
    model = _llama(max_position_embeddings=32)
    found = []
    for penalty in (1.0, 5.0):
        model.generation_config.repetition_penalty = penalty
        analysis = nm.analyse(model, {"input_ids": torch.zeros(1, 16, dtype=torch.long)})
        found.append(generate_text(analysis, 256, work=0, seed=0).batches[0][0]["input_ids"])
    assert torch.equal(*found)


@pytest.mark.filterwarnings("ignore")
def test_its_own_text_stands_beside_the_users() -> None:
    model = _llama(max_position_embeddings=32)
    text = [{"input_ids": torch.randint(50, (4, 16))} for _ in range(8)]
    small = nm.compress(model, text[0], ratio=0.5, calibration=text)
    verdict = small.summary.verdict
    assert verdict is not None and verdict.text is not None and verdict.other_text is not None
    assert SELF_GENERATED_TEXT in small.summary.statistics and "calibration" in small.summary.statistics
    assert "nats per token" in str(verdict) and "self-generated texts" in str(verdict)
    assert verdict.fidelity == pytest.approx(torch.tensor(-verdict.text.kl).exp().item())
