"""Results as notebooks show them: a short repr, and HTML with the table and the verdict."""

from __future__ import annotations

import sys
from collections import OrderedDict
from xml.etree import ElementTree

import pytest
import torch
from torch import nn

import neuron_merging as nm

NAME = "<script>alert(1)</script>"


@pytest.fixture(scope="module")
def model() -> nn.Module:
    torch.manual_seed(0)
    layers = {NAME: nn.Linear(4, 8), "act": nn.ReLU(), "b": nn.Linear(8, 6), "relu": nn.ReLU(), "c": nn.Linear(6, 2)}
    return nn.Sequential(OrderedDict(layers))


@pytest.mark.parametrize(
    ("kind", "verdict"),
    [("compress", "fidelity"), ("inspect", "prunable"), ("sensitivity", "most sensitive"), ("sweep", "best fidelity")],
)
def test_a_result_in_a_notebook_is_a_short_repr_and_a_table_with_the_verdict(
    model: nn.Module, kind: str, verdict: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"compress": {"ratio": 0.5}, "sweep": {"ratio": [0.25, 0.5], "jobs": 1}}.get(kind, {})
    found = getattr(nm, kind)(model, torch.zeros(1, 4), **options)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert repr(found).startswith(f"<{type(found).__name__}") and len(repr(found)) < 200 and "\n" not in repr(found)
    page = ElementTree.fromstring(f"<div>{found._repr_html_()}</div>")
    assert verdict in "".join(page.find("p").itertext())  # type: ignore[union-attr]
    rows = [["".join(cell.itertext()) for cell in row] for row in page.iter("tr")]
    assert not list(page.iter("script")) and len(rows) > 2
    assert kind == "sweep" or any(row[0] == NAME for row in rows)
