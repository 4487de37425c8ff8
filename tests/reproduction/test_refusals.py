"""Targets that cannot be run are left out or refused, with the reason."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from neuron_merging.reproduction import experiments, run
from tests.reproduction.tiny import FEW, read_csv, reproduce

# Which networks, which methods


def test_what_is_missing_is_left_out_with_a_plain_message(
    everything: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    part = tmp_path / "part"
    part.mkdir()
    for name in ("cifar10_test.npz", experiments.WEIGHT_FILES["vgg-16"][0]):
        os.symlink(everything / name, part / name)
    assert reproduce("table2", "--data", part, *FEW) == 0
    said = capsys.readouterr().err
    assert "paper_vgg16_cifar100.safetensors" in said and "neuron-merging train vgg-16" in said
    assert {row["network"] for row in read_csv(Path("reproduce/table2/table2.csv"))} == {"vgg-16"}
    assert "VGG-16 on CIFAR-100 is left out" in Path("reproduce/table2/index.html").read_text()
    os.symlink(
        everything / experiments.WEIGHT_FILES["vgg-16-cifar-100"][0],
        part / experiments.WEIGHT_FILES["vgg-16-cifar-100"][0],
    )
    assert reproduce("table2", "--data", part, *FEW) == 0
    assert "cifar-100 (test) was not found" in capsys.readouterr().err


def test_nothing_to_run_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert reproduce("table3", "--data", tmp_path) == 2
    said = capsys.readouterr().err
    assert "nothing can run" in said and "paper_resnet56_cifar10.safetensors" in said and "WideResNet-40-4" in said
    assert not Path("reproduce").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("tabel1",), "no 'tabel1' in the paper"),
        (("table1", "--limit", "0"), "0 images"),
        (("table1", "--limit", "many"), "many"),
        (("table1", "--ratios", "1.5"), "'1.5' is not a share"),
        (("table1", "--ratios", "half"), "'half' is not a share"),
        (("table1", "--ratios", "nan"), "'nan' is not a share"),
        (("table1", "--criteria", "l3"), "unknown criterion 'l3'"),
        (("table1", "--methods", "cosin"), "unknown merger 'cosin'"),
        (("table1", "--methods", "cosine:thresold=0.2"), "unknown option 'thresold'"),
        (("table1", "--methods", "cosine:balance=2"), "outside [0, 1]"),
        (("table1", "--methods", "t=1"), "'t=1' is not a method"),
        (("table1", "--methods", ""), "is not a method"),
        (("table1", "--methods", "cosine:"), "'cosine:' is not a method"),
        (("table1", "--methods", ":x=1"), "':x=1' is not a method"),
        (("table1", "--methods", ":"), "':' is not a method"),
        (("table1", "--methods", "none,calibrated:foo=1"), "unknown option 'foo'"),
        (("table1", "--weights", "none.safetensors"), "no file 'none.safetensors'"),
        (("table1", "--weights", "lenet=none.safetensors"), "no file 'none.safetensors'"),
        (("table3", "--weights", "here"), "does not say which network"),
        (("table1", "--weights", "resnet-56=here"), "resnet-56 does not belong to these"),
        (("figure3", "--weights", "resnet-55=here"), "no network 'resnet-55'"),
        (("table1", "--weights", "lenet-300-100-cifar-10=here"), "not those of CIFAR-10"),
        (("figure5", "--weights", "wideresnet-11-1=here"), "6n + 4"),
        (("table1", "--data", "nowhere"), "no such folder"),
        (("table1", "--device", "toaster"), "no device 'toaster'"),
        (("table1", "--weights", "here"), "not a file of weights"),
        (("figure4", "--weights", "lenet-300-100=here"), "lenet-300-100 does not belong to these"),
    ],
)
def test_what_cannot_be_meant_is_refused(
    arguments: Sequence[str], message: str, everything: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("here").write_text("not weights")
    places = [] if "--data" in arguments else ["--data", everything]
    assert reproduce(*arguments, *places) in (2, 3)
    said = capsys.readouterr()
    assert message in said.err and said.out == "" and "Traceback" not in said.err
    assert not Path("reproduce").exists()


def test_weights_of_another_network_are_refused(everything: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wrong = everything / experiments.WEIGHT_FILES["vgg-16"][0]
    assert reproduce("table1", "--data", everything, "--weights", wrong) == 3
    assert "do not fit" in capsys.readouterr().err


# Broken and unusual requests


def test_figures_that_are_no_numbers_are_told_and_not_kept(
    everything: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = run.MEASURE_FUNCTIONS["score"]
    once = ("table1", *FEW, "--data", everything)
    with monkeypatch.context() as patch:
        patch.setitem(run.MEASURE_FUNCTIONS, "score", lambda *given: {**real(*given), "ware": float("inf")})
        assert reproduce(*once) == 2
    assert "ware is inf (at LeNet-300-100 on FashionMNIST, original)" in " ".join(capsys.readouterr().err.split())
    assert not Path("reproduce/table1/cache").exists()
    assert reproduce(*once) == 0


@pytest.mark.long
def test_imagenet_is_left_out_of_calibration_and_missing_classes_are_told(
    everything: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert reproduce("table4", "--data", everything, *FEW, "--methods", "none,calibrated", "--limit", 2) == 0
    said = " ".join(capsys.readouterr().err.split())
    assert "is left out of calibrated: there are no training images" in said
    assert "2 class folders were found instead of 1,000" in said
    assert {row["method"] for row in read_csv(Path("reproduce/table4/table4.csv"))} == {"original", "none"}


def test_a_place_that_cannot_be_written_is_told_before_any_work(
    everything: Path, measured: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    Path("file").write_text("")
    assert reproduce("table1", "--data", everything, "--out", "file/inside") == 2
    assert "this is a file, not a folder" in capsys.readouterr().err and not measured
