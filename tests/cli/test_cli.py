"""The command line: from a network's name to a folder, and every way in which it can refuse."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnxruntime
import pytest
import safetensors.torch
import torch
import yaml
from torch import nn

import neuron_merging as nm
from neuron_merging import merging
from neuron_merging.checkpoint import load_folder
from neuron_merging.checkpoint.recipe import Recipe
from neuron_merging.cli import app, model_loading
from neuron_merging.models import sources
from neuron_merging.selection import criteria
from tests.conftest import import_or_fail

NETS = """
import torch
from torch import nn

def small(width=12):
    return nn.Sequential(nn.Conv2d(1, width, 3), nn.BatchNorm2d(width), nn.ReLU(), nn.Conv2d(width, 8, 3), nn.ReLU(),
                         nn.Flatten(), nn.Linear(128, 10))

def words():
    return nn.Sequential(nn.Embedding(11, 8), nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 3))

class FixedBatch(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 6), nn.Linear(6, 2)

    def forward(self, x):
        return self.b(self.a(x).relu()).view(2, 2)

def broken():
    raise ValueError("no good")

class Branching(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(4, 4)

    def forward(self, x):
        return self.a(x) if x.sum() > 0 else x

class Sorting(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 6), nn.Linear(6, 5), nn.Linear(5, 2)

    def forward(self, x):
        return self.c(self.b(self.a(x).relu()).sort(dim=1).values)

def first_rows(rows):
    return -torch.arange(len(rows)).float()

class Doubled:
    factor: float = 2.0

    def __init__(self, factor=2.0):
        self.factor = factor

    def merge(self, selection):
        from neuron_merging.extend import Merge, MergeKind, MergeResult
        found = ((site.group.name, c) for site in selection.sites() for c in site.group.consumers)
        return MergeResult(tuple(Merge(name, c, MergeKind.FITTED, error=self.factor) for name, c in found))

alone = nn.Linear
number = 3
"""
SMALL = ("nets:small", "--input", "1,1,8,8")


@pytest.fixture(autouse=True)
def here(folder_with: Callable[[str], Path]) -> Path:
    """Every test has a folder of its own with a module of networks in it."""
    return folder_with(NETS)


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The command line as a user runs it."""
    return subprocess.run(
        [sys.executable, "-m", "neuron_merging", *arguments], capture_output=True, text=True, check=False
    )


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    """Exit code and message of a command that writes nothing to stdout."""
    code = app.main(arguments)
    said = capsys.readouterr()
    assert said.out == "" and "Traceback" not in said.err
    return code, said.err


def test_from_compress_to_onnxruntime(capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(3)
    original = nm_small()
    torch.save(original.state_dict(), "weights.pt")
    options = ("--weights", "weights.pt", "--ratio", "0.5", "--layer", "0=0.25", "--merger", "none")
    done = command("compress", *SMALL, "out", *options)
    assert done.returncode == 0, done.stderr
    assert re.search("│ 0 +│ 12 +│ 9 ", done.stdout) and "written to out" in done.stderr
    assert app.main(["verify", "out", "--against", "nets:small", "--weights", "weights.pt", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["distance to the zeroed network"] < 1e-5
    assert app.main(["export", "out", "out.onnx", "--trust", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["largest difference"] < 1e-4
    model, x = nm.load("out", trust=True), torch.randn(1, 1, 8, 8)
    session = onnxruntime.InferenceSession("out.onnx")
    (got,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    assert torch.allclose(torch.from_numpy(got), model(x), atol=1e-5)
    assert set(os.listdir()) - {"__pycache__"} == {"nets.py", "out", "out.onnx", "weights.pt"}


def nm_small() -> nn.Module:
    return sources.build_from_source("nets:small", {})


SLOW_IMPORTS = ("torch", "numpy", "safetensors", "jinja2", "joblib", "matplotlib", "sklearn", "onnx")


def test_help_imports_nothing_slow() -> None:
    code = (
        "import sys, neuron_merging.cli.app as c; c.main(['compress', '--help']); print(*sys.modules, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "--round-to" in done.stdout
    assert not set(SLOW_IMPORTS) & set(done.stderr.split())


def test_help_names_every_choice(capsys: pytest.CaptureFixture[str]) -> None:
    assert app.main(["compress", "--help"]) == 0
    said = capsys.readouterr().out
    home = "neuron_merging.selection.criteria"
    ours = [name for name, function in criteria.CRITERIA.items() if function.__module__ == home]
    assert all(name in said for name in (*ours, "expected-error", *merging.MERGERS, "calibrated"))


def test_every_recipe_key_is_a_flag() -> None:
    flags = {argument.name for argument in app.app["compress"].assemble_argument_collection()}
    named = {flag.removeprefix("--").replace("-", "_").lower() for flag in flags}
    assert named - {"*", "out", "recipe", "trust"} == set(Recipe.__struct_fields__)


def test_flags_win_over_the_recipe_and_the_result_is_saved() -> None:
    Path("r.yaml").write_text("ratio: 0.25\nmerger: cosine:threshold=0.3\nignore: '3'\ninput: 1,1,8,8\n")
    assert app.main(["compress", "nets:small", "out", "--recipe", "r.yaml", "--ratio", "0.5", "--overwrite"]) == 0
    kept = yaml.safe_load(Path("out/recipe.yaml").read_text())
    assert (kept["ratio"], kept["merger"], kept["ignore"]) == (0.5, "cosine:threshold=0.3", ["3"])
    assert kept["model"] == "nets:small" and "overwrite" not in kept
    assert nm.load("out", trust=True)[0].out_channels == 6
    assert app.main(["compress", "nets:small", "again", "--recipe", "out/recipe.yaml"]) == 0
    assert load_folder.read_recipe("again") == load_folder.read_recipe("out")


def test_json_is_all_there_is_on_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["compress", *SMALL, "out", "--json", "--eval", "digits", "--calibrate", "digits", "--seed", "1"]
    assert app.main(arguments) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["parameters"][1] < report["parameters"][0] and len(report["accuracy"]) == 2
    assert report["groups"][0]["readers"][0]["kind"] == "fitted"
    assert "accuracy" in Path("out/README.md").read_text()


def test_what_compress_writes_and_says(capsys: pytest.CaptureFixture[str]) -> None:
    assert app.main(["compress", *SMALL, "out"]) == 0
    files = {"README.md", "figures.json", "model.safetensors", "plan.json", "recipe.yaml", "report.html"}
    assert set(os.listdir("out")) == files
    said = capsys.readouterr()
    assert "On 64 synthetic images" in said.out and "accuracy" not in said.out
    assert "\x1b" not in said.out + said.err
    assert app.main(["compress", *SMALL, "out", "--overwrite", "--eval", "digits"]) == 0
    said = capsys.readouterr()
    assert "On 445 images of digits test" in said.out and "accuracy" in said.out


def test_criteria_and_mergers_of_ones_own(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        app.main(["compress", *SMALL, "out", "--criterion", "nets:first_rows", "--merger", "nets:Doubled:factor=3"])
        == 0
    )
    assert "expected error 300%" in capsys.readouterr().out
    assert load_folder.read_plan("out").groups[0].kept == (0, 1, 2, 3, 4, 5)
    assert app.main(["compress", "nets:small", "again", "--recipe", "out/recipe.yaml", "--trust"]) == 0
    assert load_folder.read_plan("again") == load_folder.read_plan("out")


def test_a_dry_run_writes_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert app.main(["compress", *SMALL, "out", "--dry-run"]) == 0
    assert "parameters" in capsys.readouterr().out
    assert not Path("out").exists()


def test_inspect(capsys: pytest.CaptureFixture[str]) -> None:
    assert app.main(["inspect", "resnet-20", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [g["channels"] for g in report["groups"]][:2] == [16, 16]
    assert report["merging"]["layer1.0.conv1"] == "by any method"
    assert "by fitting; not by cosine: " in report["merging"]["conv1"] and "branches meet" in report["merging"]["conv1"]
    first = report["groups"][1]
    assert (first["parameters"], first["macs"]) == (2 * 16 * 16 * 9 + 2 * 16, 2 * 16 * 16 * 9 * 32 * 32)
    assert app.main(["inspect", *SMALL]) == 0
    said = capsys.readouterr().out
    assert "what the network returns" in said and re.search(r"│ 0 +│ 12 +│ 1,008 ", said)


def test_inspect_fits_on_a_screen_unless_it_is_verbose(capsys: pytest.CaptureFixture[str]) -> None:
    assert app.main(["inspect", "resnet-56"]) == 0
    short = capsys.readouterr().out.splitlines()
    assert app.main(["inspect", "resnet-56", "--verbose"]) == 0
    long = capsys.readouterr().out
    groups = [line for line in short if "layer" in line and "│" in line]
    assert len(groups) == 29 and len(short) < 48 and max(map(len, groups)) <= 80
    assert not any("networks.py:" in line for line in short) and any("10 │ 1 " in " ".join(x.split()) for x in short)
    assert short[-1].startswith("prunable ") and short[-1].endswith(" of 855,770 parameters")
    assert "networks.py:" in long and "layer1.8.conv1" in long and len(long.splitlines()) > len(short)


def test_refusals_have_a_reason_and_a_source_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert app.main(["inspect", "nets:Sorting", "--input", "2,4", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [g["name"] for g in report["groups"]] == ["a"]
    refusal = next(r for r in report["refusals"] if r["layer"] == "b")
    assert "sort" in refusal["operator"] and refusal["why"] and "nets.py:37: return self.c(" in refusal["place"]


def test_apply_makes_the_same_cut_in_other_weights() -> None:
    torch.manual_seed(5)
    torch.save(nm_small().state_dict(), "other.pt")
    assert app.main(["compress", *SMALL, "out"]) == 0
    assert app.main(["apply", "out/plan.json", *SMALL, "other", "--weights", "other.pt"]) == 0
    kept = [[choice.kept for choice in load_folder.read_plan(place).groups] for place in ("out", "other")]
    assert kept[0] == kept[1]
    assert app.main(["verify", "other", "--against", "nets:small", "--weights", "other.pt"]) == 0


def test_bench(capsys: pytest.CaptureFixture[str]) -> None:
    assert app.main(["compress", *SMALL, "out"]) == 0
    capsys.readouterr()
    assert app.main(["bench", "out", "--runs", "3", "--batch", "1", "--batch", "4", "--json", "--trust"]) == 0
    found = json.loads(capsys.readouterr().out)["measured"]
    assert {(row["runtime"], row["batch"], row["network"]) for row in found} == {
        ("torch", batch, network) for batch in (1, 4) for network in ("original", "small")
    }


def test_exported_programs_and_folders_are_networks_too() -> None:
    assert app.main(["compress", "lenet-300-100", "out"]) == 0
    assert app.main(["export", "out", "out.pt2"]) == 0
    assert app.main(["compress", "out.pt2", "program"]) == 0
    assert app.main(["compress", "out", "twice"]) == 0
    for place in ("program", "twice"):
        assert app.main(["verify", place, "--trust"]) == 0
        assert nm.load(place, trust=True).ip1.weight.shape == (75, 784)


def test_a_folder_from_python_takes_its_network_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    nm.compress(nm_small(), torch.zeros(1, 1, 8, 8)).save("out")
    assert refusal(capsys, "export", "out", "out.pt2")[0] == 3
    assert app.main(["export", "out", "out.pt2", "--model", "nets:small", "--input", "1,1,8,8"]) == 0
    capsys.readouterr()


def test_tokens_are_inputs_too() -> None:
    assert app.main(["compress", "nets:words", "out", "--input", "2,5:int64"]) == 0


def test_checkpoints_of_data_parallel_training() -> None:
    state = nm_small().state_dict()
    torch.save({"state_dict": {f"module.{k}": v for k, v in state.items()}, "epoch": 3}, "weights.pth")
    safetensors.torch.save_file(state, "weights.safetensors")
    for file in ("weights.pth", "weights.safetensors"):
        model, _ = model_loading.load_model("nets:small", weights=file, input=["1,1,8,8"])
        assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())


@pytest.mark.parametrize(
    ("code", "arguments", "message"),
    [
        (2, ("compress",), "MODEL"),
        (2, ("comprss",), "comprss"),
        (2, ("compress", *SMALL, "out", "--raito", "0.3"), "--ratio"),
        (2, ("compress", *SMALL, "out", "--ratio", "most"), "--ratio"),
        (2, ("compress", *SMALL, "out", "--ratio", "1.5"), "[0, 1)"),
        (2, ("compress", *SMALL, "out", "--scope", "everything"), "internal"),
        (2, ("compress", *SMALL, "out", "--criterion", "l3"), "l2-gm"),
        (2, ("compress", *SMALL, "out", "--merger", "cosin"), "cosine"),
        (2, ("compress", *SMALL, "out", "--merger", "cosine:treshold=1"), "threshold"),
        (2, ("compress", *SMALL, "out", "--merger", "cosine:bn=mine"), "paper or released"),
        (2, ("compress", *SMALL, "out", "--merger", "calibrated"), "--calibrate"),
        (2, ("compress", *SMALL, "out", "--criterion", "nets:first_row"), "Did you mean first_rows"),
        (2, ("compress", *SMALL, "out", "--criterion", "nest:first_rows"), "(at criterion)"),
        (2, ("compress", *SMALL, "out", "--merger", "nets:Double"), "Did you mean Doubled"),
        (2, ("compress", *SMALL, "out", "--merger", "nets:Doubled:factr=1"), "Did you mean factor"),
        (2, ("compress", *SMALL, "out", "--merger", "nets:small"), "not a merger"),
        (2, ("compress", *SMALL, "out", "--merger", "nets:first_rows"), "rows"),
        (2, ("compress", *SMALL, "out", "--layer", "0"), "NAME=VALUE"),
        (2, ("compress", *SMALL, "out", "--layer", "9=0.5"), "no layer matches"),
        (2, ("compress", *SMALL, "out", "--eval", "mnist"), "fashion-mnist"),
        (2, ("compress", "lenet-300-100", "out", "--eval", "digits"), "does not take a batch of (16, 1, 8, 8)"),
        (2, ("compress", "lenet-300-100", "out", "--calibrate", "digits"), "does not take a batch of (16, 1, 8, 8)"),
        (2, ("compress", *SMALL, "out", "--arg", "width=[1"), "not YAML"),
        (2, ("compress", "nets:small", "out", "--input", "1,x"), "not a shape"),
        (2, ("compress", *SMALL, "nets.py"), "something else"),
        (2, ("compress", *SMALL, "out", "--recipe", "none.yaml"), "none.yaml"),
        (3, ("compress", "resnet-57", "out"), "resnet-56"),
        (3, ("compress", "nets:smal", "--input", "1,1,8,8", "out"), "Did you mean small"),
        (3, ("compress", "nest:small", "out"), "No module named"),
        (3, ("compress", "nets:broken", "out"), "ValueError: no good (at nets.py:21"),
        (3, ("compress", "nets:number", "out"), "cannot be called"),
        (3, ("compress", "builtins:dict", "out"), "not a torch.nn.Module"),
        (3, ("compress", *SMALL, "out", "--arg", "widht=3"), "widht"),
        (3, ("compress", "nets:small", "out"), "--input"),
        (3, ("compress", "nets:small", "out", "--input", "1,3,8,8"), "could not be captured"),
        (3, ("compress", "nets:Branching", "out", "--input", "2,4"), "nets.py:29"),
        (3, ("compress", "model.pt", "out"), "--weights model.pt"),
        (3, ("compress", "model.pt2", "out"), "no such file"),
        (3, ("compress", *SMALL, "out", "--weights", "none.pt"), "no such file"),
        (3, ("verify", "none"), "plan.json"),
        (
            4,
            ("compress", "nets:alone", "out", "--input", "1,4", "--arg", "in_features=4", "--arg", "out_features=4"),
            "",
        ),
        (4, ("compress", *SMALL, "out", "--ratio", "0"), "removes nothing"),
    ],
)
def test_refusals(capsys: pytest.CaptureFixture[str], code: int, arguments: tuple[str, ...], message: str) -> None:
    got, said = refusal(capsys, *arguments)
    assert got == code and message in said, said
    assert not Path("out").exists()


def wrong_names(state: dict[str, Any]) -> Any:
    return {("0.wight" if name == "0.weight" else name): value for name, value in state.items()}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (wrong_names, "0.wight is not in the network (nearest: 0.weight)"),
        (lambda state: state | {"6.weight": torch.zeros(10, 64)}, "6.weight has shape (10, 64), the network's is (10,"),
        (lambda state: nn.Linear(2, 2), "Python objects (torch.nn.modules.linear.Linear)"),
        (lambda state: {"epoch": 3}, "no state dict"),
        (None, "not a file of weights"),
    ],
)
def test_weights_that_do_not_fit(capsys: pytest.CaptureFixture[str], content: Any, message: str) -> None:
    if content is None:
        Path("weights.pt").write_text("not weights")
    else:
        torch.save(content(nm_small().state_dict()), "weights.pt")
    code, said = refusal(capsys, "compress", *SMALL, "out", "--weights", "weights.pt")
    assert code == 3 and message in said, said


def test_a_plan_for_another_network(capsys: pytest.CaptureFixture[str]) -> None:
    assert app.main(["compress", *SMALL, "out", "--no-report"]) == 0
    capsys.readouterr()
    code, said = refusal(capsys, "apply", "out", *SMALL, "other", "--arg", "width=10")
    assert code == 2 and "it has 10 channels, the plan 12 (at 0)" in said
    assert refusal(capsys, "apply", "none", *SMALL, "other")[0] == 3


def test_a_batch_that_the_network_does_not_take(capsys: pytest.CaptureFixture[str]) -> None:
    assert app.main(["compress", "nets:FixedBatch", "out", "--input", "2,4"]) == 0
    capsys.readouterr()
    code, said = refusal(capsys, "bench", "out", "--batch", "3", "--trust")
    assert code == 2 and "does not take a batch of 3" in said


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "model", ["timm:test_resnet", pytest.param("torchvision:squeezenet1_1", marks=pytest.mark.long)]
)
def test_networks_of_a_zoo(declare_vision_operators: None, model: str) -> None:
    import_or_fail(model.partition(":")[0])
    assert app.main(["compress", model, "out", "--input", "1,3,64,64", "--merger", "cosine", "--no-report"]) == 0
    assert app.main(["verify", "out"]) == 0
    assert nm.load("out")(torch.zeros(1, 3, 64, 64)).shape == (1, 1000)


@pytest.mark.parametrize("zoo", ["timm", "torchvision"])
def test_a_zoo_works_or_says_why_not(capsys: pytest.CaptureFixture[str], zoo: str) -> None:
    code, said = refusal(capsys, "compress", f"{zoo}:resnet1", "out")
    assert code == 3 and ("resnet18" in said or "cannot be imported" in said)


class Zoo:
    """A stand-in for timm, whose networks have weights that would be fetched."""

    fetched = 0

    @staticmethod
    def list_models() -> list[str]:
        return ["tiny"]

    @classmethod
    def create_model(cls, name: str, pretrained: bool = False) -> nn.Module:
        cls.fetched += pretrained
        model = nn.Sequential(nn.Flatten(), nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 4))
        model.pretrained_cfg = {"input_size": (3, 2, 2)}
        return model


def test_a_zoo_is_asked_for_weights_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "timm", Zoo)
    assert app.main(["compress", "timm:tiny", "out", "--arg", "pretrained=true"]) == 0
    assert app.main(["verify", "out"]) == 0
    assert nm.load("out")[1].out_features == 4 and Zoo.fetched == 1


def test_a_folder_cannot_replace_its_own_source(capsys: pytest.CaptureFixture[str]) -> None:
    assert app.main(["compress", *SMALL, "out"]) == 0
    capsys.readouterr()
    code, said = refusal(capsys, "compress", "out", "out", "--overwrite")
    assert code == 2 and "the path of the input network" in said


def test_what_cannot_be_exported_is_said(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*arguments: object, **options: object) -> None:
        raise RuntimeError("no such operator\nand much more")

    assert app.main(["compress", *SMALL, "out"]) == 0
    capsys.readouterr()
    monkeypatch.setattr(torch.onnx, "export", fails)
    code, said = refusal(capsys, "export", "out", "out.onnx", "--trust")
    assert code == 3 and "RuntimeError: no such operator (at" in said
    assert refusal(capsys, "export", "out", "out.txt", "--trust")[0] == 2


def test_damage_fails_verification(capsys: pytest.CaptureFixture[str]) -> None:
    assert app.main(["compress", *SMALL, "out"]) == 0
    capsys.readouterr()
    assert refusal(capsys, "compress", *SMALL, "out")[0] == 2
    Path("out/README.md").write_text("mine")
    code, said = refusal(capsys, "verify", "out")
    assert code == 5 and "README.md" in said
    with Path("out/model.safetensors").open("ab") as file:
        file.write(b"x")
    assert refusal(capsys, "verify", "out")[0] == 5
    assert refusal(capsys, "export", "out", "out.onnx")[0] == 3


def test_ctrl_c_leaves_nothing_behind() -> None:
    arguments = [sys.executable, "-m", "neuron_merging", "compress", "resnet-110", "out"]
    heard = {"preexec_fn": lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)}  # a shell's background job ignores it
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **heard) as process:
        assert process.stderr is not None
        while "compressing" not in process.stderr.readline():
            pass
        process.send_signal(signal.SIGINT)
        _, said = process.communicate()
    assert process.returncode == 130 and said.strip() == "error: interrupted"
    assert not Path("out").exists()


def test_a_place_that_cannot_be_written_to(capsys: pytest.CaptureFixture[str]) -> None:
    code, said = refusal(capsys, "compress", *SMALL, "/proc/none/out")
    assert code == 1 and "/proc/none" in said
