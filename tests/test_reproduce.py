"""`reproduce`: every table and figure from end to end on tiny networks and made-up images."""

from __future__ import annotations

import csv
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from PIL import Image
from torch import Tensor, nn

import neuron_merging as nm
from neuron_merging import data, measuring, networks
from neuron_merging.errors import MergingError
from neuron_merging.networks import NetworkSpec
from neuron_merging.networks.resnet import ImageNetResNet, ResNet
from neuron_merging.networks.wideresnet import WideResNet
from neuron_merging.paper import cells, claims, maps, methods, options, run, settings
from neuron_merging.paper.checkpoint import Checkpoint
from neuron_merging.paper.printed import PRINTED, Point
from neuron_merging.paper.rows import Row
from neuron_merging.paper.settings import TARGETS
from neuron_merging.tool import cli


class TinyVGG(nn.Module):
    """Eight narrow convolutions; on ImageNet the layers have other names."""

    def __init__(self, classes: int = 10, features: str = "feature") -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for i in range(8):
            pool = [nn.MaxPool2d(4 if i == 0 else 2)] if i < 3 else []
            layers += [nn.Conv2d(3 if i == 0 else 6, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(), *pool]
        setattr(self, features, nn.Sequential(*layers))
        self.features_name, self.classifier = features, nn.Linear(6, classes)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.classifier(getattr(self, self.features_name)(x).mean((2, 3)))
        return logits


def tiny_imagenet_vgg(classes: int = 1000) -> TinyVGG:
    return TinyVGG(classes, "features")


def tiny_imagenet_resnet(classes: int = 1000) -> nn.Module:
    class Shrunk(ImageNetResNet):
        def forward(self, images: Tensor) -> Tensor:
            return super().forward(images[..., ::4, ::4])

    return Shrunk((1, 1, 1, 1), classes)


class TinyLeNet(nn.Module):
    def __init__(self, classes: int = 10) -> None:
        super().__init__()
        self.ip1, self.ip2, self.ip3 = nn.Linear(784, 20), nn.Linear(20, 10), nn.Linear(10, classes)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.ip3(self.ip2(self.ip1(images.flatten(1)).relu()).relu())
        return logits


CIFAR, IMAGENET = (3, 32, 32), (3, 224, 224)
TINY = {
    "lenet-300-100": NetworkSpec(TinyLeNet, (1, 28, 28), 10, "fashion-mnist"),
    "vgg-16": NetworkSpec(TinyVGG, CIFAR, 10, "cifar-10"),
    "resnet-56": NetworkSpec(lambda classes=10: ResNet(8, classes), CIFAR, 10, "cifar-10"),
    "wideresnet-40-4": NetworkSpec(lambda classes=10: WideResNet(10, 1, classes), CIFAR, 10, "cifar-10"),
    "vgg-16-imagenet": NetworkSpec(tiny_imagenet_vgg, IMAGENET, 1000, "imagenet"),
    "resnet-34-imagenet": NetworkSpec(tiny_imagenet_resnet, IMAGENET, 1000, "imagenet"),
}
IMAGES = 12


@pytest.fixture(scope="session")
def everything(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data folder with all data sets and all of the paper's files, in miniature."""
    folder = tmp_path_factory.mktemp("data")
    pick = np.random.default_rng(0)
    labels = (np.arange(IMAGES) % 10).astype(np.uint8)
    pixels = pick.integers(0, 256, (IMAGES, 28, 28), dtype=np.uint8)
    sizes = b"".join(size.to_bytes(4, "big") for size in pixels.shape)
    (folder / "t10k-images-idx3-ubyte").write_bytes(b"\0\0\x08\x03" + sizes + pixels.tobytes())
    (folder / "t10k-labels-idx1-ubyte").write_bytes(b"\0\0\x08\x01" + sizes[:4] + labels.tobytes())
    for name in ("cifar10_test", "cifar10_train_2k", "cifar100_test"):
        x = pick.integers(0, 256, (IMAGES, 32, 32, 3), dtype=np.uint8)
        np.savez(folder / f"{name}.npz", x=x, y=labels)
    for i in range(4):
        place = folder / "val" / f"n0{i % 2}"
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pick.integers(0, 256, (256, 256, 3), dtype=np.uint8)).save(place / f"{i}.png")
    for seed, name in enumerate(settings.FILES):
        save_network(name, folder / settings.FILES[name][0], seed)
    return folder


def save_network(name: str, file: Path, seed: int) -> Path:
    """Weights that batch norms have seen data with, so that no layer is dead."""
    torch.manual_seed(seed)
    spec = TINY[name.removesuffix("-cifar-100")]
    model = spec.build(classes=100 if name.endswith("cifar-100") else spec.classes)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.normal_(module.bias, 0, 0.3)
            module.running_var.uniform_(0.5, 1.5)
    state = {key: value.contiguous() for key, value in model.state_dict().items()}
    if file.suffix == ".pth":
        torch.save(state, file)
    else:
        safetensors.torch.save_file(state, file)
    return file


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The paper's names stand for tiny networks, and nothing is found outside the data folder given."""
    for name, spec in TINY.items():
        monkeypatch.setitem(networks.NETWORKS, name, spec)
    monkeypatch.delenv("NEURON_MERGING_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path / "hub"))
    monkeypatch.setattr(data.sets, "_FASHION", replace(data.sets._FASHION, system=()))
    monkeypatch.setitem(data.sets.SETS, "fashion-mnist", data.sets._FASHION)
    monkeypatch.chdir(tmp_path)


def reproduce(*arguments: object) -> int:
    return cli.main(["reproduce", *map(str, arguments)])


def read_csv(file: Path) -> list[dict[str, str]]:
    with file.open(newline="") as stream:
        return list(csv.DictReader(stream))


FEW = ("--criteria", "l1", "--ratios", "0.5")


@pytest.mark.parametrize(
    ("what", "few", "lines"),
    [
        ("table1", (), 1 + 4 * 3 * 2),
        ("table2", (), 2 * 2 * (1 + 3 * 2)),
        ("table3", ("--ratios", "0.5,0.3", "--criteria", "l2"), 3 * (1 + 2 * 2)),
        ("table4", FEW, 3 * 2 * (1 + 2)),
        ("figure3", ("--criteria", "l1,random", "--ratios", "0.2,0.5"), 2 * 2 * (1 + 2 * 2 * 2)),
        ("figure4", (), 2 * (1 + 2)),
        ("figure5", ("--ratios", "0.4"), 1 + 1 + 9),
    ],
)
def test_every_target_from_end_to_end(
    what: str, few: Sequence[str], lines: int, everything: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert reproduce(what, "--data", everything, *few) == 0
    said = capsys.readouterr()
    assert TARGETS[what].title in said.out and "The paper says" in said.out and "left out" not in said.err
    out = Path("reproduce", what)
    extra = ["figure5-similarity.csv"] if what == "figure5" else []
    wanted = {"cache", "index.html", *(f"{what}.{kind}" for kind in ("csv", "png", "svg")), *extra}
    assert {file.name for file in out.iterdir()} == wanted
    rows = read_csv(out / f"{what}.csv")
    assert len(rows) == lines and all(np.isfinite(float(row["ours"])) for row in rows)
    assert (out / f"{what}.png").read_bytes().startswith(b"\x89PNG") and b"<svg" in (out / f"{what}.svg").read_bytes()
    page = (out / "index.html").read_text()
    assert "data:image/png;base64," in page and TARGETS[what].title in page
    assert not re.search(r"https?:|//[a-z]|<script|<link", re.sub(r'base64,[^"]*', "", page))


def test_similarities_are_written_channel_by_channel(everything: Path) -> None:
    assert reproduce("figure5", "--data", everything, *FEW, "--methods", "none", "--limit", 2) == 0
    lines = read_csv(Path("reproduce/figure5/figure5-similarity.csv"))
    assert [line["layer"] for line in lines] == ["1-1"] * 16 + ["2-1"] * 32 + ["3-1"] * 64
    model = ResNet(8)
    model.load_state_dict(safetensors.torch.load_file(everything / FILE))
    rows = model.layer2[0].conv1.weight.detach().flatten(1)
    found = [float(line["maximum cosine"]) for line in lines if line["layer"] == "2-1"]
    assert found == pytest.approx(measuring.max_cosine(rows).tolist())


def test_all_runs_every_target_into_one_page(everything: Path) -> None:
    assert reproduce("all", "--data", everything, *FEW, "--limit", 4) == 0
    out = Path("reproduce/all")
    page = (out / "index.html").read_text()
    for name, target in TARGETS.items():
        assert (out / f"{name}.csv").is_file() and (out / f"{name}.png").is_file()
        assert f'id="{name}"' in page and target.title in page


def test_a_cell_is_what_compress_and_the_metrics_give(everything: Path) -> None:
    assert reproduce("table1", "--data", everything, "--criteria", "l2-gm", "--ratios", "0.7") == 0
    rows = {row["method"]: row for row in read_csv(Path("reproduce/table1/table1.csv"))}
    model, images = TinyLeNet(), data.load("fashion-mnist", "test", everything)
    model.load_state_dict(safetensors.torch.load_file(everything / settings.FILES["lenet-300-100"][0]))
    small = nm.compress(model, torch.zeros(1, 1, 28, 28), ratio=0.7, criterion="l2-gm", merger=nm.Cosine(0.45, 0.85))
    ours = measuring.accuracy(*measuring.predict(small.model, images.batches(5)))
    assert float(rows["cosine"]["ours"]) == pytest.approx(ours)
    assert rows["cosine"]["paper"] == "86.39" and rows["cosine"]["source"] == "table 1"
    assert float(rows["cosine"]["difference"]) == pytest.approx(ours - 86.39)
    assert rows["original"]["paper"] == "89.8" and rows["original"]["ratio"] == "0.0"


def test_ware_and_parameters_of_a_batch_norm_network(everything: Path) -> None:
    assert reproduce("table3", "--data", everything, "--criteria", "l1", "--ratios", "0.5") == 0
    rows = [row for row in read_csv(Path("reproduce/table3/table3.csv")) if row["network"] == "resnet-56"]
    model, images = ResNet(8).eval(), data.load("cifar-10", "test", everything)
    model.load_state_dict(safetensors.torch.load_file(everything / settings.FILES["resnet-56"][0]))
    merger = nm.Cosine(0.1, 0.85, bn="released")
    small = nm.compress(model, torch.zeros(1, 3, 32, 32), ratio=0.5, criterion="l1", merger=merger)
    want = measuring.ware_at(model, small.model, images.batches(5))
    assert float(rows[2]["ours"]) == pytest.approx(want, rel=1e-4) and rows[2]["paper"] == "4.986"


# Caching


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The trials that were really measured."""
    seen: list[str] = []
    real = run.MEASURES["score"]

    def counting(checkpoint: Checkpoint, panel: Any, trial: Any) -> Any:
        result = real(checkpoint, panel, trial)
        seen.append(str(trial))
        return result

    monkeypatch.setitem(run.MEASURES, "score", counting)
    return seen


SMALL = ("table1", "--criteria", "l1", "--ratios", "0.5,0.6")


def test_nothing_is_measured_twice(everything: Path, measured: list[str]) -> None:
    assert reproduce(*SMALL, "--data", everything) == 0
    assert len(measured) == 5
    before = Path("reproduce/table1/table1.csv").read_bytes()
    assert reproduce(*SMALL, "--data", everything) == 0
    assert len(measured) == 5 and Path("reproduce/table1/table1.csv").read_bytes() == before
    assert reproduce(*SMALL, "--data", everything, "--methods", "none,cosine,cosine:threshold=0.2") == 0
    assert measured[5:] == ["l1 50% cosine:threshold=0.2", "l1 60% cosine:threshold=0.2"]


def test_an_interrupted_run_goes_on_where_it_stopped(
    everything: Path, measured: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    counting = run.MEASURES["score"]

    def stopping(*arguments: Any) -> Any:
        if len(measured) == 3:
            raise KeyboardInterrupt
        return counting(*arguments)

    monkeypatch.setitem(run.MEASURES, "score", stopping)
    assert reproduce(*SMALL, "--data", everything) == 130
    assert "goes on from there" in capsys.readouterr().err
    assert [file.suffix for file in Path("reproduce/table1/cache").iterdir()] == [".json"] * 3
    assert not Path("reproduce/table1/index.html").exists()
    monkeypatch.setitem(run.MEASURES, "score", counting)
    assert reproduce(*SMALL, "--data", everything) == 0
    assert len(measured) == 5 and len(set(measured)) == 5


def test_other_weights_images_or_code_are_measured_anew(
    everything: Path, measured: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    once = ("table1", *FEW, "--data", everything)
    assert reproduce(*once) == 0
    assert reproduce(*once, "--weights", save_network("lenet-300-100", tmp_path / "other.safetensors", 77)) == 0
    assert len(measured) == 6
    assert reproduce(*once, "--limit", 5) == 0
    assert len(measured) == 9
    monkeypatch.setattr(cells, "engine", lambda: "changed")
    assert reproduce(*once) == 0
    assert len(measured) == 12


def test_a_damaged_cache_file_is_measured_anew(everything: Path, measured: list[str]) -> None:
    once = ("table1", *FEW, "--data", everything)
    assert reproduce(*once) == 0
    for file in Path("reproduce/table1/cache").iterdir():
        file.write_text(file.read_text()[:20])
    assert reproduce(*once) == 0
    assert len(measured) == 6


def test_the_engine_is_the_code_between_weights_and_figures() -> None:
    files = cells._imported([cells.ROOT / file for file in ("pipeline.py", "metrics.py", "data/__init__.py")])
    names = {str(file.relative_to(cells.ROOT)) for file in files}
    assert {
        "mergers/cosine.py",
        "criteria.py",
        "surgery.py",
        "metrics.py",
        "networks/vgg.py",
        "data/readers.py",
    } <= names
    assert not any(name.startswith(("paper/", "commands/", "cli")) for name in names)


# Which networks, which methods


def test_what_is_missing_is_left_out_with_a_plain_message(
    everything: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    part = tmp_path / "part"
    part.mkdir()
    for name in ("cifar10_test.npz", settings.FILES["vgg-16"][0]):
        os.symlink(everything / name, part / name)
    assert reproduce("table2", "--data", part, *FEW) == 0
    said = capsys.readouterr().err
    assert "paper_vgg16_cifar100.safetensors" in said and "neuron-merging train vgg-16" in said
    assert {row["network"] for row in read_csv(Path("reproduce/table2/table2.csv"))} == {"vgg-16"}
    assert "VGG-16 on CIFAR-100 is left out" in Path("reproduce/table2/index.html").read_text()
    os.symlink(everything / settings.FILES["vgg-16-cifar-100"][0], part / settings.FILES["vgg-16-cifar-100"][0])
    assert reproduce("table2", "--data", part, *FEW) == 0
    assert "cifar-100 (test) is not at hand" in capsys.readouterr().err


def test_nothing_to_run_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert reproduce("table3", "--data", tmp_path) == 2
    said = capsys.readouterr().err
    assert "nothing can run" in said and "paper_resnet56_cifar10.safetensors" in said and "WideResNet-40-4" in said
    assert not Path("reproduce").exists()


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


FILE = settings.FILES["resnet-56"][0]


def test_any_merger_stands_beside_the_papers(everything: Path) -> None:
    many = "none,cosine:bn=paper,threshold=0.3,calibrated:ridge=0.1,cosine"
    assert reproduce("figure3", "--data", everything, *FEW, "--methods", many) == 0
    rows = [row for row in read_csv(Path("reproduce/figure3/figure3.csv")) if row["metric"] == "accuracy"]
    found = [row["method"] for row in rows if row["network"] == "resnet-56"]
    assert found == ["original", "none", "cosine:bn=paper,threshold=0.3", "calibrated:ridge=0.1", "cosine"]
    assert [bool(row["paper"]) for row in rows[:5]] == [True, True, False, False, True]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("lenet-300-100", "cosine:threshold=0.45,balance=0.85,bn=released"),
        ("vgg-16", "cosine:threshold=0.1,balance=0.85,bn=released"),
        ("vgg-16-cifar-100", "cosine:threshold=0.1,balance=0.7,bn=released"),
        ("resnet-56", "cosine:threshold=0.1,balance=0.85,bn=released"),
        ("wideresnet-40-4", "cosine:threshold=0.1,balance=0.8,bn=released"),
    ],
)
def test_the_papers_hyperparameters(name: str, text: str) -> None:
    (method,) = methods.parse("cosine")
    assert method.text(settings.network(name)) == text
    assert method.at(0.2).text(settings.network(name)).startswith("cosine:threshold=0.2,balance=1,")
    assert methods.parse("none")[0].text(settings.network(name)) == "none"


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
        (("table1", "--weights", "resnet-56=here"), "resnet-56 has no place here"),
        (("figure3", "--weights", "resnet-55=here"), "no network 'resnet-55'"),
        (("table1", "--weights", "lenet-300-100-cifar-10=here"), "not those of CIFAR-10"),
        (("figure5", "--weights", "wideresnet-11-1=here"), "6n + 4"),
        (("table1", "--data", "nowhere"), "no such folder"),
        (("table1", "--device", "toaster"), "no device 'toaster'"),
        (("table1", "--weights", "here"), "not a file of weights"),
        (("figure4", "--weights", "lenet-300-100=here"), "lenet-300-100 has no place here"),
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
    wrong = everything / settings.FILES["vgg-16"][0]
    assert reproduce("table1", "--data", everything, "--weights", wrong) == 3
    assert "do not fit" in capsys.readouterr().err


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
    probe = (
        "import sys, neuron_merging.tool.cli as c; c.main(['reproduce', '--help']); sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "--methods" in done.stdout


# What the paper prints


def printed_gains(target: str, network: str, metric: str) -> dict[float, list[float]]:
    """Merged minus pruned, or the other way round for WARE, by ratio, as the tables print it."""
    found: dict[float, list[float]] = {}
    for point, reference in PRINTED[target].items():
        if (point.network, point.metric, point.method) == (network, metric, "cosine"):
            pruned = PRINTED[target][point._replace(method="none")].value
            found.setdefault(point.ratio, []).append(round(reference.value - pruned, 3))
    return found


GAINS = [
    ("table1", "lenet-300-100", "accuracy", {0.5: (0.29, 0.52, 0.49), 0.6: (1.75, 5.04, 2.28),
                                             0.7: (11.49, 12.06, 8.01), 0.8: (13.26, 13.21, 13.30)}),
    ("table2", "vgg-16", "accuracy", {0.5: (4.46, 4.02, 5.25)}),
    ("table2", "vgg-16-cifar-100", "accuracy", {0.5: (3.93, 4.07, 4.57)}),
    ("table3", "vgg-16", "ware", {0.5: (-2.820, -2.839, -2.916)}),
    ("table3", "resnet-56", "ware", {0.5: (-7.109, -8.214, -6.012), 0.4: (-4.848, -5.678, -5.835),
                                     0.3: (-2.605, -1.668, -3.320), 0.2: (-1.240, -1.363, -1.237)}),
    ("table3", "wideresnet-40-4", "ware", {0.5: (-1.138, -1.040, -1.017), 0.4: (-1.200, -1.100, -1.154),
                                           0.3: (-0.886, -0.814, -0.897), 0.2: (-0.470, -0.349, -0.415)}),
    ("table4", "vgg-16-imagenet", "accuracy", {0.5: (4.18, 3.98, 5.58), 0.6: (6.08, 6.13, 5.88),
                                               0.7: (8.51, 8.84, 7.39)}),
    ("table4", "vgg-16-imagenet", "top5", {0.5: (3.85, 3.49, 5.01), 0.6: (6.83, 6.29, 6.55),
                                           0.7: (11.56, 11.63, 10.14)}),
    ("table4", "resnet-34-imagenet", "accuracy", {0.1: (4.22, 3.07, 4.79), 0.2: (13.29, 12.57, 12.23),
                                                  0.3: (23.04, 20.37, 20.24)}),
    ("table4", "resnet-34-imagenet", "top5", {0.1: (2.50, 1.85, 3.07), 0.2: (11.34, 10.93, 10.63),
                                              0.3: (31.64, 26.79, 27.84)}),
]  # fmt: skip


@pytest.mark.parametrize(("target", "network", "metric", "gains"), GAINS)
def test_the_typed_figures_have_the_printed_differences(
    target: str, network: str, metric: str, gains: dict[float, tuple[float, ...]]
) -> None:
    found = printed_gains(target, network, metric)
    assert found.keys() == gains.keys()
    for ratio, want in gains.items():  # the paper rounds its differences apart from its figures
        assert found[ratio] == pytest.approx(list(want), abs=0.0101 if target == "table4" else 1e-6)


def test_every_target_has_the_figures_that_it_asks_for() -> None:
    for name, references in PRINTED.items():
        target = TARGETS[name]
        for panel in target.panels:
            metric = target.metrics[0]
            wanted = [
                Point(panel.network, c, r, m, metric)
                for c in settings.CRITERIA
                for r in panel.ratios
                for m in settings.METHODS
            ]
            assert all(point in references for point in wanted) or (name, panel.network) == (
                "figure3",
                "wideresnet-40-4",
            )


@pytest.mark.parametrize(
    ("name", "panel", "parameters"),
    [("vgg-16", 0, 5_397_034), ("vgg-16-cifar-100", 1, 8_393_348)],
)
def test_the_papers_layer_choice_gives_its_parameter_counts(
    name: str, panel: int, parameters: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, everything: Path
) -> None:
    monkeypatch.undo()
    network = settings.network(name)
    model = networks.build("vgg-16", classes=100 if panel else 10)
    safetensors.torch.save_file(model.state_dict(), tmp_path / "vgg")
    images = data.load(network.data, "test", everything)
    checkpoint = Checkpoint(network, tmp_path / "vgg.safetensors", images)
    os.rename(tmp_path / "vgg", checkpoint.file)
    ratio = checkpoint.ratio(TARGETS["table2"].panels[panel], 0.5)
    small = nm.compress(model, checkpoint.example, ratio=ratio, merger="none", verify=False)
    assert small.summary.parameters[1] == parameters
    assert PRINTED["table2"][Point(name, "l1", 0.5, "none", "parameters")].value == pytest.approx(parameters, abs=5e4)


def test_wide_networks_round_before_they_widen(tmp_path: Path, everything: Path) -> None:
    images = data.load("cifar-10", "test", everything)
    checkpoint = Checkpoint(settings.network("wideresnet-40-4"), tmp_path, images)
    ratio = checkpoint.ratio(TARGETS["figure3"].panels[1], 0.3)
    assert {
        key: round(4 * base * (1 - ratio[key])) for key, base in (("block1", 16), ("block2", 32), ("block3", 64))
    } == {
        "block1": 44,
        "block2": 88,
        "block3": 176,
    }


# Claims and maps


def row(method: str, ratio: float, ours: float, **more: Any) -> Row:
    base: dict[str, Any] = dict(
        target="figure3", network="resnet-56", title="", criterion="" if method == "original" else "l1", ratio=ratio,
        method=method, threshold=None, metric="accuracy", paper=None, ours=ours, spread=None, checkpoints=1,
        difference=None, agrees=None, source="",
    )  # fmt: skip
    return Row(**(base | more))


def holds(target: str, rows: Sequence[Row], similarities: Any = None) -> list[bool | None]:
    return [verdict.holds for verdict in claims.verdicts(target, rows, similarities)]


def test_claims_are_tested_on_our_own_figures() -> None:
    good = [row("original", 0, 90), row("none", 0.5, 20), row("cosine", 0.5, 60)]
    assert holds("figure3", good) == [True, True, None, None]
    assert holds("figure3", [*good[:2], row("cosine", 0.5, 45)]) == [True, False, None, None]
    wide = [replace(r, network="wideresnet-16-2") for r in (good[0], row("none", 0.5, 66), row("cosine", 0.5, 86))]
    assert holds("figure3", wide) == [True, None, True, True]
    assert holds("table1", [row("none", 0.8, 60), row("cosine", 0.8, 73)]) == [True, None, False]
    ware = [row("none", 0.5, 12, metric="ware"), row("cosine", 0.5, 5, metric="ware")]
    assert holds("table3", ware) == [True] and holds("table3", ware[:1]) == [None]


def test_claims_about_similarity_and_t() -> None:
    sweep = [row("cosine", 0.3, value, threshold=t) for t, value in ((0.0, 70.0), (0.15, 80.0), (0.4, 60.0))]
    layers = {"1-1": [0.6, 0.7], "2-1": [0.4, 0.5], "3-1": [0.2, 0.25]}
    assert holds("figure5", sweep, layers) == [True, True, True]
    backwards = dict(reversed(layers.items()))
    assert holds("figure5", [replace(r, threshold=0.4 - (r.threshold or 0)) for r in sweep[::2]], backwards) == [
        False,
        False,
        False,
    ]
    assert holds("figure5", []) == [None, None, None]


def test_a_class_map_is_the_classifiers_sum_of_channels() -> None:
    model = ResNet(8).eval()
    x, labels = torch.randn(3, 3, 32, 32), torch.tensor([1, 4, 4])
    seen: list[Tensor] = []
    handle = model.layer3.register_forward_hook(lambda module, inputs, output: seen.append(output))
    with torch.no_grad():
        model(x)
    handle.remove()
    want = torch.einsum("nc,nchw->nhw", model.fc.weight[labels], seen[0].relu()) / 64
    found = maps.class_maps(model, "layer3", x, labels)
    assert torch.allclose(found, want, atol=1e-5) and not model.layer3._forward_hooks


def test_pictures_are_the_first_of_each_class_in_the_order_of_classes(everything: Path) -> None:
    images = data.load("cifar-10", "test", everything)
    shuffled = replace(images, y=torch.tensor([3, 1, 3, 0, 1, 2, 9, 9, 0, 2, 1, 1]))
    checkpoint = Checkpoint(settings.network("resnet-56"), Path(), shuffled)
    assert maps.chosen(checkpoint) == [3, 1, 5, 0, 6]
    x, labels = maps.pictures(checkpoint)
    assert labels.tolist() == [0, 1, 2, 3, 9]
    seen = torch.from_numpy(np.stack(maps.visible(x, shuffled))).permute(0, 3, 1, 2)
    assert torch.allclose(seen, images.x[[3, 1, 5, 0, 6]] / 255, atol=1e-6)


def test_networks_are_named_by_architecture_and_data() -> None:
    assert settings.network("vgg-16-cifar-10").name == "vgg-16"
    assert settings.network("resnet-20-cifar-100").data == "cifar-100"
    assert settings.network("wideresnet-16-2").title == "WideResNet-16-2 on CIFAR-10"
    with pytest.raises(MergingError, match="no network"):
        settings.network("alexnet")


def test_a_network_takes_the_place_of_its_own_kind() -> None:
    figure3, table2 = TARGETS["figure3"].panels, TARGETS["table2"].panels
    assert [options.fits("resnet-20", panel, alone=False) for panel in figure3] == [True, False]
    assert [options.fits("vgg-13-cifar-100", panel, alone=False) for panel in table2] == [False, True]
    (figure5,) = TARGETS["figure5"].panels
    assert options.fits("vgg-16", figure5, alone=True)
    assert not options.fits("vgg-16", figure5, alone=False)  # in `all` it has a place of its own


def test_options_default_to_the_paper() -> None:
    found = options.resolve("figure5")
    assert [panel.ratios for panel in found.targets[0].panels] == [(0.3, 0.4, 0.5)]
    assert found.targets[0].criteria == ("l1",) and found.limit is None
    assert [method.label for method in found.methods] == ["none", "cosine"]


# With the paper's own checkpoints


@pytest.fixture
def real(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[None]:
    monkeypatch.undo()
    if not os.environ.get("NEURON_MERGING_DATA"):
        pytest.skip("NEURON_MERGING_DATA is not set: the paper's checkpoints are not at hand")
    try:
        data.load("fashion-mnist", "test")
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


# Broken and unusual requests


def test_a_merger_of_ones_own_is_measured_anew_when_it_changes(
    everything: Path, measured: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = "from neuron_merging.mergers.none import Prune\nclass Mine(Prune):\n    pass\n"
    once = ("table1", *FEW, "--data", everything, "--methods", "my_merger:Mine")
    monkeypatch.setattr(sys, "path", list(sys.path))
    counts = []
    for text in (source, source, source + "# changed\n"):
        Path("my_merger.py").write_text(text)
        sys.modules.pop("my_merger", None)
        measured.clear()
        assert reproduce(*once) == 0
        counts.append(len(measured))
    assert counts == [2, 0, 1]


def test_a_picture_for_every_ratio(everything: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[list[str]] = []
    monkeypatch.setattr(
        run.plots, "heat_maps", lambda x, shown, names: drawn.append([*shown]) or run.plots._sheet(1)[0]
    )
    assert reproduce("figure4", "--data", everything, "--ratios", "0.25,0.5", "--limit", 4) == 0
    assert drawn == [
        ["original", "pruned\nl1 25%", "merged\nl1 25%", "pruned\nl1 50%", "merged\nl1 50%"],
    ]


def test_a_threshold_that_is_asked_for_is_not_swept(everything: Path) -> None:
    methods = ("--methods", "cosine:threshold=0.3", "--limit", 4)
    assert reproduce("figure5", "--data", everything, *FEW, *methods) == 0
    assert [row["threshold"] for row in read_csv(Path("reproduce/figure5/figure5.csv"))] == ["", ""]


def test_figures_that_are_no_numbers_are_told_and_not_kept(
    everything: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = run.MEASURES["score"]
    once = ("table1", *FEW, "--data", everything)
    with monkeypatch.context() as patch:
        patch.setitem(run.MEASURES, "score", lambda *given: {**real(*given), "ware": float("inf")})
        assert reproduce(*once) == 2
    assert "ware is inf (at LeNet-300-100 on FashionMNIST, original)" in " ".join(capsys.readouterr().err.split())
    assert not Path("reproduce/table1/cache").exists()
    assert reproduce(*once) == 0


def test_a_file_named_twice_counts_once_under_any_name_of_its_network(everything: Path) -> None:
    file = everything / FILE
    twice = ("--weights", f"resnet-56={file}", "--weights", f"resnet-56-cifar-10={file}")
    assert reproduce("figure3", "--data", everything, *FEW, "--limit", 4, *twice) == 0
    rows = read_csv(Path("reproduce/figure3/figure3.csv"))
    assert {row["checkpoints"] for row in rows if row["network"] == "resnet-56"} == {"1"}
    assert len(rows) == len({(r["network"], r["method"], r["metric"]) for r in rows})


def test_a_file_with_an_equals_sign_in_its_path(everything: Path, tmp_path: Path) -> None:
    file = tmp_path / "a=b.safetensors"
    shutil.copy(everything / settings.FILES["lenet-300-100"][0], file)
    assert reproduce("table1", "--data", everything, *FEW, "--limit", 4, "--weights", file) == 0


def test_imagenet_is_left_out_of_calibration_and_missing_classes_are_told(
    everything: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert reproduce("table4", "--data", everything, *FEW, "--methods", "none,calibrated", "--limit", 2) == 0
    said = " ".join(capsys.readouterr().err.split())
    assert "is left out of calibrated: there are no training images" in said
    assert "2 folders of classes are there, not 1,000" in said
    assert {row["method"] for row in read_csv(Path("reproduce/table4/table4.csv"))} == {"original", "none"}


def test_a_place_that_cannot_be_written_is_told_before_any_work(
    everything: Path, measured: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    Path("file").write_text("")
    assert reproduce("table1", "--data", everything, "--out", "file/inside") == 1
    assert "nothing can be written there" in capsys.readouterr().err and not measured
