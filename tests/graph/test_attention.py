"""`PrunableMultiheadAttention` equals torch's attention, and takes its sizes from its weights."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import neuron_merging as nm
from neuron_merging.graph.copying import copy_without_hooks
from neuron_merging.graph.module_rewrites import PrunableMultiheadAttention, make_heads_prunable

MADE: list[dict[str, Any]] = [
    {},
    {"batch_first": True, "bias": False},
    {"add_bias_kv": True},
    {"add_zero_attn": True, "batch_first": True},
    {"kdim": 5, "vdim": 7},
]


@pytest.mark.parametrize("made", MADE, ids=str)
def test_it_computes_what_torch_computes(made: dict[str, Any]) -> None:
    torch.manual_seed(0)
    attention = nn.MultiheadAttention(12, 3, **made).eval()
    twin = make_heads_prunable(copy_without_hooks(attention))
    front = (2, 4) if attention.batch_first else (4, 2)
    query = torch.randn(*front, 12)
    key, value = torch.randn(*front, attention.kdim), torch.randn(*front, attention.vdim)
    hidden, padding = torch.ones(4, 4, dtype=torch.bool).triu(1), torch.tensor([[False] * 4, [False] * 3 + [True]])
    each = torch.randn(6, 4, 4)
    masks = ({}, {"attn_mask": hidden}, {"key_padding_mask": padding}, {"attn_mask": each})
    for masked, need, average in product(masks, (True, False), (True, False)):
        asked = {**masked, "need_weights": need, "average_attn_weights": average}
        for given in ((query, key, value), (query,) * 3):
            if given[1].shape[-1] == attention.kdim and given[2].shape[-1] == attention.vdim:
                _alike(attention(*given, **asked), twin(*given, **asked))
    _alike(attention(query[0], key[0], value[0]), twin(query[0], key[0], value[0]))


def _alike(want: tuple[Tensor, Tensor | None], got: tuple[Tensor, Tensor | None]) -> None:
    for a, b in zip(want, got, strict=True):
        assert (a is None) == (b is None)
        if a is not None and b is not None:
            torch.testing.assert_close(a, b)


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.head = nn.Linear(6, 16), nn.Linear(16, 3)
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 4, 24, batch_first=True), 2)

    def forward(self, x: Tensor, padding: Tensor | None = None) -> Tensor:
        return self.head(self.encoder(self.a(x), src_key_padding_mask=padding))


def test_an_encoder_without_some_heads_runs_everywhere() -> None:
    """In evaluation without gradients torch would take kernels that read all heads."""
    torch.manual_seed(0)
    small = nm.compress(Encoder(), torch.randn(2, 5, 6), ratio=0.5, scope="all").model
    attention = small.encoder.layers[0].self_attn
    assert isinstance(attention, PrunableMultiheadAttention) and (attention.num_heads, attention.embed_dim) == (2, 8)
    x, padding = torch.randn(2, 5, 6), torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    for given in (None, padding):
        with torch.no_grad():
            quick = small.eval()(x, given)
        torch.testing.assert_close(quick, small(x, given))


def test_a_folder_is_read_back_with_fewer_heads(tmp_path: Any) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 5, 6)
    small = nm.compress(Encoder(), x, ratio=0.5)
    small.save(tmp_path / "small")
    back = nm.load(tmp_path / "small", build=Encoder)
    back = getattr(back, "model", back).eval()
    with torch.no_grad():
        assert torch.equal(back(x), small.model.eval()(x))
