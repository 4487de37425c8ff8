"""Where a folder may be written, and which files of others are never replaced."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import neuron_merging as nm
from neuron_merging import atomic
from neuron_merging.checkpoint import save_folder
from neuron_merging.reproduction.training import run_state


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))


def compressed() -> nm.Compressed:
    return nm.compress(net(), torch.randn(2, 6), merger="none")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    compressed().save(tmp_path / "small")
    return tmp_path / "small"


# Overwriting


def test_a_folder_with_some_plan_of_its_own_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "garden").mkdir()
    (tmp_path / "garden/plan.json").write_text('{"roses": 3}')
    (tmp_path / "garden/letters").mkdir()
    with pytest.raises(nm.MergingError, match=r"something else is there: plan\.json is damaged"):
        compressed().save(tmp_path / "garden", overwrite=True)
    assert (tmp_path / "garden/plan.json").read_text() == '{"roses": 3}' and (tmp_path / "garden/letters").is_dir()


def test_files_of_others_are_named_and_kept(folder: Path) -> None:
    (folder / "thesis.tex").write_text("all of it")
    (folder / "photos").mkdir()
    with pytest.raises(nm.MergingError, match=r"did not write: photos, thesis\.tex"):
        compressed().save(folder, overwrite=True)
    assert (folder / "thesis.tex").read_text() == "all of it"
    nm.load(folder, build=net)


def test_many_files_of_others_are_counted(folder: Path) -> None:
    for i in range(9):
        (folder / f"f{i}").touch()
    with pytest.raises(nm.MergingError, match="and 3 more"):
        compressed().save(folder, overwrite=True)


def test_what_we_write_ourselves_is_replaced(folder: Path) -> None:
    save_folder.write_report_page(folder, "<html>")
    (folder / ".report.html.neuron-merging-lock").touch()  # what a killed writer leaves
    compressed().save(folder, overwrite=True)
    assert not (folder / "report.html").exists()


def test_folders_of_the_user_beside_the_place_are_neither_deleted_nor_renamed(tmp_path: Path) -> None:
    own = [".small.new", ".small.old", ".small.neuron-merging-abcdefgh", ".small.onnx.neuron-merging-abcdefgh"]
    for name in own:
        (tmp_path / name).mkdir()
        (tmp_path / name / "thesis").write_text(name)
    files = [".small.lock", ".small.onnx.lock", ".small.part"]
    for name in files:
        (tmp_path / name).write_text(name)
    result = compressed()
    result.save(tmp_path / "small")
    result.save(tmp_path / "small", overwrite=True)
    result.save(tmp_path / "small.onnx")
    nm.load(tmp_path / "small", build=net)
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted([*own, *files, "small", "small.onnx"])
    assert all((tmp_path / name / "thesis").read_text() == name for name in own)
    assert all((tmp_path / name).read_text() == name for name in files)
    with pytest.raises(nm.MergingError):
        nm.load(tmp_path / "nothing", build=net)


@pytest.mark.parametrize("name", [".small.new", ".small.old"])
def test_a_file_of_the_user_beside_the_place_stays(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("all of it")
    result = compressed()
    result.save(tmp_path / "small")
    result.save(tmp_path / "small", overwrite=True)
    assert (tmp_path / name).read_text() == "all of it"


@pytest.mark.parametrize("target", ["file/small", "file/deeper/small", "file/small.onnx"])
def test_a_file_where_a_folder_should_be_is_one_clear_error(tmp_path: Path, target: str) -> None:
    (tmp_path / "file").write_text("all of it")
    with pytest.raises(nm.MergingError, match=r"this is a file, not a folder|there is no such folder"):
        compressed().save(tmp_path / target)
    assert (tmp_path / "file").read_text() == "all of it"


KILLED_WHILE_STAGING = """
import os, signal, sys
from neuron_merging import atomic
with atomic.stage_file(sys.argv[1]) as part:
    part.write_bytes(b"half of it")
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_a_killed_save_of_a_file_left_is_gone_after_the_next_one(tmp_path: Path) -> None:
    file = tmp_path / "small.onnx"
    subprocess.run([sys.executable, "-c", KILLED_WHILE_STAGING, str(file)], check=False)
    assert len(list(tmp_path.glob(".small.onnx.*"))) > 0
    compressed().save(file)
    assert [path.name for path in tmp_path.iterdir()] == ["small.onnx"]


# Places


@pytest.mark.parametrize("place", [5, None, b"small\xff\x00", "", "/", "a\0b", "//"])
def test_what_is_no_place_is_one_clear_error(place: Any) -> None:
    with pytest.raises(nm.MergingError, match=r"not a path|empty|root of a disk"):
        compressed().save(place)


def test_a_loop_of_links_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to(tmp_path / "b")
    (tmp_path / "b").symlink_to(tmp_path / "a")
    for place in ("a", "a/small"):
        with pytest.raises(nm.MergingError, match="loop"):
            compressed().save(tmp_path / place, overwrite=True)
        with pytest.raises(nm.MergingError):
            nm.load(tmp_path / place, build=net)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "b"]


def test_a_link_to_a_folder_stays_a_link(folder: Path) -> None:
    link = folder.with_name("link")
    link.symlink_to(folder)
    compressed().save(link, overwrite=True)
    assert link.is_symlink() and nm.load(link, build=net)


# Locks


WITHOUT_FCNTL = """
import sys
sys.modules["fcntl"] = None
import neuron_merging.cli.app, neuron_merging.atomic, neuron_merging.reproduction.training.run_state
import neuron_merging.checkpoint.save_folder, neuron_merging.api
from pathlib import Path
place = Path(sys.argv[1]) / "file"
neuron_merging.atomic.replace_file(place, b"whole")
print(place.read_text(), *sorted(p.name for p in place.parent.iterdir()))
"""


def test_the_package_imports_and_writes_without_fcntl(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_FCNTL, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert done.stdout == "whole file\n", done.stderr


def test_nothing_that_only_posix_has_is_called_on_windows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows opens no folders and removes no open files: there, filelock removes its own."""
    opened: list[Any] = []
    right = os.open

    def watched(path: Any, flags: int, *arguments: Any, **options: Any) -> int:
        opened.extend([path] if flags == os.O_RDONLY else [])
        return right(path, flags, *arguments, **options)

    monkeypatch.setattr(atomic, "IS_WINDOWS", True)
    monkeypatch.setattr(os, "open", watched)
    compressed().save(tmp_path / "small")
    assert not [path for path in opened if os.path.isdir(path)]
    assert nm.load(tmp_path / "small", build=net)


def test_writers_in_threads_take_turns(tmp_path: Path) -> None:
    inside, most = 0, 0

    def write() -> None:
        nonlocal inside, most
        for _ in range(20):
            with atomic.lock_path(tmp_path / "small"):
                inside += 1
                most = max(most, inside)
                inside -= 1

    threads = [threading.Thread(target=write) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == 1
    assert not list(tmp_path.iterdir())


HOLDS = """
import sys, time
from pathlib import Path
from neuron_merging.reproduction.training import run_state
with run_state.lock_run_folder(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(600)
"""


def test_a_run_keeps_others_out_until_it_is_killed(tmp_path: Path) -> None:
    place = tmp_path / "run"
    with subprocess.Popen([sys.executable, "-c", HOLDS, str(place)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "held\n"
        try:
            with pytest.raises(nm.MergingError, match="another run is using"), run_state.lock_run_folder(place):
                pass
        finally:
            process.kill()  # else a failure waits for its ten minutes
    with run_state.lock_run_folder(place):
        pass
    assert [p.name for p in tmp_path.iterdir()] == ["run"] and not list(place.iterdir())
