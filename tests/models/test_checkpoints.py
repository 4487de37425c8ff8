"""Weights as trainers write them: found, named, and refused with words that help."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn

from neuron_merging.cli import app
from neuron_merging.errors import ModelError
from neuron_merging.models.state_dicts import load_weights


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))


def trained(seed: int = 1) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    return net().state_dict()


def before(prefix: str) -> dict[str, torch.Tensor]:
    return {prefix + name: tensor for name, tensor in trained().items()}


AROUND: dict[str, Callable[[], Any]] = {
    "plain": trained,
    "compiled": lambda: before("_orig_mod."),
    "compiled inside": lambda: {"state_dict": {n.replace(".", "._orig_mod.", 1): t for n, t in trained().items()}},
    "data parallel": lambda: {"net": before("module."), "epoch": 3},
    "both": lambda: before("module._orig_mod."),
    "lightning": lambda: {"state_dict": {**before("model."), "loss.weight": torch.ones(2)}, "epoch": 3},
    "ema beside": lambda: {"model": trained(), "ema": trained(2), "optimizer": {"lr": 0.1}},
    "ema alone": lambda: {"state_dict_ema": trained(), "args": {"lr": 0.1}},
    "nested": lambda: {"ema": {"decay": 0.9, "module": trained()}},
}


@pytest.mark.parametrize("name", AROUND)
def test_the_state_dict_is_found(name: str, tmp_path: Path) -> None:
    file = tmp_path / "w.pt"
    torch.save(AROUND[name](), file)
    network = net()
    load_weights(network, str(file))
    torch.testing.assert_close(network.state_dict(), trained())


def test_which_one_was_taken_is_said_and_can_be_chosen(tmp_path: Path) -> None:
    file = str(tmp_path / "w.pt")
    torch.save(AROUND["ema beside"](), file)
    assert load_weights(net(), file) == ["weights: took 'model'; the file also has ema (--weights-key)"]
    network = net()
    assert load_weights(network, file, "ema") == []
    torch.testing.assert_close(network.state_dict(), trained(2))
    with pytest.raises(ModelError, match=r"no weights under 'optimizer'.*Use one of model, ema"):
        load_weights(net(), file, "optimizer")


def test_what_is_left_out_is_said(tmp_path: Path) -> None:
    torch.save(AROUND["lightning"](), tmp_path / "w.ckpt")
    said = load_weights(net(), str(tmp_path / "w.ckpt"))
    assert said == ["weights: took 'state_dict'", "weights: took those under 'model.', and left 1 others out"]


@pytest.mark.parametrize("given", ["index", "folder", "shard"])
def test_shards(given: str, tmp_path: Path) -> None:
    names = list(trained())
    files = [f"m-0000{i}-of-00002.safetensors" for i in (1, 2)]
    for file, part in zip(files, (names[:3], names[3:]), strict=True):
        safetensors.torch.save_file({name: trained()[name] for name in part}, tmp_path / file)
    if given == "index":
        index = {"weight_map": {name: files[names.index(name) > 2] for name in names}}
        (tmp_path / "m.safetensors.index.json").write_text(json.dumps(index))
    path = {"index": tmp_path / "m.safetensors.index.json", "folder": tmp_path, "shard": tmp_path / files[0]}[given]
    network = net()
    load_weights(network, str(path))
    torch.testing.assert_close(network.state_dict(), trained())
    (tmp_path / files[1]).unlink()
    with pytest.raises(ModelError):
        load_weights(net(), str(path))


def test_torchscript_says_what_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.jit.save(torch.jit.script(nn.Linear(4, 2)), "m.pt")
    with pytest.raises(ModelError, match="TorchScript") as error:
        load_weights(net(), "m.pt")
    assert "weights_only=False will" not in str(error.value)
    assert app.main(["inspect", "m.pt"]) == 3
    assert "TorchScript" in capsys.readouterr().err


def test_what_is_no_checkpoint_is_said_without_bad_advice(tmp_path: Path) -> None:
    (tmp_path / "w.pt").write_bytes(b"\x80\x02junk" * 20)
    with pytest.raises(ModelError) as error:
        load_weights(net(), str(tmp_path / "w.pt"))
    assert "weights_only" not in str(error.value)
    torch.save({"epoch": 3, "lr": 0.1}, tmp_path / "w.pt")
    with pytest.raises(ModelError, match="no state dict \\(it has epoch, lr\\)"):
        load_weights(net(), str(tmp_path / "w.pt"))


def test_a_key_without_a_file_is_not_ignored(capsys: pytest.CaptureFixture[str]) -> None:
    assert app.main(["inspect", "lenet-300-100", "--weights-key", "ema"]) == 2
    assert "Give --weights too" in capsys.readouterr().err


def test_a_file_in_place_of_a_module_is_put_right(capsys: pytest.CaptureFixture[str]) -> None:
    assert app.main(["inspect", "mynet.py:build"]) == 3
    assert "Write mynet:build" in capsys.readouterr().err
