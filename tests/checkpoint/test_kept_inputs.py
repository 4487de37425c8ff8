"""Synthesised inputs, saved beside the result on request."""

from __future__ import annotations

import gc
import logging
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import neuron_merging as nm
from neuron_merging.cli.app import main
from neuron_merging.onnx.quantize import MAX_CALIBRATION_SAMPLES, MAX_TRIAL_SAMPLES


def network() -> nn.Module:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3), nn.Flatten())
    net(torch.randn(64, 3, 8, 8))  # in training mode: the norm sees something
    return net.eval()


def test_they_lie_beside_the_weights_and_the_folder_is_read_as_ever(tmp_path: Path) -> None:
    net, x = network(), torch.randn(1, 3, 8, 8)
    small = nm.compress(net, x, ratio=0.5)
    batches = nm.synthesize_inputs(net, x).batches
    small.save(tmp_path / "with", inputs=batches)
    small.save(tmp_path / "without")
    kept = load_file(tmp_path / "with" / "inputs.safetensors")
    assert {name: tensor.shape[1:] for name, tensor in kept.items()} == {"0": x.shape[1:]}
    assert torch.equal(kept["0"], torch.cat([batch for (batch,) in batches]))
    assert not (tmp_path / "without" / "inputs.safetensors").exists()
    assert len({file.stat().st_mode for file in (tmp_path / "with").iterdir()}) == 1  # all may be read by the same
    assert torch.equal(nm.load(tmp_path / "with", build=network)(x), small.model(x))
    small.save(tmp_path / "with", overwrite=True)  # it is one of the folder's own files
    assert not (tmp_path / "with" / "inputs.safetensors").exists()


def test_where_nothing_was_remembered_a_log_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    plain = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    with caplog.at_level(logging.WARNING, logger="neuron_merging"):
        none = nm.synthesize_inputs(plain, torch.zeros(1, 4)).batches
        nm.compress(plain, torch.zeros(1, 4), ratio=0.5).save(tmp_path / "small", inputs=none)
    assert "none were synthesised" in caplog.text
    assert not (tmp_path / "small" / "inputs.safetensors").exists()


def _count_held_entries() -> int:
    """Of all large tensors that are alive, those that share memory counted once."""
    gc.collect()
    plain = (value for value in gc.get_objects() if type(value) in (Tensor, nn.Parameter) and value.numel() > 64)
    return sum({value.untyped_storage().data_ptr(): value.numel() for value in plain}.values())


def test_a_result_holds_neither_the_inputs_nor_the_weights_twice(tmp_path: Path) -> None:
    net, x = network(), torch.randn(1, 3, 8, 8)
    before = _count_held_entries()
    small = nm.compress(net, x, budget={"params": 0.6})
    own = sum(tensor.numel() for tensor in small.model.state_dict().values())
    for_int8 = [batch for batches in small.calibration_inputs for batch in batches]
    assert sum(len(batch[0]) for batch in for_int8) <= MAX_CALIBRATION_SAMPLES + MAX_TRIAL_SAMPLES
    kept = x.numel() + sum(value.numel() for batch in for_int8 for value in batch)  # the example, to export it with
    assert _count_held_entries() - before <= own + kept
    with pytest.raises(nm.MergingError, match="synthesize_inputs"):
        small.save(tmp_path / "small", inputs=True)  # type: ignore[arg-type]


def test_the_command_keeps_the_inputs_that_it_has_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "nets_with_norms.py").write_text(
        "import torch\nfrom torch import nn\n"
        "def make():\n"
        "    torch.manual_seed(0)\n"
        "    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3), nn.Flatten())\n"
        "    net(torch.randn(64, 3, 8, 8))\n"
        "    return net.eval()\n"
    )
    assert main(["compress", "nets_with_norms:make", "out", "--input", "1,3,8,8", "--keep-inputs", "--no-report"]) == 0
    assert load_file(tmp_path / "out" / "inputs.safetensors")["0"].shape[1:] == (3, 8, 8)
