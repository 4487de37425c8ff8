"""Networks as people write them: each works and is verified, or is refused for the right reason."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

import neuron_merging as nm
from neuron_merging import atomic
from neuron_merging.checkpoint import load_folder, save_folder
from neuron_merging.checkpoint.recipe import Recipe
from neuron_merging.cli import model_loading
from neuron_merging.graph.example_inputs import flatten_outputs
from tests.zoo import CASES
from tests.zoo.unusual import VECTORS, Plain


@pytest.mark.parametrize("build", [lambda: None, Plain(), 3])
def test_a_builder_that_builds_nothing_is_told(build: Any, tmp_path: Path) -> None:
    nm.compress(Plain(), VECTORS).save(tmp_path / "small")
    with pytest.raises(nm.MergingError, match="build"):
        nm.load(tmp_path / "small", build=build)


ROOT = Path(__file__).parents[2]
ZOO = (
    *("linear", "conv1d", "transposed 2d", "grouped", "depthwise", "batch norm 2d", "group norm", "prelu per channel"),
    *("per-channel buffers", "tied autoencoder", "tied layers", "tied embedding", "weight norm", "spectral norm"),
    *("residual", "dense block", "squeeze and excite", "u-net", "transformer", "mixer"),
)
BUILTIN = ("lenet-300-100", "resnet-20", "wideresnet-16-2", "vgg-11")


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))


def compressed(fill: float | None = None) -> nm.Compressed:
    """A small result; `fill` gives every weight this value, to recognise a mixture."""
    small = nm.compress(net(), torch.randn(2, 6), merger="none")
    if fill is not None:
        for parameter in small.model.parameters():
            nn.init.constant_(parameter, fill)
    return small


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    compressed().save(tmp_path / "small")
    return tmp_path / "small"


def outputs(model: nn.Module, inputs: tuple[Any, ...]) -> list[Tensor]:
    with torch.no_grad():
        return [t.contiguous() for t in flatten_outputs(model.eval()(*inputs))]


# Reading back


RELOAD = """
import sys, torch, safetensors.torch
from pathlib import Path
sys.path.insert(0, sys.argv[2])
import neuron_merging as nm
from tests.zoo import CASES
from neuron_merging.cli import model_loading
from tests.checkpoint.test_store import outputs
torch.set_num_threads(1)
torch.manual_seed(99)
for i, name in enumerate(sys.argv[3:]):
    place = Path(sys.argv[1]) / str(i)
    model = nm.load(place, build=CASES[name].make) if name in CASES else nm.load(place)
    assert not model.training
    inputs = CASES[name].inputs() if name in CASES else model_loading.make_example_inputs(name, model)
    want = safetensors.torch.load_file(place.with_suffix(".outputs"))
    got = outputs(model, inputs)
    assert len(got) == len(want), name
    assert all(torch.equal(tensor, want[str(k)]) for k, tensor in enumerate(got)), name
print("equal")
"""


@pytest.mark.parametrize("names", [(*ZOO, BUILTIN[0]), pytest.param(BUILTIN[1:], marks=pytest.mark.long)])
def test_a_fresh_process_gives_equal_bits(names: tuple[str, ...], tmp_path: Path) -> None:
    for i, name in enumerate(names):
        case = CASES.get(name)
        model, inputs = (case.build(), case.inputs()) if case else model_loading.load_model(name)
        small = nm.compress(
            model, inputs, merger=("cosine", "none", "moments")[i % 3] if case else "cosine", scope="all"
        )
        save_folder.save(small, tmp_path / str(i), recipe=None if case else Recipe(model=name))
        tensors = {str(k): tensor for k, tensor in enumerate(outputs(small.model, inputs))}
        safetensors.torch.save_file(tensors, tmp_path / f"{i}.outputs")
    done = subprocess.run(
        [sys.executable, "-c", RELOAD, str(tmp_path), str(ROOT), *names], capture_output=True, text=True, check=False
    )
    assert done.stdout == "equal\n", done.stderr


def test_biases_that_merging_made_are_read_back(tmp_path: Path) -> None:
    case = CASES["batch norm 2d"]
    small = nm.compress(case.build(), case.inputs(), merger="moments")
    small.save(tmp_path / "small")
    again = nm.load(tmp_path / "small", build=case.make)
    assert all(map(torch.equal, outputs(small.model, case.inputs()), outputs(again, case.inputs())))


def test_precision_is_that_of_the_folder(tmp_path: Path) -> None:
    case = CASES["per-channel buffers"]
    inputs = tuple(x.double() for x in case.inputs())
    small = nm.compress(case.build().double(), inputs, merger="none")
    small.save(tmp_path / "small")
    again = nm.load(tmp_path / "small", build=case.make)
    assert all(map(torch.equal, outputs(small.model, inputs), outputs(again, inputs)))


class Loose(nn.Module):
    """Two layers that only the user's script ties."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.s, self.t, self.c = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.t(self.s(self.a(x).relu()).relu()).relu())


@pytest.mark.parametrize("tied_by_build", [True, False])
def test_shared_weights_stay_shared(tmp_path: Path, tied_by_build: bool) -> None:
    def build(tie: bool = tied_by_build) -> Loose:
        model = Loose()
        if tie:
            model.t.weight = model.s.weight
        return model

    x = torch.randn(2, 6)
    small = nm.compress(build(tie=True), x, merger="none")
    small.save(tmp_path / "small")
    again = nm.load(tmp_path / "small", build=build)
    assert again.t.weight is again.s.weight
    assert torch.equal(outputs(again, (x,))[0], outputs(small.model, (x,))[0])
    assert len(safetensors.torch.load_file(tmp_path / "small/model.safetensors")) == 7


def test_saving_leaves_the_network_alone(tmp_path: Path) -> None:
    small = compressed()
    before = {k: v.clone() for k, v in small.model.state_dict().items()}
    small.save(tmp_path / "small")
    assert all(torch.equal(v, before[k]) for k, v in small.model.state_dict().items())
    assert small.model.training


def test_files(folder: Path) -> None:
    files = ["README.md", "figures.json", "model.safetensors", "plan.json", "recipe.yaml"]
    assert sorted(p.name for p in folder.iterdir()) == files
    assert [p.name for p in folder.parent.iterdir()] == ["small"]
    assert "nm.load(" in (folder / "README.md").read_text()


def test_a_folder_without_a_network_needs_build(folder: Path) -> None:
    with pytest.raises(nm.FolderError, match="build="):
        nm.load(folder)


def test_another_network_is_refused(folder: Path) -> None:
    with pytest.raises(nm.MergingError, match=r"does not fit|do not fit"):
        nm.load(folder, build=lambda: nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4)))
    with pytest.raises(nm.MergingError, match=r"does not fit|do not fit"):
        nm.load(folder, build=lambda: nn.Sequential(nn.Linear(6, 9), nn.ReLU(), nn.Linear(9, 3)))


# Damage


def flip(data: bytes) -> bytes:
    return data[:-1] + bytes([data[-1] ^ 1])


def newer(data: bytes) -> bytes:
    return data.replace(b'"version": 1', b'"version": 7', 1)


def other_choice(data: bytes) -> bytes:
    keys = msgspec.json.decode(data)
    keys["plan"]["cuts"][0]["kept"][0] += 1
    return msgspec.json.encode(keys)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("model.safetensors", flip, "changed or cut short"),
        ("model.safetensors", lambda data: data[: len(data) // 2], "changed or cut short"),
        ("recipe.yaml", lambda data: data + b"model: os:system\n", "changed or cut short"),
        ("plan.json", lambda data: data[: len(data) // 2], "damaged"),
        ("plan.json", lambda data: b"", "damaged"),
        ("plan.json", lambda data: b"[]", "damaged"),
        ("plan.json", other_choice, "changed by hand"),
        ("plan.json", newer, "format 7.*reads up to 2.*newer"),
    ],
)
def test_damage_is_refused(folder: Path, name: str, change: Any, message: str) -> None:
    file = folder / name
    file.write_bytes(change(file.read_bytes()))
    with pytest.raises(nm.FolderError, match=message):
        nm.load(folder, build=net)


@pytest.mark.parametrize("name", ["model.safetensors", "plan.json", "recipe.yaml"])
def test_a_missing_file_is_refused(folder: Path, name: str) -> None:
    (folder / name).unlink()
    with pytest.raises(nm.FolderError, match=name):
        nm.load(folder, build=net)


def test_a_card_may_be_edited(folder: Path) -> None:
    (folder / "README.md").write_text("mine")
    nm.load(folder, build=net)


def test_state_that_is_no_tensor_is_refused(tmp_path: Path) -> None:
    class Extra(nn.Linear):
        def get_extra_state(self) -> object:
            return {"calls": 3}

        def set_extra_state(self, state: object) -> None:
            pass

    model = nn.Sequential(Extra(6, 8), nn.ReLU(), nn.Linear(8, 3))
    small = nm.compress(model, torch.randn(2, 6), merger="none")
    with pytest.raises(nm.FolderError, match=r"0\._extra_state"):
        small.save(tmp_path / "small")
    assert not list(tmp_path.iterdir())


# Writing


def values(place: Path) -> set[float]:
    model = nm.load(place, build=net)
    return {float(v) for p in model.parameters() for v in p.detach().flatten()}


def test_an_existing_folder_needs_overwrite(folder: Path) -> None:
    with pytest.raises(nm.MergingError, match="overwrite"):
        compressed().save(folder)
    compressed(2.0).save(folder, overwrite=True)
    assert values(folder) == {2.0}


def test_what_we_did_not_write_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis/chapter").write_text("all of it")
    (tmp_path / "file").write_text("")
    for name in ("thesis", "file"):
        with pytest.raises(nm.MergingError, match="something else"):
            compressed().save(tmp_path / name, overwrite=True)
    assert (tmp_path / "thesis/chapter").read_text() == "all of it"


@pytest.mark.parametrize("fault", [OSError(28, "No space left on device"), KeyboardInterrupt()])
@pytest.mark.parametrize("call", ["fsync", "rename"])
def test_a_failing_write_leaves_the_old_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: BaseException, call: str
) -> None:
    place, right, calls = tmp_path / "small", getattr(atomic.os, call), []
    compressed(1.0).save(place)

    def second_fails(*arguments: Any) -> Any:
        calls.append(arguments)
        if len(calls) == 2:
            raise fault
        return right(*arguments)

    monkeypatch.setattr(atomic.os, call, second_fails)
    with pytest.raises(type(fault)):
        compressed(2.0).save(place, overwrite=True)
    assert values(place) == {1.0}
    assert [p.name for p in tmp_path.iterdir()] == ["small"]


KILLED = """
import os, shutil, signal, sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from tests.checkpoint.test_store import atomic, compressed, values
place, old, new = Path(sys.argv[1]) / "small", compressed(1.0), compressed(2.0)

def write(step):
    count = 0
    def dying(call):
        def wrapped(*arguments, **options):
            nonlocal count
            count += 1
            if count > step:
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*arguments, **options)
        return wrapped
    for module, names in ((os, ("rename", "fsync", "mkdir", "unlink", "rmdir")), (atomic, ("write_file",))):
        for name in names:
            setattr(module, name, dying(getattr(module, name)))
    new.save(place, overwrite=True)
    os._exit(0)

seen = []
for step in range(100):
    old.save(place, overwrite=True)
    child = os.fork()
    if child == 0:
        write(step)
    if os.WIFEXITED(os.waitpid(child, 0)[1]):
        break
    seen.append(values(place))
print(*[sorted(v)[0] if len(v) == 1 else "mixed" for v in seen])
old.save(place, overwrite=True)
print(*sorted(os.listdir(sys.argv[1])))
"""


@pytest.mark.long
def test_kill_at_every_step_leaves_the_old_or_the_new_folder(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path), str(ROOT)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    states, left = done.stdout.splitlines()
    assert set(states.split()) == {"1.0", "2.0"}
    assert states.split() == sorted(states.split()) and len(states.split()) > 12
    assert left == "small"


WRITERS = """
import os, sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from tests.checkpoint.test_store import compressed, values
place, results = Path(sys.argv[1]) / "small", [compressed(1.0), compressed(2.0)]
results[0].save(place)
children = []
for result in results:
    children.append(os.fork())
    if children[-1] == 0:
        for _ in range(25):
            result.save(place, overwrite=True)
        os._exit(0)
seen = set()
while children:
    seen.add(frozenset(values(place)))
    pid, status = os.waitpid(-1, os.WNOHANG)
    if pid:
        assert status == 0
        children.remove(pid)
print(sorted(sorted(v) for v in seen))
print(*sorted(os.listdir(sys.argv[1])))
"""


@pytest.mark.long
def test_two_writers_and_a_reader(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", WRITERS, str(tmp_path), str(ROOT)], capture_output=True, text=True, check=False
    )
    assert done.stdout == "[[1.0], [2.0]]\nsmall\n", done.stderr


# Plans on their own


def test_a_plan_is_read_from_a_folder_a_manifest_or_a_file(folder: Path, tmp_path: Path) -> None:
    plan = load_folder.read_plan(folder)
    (tmp_path / "alone.json").write_text(plan.to_json())
    assert load_folder.read_plan(folder / "plan.json") == plan == load_folder.read_plan(tmp_path / "alone.json")
    with pytest.raises(nm.FolderError, match="no plan"):
        load_folder.read_plan(tmp_path / "nothing.json")


def test_fields_of_other_versions_do_not_break_the_seal(folder: Path) -> None:
    """Version 0.1.0 had prose in each group, and later versions may have what this one does not know."""
    file = folder / "plan.json"
    known = json.loads(file.read_text())
    known["plan"]["groups"][0]["how"] = ["2: fitted, expected error 15%"]
    known["digest"] = ""
    known["digest"] = hashlib.sha256(json.dumps(known, separators=(",", ":"), ensure_ascii=False).encode()).hexdigest()
    file.write_text(json.dumps(known))
    assert load_folder.read_plan(folder).groups[0].readers
    known["plan"]["groups"][0]["how"] = ["another"]
    file.write_text(json.dumps(known))
    with pytest.raises(nm.FolderError, match="changed by hand"):
        load_folder.read_plan(folder)
