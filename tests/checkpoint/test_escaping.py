"""Names of layers are untrusted: cards, pages and terminals show them as plain text."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import neuron_merging as nm
from neuron_merging.checkpoint.card import escape_markdown
from neuron_merging.cli import console

HOSTILE = "<script>alert(1)</script>|[x](javascript:y)`*\n# [red]\x1b[2J"


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.add_module(HOSTILE, nn.Linear(4, 8))
        self.last = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(getattr(self, HOSTILE)(x).relu())


def test_a_layer_name_cannot_write_into_the_card(tmp_path: Path) -> None:
    nm.compress(Named(), torch.randn(1, 4), merger="none").save(tmp_path / "small")
    text = (tmp_path / "small/README.md").read_text()
    assert "<script" not in text and "[x](" not in text and "\x1b" not in text and "\n# [" not in text
    row = next(line for line in text.splitlines() if "alert" in line)
    assert row.count("|") == 5


def test_a_layer_name_cannot_write_into_the_page() -> None:
    from neuron_merging import report

    model = Named()
    page = report.render_report(nm.compress(model, torch.randn(1, 4), merger="none"), model, torch.randn(1, 4))
    assert "alert(1)" in page and "<script>alert" not in page


def test_a_layer_name_is_no_markup_on_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    console.print_table(HOSTILE, (HOSTILE,), [(HOSTILE,)])
    console.print_message(HOSTILE)
    console.print_error(HOSTILE)
    console.print_warning(HOSTILE)
    console.print_verdict(HOSTILE, calm=False)
    said = capsys.readouterr()
    for text in (said.out, said.err):
        assert "[red]" in text and "\x1b" not in text and "\\x1b" in text


def test_ordinary_names_stay_readable() -> None:
    for name in ("layer1.0.conv_1", "features.3", "Linear", "cosine:threshold=0.2"):
        assert escape_markdown(name) == name


def test_the_model_and_the_settings_are_escaped_too(tmp_path: Path) -> None:
    from neuron_merging.checkpoint import save_folder
    from neuron_merging.checkpoint.recipe import Recipe

    small = nm.compress(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)), torch.randn(1, 4), merger="none")
    save_folder.save(small, tmp_path / "small", recipe=Recipe(model="a:<b>", criterion="x:<i>"))
    text = (tmp_path / "small/README.md").read_text()
    assert "<b>" not in text and "<i>" not in text
