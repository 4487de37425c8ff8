"""The data of the page: layers, similarities, pictures of scaling matrices."""

from __future__ import annotations

import base64
import io
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import neuron_merging as nm
from neuron_merging import report
from neuron_merging.evaluation import figures
from tests.report.small_result import collected, net
from tests.zoo import CASES


def levels(heat: figures.ScalingImage) -> np.ndarray:
    """The picture's levels: -127 … 127."""
    image = Image.open(io.BytesIO(base64.b64decode(heat.image.partition(",")[2])))
    assert image.mode == "P"
    return np.array(image).astype(int) - 127


def test_layers_are_counted() -> None:
    _, small, found = collected("cosine")
    merged = {m.group: m.folded for m in small.merged.merges}
    for layer in found.layers:
        assert layer.kept + (layer.merged or 0) + layer.dropped_count == layer.before
        assert layer.merged == merged[layer.name]
    assert [layer.dropped_count for layer in collected("none")[2].layers] == [6, 4]
    assert [layer.dropped_count for layer in collected("moments")[2].layers] == [0, 0]


def test_similarity_by_hand() -> None:
    model, small, found = collected("none")
    rows = model[0].weight.detach().flatten(1).double()
    cosine = nn.functional.cosine_similarity(rows[:, None], rows[None], dim=2).numpy()
    kept = list(small.plan.groups[0].kept)
    removed = [i for i in range(12) if i not in kept]
    assert found.layers[0].similarity == pytest.approx(cosine[np.ix_(removed, kept)].max(1), abs=1e-6)


def test_the_picture_of_cosine_merging_is_its_matrix() -> None:
    model, small, found = collected("cosine")
    heat = found.layers[0].heat
    assert heat is not None and heat.exact and heat.whole and heat.shape == (6, 12)
    kept = torch.tensor(small.plan.groups[0].kept)
    removed = torch.tensor([i for i in range(12) if i not in kept])
    merge = next(m for m in small.merged.merges if m.group == "0")
    assert merge.scaling is not None
    scales, rows = merge.scaling.to_dense(), list(small.plan.groups[1].kept)
    weight = model[3].weight.detach()
    assert torch.allclose(
        (weight[:, kept] + torch.einsum("orab,kr->okab", weight[:, removed], scales))[rows],
        small.model[3].weight,
        atol=1e-6,
    )
    shown = levels(heat)
    assert np.array_equal(shown[:, :6], 127 * np.eye(6))
    assert np.array_equal(shown[:, 6:], np.clip(np.round(scales.numpy() / heat.top * 127), -127, 127))


def test_the_nearest_matrix_is_found_where_there_is_one() -> None:
    _, small, _ = collected("cosine")
    model = net()
    kept, removed = np.arange(0, 12, 2), np.arange(1, 12, 2)
    weight = model[3].weight.detach()
    want = torch.randn(6, 6)
    columns = weight[:, kept] + torch.einsum("orab,kr->okab", weight[:, removed], want)
    merge = replace(
        next(m for m in small.merged.merges if m.group == "0"),
        scaling=None,
        columns=columns,
        positions=torch.from_numpy(kept),
    )
    heat = figures.build_scaling_image(merge, kept, removed, {"3.weight": weight})
    assert heat is not None and not heat.exact
    assert np.abs(levels(heat)[:, 6:] * heat.top / 127 - want.clamp(-heat.top, heat.top).numpy()).max() < 0.05


def test_large_matrices_are_shown_by_their_strongest_entries() -> None:
    matrix = np.zeros((300, 900))
    matrix[299, 899], matrix[0, 450] = -3, 2
    heat = figures.draw_scaling_matrix(matrix, 300, "next", True)
    shown = levels(heat)
    assert shown.shape == (100, 225) and not heat.whole and heat.shape == (300, 900)
    assert shown[-1, -1] == -127 and shown[0, 112] > 0 and np.count_nonzero(shown) == 2


@pytest.mark.parametrize(
    "name", ["residual", "depthwise", "grouped", "tied layers", "transformer", "u-net", "dense block"]
)
def test_any_network_has_a_page(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    model = case.build()
    small = nm.compress(model, case.inputs(), scope="all", merger="cosine")
    file = report.write_report(tmp_path / "page.html", small, model, case.inputs())
    assert all(f">{choice.name}<" in file.read_text() for choice in small.plan.groups)
    assert [p.name for p in tmp_path.iterdir()] == ["page.html"]
