"""`compare`: how close the outputs of two networks of any kind are."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import neuron_merging as nm
from neuron_merging import models
from neuron_merging.cli import app
from tests.conftest import import_or_fail
from tests.onnx import small_files


@pytest.fixture
def network() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(128, 5)]
    return nn.Sequential(*layers).eval(), torch.randn(2, 3, 6, 6)


def test_a_file_of_each_format_is_the_network(network: tuple[nn.Module, Tensor], tmp_path: Path) -> None:
    net, x = network
    small = nm.compress(net, x, ratio=0.25, merger="none", effort="fast")
    for name in ("small.onnx", "small.pt2"):
        small.save(tmp_path / name)
        same = nm.compare(small, tmp_path / name)
        assert same.verdict.fidelity == pytest.approx(1, abs=1e-6) and same.verdict.level == "good"
        other = nm.compare(net, tmp_path / name, x)
        assert other.verdict.fidelity == pytest.approx(small.summary.verdict.fidelity, abs=0.2)
        assert nm.compare(tmp_path / name, tmp_path / name).verdict.level == "good"
    small.save(tmp_path / "folder")


def test_the_words_are_those_of_a_verdict(network: tuple[nn.Module, Tensor]) -> None:
    net, x = network
    torch.manual_seed(1)
    other = copy.deepcopy(net)
    nn.init.normal_(other[4].weight)
    text = str(nm.compare(net, other, x))
    assert text.startswith("WARNING: its outputs are far from the first network's: fidelity 0.")
    assert "(no data was given)" in text and "budget" not in text and "Cut less" not in text
    with pytest.raises(nm.FidelityError, match=r"0\.9 is required"):
        nm.compare(net, other, x, require=0.9)


def test_data_with_labels_give_the_accuracy(network: tuple[nn.Module, Tensor]) -> None:
    net, x = network
    batches = [(torch.randn(8, 3, 6, 6), torch.arange(8) % 5) for _ in range(3)]
    found = nm.compare(net, copy.deepcopy(net), x, evaluate=batches)
    assert found.verdict.data and found.verdict.accuracy is not None and found.verdict.fidelity == 1
    assert "24 samples of your data" in str(found)


def test_a_quantised_file_is_judged_by_its_own_runtime(tmp_path: Path) -> None:
    quantization = pytest.importorskip("onnxruntime.quantization")
    whole, int8 = small_files.classifier(tmp_path / "whole.onnx"), tmp_path / "int8.onnx"
    quantization.quantize_dynamic(whole, int8, weight_type=quantization.QuantType.QUInt8)
    for first, second in ((whole, int8), (int8, whole), (int8, int8)):
        found = nm.compare(first, second)
        assert found.verdict.fidelity is not None and 0.9 < found.verdict.fidelity <= 1
        assert (found.verdict.fidelity == 1) == (first == second)


def test_a_fixed_batch_is_run_in_pieces(network: tuple[nn.Module, Tensor], tmp_path: Path) -> None:
    net, x = network
    torch.onnx.export(net, (x,), tmp_path / "two.onnx", dynamo=True, verbose=False)
    data = [torch.randn(5, 3, 6, 6)]
    assert nm.compare(net, tmp_path / "two.onnx", x, evaluate=data).verdict.fidelity == pytest.approx(1, abs=1e-6)


class TwoOutputs(nn.Module):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> dict[str, Any]:
        return {"hidden": self.net[:3](x), "scores": self.net(x)}


def test_outputs_that_only_one_network_has_are_named(network: tuple[nn.Module, Tensor]) -> None:
    net, x = network
    found = nm.compare(TwoOutputs(net), net, x)
    assert found.outputs == ((1, 0),) and found.verdict.fidelity == 1
    assert "compared 1 of 2 and 1 outputs" in str(found)


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (nn.Sequential(nn.Flatten(), nn.Linear(108, 7)), r"different shapes: \(2, 5\) and \(2, 7\)"),
        (nn.Linear(4, 5), "the second network does not run"),
        ("nothing.onnx", "no such file"),
        (3, "a int is no network"),
    ],
)
def test_networks_that_cannot_be_compared_are_one_clear_error(
    network: tuple[nn.Module, Tensor], other: Any, words: str
) -> None:
    with pytest.raises(nm.MergingError, match=words):
        nm.compare(network[0], other, network[1])


def test_the_networks_are_not_changed(network: tuple[nn.Module, Tensor]) -> None:
    net, x = network
    net.train()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    assert nm.compare(net, net, x).verdict.fidelity == 1
    assert net.training and all(torch.equal(before[name], value) for name, value in net.state_dict().items())


@pytest.mark.long
def test_tokens_by_name_reach_the_inputs_of_a_file(tmp_path: Path) -> None:
    library = import_or_fail("transformers")
    config = library.BertConfig(
        vocab_size=50, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=12
    )
    model = library.BertModel(config).eval()
    tokens = {"input_ids": torch.arange(12).view(2, 6), "attention_mask": torch.ones(2, 6, dtype=torch.int64)}
    nm.compress(model, tokens, ratio={"*intermediate*": 0.5}, merger="none").save(tmp_path / "small.onnx")
    found = nm.compare(model, tmp_path / "small.onnx", tokens)
    assert found.verdict.fidelity is not None and found.verdict.fidelity > 0.9


@pytest.mark.long
def test_from_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for seed in (0, 1):
        torch.manual_seed(seed)
        torch.save(models.create_network("lenet-300-100").state_dict(), f"{seed}.pt")
    flags = ["--ratio", "0.5", "--no-report", "--effort", "fast"]
    assert app.main(["compress", "lenet-300-100", "out", "--weights", "0.pt", *flags]) == 0
    assert app.main(["export", "out", "out.onnx"]) == 0
    capsys.readouterr()
    first = ["lenet-300-100", "--weights", "0.pt", "--effort", "fast"]
    assert app.main(["compare", first[0], "out", *first[1:]]) == 0
    assert "fidelity" in capsys.readouterr().out
    assert app.main(["compare", "out", "out.onnx", "--require", "99.9%", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["verdict"]["level"] == "good"
    assert app.main(["compare", first[0], first[0], *first[1:], "--other-weights", "1.pt", "--require", "0.9"]) == 6
    assert "is required" in capsys.readouterr().err
    np.savez("x.npz", x=np.random.default_rng(0).normal(size=(20, 1, 28, 28)).astype(np.float32))
    assert app.main(["compare", first[0], "out.onnx", *first[1:], "--eval", "x.npz"]) == 0
    assert "20 images of x" in capsys.readouterr().out
    assert app.main(["compare", "out.onnx", "nothing.onnx"]) == 3


def test_hooks_that_change_outputs_are_part_of_a_compared_network(network: tuple[nn.Module, Tensor]) -> None:
    net, x = network
    hooked = copy.deepcopy(net)
    hooked[2].register_forward_hook(lambda module, inputs, output: output * 0.3 + 1)
    assert (nm.compare(hooked, net, x).verdict.fidelity or 0) < 0.9
    assert (nm.compare(net, hooked, x).verdict.fidelity or 0) < 0.9
    same = nm.compare(hooked, hooked, x)
    assert same.verdict.level == "good" and repr(same) == f"<Comparison: {same}>"


def test_comparing_does_not_change_weights_that_forward_rewrites() -> None:
    net = nn.Sequential(nn.Embedding(20, 8, max_norm=0.1), nn.Linear(8, 4))
    before = copy.deepcopy(net.state_dict())
    nm.compare(net, net, torch.arange(20)[None])
    assert all(torch.equal(before[name], tensor) for name, tensor in net.state_dict().items())
