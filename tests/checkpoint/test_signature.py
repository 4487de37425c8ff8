"""Signatures: a folder that this user wrote needs no --trust, anyone else's does."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest
import torch

import neuron_merging as nm
from neuron_merging.checkpoint.manifest import KEY_FILE, SIGNATURE_FILE, is_signed_by_user
from neuron_merging.checkpoint.save_folder import save_finetuned
from neuron_merging.cli import app
from tests.checkpoint.test_security import reseal, rewrite

NETS = "from torch import nn\n\ndef build():\n    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))\n"


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that names code, written by the user whose key lies in `config`."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.delitem(sys.modules, "mynets", raising=False)
    Path("mynets.py").write_text(NETS)
    flags = ["--input", "1,4", "--merger", "none", "--effort", "fast", "--no-report"]
    assert app.main(["compress", "mynets:build", "small", *flags]) == 0
    return tmp_path / "small"


def test_a_folder_of_ones_own_needs_no_trust(own: Path) -> None:
    assert nm.load(own)(torch.ones(1, 4)).shape == (1, 2)
    assert app.main(["verify", "small"]) == 0
    shutil.move(own, own.with_name("moved"))
    assert app.main(["verify", "moved"]) == 0
    assert app.main(["compress", "moved", "small", "--input", "1,4", "--no-report"]) == 0


def test_other_folders_still_need_trust(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(own, own.with_name("changed"))
    rewrite(own.with_name("changed"), model="os:system")
    with pytest.raises(nm.FolderError, match="import os"):
        nm.load(own.with_name("changed"))
    shutil.copytree(own, own.with_name("plan"))
    reseal(own.with_name("plan"), lambda keys: keys.update(macs=[1, 1]))
    assert not is_signed_by_user(own.with_name("plan"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(own.parent / "another user"))
    assert not is_signed_by_user(own)
    with pytest.raises(nm.FolderError, match="trust=True"):
        nm.load(own)
    assert app.main(["verify", "small"]) == 3


def test_the_origin_of_a_signed_folder_needs_its_own_signature(own: Path) -> None:
    assert app.main(["compress", "small", "smaller", "--input", "1,4", "--no-report"]) == 0
    (own / SIGNATURE_FILE).unlink()
    assert is_signed_by_user("smaller")
    with pytest.raises(nm.FolderError, match="import mynets"):
        nm.load("smaller")


def test_fine_tuning_does_not_sign_a_strangers_recipe(own: Path) -> None:
    net = nm.load(own)
    save_finetuned(own, net, "tuned", accuracy=(1.0, 2.0), data="it", more={})
    assert is_signed_by_user("tuned")
    (own / SIGNATURE_FILE).unlink()
    save_finetuned(own, net, "of a stranger", accuracy=(1.0, 2.0), data="it", more={})
    assert not is_signed_by_user("of a stranger")


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such modes")
def test_a_key_that_others_can_read_is_not_used(own: Path, tmp_path: Path) -> None:
    key = tmp_path / "config" / "neuron-merging" / KEY_FILE
    assert key.stat().st_mode & 0o777 == 0o600
    key.chmod(0o644)
    assert not is_signed_by_user(own)


def test_without_a_config_folder_nothing_is_signed(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", os.devnull)
    net = nm.load(own, trust=True)
    nm.compress(net, torch.zeros(1, 4), merger="none").save("unsigned")
    assert not Path("unsigned", SIGNATURE_FILE).exists()
