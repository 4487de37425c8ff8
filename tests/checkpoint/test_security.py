"""What docs/security.md promises to a reader of a stranger's folder: a test for each sentence."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import yaml
from torch import nn

import neuron_merging as nm
from neuron_merging import models
from neuron_merging.checkpoint import load_folder, save_folder
from neuron_merging.checkpoint import recipe as recipes
from neuron_merging.checkpoint.manifest import Manifest, encode_manifest, parse_manifest
from neuron_merging.checkpoint.recipe import Recipe
from neuron_merging.cli import app
from neuron_merging.errors import RecipeError
from neuron_merging.graph.digests import compute_sha256
from neuron_merging.models import sources

EVIL = """
import pathlib
pathlib.Path(__file__).with_name("ran").write_text("")
def build(**arguments):
    from neuron_merging import models
    return models.create_network("lenet-300-100")
def rows(*arguments):
    raise SystemExit
"""


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as the command line writes it, for a network of ours."""
    torch.manual_seed(0)
    small = nm.compress(models.create_network("lenet-300-100"), torch.zeros(1, 1, 28, 28), merger="none")
    place = tmp_path_factory.mktemp("saved") / "small"
    save_folder.save(small, place, recipe=Recipe(model="lenet-300-100", input=["1,1,28,28"]))
    return place


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    """A copy of that folder, which a test may change."""
    return Path(shutil.copytree(saved, tmp_path / "small"))


@pytest.fixture
def sent(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The same, sealed again by someone whose recipe names code that lies where Python finds it."""
    (tmp_path / "evil.py").write_text(EVIL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "evil", raising=False)
    rewrite(folder, model="evil:build")
    return folder


def rewrite(folder: Path, **keys: Any) -> None:
    """Change keys of a folder's recipe and give it new sums, as its sender can."""
    file = folder / "recipe.yaml"
    file.write_text(yaml.safe_dump({**yaml.safe_load(file.read_text()), **keys}))
    reseal(folder)


def reseal(folder: Path, change: Callable[[dict[str, Any]], None] = lambda keys: None) -> None:
    keys = msgspec.json.decode((folder / "plan.json").read_bytes())
    keys["files"] = {name: compute_sha256((folder / name).read_bytes()) for name in keys["files"]}
    change(keys)
    keys["digest"] = ""
    ordered = msgspec.json.encode(keys)
    keys["digest"] = compute_sha256(ordered)
    (folder / "plan.json").write_bytes(msgspec.json.encode(keys))


def ran(folder: Path) -> bool:
    return (folder.parent / "ran").exists()


def test_every_promise_of_the_page_has_its_test() -> None:
    root = Path(__file__).resolve().parents[2]
    page = (root / "docs/security.md").read_text()
    tests = "".join(file.read_text() for file in (root / "tests").rglob("test_*.py"))
    rows = [line for line in page.splitlines() if line.startswith("| ") and not line.startswith("| promise")]
    assert len(rows) > 25
    for row in rows:
        (name,) = re.findall(r"`(test_\w+)`", row)
        assert f"def {name}(" in tests, name


# Code


COMMANDS = (
    ("verify", "small"),
    ("report", "small", "--eval", "digits"),
    ("bench", "small", "--runs", "1"),
    ("export", "small", "out.pt2"),
    ("inspect", "small"),
    ("compress", "small", "out", "--no-report"),
    ("finetune", "small", "--data", "digits", "--epochs", "1"),
    ("apply", "small", "small", "out"),
)


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
def test_no_command_runs_code_that_a_folder_names(
    sent: Path, capsys: pytest.CaptureFixture[str], command: tuple[str, ...]
) -> None:
    assert app.main(command) == 3
    said = " ".join(capsys.readouterr().err.split())
    assert "would import evil and call build" in said and "--trust" in said
    assert not ran(sent)


def test_the_page_from_stored_figures_runs_no_code(sent: Path) -> None:
    assert app.main(["report", "small"]) == 0 and (sent / "report.html").is_file()
    assert not ran(sent)


def test_load_runs_no_code_that_a_folder_names(sent: Path) -> None:
    with pytest.raises(nm.FolderError, match=r"import evil and call build.*trust=True"):
        nm.load(sent)
    assert not ran(sent)


def test_a_shell_command_in_the_recipe_is_not_run(folder: Path) -> None:
    rewrite(folder, model="os:system", arg={"command": f"touch {folder.parent}/ran"})
    with pytest.raises(nm.FolderError, match="import os and call system"):
        nm.load(folder)
    assert not ran(folder)


def test_the_users_word_lets_it_run(sent: Path) -> None:
    assert nm.load(sent, trust=True).ip1.out_features == 150
    assert ran(sent)
    assert app.main(["verify", "small", "--trust"]) == 0


def test_a_network_that_the_user_names_is_his_own(sent: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert app.main(["verify", "small", "--model", "lenet-300-100"]) == 0
    assert not ran(sent)
    assert app.main(["verify", "small", "--model", "evil:build"]) == 0
    assert ran(sent)


@pytest.mark.parametrize("key", ["criterion", "merger"])
def test_a_criterion_or_merger_of_a_folder_is_not_imported(
    sent: Path, capsys: pytest.CaptureFixture[str], key: str
) -> None:
    rewrite(sent, model="lenet-300-100", **{key: "evil:rows"})
    assert app.main(["report", "small", "--model", "lenet-300-100"]) == 3
    assert "would import evil and call rows" in capsys.readouterr().err
    assert not ran(sent)


@pytest.mark.parametrize("key", ["metric", "eval", "calibrate"])
def test_a_metric_or_data_of_a_folder_are_not_imported(
    sent: Path, capsys: pytest.CaptureFixture[str], key: str
) -> None:
    rewrite(sent, model="lenet-300-100", **{key: "evil:rows"})
    assert app.main(["report", "small", "--model", "lenet-300-100"]) == 3
    assert "would import evil and call rows" in capsys.readouterr().err
    Path("r.yaml").write_text(f"{key}: evil:rows\n")
    assert app.main(["compress", "lenet-300-100", "out", "--recipe", "r.yaml"]) == 2
    assert not ran(sent) and not Path("out").exists()


@pytest.mark.parametrize("key", ["criterion", "merger"])
def test_a_recipe_file_needs_the_same_word(sent: Path, capsys: pytest.CaptureFixture[str], key: str) -> None:
    Path("r.yaml").write_text(f"{key}: evil:rows\n")
    assert app.main(["compress", "lenet-300-100", "out", "--recipe", "r.yaml"]) == 2
    assert "would import evil and call rows" in capsys.readouterr().err
    assert not ran(sent)
    typed = ["compress", "lenet-300-100", "out", "--recipe", "r.yaml", f"--{key}", "none" if key == "merger" else "l1"]
    assert app.main([*typed, "--no-report"]) == 0  # what is typed takes its place
    assert not ran(sent)


@pytest.mark.parametrize(
    "name", ["lenet-300-100", "digit-net", "wideresnet-16-2", "timm:resnet18", "torchvision:alexnet"]
)
def test_our_networks_and_the_zoos_are_free(name: str) -> None:
    assert sources.describe_foreign_code(name, {"num_classes": 7}) is None


@pytest.mark.parametrize(
    ("name", "arg"),
    [
        ("os:system", {}),
        ("program.pt2", {}),
        ("timm:hf-hub:someone/something", {}),
        ("timm:local-dir:/somewhere", {}),
        ("timm:resnet18", {"checkpoint_path": "/tmp/weights.pth"}),
        ("timm:resnet18", {"pretrained_cfg": {"url": "http://somewhere"}}),
        ("torchvision:fcn_resnet50", {"weights_backbone": "DEFAULT"}),
    ],
)
def test_what_opens_other_files_needs_trust(name: str, arg: dict[str, Any]) -> None:
    assert sources.describe_foreign_code(name, arg)


def test_arguments_of_a_file_cannot_make_a_zoo_open_files(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not even for a network that the user types."""
    monkeypatch.chdir(tmp_path)
    rewrite(folder, arg={"checkpoint_path": "weights.pth"})
    Path("r.yaml").write_text("arg: {checkpoint_path: weights.pth}\n")
    typed = ("timm:resnet18", "--input", "1,3,64,64")
    for code, command in (
        (3, ["verify", "small", "--model", *typed]),
        (3, ["finetune", "small", "--model", "timm:resnet18", "--data", "digits"]),
        (2, ["compress", typed[0], "out", *typed[1:], "--recipe", "r.yaml"]),
    ):
        assert app.main(command) == code
        assert "would have timm open or fetch files" in " ".join(capsys.readouterr().err.split())


def test_nothing_is_imported_from_inside_a_folder(sent: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even with trust, not even for a name that the user types while he is in it."""
    (sent.parent / "evil.py").unlink()
    (sent / "evil.py").write_text(EVIL)
    monkeypatch.chdir(sent)
    for path in ([], [str(sent)], [""]):
        monkeypatch.setattr(sys, "path", [*path, *(p for p in sys.path if p not in ("", str(sent)))])
        with pytest.raises(nm.MergingError, match="evil"):
            nm.load(sent, trust=True)
        with pytest.raises(nm.MergingError, match="evil"):
            sources.build_from_source("evil:build", {})
    assert not (sent / "ran").exists()


def test_a_zoo_is_not_looked_for_in_the_current_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder.parent / "timm.py").write_text(EVIL)
    monkeypatch.chdir(folder.parent)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p not in ("", str(folder.parent))])
    monkeypatch.delitem(sys.modules, "timm", raising=False)
    rewrite(folder, model="timm:no_such_network")
    with pytest.raises(nm.MergingError, match="timm"):
        nm.load(folder)
    assert not ran(folder)


def test_a_folder_that_names_itself_is_refused(folder: Path) -> None:
    rewrite(folder, model=str(folder))
    with pytest.raises(nm.FolderError, match="the folder itself as its origin"):
        nm.load(folder)


def test_no_pickle_is_read(folder: Path) -> None:
    torch.save({"ip1.weight": torch.zeros(1)}, folder / "model.safetensors")
    reseal(folder)
    with pytest.raises(nm.FolderError, match="not a safetensors file"):
        nm.load(folder)


# Texts


ALIASES = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 9)
)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (ALIASES, "anchor"),
        ("ratio: " + "[" * 20_000, "deep"),
        ("a:\n" + "".join(" " * i + "a:\n" for i in range(1, 300)), "deep"),
        ("seed: " + "9" * 5_000, "not YAML|bits"),
        ("seed: 0x" + "f" * 50_000, "bits"),
        ("arg: {a: 1e999, b: 0b" + "1" * 100 + "}", "bits"),
        ("ratio: 0.5\n" * 20_000, "bytes"),
        ("model: !!python/object/apply:os.system [ls]", "tag"),
        ("ignore: !!set {a, b}", "tag"),
        ("ratio: 2020-13-45", "not YAML"),
        ("? {a: 1}\n: 2", "not YAML"),
        ("5: 6", "unknown key"),
        ("ratio: [1, 2]", "ratio is a number"),
        ("layer: {1: 0.5}", "not a name"),
        ("x" * 900 + ": 1", "unknown key"),
        ("\x00", "not YAML"),
        ("- 1", "expected keys"),
    ],
)
def test_a_recipe_is_data_of_bounded_size(text: str, message: str) -> None:
    start = time.process_time()
    with pytest.raises(RecipeError, match=message) as found:
        recipes.build_recipe(recipes.parse_recipe_keys(text))
    assert time.process_time() - start < 5 and len(str(found.value)) < 1000


def test_a_recipe_that_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_bytes(b"ratio: \xff\xfe")
    with pytest.raises(RecipeError):
        recipes.read_recipe_keys(tmp_path / "r.yaml")


# Plans


def set_in(path: str, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(keys: dict[str, Any]) -> None:
        *way, last = path.split("/")
        for part in way:
            keys = keys[int(part)] if isinstance(keys, list) else keys[part]
        keys[int(last) if isinstance(keys, list) else last] = value

    return change


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("version", 99),
        ("version", "1"),
        ("plan/version", 99),
        ("plan/biases", {"ip1.bias": 10**12}),
        ("plan/biases", {"ip1.bias": -4}),
        ("plan/biases", {"ip1.bias": 300}),
        ("plan/biases", {"nowhere.bias": 3}),
        ("plan/biases", {"ip1.__class__": 3}),
        ("plan/modules/nowhere", {"in_features": 3}),
        ("plan/modules/ip1", {"__class__": 3}),
        ("plan/modules/ip1", {"_parameters": 3}),
        ("plan/modules/ip1", {"forward": 3}),
        ("plan/modules/ip1", {"out_features": 0}),
        ("plan/modules/ip1", {"out_features": -1}),
        ("plan/modules/ip1", {"out_features": 10**9}),
        ("plan/modules/ip1", {"out_features": [3, 4]}),
        ("plan/modules/ip1", {"num_groups": 3}),
        ("plan/cuts/0/dim", -1),
        ("plan/cuts/0/dim", 40),
        ("plan/cuts/0/size", 10**12),
        ("plan/cuts/0/blocks", 0),
        ("plan/cuts/0/blocks", 3),
        ("plan/cuts/0/tensor", "__class__"),
        ("plan/cuts/0/tensor", "x" * 10**5),
        ("plan/cuts/0/kept", []),
        ("plan/cuts/0/kept", [3, 2]),
        ("plan/cuts/0/kept", [10**6]),
        ("plan/cuts", []),
        ("shared", {"ip1.weight": "nowhere"}),
        ("transient", ["nowhere"]),
        ("transient", ["ip1.weight"]),
        ("files/..%2F", ""),
        ("files", {"../../etc/passwd": "0"}),
        ("files", {}),
        ("files", 5),
    ],
)
def test_a_plan_that_does_not_fit_is_one_clear_error(folder: Path, path: str, value: Any) -> None:
    reseal(folder, set_in(path, value))
    with pytest.raises(nm.MergingError):
        nm.load(folder)


@pytest.mark.parametrize(
    "text",
    [b"[" * 10**6, b'{"a":' * 10**5, b'{"version":' + b"9" * 5_000 + b"}", b"\xff\xff", b'{"version": 1}', b"null"],
)
def test_a_plan_that_is_no_plan_is_one_clear_error(folder: Path, tmp_path: Path, text: bytes) -> None:
    (folder / "plan.json").write_bytes(text)
    with pytest.raises(nm.FolderError, match="damaged"):
        nm.load(folder)
    (tmp_path / "plan.json").write_bytes(text)
    with pytest.raises(nm.MergingError):
        load_folder.read_plan(tmp_path / "plan.json")
    with pytest.raises(nm.MergingError, match="not a plan"):
        nm.Plan.from_json(text)


def test_the_same_choices_are_refused_by_apply(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for kept in ([], [5, 5], [7, 3], [10**6]):
        reseal(folder, set_in("plan/groups/0/kept", kept))
        out = str(folder.parent / "out")
        assert app.main(["apply", str(folder), "lenet-300-100", out]) == 2
        assert "not in order or not in range" in capsys.readouterr().err


@pytest.mark.skipif(sys.platform == "win32", reason="no pipes in folders there")
def test_a_pipe_or_a_device_is_not_waited_for(folder: Path) -> None:
    (folder / "recipe.yaml").unlink()
    os.mkfifo(folder / "recipe.yaml")
    with pytest.raises(nm.FolderError, match="not an ordinary file"):
        nm.load(folder)
    (folder / "plan.json").unlink()
    (folder / "plan.json").symlink_to("/dev/zero")
    with pytest.raises(nm.FolderError, match="not an ordinary file"):
        nm.load(folder)


def test_weights_of_another_kind_are_refused(folder: Path) -> None:
    import safetensors.torch

    file = folder / "model.safetensors"
    tensors = {name: tensor.to(torch.int32) for name, tensor in safetensors.torch.load_file(file).items()}
    safetensors.torch.save_file(tensors, file)
    reseal(folder)
    with pytest.raises(nm.MergingError, match=r"torch\.int32"):
        nm.load(folder)


def test_the_sums_are_no_signature(folder: Path) -> None:
    """What security.md warns of: whoever can write the folder can seal it again."""
    rewrite(folder, ratio=0.25)
    assert isinstance(parse_manifest((folder / "plan.json").read_bytes(), ""), Manifest)
    assert load_folder.read_recipe(folder).ratio == 0.25


def test_a_sealed_manifest_is_read_back(folder: Path) -> None:
    manifest = parse_manifest((folder / "plan.json").read_bytes(), "")
    assert parse_manifest(encode_manifest(manifest), "") == manifest


# What a loaded network depends on


def test_a_loaded_network_does_not_change_with_its_folder(folder: Path) -> None:
    model = nm.load(folder)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with open(folder / "model.safetensors", "r+b") as file:
        file.seek(0)
        file.write(bytes(os.path.getsize(folder / "model.safetensors")))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_the_network_that_build_returns_is_not_touched(tmp_path: Path) -> None:
    nm.compress(net(), torch.randn(2, 6), merger="none").save(tmp_path / "small")
    live = net()
    before = {name: value.clone() for name, value in live.state_dict().items()}
    nm.load(tmp_path / "small", build=lambda: live)
    after = live.state_dict()
    assert all(torch.equal(after[name], value) and not after[name].is_meta for name, value in before.items())


def test_importing_the_package_runs_nothing_of_the_current_folder(tmp_path: Path) -> None:
    for name in ("torch", "yaml", "msgspec", "timm"):
        (tmp_path / f"{name}.py").write_text(EVIL)
    program = (
        "import sys; sys.path[:] = [p for p in sys.path if p]; import neuron_merging.cli.app as c; c.main(['--help'])"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "ran").exists()
