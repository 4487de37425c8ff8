"""Fixtures that hide the data sets of this machine: tests find only files that they write."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from neuron_merging.reproduction import datasets


@pytest.fixture(autouse=True)
def nothing_at_hand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only what a test writes can be found: no data folder, no cache, no system files."""
    monkeypatch.delenv("NEURON_MERGING_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    fashion = dataclasses.replace(datasets.DATASET_SPECS["fashion-mnist"], system_folders=())
    monkeypatch.setitem(datasets.DATASET_SPECS, "fashion-mnist", fashion)
