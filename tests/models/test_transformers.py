"""Networks of transformers, tiny and with random weights: inputs by name, caches, hooks of their own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import neuron_merging as nm
from tests.conftest import import_or_fail

SIZES = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 32, "intermediate_size": 64}
TOKENS = torch.arange(14).view(2, 7)
pytestmark = pytest.mark.filterwarnings("ignore")


def bert() -> nn.Module:
    library = import_or_fail("transformers")
    return library.BertModel(library.BertConfig(**SIZES, vocab_size=50)).eval()


def llama() -> nn.Module:
    library = import_or_fail("transformers")
    return library.LlamaForCausalLM(library.LlamaConfig(**SIZES, vocab_size=50, num_key_value_heads=2)).eval()


def segformer() -> nn.Module:
    library = import_or_fail("transformers")
    config = library.SegformerConfig(
        depths=[1], num_encoder_blocks=1, hidden_sizes=[8], num_attention_heads=[1], sr_ratios=[2],
        strides=[4], patch_sizes=[7], mlp_ratios=[2], decoder_hidden_size=16, num_labels=3,
    )  # fmt: skip
    return library.SegformerForSemanticSegmentation(config).eval()


def test_inputs_by_name_as_a_tokenizer_gives_them() -> None:
    batch = import_or_fail("transformers").BatchEncoding(
        {"input_ids": TOKENS, "attention_mask": torch.ones_like(TOKENS)}
    )
    small = nm.compress(bert(), batch, merger="none")
    assert small.model.encoder.layer[0].intermediate.dense.out_features == 32
    assert small.summary.verified and small.model(**batch).last_hidden_state.shape == (2, 7, 32)


def test_batches_by_name_calibrate() -> None:
    batches = [{"input_ids": TOKENS + i, "labels": None, "attention_mask": torch.ones_like(TOKENS)} for i in range(4)]
    example = {"attention_mask": torch.ones_like(TOKENS), "input_ids": TOKENS}
    small = nm.compress(bert(), example, calibration=batches)
    assert {str(reader.kind) for group in small.plan.groups for reader in group.readers} == {"fitted"}


@pytest.mark.parametrize(
    "inputs",
    [
        pytest.param(TOKENS, id="by position", marks=pytest.mark.long),
        pytest.param({"input_ids": TOKENS}, id="by name"),
    ],
)
def test_caches_are_no_part_of_what_is_captured(inputs: Any) -> None:
    model = llama()
    assert model(TOKENS).past_key_values is not None
    small = nm.compress(model, inputs, merger="none")
    assert small.model.model.layers[0].mlp.gate_proj.out_features == 32
    assert small.model.config.use_cache and small.model(TOKENS).past_key_values is not None


@pytest.mark.long
def test_hooks_that_a_network_installs_itself_are_kept() -> None:
    model, images = segformer(), torch.randn(1, 3, 64, 64)
    model(images)
    small = nm.compress(model, images, merger="none")
    assert small.summary.verified and not any("hooks" in note for note in small.summary.notes)
