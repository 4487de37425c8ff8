"""One schema: an option, a budget kind and a file format are each written down once, and everything follows."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import neuron_merging

SOURCE = Path(neuron_merging.__file__).parent
Printed = dict[str, dict[str, object]]
pytestmark = pytest.mark.xdist_group("schema")  # one process starts the program once for all three

OPTION = {
    "config/__init__.py": (
        "    round_to: int = option(",
        '    sparkle: int = option(3, "How much it sparkles.", check=check_integer(1, 9))\n    round_to: int = option(',
    ),
    "api.py": (
        "    settings = build_config(options)\n",
        "    settings = build_config(options)\n    print('sparkle', settings.sparkle)\n",
    ),
}
USES_OPTION = """
import contextlib, inspect, io, json, sys
from neuron_merging.cli import app
out = io.StringIO()
with contextlib.redirect_stdout(out):
    app.main(["compress", "--help"]); app.main(["sweep", "--help"])
assert "torch" not in sys.modules
import torch, neuron_merging as nm
from neuron_merging.checkpoint.recipe import build_recipe
from neuron_merging.checkpoint.recipe_names import config_from_recipe
from neuron_merging.report.report_data import describe_settings
net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
recipe = build_recipe({"sparkle": 5})
with contextlib.redirect_stdout(io.StringIO()) as used:
    small = nm.compress(net, torch.zeros(1, 4), sparkle=7)
def refused(call):
    try: call()
    except nm.MergingError as error: return str(error)
print(json.dumps({
    "signature": str(inspect.signature(nm.compress).parameters["sparkle"]),
    "docstring": "sparkle\\n    How much it sparkles." in inspect.getdoc(nm.compress),
    "flags": out.getvalue().count("--sparkle INT"),
    "config": config_from_recipe(recipe).sparkle,
    "written": small.recipe.sparkle, "yaml": "sparkle: 7" in small.recipe.to_yaml(), "used": used.getvalue().strip(),
    "report": describe_settings(small.recipe)[-1], "silent": "sparkle" not in dict(describe_settings(build_recipe({}))),
    "sweep": len(nm.sweep(net, torch.zeros(1, 4), ratio=[.25, .5], sparkle=4, jobs=1).rows),
    "check": refused(lambda: nm.compress(net, torch.zeros(1, 4), sparkle=10)),
    "sweep check": refused(lambda: nm.sweep(net, torch.zeros(1, 4), ratio=.5, sparkle=10)),
}))
"""


def test_an_option_is_written_in_two_places(printed: Printed) -> None:
    found = printed["option"]
    assert found == {
        "signature": "sparkle: 'int' = 3",
        "docstring": True,
        "flags": 2,
        "config": 5,
        "written": 7,
        "yaml": True,
        "used": "sparkle 7",
        "report": ["sparkle", "7"],
        "silent": True,
        "sweep": 2,
        "check": "sparkle 10 is not an integer of at most 9 (at sparkle=). For instance sparkle=8.",
        "sweep check": "sparkle 10 is not an integer of at most 9 (at sparkle=). For instance sparkle=8.",
    }
    assert len(OPTION) == 2


KIND = {
    "selection/budget.py": (
        '        BudgetKind("params",',
        '        BudgetKind("half-params", "parameters by two", {"h": 1}, lambda cut: cut.parameters / 2),\n'
        '        BudgetKind("params",',
    ),
}
USES_KIND = """
import json
import torch, neuron_merging as nm
from neuron_merging.checkpoint.recipe_names import config_from_recipe
from neuron_merging.report.report_data import describe_settings
net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
small = nm.compress(net, torch.zeros(1, 4), budget={"half-params": "20h"})
again = config_from_recipe(small.recipe)
def refused(call):
    try: call()
    except nm.MergingError as error: return str(error)
print(json.dumps({
    "parameters": small.summary.parameters[1],
    "yaml": small.recipe.budget, "again": again.budget[0].amount,
    "report": dict(describe_settings(small.recipe))["budget"],
    "sweep": [r.target for r in nm.sweep(net, torch.zeros(1, 4), budget={"half-params": ["60%", "20h"]}, jobs=1).rows],
    "error": refused(lambda: nm.compress(net, torch.zeros(1, 4), budget={"half-params": "2h"})),
}))
"""


def test_a_budget_kind_is_one_row(printed: Printed) -> None:
    found = dict(printed["budget"])
    error = str(found.pop("error"))
    assert "budget of parameters by two cannot be met: 2h are allowed, the smallest possible network has 4.5h" in error
    assert found == {
        "parameters": 37,
        "yaml": {"half-params": "20h"},
        "again": 20,
        "report": "half-params 20h",
        "sweep": ["half-params 60%", "half-params 20h"],
    }
    assert len(KIND) == 1


FORMAT = {
    "onnx/formats.py": (
        "FILE_FORMATS = {\n    row.suffix: row\n    for row in (\n",
        "FILE_FORMATS = {\n    row.suffix: row\n    for row in (\n"
        '        FileFormat(".prog", read_exported_program, _save_exported_program, _open_program_runner, "Ask us.",\n'
        '                   risk="which may bite"),\n',
    ),
}
USES_FORMAT = """
import contextlib, io, json
import torch, neuron_merging as nm
from neuron_merging.cli import app
from neuron_merging.models.sources import describe_foreign_code
net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
nm.compress(net, torch.zeros(1, 4)).save("small.prog")
with contextlib.redirect_stdout(io.StringIO()):
    code = app.main(["compress", "small.prog", "smaller.prog", "--ratio", "0.5", "--output", "graph"])
def refused(call):
    try: call()
    except nm.MergingError as error: return str(error)
print(json.dumps({
    "read": [group.size for group in nm.analyse("small.prog").channels.groups],
    "command": code, "again": [group.size for group in nm.analyse("smaller.prog").channels.groups],
    "load": refused(lambda: nm.load("small.prog")), "trust": describe_foreign_code("small.prog", {}),
}))
"""


def test_a_file_format_is_one_row(printed: Printed) -> None:
    found = dict(printed["format"])
    assert "Ask us." in str(found.pop("load"))
    assert found == {"read": [4], "command": 0, "again": [2], "trust": "open small.prog, which may bite"}
    assert len(FORMAT) == 1


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> Printed:
    """What the three programs print with a copy of the package in which all these files were changed."""
    place = tmp_path_factory.mktemp("changed")
    shutil.copytree(SOURCE, place / "neuron_merging", ignore=shutil.ignore_patterns("__pycache__"))
    for name, (before, after) in (OPTION | KIND | FORMAT).items():
        file = place / "neuron_merging" / name
        text = file.read_text(encoding="utf-8")
        assert text.count(before) == 1
        file.write_text(text.replace(before, after), encoding="utf-8")
    programs = {
        "option": USES_OPTION,
        "budget": USES_KIND,
        "format": USES_FORMAT,
    }  # the first: without torch
    code = "\n".join(f"exec({program!r}, {{}})" for program in programs.values())
    done = subprocess.run([sys.executable, "-c", code], cwd=place, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return dict(zip(programs, lines, strict=True))
