"""Every example in the README and in the pages of docs/ runs as it stands."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

import pytest
import torch
import yaml

import neuron_merging as nm
from neuron_merging import networks
from neuron_merging.channels.operators import table
from neuron_merging.choosing.criteria import CRITERIA
from neuron_merging.folder import recipe
from neuron_merging.settings import from_recipe
from neuron_merging.tool import cli

ROOT = Path(__file__).parent.parent
PYTHON = [
    "README.md",
    "docs/plan-format.md",
    "docs/add-a-criterion.md",
    "docs/add-a-merger.md",
    "docs/add-an-operator.md",
]
SHELL = ["README.md", "docs/cli.md", "docs/add-a-criterion.md", "docs/add-a-merger.md"]
PACKAGE = """
from torch import nn

def build():
    layers = [nn.Conv2d(3, 8, 3, stride=2), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3, stride=2), nn.ReLU()]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(196, 10))
"""


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    return tmp_path


@pytest.mark.parametrize("page", PYTHON)
def test_python(page: str, here: Path) -> None:
    """One module for each page, so that types and source lines are found as in a user's file."""
    known = [dict(CRITERIA), dict(table.OPERATORS)]
    parts = blocks(page, "python")
    assert parts
    name = "page_" + re.sub(r"\W", "_", page)
    (here / f"{name}.py").write_text("\n".join(parts))
    try:
        made = [value for value in vars(__import__(name)).values() if isinstance(value, nm.Compressed)]
        assert all(small.summary.parameters[1] < small.summary.parameters[0] for small in made)
        assert made or page != "README.md"
    finally:
        sys.modules.pop(name, None)
        for registry, before in zip((CRITERIA, table.OPERATORS), known, strict=True):
            for added in set(registry) - set(before):
                del registry[added]  # type: ignore[attr-defined]


@pytest.mark.parametrize("page", SHELL)
def test_shell(page: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prepare(here)
    lines = [line for part in blocks(page, "sh") for line in part.splitlines() if line.startswith("neuron-merging")]
    assert lines
    for line in lines:
        if line == "neuron-merging demo":  # has a test of its own
            continue
        assert cli.main(shlex.split(line, comments=True)[1:]) == 0, (line, capsys.readouterr().err)
    folders = [plan.parent for plan in here.rglob("plan.json")]
    assert folders and all(cli.main(["verify", str(folder)]) == 0 for folder in folders)


def prepare(here: Path) -> None:
    """What the examples take for granted."""
    for name in ("my_package", "my_package.models", "my_criteria", "my_mergers"):
        sys.modules.pop(name, None)
    (here / "my_package").mkdir()
    (here / "my_package/__init__.py").touch()
    (here / "my_package/models.py").write_text(PACKAGE)
    (here / "my_criteria.py").write_text(blocks("docs/add-a-criterion.md", "python")[0].partition("model, x")[0])
    (here / "my_mergers.py").write_text(blocks("docs/add-a-merger.md", "python")[0])
    spec: dict[str, object] = {}
    exec(PACKAGE, spec)
    torch.save(spec["build"]().state_dict(), "model.pt")  # type: ignore[operator]
    for file in ("lenet.pt", "lenet-other-seed.pt"):
        torch.save(networks.build("lenet-300-100").state_dict(), file)


@pytest.mark.parametrize("page", ["docs/cli.md"])
def test_yaml(page: str) -> None:
    for part in blocks(page, "yaml"):
        assert from_recipe(recipe.from_mapping(yaml.safe_load(part)))


@pytest.mark.parametrize(
    "page", sorted(str(p.relative_to(ROOT)) for p in [*ROOT.glob("docs/*.md"), ROOT / "README.md"])
)
def test_links_lead_somewhere(page: str) -> None:
    for target in re.findall(r"\]\(([^)#]+)", (ROOT / page).read_text()):
        if not target.startswith("http"):
            assert ((ROOT / page).parent / target).exists(), target


def test_every_command_and_exit_code_is_documented() -> None:
    page, errors = (ROOT / "docs/cli.md").read_text(), (ROOT / "docs/errors.md").read_text()
    assert all(f"`{name}" in page for name in cli.COMMANDS)
    assert all(f"| {code} |" in errors for code in (0, 1, 130, *cli.EXIT_CODES.values()))
    assert all(f"`{kind}`" in errors for kind in cli.EXIT_CODES)
