"""Checkpoints: where they are found, and which networks they replace."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch

from neuron_merging.errors import MergingError
from neuron_merging.reproduction import experiments, run_setup
from neuron_merging.reproduction.experiments import PAPER_TARGETS
from neuron_merging.reproduction.networks import WideResNet
from tests.reproduction.tiny import FEW, FILE, read_csv, reproduce, save_network

# Which networks, which methods


def test_weights_are_found_through_the_environment(everything: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEURON_MERGING_DATA", str(everything))
    assert reproduce("table1", *FEW, "--out", "here") == 0
    assert Path("here/table1.csv").is_file()


def test_several_checkpoints_give_mean_and_deviation(
    everything: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [save_network("lenet-300-100", tmp_path / f"{seed}.safetensors", seed) for seed in (21, 22, 23)]
    single = []
    for file in files:
        assert reproduce("table1", "--data", everything, *FEW, "--weights", file) == 0
        single.append([float(row["ours"]) for row in read_csv(Path("reproduce/table1/table1.csv"))])
    given = [part for file in files for part in ("--weights", f"lenet={file}")]
    capsys.readouterr()
    assert reproduce("table1", "--data", everything, *FEW, *given) == 0
    for row, values in zip(read_csv(Path("reproduce/table1/table1.csv")), zip(*single, strict=True), strict=True):
        assert float(row["ours"]) == pytest.approx(np.mean(values)) and row["checkpoints"] == "3"
        assert float(row["spread"]) == pytest.approx(np.std(values, ddof=1))
    assert "±" in capsys.readouterr().out


@pytest.mark.long
def test_another_network_may_take_a_place(everything: Path, tmp_path: Path) -> None:
    torch.manual_seed(5)
    file = tmp_path / "wide.safetensors"
    safetensors.torch.save_file(WideResNet(10, 2).state_dict(), file)
    assert reproduce("figure3", "--data", everything, *FEW, "--weights", f"wideresnet-10-2={file}") == 0
    rows = read_csv(Path("reproduce/figure3/figure3.csv"))
    assert {row["network"] for row in rows} == {"resnet-56", "wideresnet-10-2"}
    assert {row["title"] for row in rows if row["network"] != "resnet-56"} == {"WideResNet-10-2 on CIFAR-10"}
    assert reproduce("figure4", "--data", everything, "--weights", f"resnet-56={everything / FILE}") == 0
    assert {row["network"] for row in read_csv(Path("reproduce/figure4/figure4.csv"))} == {"resnet-56"}


# Claims and maps


def test_networks_are_named_by_architecture_and_data() -> None:
    assert experiments.find_paper_network("vgg-16-cifar-10").name == "vgg-16"
    assert experiments.find_paper_network("resnet-20-cifar-100").data == "cifar-100"
    assert experiments.find_paper_network("wideresnet-16-2").title == "WideResNet-16-2 on CIFAR-10"
    with pytest.raises(MergingError, match="no network"):
        experiments.find_paper_network("alexnet")


def test_a_network_takes_the_place_of_its_own_kind() -> None:
    figure3, table2 = PAPER_TARGETS["figure3"].panels, PAPER_TARGETS["table2"].panels
    assert [run_setup.can_fill_panel("resnet-20", panel, alone=False) for panel in figure3] == [True, False]
    assert [run_setup.can_fill_panel("vgg-13-cifar-100", panel, alone=False) for panel in table2] == [False, True]
    (figure5,) = PAPER_TARGETS["figure5"].panels
    assert run_setup.can_fill_panel("vgg-16", figure5, alone=True)
    assert not run_setup.can_fill_panel("vgg-16", figure5, alone=False)  # in `all` it has a place of its own


# Broken and unusual requests


@pytest.mark.long
def test_a_file_named_twice_counts_once_under_any_name_of_its_network(everything: Path) -> None:
    file = everything / FILE
    twice = ("--weights", f"resnet-56={file}", "--weights", f"resnet-56-cifar-10={file}")
    assert reproduce("figure3", "--data", everything, *FEW, "--limit", 4, *twice) == 0
    rows = read_csv(Path("reproduce/figure3/figure3.csv"))
    assert {row["checkpoints"] for row in rows if row["network"] == "resnet-56"} == {"1"}
    assert len(rows) == len({(r["network"], r["method"], r["metric"]) for r in rows})


def test_a_file_with_an_equals_sign_in_its_path(everything: Path, tmp_path: Path) -> None:
    file = tmp_path / "a=b.safetensors"
    shutil.copy(everything / experiments.WEIGHT_FILES["lenet-300-100"][0], file)
    assert reproduce("table1", "--data", everything, *FEW, "--limit", 4, "--weights", file) == 0
