"""Every example in the README and in the pages of docs/ runs as it stands, and what they say of the code holds."""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import io
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from PIL import Image

import neuron_merging as nm
from neuron_merging import data, evaluation, extend, models, report
from neuron_merging.channels.rules import table
from neuron_merging.checkpoint import recipe
from neuron_merging.checkpoint.recipe_names import config_from_recipe
from neuron_merging.cli import app
from neuron_merging.inputs import input_sets
from neuron_merging.merging import MERGERS
from neuron_merging.reproduction import datasets, training
from neuron_merging.selection.criteria import CRITERIA
from tests.conftest import mark_long

ROOT = next(place for place in Path(__file__).parents if (place / "pyproject.toml").exists())
GUIDES = ["docs/add-a-criterion.md", "docs/add-a-merger.md", "docs/add-an-operator.md"]
PYTHON = [
    "README.md",
    "docs/index.md",
    "docs/own-checkpoint.md",
    "docs/budgets.md",
    "docs/files.md",
    "docs/plan-format.md",
    "docs/reproduce.md",
    "docs/verdict.md",
    *GUIDES,
]
QUICK = {"docs/plan-format.md", *GUIDES[::2]}
"""Pages whose examples `make test` runs; `make test-long` runs the others'."""
PRINTING = "docs/how-channels-are-found.md"
SHELL = [
    "README.md",
    "docs/cli.md",
    "docs/own-checkpoint.md",
    "docs/budgets.md",
    "docs/add-a-criterion.md",
    "docs/add-a-merger.md",
]
LINKING = [*ROOT.glob("docs/**/*.md"), *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md"))]
PACKAGE = """
from torch import nn

def build():
    layers = [nn.Conv2d(3, 8, 3, stride=2), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3, stride=2), nn.ReLU()]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(196, 10))
"""


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL)


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of its own; and few inputs to try cuts on, for what pages say does not depend on how many."""
    monkeypatch.setattr(input_sets, "SEARCH_INPUT_RANGES", dict.fromkeys(input_sets.SEARCH_INPUT_RANGES, (4, 8)))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))  # folders of one's own need no --trust
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    return tmp_path


@contextlib.contextmanager
def registries_as_they_were() -> Iterator[None]:
    """What a page registers is forgotten after it."""
    known = [(registry, dict(registry)) for registry in (CRITERIA, MERGERS, table.OPERATORS)]
    try:
        yield
    finally:
        for registry, before in known:
            registry.clear()  # type: ignore[attr-defined]
            registry.update(before)  # type: ignore[attr-defined]


# Examples


@pytest.mark.parametrize("page", mark_long(PYTHON, QUICK))
def test_python(page: str, here: Path) -> None:
    """One module for each page, so that types and source lines are found as in a user's file."""
    parts = blocks(page, "python")
    assert parts
    photos(here)
    prepare(here)
    name = "page_" + re.sub(r"\W", "_", page)
    (here / f"{name}.py").write_text("\n".join(parts), encoding="utf-8")
    with registries_as_they_were():
        try:
            made = [value for value in vars(__import__(name)).values() if isinstance(value, nm.Compressed)]
            assert all(small.summary.parameters[1] < small.summary.parameters[0] for small in made)
            assert made or page != "README.md"
        finally:
            sys.modules.pop(name, None)


def test_printed_output(here: Path) -> None:
    """Every block of code on the page prints what stands below it."""
    text = (ROOT / PRINTING).read_text(encoding="utf-8")
    pairs = re.findall(r"```python\n(.*?)```\n\n```text\n(.*?)```\n", text, re.DOTALL)
    assert len(pairs) == len(blocks(PRINTING, "python"))
    names: dict[str, object] = {}
    for code, printed in pairs:
        with contextlib.redirect_stdout(io.StringIO()) as out:
            exec(compile(code, PRINTING, "exec"), names)
        assert [line.rstrip() for line in out.getvalue().splitlines()] == printed.splitlines()


@pytest.mark.parametrize("page", mark_long(SHELL, QUICK))
def test_shell(page: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prepare(here)
    lines = [line for part in blocks(page, "sh") for line in part.splitlines() if line.startswith("neuron-merging")]
    assert lines
    with registries_as_they_were():
        for line in lines:
            if line == "neuron-merging demo":  # has a test of its own
                continue
            assert app.main(shlex.split(line, comments=True)[1:]) == 0, (line, capsys.readouterr().err)


def photos(here: Path) -> None:
    """A folder of images, ten classes of them."""
    pick = np.random.default_rng(0)
    for label in range(10):
        (here / "photos" / str(label)).mkdir(parents=True)
        for i in range(2):
            pixels = pick.integers(0, 256, (9, 11), dtype=np.uint8)
            Image.fromarray(pixels).save(here / "photos" / str(label) / f"{i}.png")


def prepare(here: Path) -> None:
    """What the examples take for granted."""
    for name in ("my_package", "my_package.models", "my_criteria", "my_mergers"):
        sys.modules.pop(name, None)
    (here / "my_package").mkdir()
    (here / "my_package/__init__.py").touch()
    (here / "my_package/models.py").write_text(PACKAGE)
    (here / "my_criteria.py").write_text(blocks("docs/add-a-criterion.md", "python")[0].partition("model = ")[0])
    (here / "my_mergers.py").write_text(blocks("docs/add-a-merger.md", "python")[0])
    spec: dict[str, object] = {}
    exec(PACKAGE, spec)
    torch.save(spec["build"]().state_dict(), "model.pt")  # type: ignore[operator]
    for file in ("lenet.pt", "lenet-other-seed.pt"):
        torch.save(models.create_network("lenet-300-100").state_dict(), file)
    np.savez(
        "lenet-data.npz", x=np.random.default_rng(0).integers(0, 256, (64, 28, 28), np.uint8), y=np.arange(64) % 10
    )


@pytest.mark.parametrize("page", ["docs/cli.md"])
def test_yaml(page: str) -> None:
    for part in blocks(page, "yaml"):
        assert config_from_recipe(recipe.build_recipe(yaml.safe_load(part)))


# What pages say


def test_the_readme_begins_with_two_commands() -> None:
    """And with these alone: everything else is set up by them."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    commands = [line.partition("#")[0].split() for line in blocks("README.md", "sh")[0].splitlines()]
    assert commands == [["make", "demo"], ["make", "test"]]
    assert text.index("make demo") < 600


def test_the_install_lines_name_what_is_there(tmp_path: Path) -> None:
    """The README installs a checkout or a wheel, and `make wheel` ends with the line that installs what it built."""
    text = (ROOT / "README.md").read_text(encoding="utf-8").partition("## Install")[2].partition("\n## ")[0]
    lines = [shlex.split(line, comments=True) for line in text.split("```")[1].splitlines()]
    targets = [line[2] for line in lines if line[:2] == ["pip", "install"]]
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    assert {target.partition("[")[0] for target in targets} == {".", "dist/*.whl"}
    assert {name for target in targets for name in re.findall(r"\w+", target.partition("[")[2])} <= set(extras)
    command = ["make", "--no-print-directory", "-n", "wheel"]  # below another make it would name folders
    steps = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    wheel = tmp_path / "dist" / "neuron_merging-9-py3-none-any.whl"
    wheel.parent.mkdir()
    wheel.touch()
    last = subprocess.run(
        ["sh", "-c", steps.splitlines()[-1]], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert shlex.split(last.stdout, comments=True) == ["pip", "install", str(wheel)]


def test_the_home_page_leads_to_the_users_own_checkpoint() -> None:
    home = (ROOT / "docs/index.md").read_text(encoding="utf-8")
    assert "(own-checkpoint.md)" in home.partition("```")[0]  # before any code


def test_the_site_works_from_disk() -> None:
    """Search is a script in place of a request, and nothing is loaded from elsewhere."""
    site = yaml.safe_load(re.sub(r"!!python\S+", "", (ROOT / "mkdocs.yml").read_text(encoding="utf-8")))
    assert "offline" in site["plugins"] and site["use_directory_urls"] is False and site["theme"]["font"] is False
    (script,) = site["extra"]["polyfills"]
    assert "iframe-worker" in script and (ROOT / "docs" / script).is_file()


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node")
def test_the_worker_of_pages_from_disk_passes_messages_on() -> None:
    program = (ROOT / "tests/worker_in_a_frame.js").read_text(encoding="utf-8")
    shim = str(ROOT / "docs/assets/iframe-worker.js")
    found = subprocess.run(["node", "-e", program, shim], capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["early", "late"]


@pytest.mark.parametrize("page", sorted(str(p.relative_to(ROOT)) for p in LINKING))
def test_links_lead_somewhere(page: str) -> None:
    for target in re.findall(r"\]\(([^)#]+)", (ROOT / page).read_text(encoding="utf-8")):
        if not target.startswith("http"):
            assert ((ROOT / page).parent / target).exists(), target


def test_every_command_and_exit_code_is_documented() -> None:
    page, errors = (ROOT / f"docs/{name}.md" for name in ("cli", "errors"))
    said, codes = page.read_text(encoding="utf-8"), errors.read_text(encoding="utf-8")
    assert all(f"`{name}" in said for name in app.COMMANDS)
    assert all(f"| {code} |" in codes for code in (0, 1, 130, *app.EXIT_CODES.values()))
    assert all(f"`{kind}`" in codes for kind in app.EXIT_CODES)


@pytest.mark.parametrize("page", GUIDES)
def test_guides_need_nothing_but_extend(page: str) -> None:
    """What an extension imports of the package is `neuron_merging` and `neuron_merging.extend`."""
    code = "\n".join(blocks(page, "python"))
    used = set(re.findall(r"^(?:from|import) (neuron_merging[\w.]*)", code, re.MULTILINE))
    assert used <= {"neuron_merging", "neuron_merging.extend"}
    assert re.search(r"^@nm\.(criterion|merger|operator)\(", code, re.MULTILINE)


def test_citation_and_changelog_have_this_version() -> None:
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert cited["version"] == nm.__version__
    assert f"\n## {nm.__version__}\n" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


# The architecture


def drawer() -> ModuleType:
    spec = importlib.util.spec_from_file_location("draw_packages", ROOT / "docs/draw_packages.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_drawing_of_the_packages_is_up_to_date() -> None:
    """`make drawing` makes it anew."""
    draw = drawer()
    assert draw.TARGET.read_text(encoding="utf-8") == draw.draw_svg()


def test_the_drawing_has_no_upward_arrow() -> None:
    draw = drawer()
    edges = draw.find_imports()
    assert len(edges) > 40
    assert draw.find_upward_imports(edges) == []
    assert draw.find_upward_imports({*edges, ("graph", "channels")}) == [("graph", "channels")]


def on_trial(frame: Any) -> bool:
    """Trial cuts are made of shapes, without a tensor."""
    while frame is not None and Path(frame.f_code.co_filename).name != "trial_prune.py":
        frame = frame.f_back
    return frame is not None and frame.f_code.co_name != "analyse"


def test_a_tensor_goes_the_way_that_the_page_names(here: Path) -> None:
    """The files are entered for the first time in the order of the page, each named once."""
    page = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    named = re.findall(r"^\| \d+ \| `([\w/.]+)`", page, re.MULTILINE)
    assert 8 <= len(named) == len(set(named)) <= 12
    home = Path(nm.__file__).parent
    files = {str(home / name): name for name in named}
    entered: dict[str, None] = {}

    def note(frame: object, event: str, argument: object) -> None:
        name = files.get(frame.f_code.co_filename)  # type: ignore[attr-defined]
        if event == "call" and name is not None and not on_trial(frame):
            entered.setdefault(name)

    model = torch.nn.Sequential(torch.nn.Conv2d(1, 4, 1), torch.nn.ReLU(), torch.nn.Conv2d(4, 2, 1))
    compress, default = nm.compress, nm.Moments()  # imported and made before the network is looked at
    sys.setprofile(note)
    try:
        compress(model, torch.zeros(1, 1, 4, 4), merger=default).save("small")
    finally:
        sys.setprofile(None)
    assert list(entered) == named


# The reference

PUBLIC = [(nm, name) for name in nm.__all__]
PUBLIC += [(evaluation, name) for name in evaluation.__all__] + [(report, name) for name in report.__all__]
PUBLIC += [(training, name) for name in training.__all__] + [(data, "Images")]
PUBLIC += [(datasets, name) for name in ("load_dataset", "load_digits")]
PUBLIC += [(models, name) for name in ("create_network", "find_network")]
PUBLIC += [(extend, name) for name in extend.__all__ if inspect.getdoc(getattr(extend, name)) and name[0].islower()]


def sections(thing: object) -> dict[str, str]:
    """A docstring's numpy sections, by title."""
    parts = re.split(r"^(\w+)\n-{3,}\n", inspect.getdoc(thing) or "", flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def names_in(section: str) -> list[str]:
    return re.findall(r"^\*{0,2}(\w+)$", section, re.MULTILINE)


def taken(thing: object) -> list[str]:
    """What a function takes, or what a value is made of."""
    if isinstance(thing, type) and issubclass(thing, nm.MergingError):
        return list(inspect.signature(thing).parameters) if "__init__" in vars(thing) else []
    if isinstance(thing, type) and is_dataclass(thing):
        return [field.name for field in fields(thing) if not field.name.startswith("_")]
    if isinstance(thing, type):
        return list(getattr(thing, "__struct_fields__", ()))
    return list(inspect.signature(thing).parameters)  # type: ignore[arg-type]


def raises(thing: object) -> bool:
    """Whether a `raise` stands in its own code, or in what checks its fields."""
    code = getattr(thing, "__post_init__", None) if isinstance(thing, type) else inspect.unwrap(thing)  # type: ignore[arg-type]
    return code is not None and bool(re.search(r"^\s+raise |check_\w+\(", inspect.getsource(code), re.MULTILINE))


@pytest.mark.parametrize(("module", "name"), PUBLIC, ids=lambda value: getattr(value, "__name__", value))
def test_public_names_say_what_they_take_return_and_raise(module: ModuleType, name: str) -> None:
    thing = getattr(module, name)
    said = sections(thing)
    assert ">>> " in said.get("Examples", ""), "an example"
    assert module is not nm or "+SKIP" not in said["Examples"], "an example that runs"
    assert names_in(said.get("Parameters", "") or said.get("Attributes", "")) == taken(thing)
    if not isinstance(thing, type):
        annotation = inspect.signature(thing).return_annotation
        assert ("Returns" in said) == (annotation not in (None, "None"))
    if raises(thing):
        assert names_in(said.get("Raises", "")), "what it raises"


def test_the_reference_has_every_public_name() -> None:
    text = "\n".join(page.read_text(encoding="utf-8") for page in ROOT.glob("docs/api/*.md"))
    listed = set(re.findall(r"^::: neuron_merging\.([\w.]+)$", text, re.MULTILINE))
    assert set(nm.__all__) <= listed
    shared = {"Analysis", "MergingError", "criterion", "merger", "operator"}
    assert {f"extend.{name}" for name in set(extend.__all__) - shared} <= listed
    for module in (evaluation, report, training):
        assert {f"{module.__name__.removeprefix('neuron_merging.')}.{name}" for name in module.__all__} <= listed
