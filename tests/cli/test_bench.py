"""bench: in torch and in onnxruntime, folders and files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import neuron_merging as nm
from neuron_merging.cli import app
from tests.onnx import small_files


def test_a_file_is_measured_against_its_original(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    small_files.classifier(Path("m.onnx"), width=32)
    small = nm.compress("m.onnx", budget={"latency@onnxruntime": "100%"}, merger="none")  # what it takes, it may take
    small.save("small.onnx")
    options = ["--runs", "2", "--batch", "1", "--batch", "3", "--threads", "1", "--json"]
    assert app.main(["bench", "small.onnx", "--against", "m.onnx", *options]) == 0
    rows = json.loads(capsys.readouterr().out)["measured"]
    assert {(row["runtime"], row["threads"], row["batch"], row["network"]) for row in rows} == {
        ("onnxruntime", 1, batch, network) for batch in (1, 3) for network in ("original", "small")
    }
    assert all(0 < row["seconds"]["low"] <= row["seconds"]["median"] <= row["seconds"]["high"] for row in rows)
    assert app.main(["bench", "small.onnx", "--runtime", "tensorflow"]) == 2
    assert app.main(["compress", "m.onnx", "x.onnx", "--budget", "latency@tensorflow=5ms"]) == 2
    assert app.main(["compress", "m.onnx", "x.onnx", "--budget", "latency=50%", "--budget", "latency@torch=50%"]) == 2


@pytest.mark.parametrize("batch", [1, 3])
def test_a_file_of_one_batch_size_is_measured_at_that(
    batch: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    nodes = [small_files.node("Conv", ["x", "w"], "y")]
    small_files.write(Path("m.onnx"), nodes, {"w": small_files.weights(4, 3, 3, 3)}, inputs={"x": (batch, 3, 8, 8)})
    assert app.main(["bench", "m.onnx", "--runs", "2", "--json"]) == 0
    assert {row["batch"] for row in json.loads(capsys.readouterr().out)["measured"]} == {batch}
    assert app.main(["bench", "m.onnx", "--batch", "16"]) == 2
