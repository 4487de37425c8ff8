"""Requests that cannot be meant end in one clear error."""

from __future__ import annotations

import io
import os
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import neuron_merging as nm
from neuron_merging import evaluation
from neuron_merging.cli import app, model_loading
from tests.onnx import small_files


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))


@pytest.mark.parametrize("text", ["1,3,1000000000", "1000000000,1000000000,1000000000", "9" * 5000, ",".join("1" * 99)])
def test_an_input_that_fits_into_no_memory_is_refused(text: str) -> None:
    with pytest.raises(nm.MergingError, match=r"more than|not a shape") as found:
        model_loading.make_example_inputs("lenet-300-100", net(), [text])
    assert len(str(found.value)) < 400


@pytest.mark.parametrize("seed", [2**64, 2**63, -1, 1.5, True])
def test_a_seed_out_of_range_is_refused(seed: object) -> None:
    with pytest.raises(nm.MergingError, match=r"seed .* is not an integer"):
        nm.compress(net(), torch.randn(2, 6), seed=seed)


def test_the_largest_seed_is_taken() -> None:
    nm.compress(net(), torch.randn(2, 6), seed=2**63 - 1, criterion="random")


def test_round_to_out_of_range_is_refused() -> None:
    with pytest.raises(nm.MergingError, match="round_to"):
        nm.compress(net(), torch.randn(2, 6), round_to=10**30)


def test_no_images_to_calibrate_on_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for count in ("0", "-3"):
        arguments = [
            "compress",
            "digit-net",
            str(tmp_path / "out"),
            "--calibrate",
            "digits",
            "--calibrate-images",
            count,
        ]
        assert app.main(arguments) == 2
        assert "calibrate_images" in capsys.readouterr().err


def test_labels_that_the_network_has_no_answer_for_are_refused() -> None:
    with pytest.raises(nm.MergingError, match="labels are 0 to 5, the network has 3 outputs"):
        evaluation.accuracy(torch.zeros(2, 3), torch.tensor([0, 5]))


@pytest.mark.parametrize(("classes", "code"), [(4, 2), (20, 0)])
def test_images_of_other_classes_are_told(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, classes: int, code: int
) -> None:
    out = str(tmp_path / "out")
    arguments = ["compress", "digit-net", out, "--arg", f"classes={classes}", "--eval", "digits", "--no-report"]
    assert app.main([*arguments, "--merger", "none"]) == code
    assert f"the images have 10 classes, the network has {classes} outputs" in " ".join(capsys.readouterr().err.split())


def test_places_that_cannot_be_meant(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for place in ("/", "", str(tmp_path / "loop")):
        assert app.main(["compress", "lenet-300-100", place]) == 2
        assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ratio": 0.5, "round_to": 100}, "No smaller multiple of round_to=100"),
        ({"ratio": 0.0}, "Give a ratio above 0"),
        ({"ratio": 0.5, "ignore": ["*"]}, "out of ignore="),
        ({"budget": {"flops": "50%"}}, "Did you mean macs"),
        ({"budget": {"size": "1MB"}}, "Did you mean weights"),
        ({"budget": {"macs": "50%,params=50%"}}, "Give each budget by itself"),
        ({"criterion": lambda rows: 1 / 0}, "the criterion raised ZeroDivisionError"),
        ({"ratio": "half"}, "half'? is not a number"),
    ],
)
def test_the_fix_is_for_the_setting_that_is_the_cause(options: dict[str, object], message: str) -> None:
    with pytest.raises(nm.MergingError, match=message):
        nm.compress(net(), torch.randn(2, 6), effort="fast", **options)


@pytest.mark.parametrize("name", ["small.pt", "small.safetensors", "small.zip"])
def test_a_folder_is_not_named_like_a_file_of_weights(name: str, tmp_path: Path) -> None:
    small = nm.compress(net(), torch.randn(2, 6), effort="fast")
    with pytest.raises(nm.MergingError, match=r"Name it small for a folder, or small\.onnx or small\.pt2"):
        small.save(tmp_path / name)


def test_export_keeps_a_file_that_is_there(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out, file = str(tmp_path / "out"), tmp_path / "small.pt2"
    assert app.main(["compress", "digit-net", out, "--ratio", "0.25", "--effort", "fast", "--no-report"]) == 0
    file.write_text("mine")
    assert app.main(["export", out, str(file)]) == 2
    assert "the file exists" in capsys.readouterr().err and file.read_text() == "mine"
    assert app.main(["export", out, str(file), "--overwrite"]) == 0


def test_data_that_is_not_there_is_not_called_damaged() -> None:
    with pytest.raises(nm.MergingError, match="there is no such file"):
        nm.images("nowhere.npz")


class ClosedPipe(io.StringIO):
    """A stdout whose reader is gone."""

    def write(self, text: str) -> int:
        raise BrokenPipeError

    def fileno(self) -> int:
        return 1


@pytest.mark.parametrize("stdout", [ClosedPipe(), None], ids=["pipe", "closed"])
def test_a_closed_stdout_is_no_failure(stdout: ClosedPipe | None, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:  # pytest itself uses dup2 before the patches are undone
        patch.setattr(os, "dup2", lambda old, new: os.close(old))
        patch.setattr(sys, "stdout", stdout)
        assert app.main(["inspect", "digit-net"]) == 0


def test_checks_of_an_exported_program_are_not_called_hooks(tmp_path: Path) -> None:
    nm.compress(net(), torch.randn(2, 6), effort="fast").save(tmp_path / "small.pt2")
    assert not [note for note in nm.compress(tmp_path / "small.pt2", effort="fast").summary.notes if "hooks" in note]


def test_a_budget_that_the_original_meets_is_told() -> None:
    small = nm.compress(net(), torch.randn(2, 6), effort="fast", budget={"params": "1M"})
    assert "nothing was removed: the original is within the budget" in small.summary.notes


def test_a_folder_of_transformers(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1, "intermediate_size": 16}
    transformers.BertModel(transformers.BertConfig(vocab_size=50, **sizes)).save_pretrained(tmp_path / "bert")
    monkeypatch.chdir(tmp_path)
    capsys.readouterr()
    assert app.main(["inspect", "bert"]) == 3
    assert "If this is a folder of transformers, write hf:" in capsys.readouterr().err
    assert app.main(["inspect", ":build"]) == 3 and "there is no network ':build'" in capsys.readouterr().err
    assert app.main(["inspect", f"hf:{tmp_path}/nowhere"]) == 3
    assert "there is no such folder" in capsys.readouterr().err
    assert app.main(["compress", "hf:bert", "out", "--ratio", "0.5", "--effort", "fast", "--no-report"]) == 0
    assert "\r" not in capsys.readouterr().err  # a progress bar
    for arguments in (["export", "out", "small.pt2"], ["bench", "out", "--runs", "1"]):  # inputs by name
        assert app.main([*arguments, "--trust"]) == 0


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (["verify", "m.onnx"], "this is a file, not a folder"),
        (["apply", "m.onnx", "m.onnx", "small.onnx", "--merger", "none"], "a file of a network, not a plan"),
    ],
)
def test_a_file_is_not_taken_for_a_folder(
    command: list[str], words: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    small_files.classifier(Path("m.onnx"))
    assert app.main(command) == 3
    said = capsys.readouterr()
    assert words in said.err and not said.out and [own.name for own in tmp_path.iterdir()] == ["m.onnx"]
