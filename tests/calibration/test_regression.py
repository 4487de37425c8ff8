"""The regression itself."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from neuron_merging.calibration import regression
from neuron_merging.calibration.regression import (
    MAX_ROWS,
    CenteredRows,
    JointMoments,
    MomentAccumulator,
    RowAccumulator,
    average_statistics,
    solve_fit,
)


def rows(count: int = 500, features: int = 6, outputs: int = 3) -> tuple[Tensor, Tensor, Tensor]:
    x = torch.randn(count, features, dtype=torch.float64) @ torch.randn(features, features, dtype=torch.float64) + 1
    t = x.relu() @ torch.randn(features, outputs, dtype=torch.float64) + 2
    return x, t, t + x[:, :outputs]


def collected(x: Tensor, t: Tensor, y: Tensor, batches: int = 1) -> MomentAccumulator:
    regression = MomentAccumulator()
    for part in zip(x.chunk(batches), t.chunk(batches), y.chunk(batches), strict=True):
        regression.add(*part)
    return regression


def test_the_fit_is_least_squares() -> None:
    x, t, y = rows()
    found = solve_fit(
        torch.zeros(3, 6, dtype=torch.float64), collected(x, t, y).to_fit_statistics(), 0.0, restore=False
    )
    ones = torch.cat([x, torch.ones(len(x), 1, dtype=torch.float64)], 1)
    wanted = torch.linalg.lstsq(ones, t).solution
    assert found is not None
    assert torch.allclose(found.weight, wanted[:-1].T, rtol=1e-4, atol=1e-6)
    assert torch.allclose(found.offset, wanted[-1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("restore", [False, True])
@pytest.mark.parametrize("kind", [MomentAccumulator, RowAccumulator])
def test_outputs_are_fitted_some_at_a_time(
    monkeypatch: pytest.MonkeyPatch, kind: type[MomentAccumulator | RowAccumulator], restore: bool
) -> None:
    given = kind()
    given.add(*rows(outputs=5))
    weight = torch.randn(5, 6, dtype=torch.float64)
    whole = solve_fit(weight, given.to_fit_statistics(), 0.1, restore)
    monkeypatch.setattr(regression, "OUTPUT_CHUNK", 2)
    parts = solve_fit(weight, given.to_fit_statistics(), 0.1, restore)
    assert whole is not None and parts is not None and whole.error == pytest.approx(parts.error)
    assert torch.allclose(whole.weight, parts.weight) and torch.allclose(whole.offset, parts.offset)


def test_a_fit_leaves_the_statistics_as_they_are() -> None:
    given = collected(*rows()).to_fit_statistics()
    before = given.xx.clone()
    solve_fit(torch.zeros(3, 6, dtype=torch.float64), given, 0.01, restore=True)
    assert torch.equal(given.xx, before)


def test_batches_add_up() -> None:
    x, t, y = rows()
    whole, pieces = collected(x, t, y).to_fit_statistics(), collected(x, t, y, 7).to_fit_statistics()
    for name in ("mean", "target", "xx", "xt", "tt", "yy"):
        assert torch.allclose(getattr(whole, name), getattr(pieces, name), rtol=1e-9, atol=1e-9)


def test_restoring_gives_the_variance_back() -> None:
    x, t, y = rows()
    moments = collected(x, t, y).to_fit_statistics()
    weight = torch.eye(3, 6, dtype=torch.float64)
    found = solve_fit(weight, moments, 0.3, restore=True)
    assert found is not None
    assert torch.allclose(((found.weight @ moments.xx) * found.weight).sum(1), moments.yy, rtol=1e-6)


@pytest.mark.parametrize("count", [1, 2, 5])
def test_singular_statistics_are_fitted_no_worse_than_by_the_mean(count: int) -> None:
    x, t, y = rows(count)
    found = solve_fit(
        torch.zeros(3, 6, dtype=torch.float64), collected(x, t, y).to_fit_statistics(), 0.01, restore=False
    )
    by_mean = (t - t.mean(0)).square().sum()
    assert found is not None
    assert (x @ found.weight.T + found.offset - t).square().sum() <= by_mean + 1e-9


def test_rows_give_the_fit_that_covariances_give() -> None:
    torch.manual_seed(0)
    x = torch.randn(3000, 12) @ torch.randn(12, 12) + 1
    t, y = x @ torch.randn(12, 3) + 3 * torch.randn(3000, 3), torch.randn(3000, 3)  # so much that the ridge stays whole
    sums, rows = MomentAccumulator(), RowAccumulator()
    for gatherer in (sums, rows):
        for part in range(0, 3000, 1000):
            gatherer.add(x[part : part + 1000], t[part : part + 1000], y[part : part + 1000])
    weight = torch.randn(3, 12).double()
    for centred in (True, False):
        one, other = (
            solve_fit(weight, g.to_fit_statistics(), 0.01, restore=False, centred=centred) for g in (sums, rows)
        )
        assert one is not None and other is not None
        assert torch.allclose(one.weight, other.weight.double(), atol=1e-3)
        assert torch.allclose(one.offset, other.offset.double(), atol=1e-2)
        assert one.error == pytest.approx(other.error, rel=1e-2)


def test_of_more_rows_than_are_kept_the_first_count() -> None:
    rows = RowAccumulator()
    for _ in range(3):
        rows.add(torch.randn(3000, 2), torch.randn(3000, 1), torch.randn(3000, 1))
    assert rows.count == len(rows.to_fit_statistics().x) == MAX_ROWS


def test_half_way_between_two_sources() -> None:
    one, other = (collected(*rows(count)).to_fit_statistics() for count in (300, 200))
    found = average_statistics(replace(one, rows=math.inf), other)
    assert isinstance(found, JointMoments) and found.rows == 400
    assert torch.allclose(found.xt, (one.xt + other.xt) / 2) and torch.allclose(found.mean, (one.mean + other.mean) / 2)


def test_rows_themselves_count_alone() -> None:
    kept = RowAccumulator()
    kept.add(*rows(50))
    assert average_statistics(collected(*rows(50)).to_fit_statistics(), sample := kept.to_fit_statistics()) is sample


@pytest.mark.parametrize("kind", [MomentAccumulator, RowAccumulator])
def test_outputs_that_are_not_given_follow_from_the_weight(
    kind: type[MomentAccumulator] | type[RowAccumulator],
) -> None:
    """Also over several batches, of which sums are symmetric."""
    torch.manual_seed(0)
    x, t, weight = torch.randn(90, 7) @ torch.randn(7, 7) + 1, torch.randn(90, 3), torch.randn(3, 7)
    told, quiet = kind(), kind()
    for part in (slice(40), slice(40, 90)):
        told.add(x[part], t[part], t[part] + x[part] @ weight.T)
        quiet.add(x[part], t[part])
    one, other = (own.to_fit_statistics().with_output_variance(weight) for own in (told, quiet))
    assert torch.allclose(one.yy, other.yy, rtol=1e-5)
    assert isinstance(other, CenteredRows) or torch.equal(other.xx, other.xx.T)
