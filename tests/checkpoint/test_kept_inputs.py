"""Synthesised inputs, saved beside the result on request."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import neuron_merging as nm


def network() -> nn.Module:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3), nn.Flatten())
    net(torch.randn(64, 3, 8, 8))  # in training mode: the norm sees something
    return net.eval()


def test_they_lie_beside_the_weights_and_the_folder_is_read_as_ever(tmp_path: Path) -> None:
    net, x = network(), torch.randn(1, 3, 8, 8)
    small = nm.compress(net, x, ratio=0.5)
    small.save(tmp_path / "with", inputs=True)
    small.save(tmp_path / "without")
    kept = load_file(tmp_path / "with" / "inputs.safetensors")
    assert {name: tensor.shape[1:] for name, tensor in kept.items()} == {"0": x.shape[1:]}
    assert torch.equal(kept["0"], torch.cat([batch for (batch,) in nm.synthesize_inputs(net, x).batches]))
    assert not (tmp_path / "without" / "inputs.safetensors").exists()
    assert len({file.stat().st_mode for file in (tmp_path / "with").iterdir()}) == 1  # all may be read by the same
    assert torch.equal(nm.load(tmp_path / "with", build=network)(x), small.model(x))
    small.save(tmp_path / "with", overwrite=True)  # it is one of the folder's own files
    assert not (tmp_path / "with" / "inputs.safetensors").exists()


def test_where_nothing_was_remembered_a_log_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    plain = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    with caplog.at_level(logging.WARNING, logger="neuron_merging"):
        nm.compress(plain, torch.zeros(1, 4), ratio=0.5).save(tmp_path / "small", inputs=True)
    assert "none were synthesised" in caplog.text
    assert not (tmp_path / "small" / "inputs.safetensors").exists()
