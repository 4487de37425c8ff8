"""Every table and figure from end to end, and with the paper's own checkpoints."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch

import neuron_merging as nm
from neuron_merging import evaluation, models
from neuron_merging.config import CompressConfig
from neuron_merging.errors import MergingError
from neuron_merging.pipeline import compress_analysis
from neuron_merging.reproduction import datasets, experiments, layer_metrics
from neuron_merging.reproduction.experiments import PAPER_TARGETS
from neuron_merging.reproduction.measurements import PaperCheckpoint
from neuron_merging.reproduction.networks import ResNet
from neuron_merging.reproduction.paper_values import PAPER_VALUES, ValueKey
from tests.reproduction.tiny import FEW, FILE, TinyLeNet, read_csv, reproduce


@pytest.mark.parametrize(
    ("what", "few", "lines"),
    [
        ("table1", (), 1 + 4 * 3 * 2),
        pytest.param("table2", (), 2 * 2 * (1 + 3 * 2), marks=pytest.mark.long),
        pytest.param("table3", ("--ratios", "0.5,0.3", "--criteria", "l2"), 3 * (1 + 2 * 2), marks=pytest.mark.long),
        pytest.param("table4", FEW, 3 * 2 * (1 + 2), marks=pytest.mark.long),
        pytest.param(
            "figure3",
            ("--criteria", "l1,random", "--ratios", "0.2,0.5"),
            2 * 2 * (1 + 2 * 2 * 2),
            marks=pytest.mark.long,
        ),
        pytest.param("figure4", (), 2 * (1 + 2), marks=pytest.mark.long),
        pytest.param("figure5", ("--ratios", "0.4"), 1 + 1 + 9, marks=pytest.mark.long),
    ],
)
def test_every_target_from_end_to_end(
    what: str, few: Sequence[str], lines: int, everything: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert reproduce(what, "--data", everything, *few) == 0
    said = capsys.readouterr()
    assert PAPER_TARGETS[what].title in said.out and "The paper says" in said.out and "left out" not in said.err
    out = Path("reproduce", what)
    extra = ["figure5-similarity.csv"] if what == "figure5" else []
    wanted = {"cache", "index.html", *(f"{what}.{kind}" for kind in ("csv", "png", "svg")), *extra}
    assert {file.name for file in out.iterdir()} == wanted
    rows = read_csv(out / f"{what}.csv")
    assert len(rows) == lines and all(np.isfinite(float(row["ours"])) for row in rows)
    assert (out / f"{what}.png").read_bytes().startswith(b"\x89PNG") and b"<svg" in (out / f"{what}.svg").read_bytes()
    page = (out / "index.html").read_text()
    assert "data:image/png;base64," in page and PAPER_TARGETS[what].title in page
    assert not re.search(r"https?:|//[a-z]|<script|<link(?! rel=.icon)", re.sub(r'base64,[^"]*', "", page))


def test_similarities_are_written_channel_by_channel(everything: Path) -> None:
    assert reproduce("figure5", "--data", everything, *FEW, "--methods", "none", "--limit", 2) == 0
    lines = read_csv(Path("reproduce/figure5/figure5-similarity.csv"))
    assert [line["layer"] for line in lines] == ["1-1"] * 16 + ["2-1"] * 32 + ["3-1"] * 64
    model = ResNet(8)
    model.load_state_dict(safetensors.torch.load_file(everything / FILE))
    rows = model.layer2[0].conv1.weight.detach().flatten(1)
    found = [float(line["maximum cosine"]) for line in lines if line["layer"] == "2-1"]
    assert found == pytest.approx(layer_metrics.max_cosine(rows).tolist())


@pytest.mark.long
def test_all_runs_every_target_into_one_page(everything: Path) -> None:
    assert reproduce("all", "--data", everything, *FEW, "--limit", 4) == 0
    out = Path("reproduce/all")
    page = (out / "index.html").read_text()
    for name, target in PAPER_TARGETS.items():
        assert (out / f"{name}.csv").is_file() and (out / f"{name}.png").is_file()
        assert f'id="{name}"' in page and target.title in page


def test_a_cell_is_what_compress_and_the_metrics_give(everything: Path) -> None:
    assert reproduce("table1", "--data", everything, "--criteria", "l2-gm", "--ratios", "0.7") == 0
    rows = {row["method"]: row for row in read_csv(Path("reproduce/table1/table1.csv"))}
    model, images = TinyLeNet(), datasets.load_dataset("fashion-mnist", "test", everything)
    model.load_state_dict(safetensors.torch.load_file(everything / experiments.WEIGHT_FILES["lenet-300-100"][0]))
    small = nm.compress(model, torch.zeros(1, 1, 28, 28), ratio=0.7, criterion="l2-gm", merger=nm.Cosine(0.45, 0.85))
    ours = evaluation.accuracy(*evaluation.predict(small.model, images.batches(5)))
    assert float(rows["cosine"]["ours"]) == pytest.approx(ours)
    assert rows["cosine"]["paper"] == "86.39" and rows["cosine"]["source"] == "table 1"
    assert float(rows["cosine"]["difference"]) == pytest.approx(ours - 86.39)
    assert rows["original"]["paper"] == "89.8" and rows["original"]["ratio"] == "0.0"


@pytest.mark.long
def test_ware_and_parameters_of_a_batch_norm_network(everything: Path) -> None:
    assert reproduce("table3", "--data", everything, "--criteria", "l1", "--ratios", "0.5") == 0
    rows = [row for row in read_csv(Path("reproduce/table3/table3.csv")) if row["network"] == "resnet-56"]
    model, images = ResNet(8).eval(), datasets.load_dataset("cifar-10", "test", everything)
    model.load_state_dict(safetensors.torch.load_file(everything / experiments.WEIGHT_FILES["resnet-56"][0]))
    merger = nm.Cosine(0.1, 0.85, bn="released")
    small = nm.compress(model, torch.zeros(1, 3, 32, 32), ratio={"layer*.conv1": 0.5}, criterion="l1", merger=merger)
    want = layer_metrics.ware_at(model, small.model, images.batches(5))
    assert float(rows[2]["ours"]) == pytest.approx(want, rel=1e-4) and rows[2]["paper"] == "4.986"


# Which networks, which methods


def test_check_fails_where_figures_differ(everything: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert reproduce("table1", "--data", everything, *FEW, "--check") == 5
    assert "figures differ from the paper's" in capsys.readouterr().err
    assert reproduce("figure4", "--data", everything, "--check") == 5
    assert "no figure to check" in capsys.readouterr().err


def test_json_in_place_of_tables(everything: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert reproduce("table1", "--data", everything, *FEW, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    (target,) = found["targets"]
    assert [row["method"] for row in target["rows"]] == ["original", "none", "cosine"]
    assert target["rows"][2]["paper"] == 88.69 and len(target["claims"]) == 3
    assert "reproduce/table1/index.html" in found["files"] and len(target["networks"][0]["sha256"]) == 64


def test_help_needs_no_torch() -> None:
    probe = "import sys, neuron_merging.cli.app as c; c.main(['reproduce', '--help']); sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "--methods" in done.stdout


# What the paper prints


@pytest.mark.parametrize(
    ("name", "panel", "parameters"),
    [("vgg-16", 0, 5_397_034), ("vgg-16-cifar-100", 1, 8_393_348)],
)
def test_the_papers_layer_choice_gives_its_parameter_counts(
    name: str, panel: int, parameters: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, everything: Path
) -> None:
    monkeypatch.undo()
    network = experiments.find_paper_network(name)
    model = models.create_network("vgg-16", classes=100 if panel else 10)
    safetensors.torch.save_file(model.state_dict(), tmp_path / "vgg")
    images = datasets.load_dataset(network.data, "test", everything)
    checkpoint = PaperCheckpoint(network, tmp_path / "vgg.safetensors", images)
    os.rename(tmp_path / "vgg", checkpoint.file)
    ratio = checkpoint.ratio(PAPER_TARGETS["table2"].panels[panel], 0.5)
    plain = CompressConfig(ratio=ratio, merger="none", criterion="l2")
    small = compress_analysis(nm.analyse(model, checkpoint.example), plain, verify=False, judge=False)
    assert small.summary.parameters[1] == parameters
    assert PAPER_VALUES["table2"][ValueKey(name, "l1", 0.5, "none", "parameters")].value == pytest.approx(
        parameters, abs=5e4
    )


def test_wide_networks_round_before_they_widen(tmp_path: Path, everything: Path) -> None:
    images = datasets.load_dataset("cifar-10", "test", everything)
    checkpoint = PaperCheckpoint(experiments.find_paper_network("wideresnet-40-4"), tmp_path, images)
    ratio = checkpoint.ratio(PAPER_TARGETS["figure3"].panels[1], 0.3)
    assert {
        key: round(4 * base * (1 - ratio[key])) for key, base in (("block1", 16), ("block2", 32), ("block3", 64))
    } == {
        "block1": 44,
        "block2": 88,
        "block3": 176,
    }


# With the paper's own checkpoints


@pytest.fixture
def real(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[None]:
    monkeypatch.undo()
    if not os.environ.get("NEURON_MERGING_DATA"):
        pytest.skip("NEURON_MERGING_DATA is not set: the paper's checkpoints are not at hand")
    try:
        datasets.load_dataset("fashion-mnist", "test")
    except MergingError:
        pytest.skip("FashionMNIST is not at hand")
    yield


def test_table_1_to_the_digit(real: None, tmp_path: Path) -> None:
    assert reproduce("table1", "--check", "--out", tmp_path / "out") == 0
    rows = read_csv(tmp_path / "out/table1.csv")
    assert len(rows) == 25 and all(row["agrees"] == "True" for row in rows)


@pytest.mark.long
def test_table_3_and_figure_3_of_resnet_56(real: None, tmp_path: Path) -> None:
    for what in ("figure3", "table3"):
        assert reproduce(what, "--check", "--out", tmp_path / "out") == 0


def test_with_a_limit_nothing_is_judged_and_the_title_says_so(
    everything: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    few = ("--data", everything, *FEW, "--limit", 4)
    assert reproduce("table1", *few) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "only the first 4 test images: not judged" in printed and "The paper says" not in printed
    page = Path("reproduce/table1/index.html").read_text()
    assert "not judged against the paper" in page and "hold" not in page and 'class="off"' not in page
    assert {row["agrees"] for row in read_csv(Path("reproduce/table1/table1.csv"))} == {""}
    assert reproduce("table1", *few, "--json") == 0
    (found,) = json.loads(capsys.readouterr().out)["targets"]
    assert found["claims"] == [] and "not judged" in found["title"]
    assert reproduce("table1", *few, "--check") == 2 and "--limit" in capsys.readouterr().err


@pytest.mark.long
def test_with_a_limit_the_page_of_everything_says_so(everything: Path) -> None:
    assert reproduce("all", "--data", everything, *FEW, "--limit", 4) == 0
    heading = Path("reproduce/all/index.html").read_text().partition("<h1>")[2].partition("</h1>")[0]
    assert "not judged" in heading
