"""Which source lines count as the user's code."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

import neuron_merging as nm
from neuron_merging.graph.user_code import PACKAGE_ROOT, import_object, keep_user_code_importable, parse_source_line


@pytest.mark.parametrize("folder", ["torch", "onnxruntime", "neuron_merging_nets"])
def test_a_folder_with_a_librarys_name_is_still_the_users(folder: str) -> None:
    trace = f'  File "/home/me/{folder}/model.py", line 12, in forward\n    return self.a(x)\n'
    assert parse_source_line(trace) == "model.py:12: return self.a(x)"


def test_code_beside_the_package_is_the_users() -> None:
    assert (
        parse_source_line(f'File "{PACKAGE_ROOT}_of_mine/model.py", line 3, in forward\n    y = x\n')
        == "model.py:3: y = x"
    )


@pytest.mark.parametrize(
    "file", [Path(torch.__file__).parent / "nn" / "modules" / "linear.py", PACKAGE_ROOT / "api.py"]
)
def test_torch_and_the_library_are_not_the_users(file: Path) -> None:
    assert parse_source_line(f'File "{file}", line 3, in forward\n    y = x\n') == ""


def test_the_search_path_is_as_it_was_after_an_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "nets_of_mine.py").write_text("def make(): return 1\nnumber = 1\n")
    monkeypatch.chdir(tmp_path)
    before = list(sys.path)
    assert import_object("nets_of_mine", "make")() == 1
    with pytest.raises(nm.ModelError):
        import_object("nets_of_mine", "number")
    assert sys.path == before
    with keep_user_code_importable():  # as in a command, whose functions may import more
        import_object("nets_of_mine", "make")
        assert sys.path == [str(tmp_path), *before]
    assert sys.path == before
