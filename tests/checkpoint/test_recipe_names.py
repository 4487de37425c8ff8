"""Settings from Python as a recipe: what has a name is named, what has none is remarked on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor, nn

import neuron_merging as nm
from neuron_merging.checkpoint.recipe_names import config_from_recipe, format_input_shapes, get_network_import_path
from neuron_merging.config import format_merger, get_import_path, parse_merger
from tests.zoo.unusual import VECTORS, Plain


def largest(rows: Tensor) -> Tensor:
    return rows.abs().amax(1)


class Sized(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, width), nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.b(self.a(x).relu())
        return out


def test_what_can_be_imported_has_a_name() -> None:
    class Local(Plain):
        pass

    assert get_import_path(largest) == "tests.checkpoint.test_recipe_names:largest" and get_import_path(Local) is None
    assert get_network_import_path(Plain()) == "tests.zoo.unusual:Plain" and get_network_import_path(Local()) is None
    assert get_network_import_path(Sized(4)) is None and get_network_import_path(nn.Sequential(nn.Linear(2, 2))) is None
    assert format_input_shapes([torch.zeros(2, 3), 4]) == []


@pytest.mark.parametrize(
    "merger",
    [nm.Moments(), nm.Moments(ridge=0.1, restore_variance=False), nm.Cosine(bn="released"), nm.Fold(), nm.Linear()],
)
def test_mergers_come_back_from_their_names(merger: Any) -> None:
    assert parse_merger(format_merger(merger) or "") == merger


def test_settings_come_back_from_the_folder(tmp_path: Path) -> None:
    small = nm.compress(
        Plain(), VECTORS, budget={"macs": 0.7, "weights": "1MB"}, limits={"*": 0.9}, criterion=largest, seed=3
    )
    small.save(tmp_path / "small")
    text = (tmp_path / "small" / "recipe.yaml").read_text()
    assert text.startswith("# compressed from Python\nmodel: tests.zoo.unusual:Plain\n")
    assert small.recipe is not None and yaml.safe_load(text)["budget"] == {"macs": 0.7, "weights": "1MB"}
    again = config_from_recipe(small.recipe)
    assert again.criterion is largest and again.seed == 3 and again.limits == {"*": 0.9}
    assert [limit.amount for limit in again.budget or ()] == [0.7, 1e6]
    assert "Budget macs 0.7" in (tmp_path / "small" / "README.md").read_text()


def test_what_has_no_name_is_remarked_on(tmp_path: Path) -> None:
    small = nm.compress(
        Sized(8), torch.zeros(2, 6), criterion=lambda rows: rows.norm(dim=1), calibration=[torch.randn(9, 6)]
    )
    small.save(tmp_path / "small")
    lines = (tmp_path / "small" / "recipe.yaml").read_text().splitlines()
    remarks = [line for line in lines if line.startswith("#")]
    assert len(remarks) == 4 and "build=" in remarks[1] and "criterion" in remarks[2] and "calibrate" in remarks[3]
    assert nm.load(tmp_path / "small", build=lambda: Sized(8)).a.out_features == 4  # type: ignore[union-attr]
    with pytest.raises(nm.FolderError, match="compressed from Python"):
        nm.load(tmp_path / "small")
