"""Ridge regression of a layer's output on the channels that it still reads.

With features x (kept channels and taps), target t (the contribution of the removed channels) and output y, the best
linear replacement adds (C_xx + ridge·diag)⁻¹ C_xt to the weights of the kept columns; its offset restores the mean.
Only sums are stored, so any number of batches can be added.

Where there are too many features for a covariance matrix, some thousand rows are stored instead, and the same fit
is found among their combinations: D⁻¹Xᵀ (X D⁻¹ Xᵀ + n)⁻¹ T with D = ridge·diag, a system as large as there are
rows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields, replace

import torch
from torch import Tensor

from neuron_merging.errors import MergingError

MAX_VARIANCE_RATIO = 4.0
RIDGE_GROWTH = 20.0
"""How the ridge grows with features / rows: covariances measured on few rows are noisy."""
EXACT_FIT_SHARE = 1e-3
"""A share of the target's variance below which what is left over may be exactness: the ridge shrinks with it."""
POOR_FIT_SHARE = 0.25
"""A share that a ridge of some hundredths does not leave over of what could be explained without it."""
ROUNDING_SHARE = 1e-5
"""A share that sums in single precision leave over where nothing is."""
MAX_ROWS = 4096
"""Rows that are kept of what is too wide for covariances."""
VARIANCE_TOLERANCE = 1e-10
"""Of a mean's square; a variance below that may be rounding, and a constant feature explains nothing."""
PRODUCT_STRIPS = 4
"""Parts that products of features with themselves are computed in."""
OUTPUT_CHUNK = 1024
"""Outputs whose fits are looked at together: of a wide layer, matrices of all of them would be a lot."""


def check_ridge(value: object, where: str) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
        raise MergingError(f"ridge {value!r} is not a number of at least 0", where=where, fix="Try 0.01.")


def _make_zero() -> Tensor:
    return torch.zeros((), dtype=torch.float32, device="cpu")


def add_products(total: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """A sum xᵀy over rows, with those of more rows; it is changed in place."""
    return total.to(x).addmm_(x.T, y) if total.ndim else x.T @ y


def add_squares(total: Tensor, x: Tensor) -> Tensor:
    """A sum xᵀx over rows, with those of more rows: half of it is known from the other half."""
    if not total.ndim:
        return x.T @ x
    total, step = total.to(x), -(-len(total) // PRODUCT_STRIPS)
    for start in range(0, len(total), step):
        own, rest = slice(start, start + step), slice(start + step, None)
        total[own, start:].addmm_(x[:, own].T, x[:, start:])
        total[rest, own] = total[own, rest].T
    return total


def _default_outputs(outputs: Tensor | None, targets: Tensor) -> Tensor:
    """Outputs; none of any row where they are not given."""
    return targets[:, :0] if outputs is None else outputs


@dataclass
class MomentAccumulator:
    """Running sums over rows of features, targets and outputs, each around its first mean."""

    count: int = 0
    shift: tuple[Tensor, Tensor, Tensor] | None = None
    sums: tuple[Tensor, Tensor, Tensor] = field(default_factory=lambda: (_make_zero(), _make_zero(), _make_zero()))
    xx: Tensor = field(default_factory=_make_zero)
    xt: Tensor = field(default_factory=_make_zero)
    tt: Tensor = field(default_factory=_make_zero)
    yy: Tensor = field(default_factory=_make_zero)

    def add(self, x: Tensor, t: Tensor, y: Tensor | None = None) -> None:
        """Rows of features (n × f), targets (n × o) and original outputs (n × o), if `with_outputs` is not to tell."""
        x, t, y = (v if v.dtype == torch.float64 else v.float() for v in (x, t, _default_outputs(y, t)))
        if self.shift is None:
            self.shift = (x.mean(0), t.mean(0), y.mean(0))
        x, t, y = (v - s for v, s in zip((x, t, y), self.shift, strict=True))
        self.count += len(x)
        self.sums = tuple(old.to(v) + v.sum(0) for old, v in zip(self.sums, (x, t, y), strict=True))  # type: ignore[assignment]
        self.xx, self.xt = add_squares(self.xx, x), add_products(self.xt, x, t)
        self.tt = self.tt.to(x) + t.square().sum(0)
        self.yy = self.yy.to(x) + y.square().sum(0)

    def around(self, shift: tuple[Tensor, Tensor, Tensor]) -> MomentAccumulator:
        """The same sums around another centre, in double precision."""
        assert self.shift is not None
        dx, dt, dy = (old.double() - new.double() for old, new in zip(self.shift, shift, strict=True))
        sx, st, sy = (part.double() for part in self.sums)
        n = self.count
        return MomentAccumulator(
            count=n,
            shift=shift,
            sums=(sx + n * dx, st + n * dt, sy + n * dy),
            xx=self.xx.double() + torch.outer(sx, dx) + torch.outer(dx, sx) + n * torch.outer(dx, dx),
            xt=self.xt.double() + torch.outer(sx, dt) + torch.outer(dx, st) + n * torch.outer(dx, dt),
            tt=self.tt.double() + 2 * st * dt + n * dt.square(),
            yy=self.yy.double() + 2 * sy * dy + n * dy.square(),
        )

    def to_fit_statistics(self) -> JointMoments:
        assert self.shift is not None
        mx, mt, my = (s.double() / self.count for s in self.sums)
        return JointMoments(
            mean=self.shift[0].double() + mx,
            target=self.shift[1].double() + mt,
            xx=_to_covariance(self.xx, self.count, mx, mx),
            xt=_to_covariance(self.xt, self.count, mx, mt),
            tt=self.tt.double() / self.count - mt.square(),
            yy=self.yy.double() / self.count - my.square(),
            rows=self.count,
        )


@dataclass(frozen=True)
class WeightEffect:
    """A weight (outputs × features), and its product with what it reads: all that costs anything about it.

    That is the covariance of the features, or rows of them.
    """

    weight: Tensor
    image: Tensor

    def __add__(self, other: WeightEffect) -> WeightEffect:
        return WeightEffect(self.weight + other.weight, self.image + other.image)

    def __sub__(self, other: WeightEffect) -> WeightEffect:
        return WeightEffect(self.weight - other.weight, self.image - other.image)

    def scale_outputs(self, factors: Tensor) -> WeightEffect:
        """Each output by a factor of its own."""
        return WeightEffect(self.weight * factors[:, None], self.image * factors[:, None])


@dataclass(frozen=True)
class WeightChange:
    """What is added to weights, and what the diagonal of the system had on top that it solves, if it solves one."""

    weight: Tensor
    load: Tensor | None = None

    def part(self, own: slice) -> WeightChange:
        """The same for some of the outputs."""
        return replace(self, weight=self.weight[own])


@dataclass(frozen=True)
class JointMoments:
    """Means of features and target; covariances of features, with the target; variances.

    `rows` says how many rows they were measured on.
    """

    mean: Tensor
    target: Tensor
    xx: Tensor
    xt: Tensor
    tt: Tensor
    yy: Tensor
    rows: float = math.inf

    def with_output_variance(self, weight: Tensor) -> JointMoments:
        """With the variance of outputs, where none were given: the target, and what the kept columns `weight` make."""
        if len(self.yy):
            return self
        old = self.compute_effect(weight.to(self.xx))
        return replace(self, yy=self.tt + 2 * (old.weight * self.xt.T).sum(1) + self.variance(old))

    def uncenter(self) -> JointMoments:
        """Squares in place of variances, for a fit that has no offset."""
        return replace(
            self,
            mean=torch.zeros_like(self.mean),
            target=torch.zeros_like(self.target),
            xx=self.xx + torch.outer(self.mean, self.mean),
            xt=self.xt + torch.outer(self.mean, self.target),
            tt=self.tt + self.target.square(),
        )

    def compute_effect(self, weight: Tensor, load: Tensor | None = None) -> WeightEffect:
        """`load` is what was added to the diagonal of the system that the weight solves: that spares a product."""
        return WeightEffect(weight, weight @ self.xx if load is None else self.xt.T - weight * load)

    def change(self, ridge: float) -> WeightChange | None:
        """What is added to the weights, with as much of the ridge as the statistics need: more for few rows."""
        features = len(self.xx)
        full = ridge * (1 + RIDGE_GROWTH * features / self.rows)
        found = self._solve_ridge(full)
        if found is None or 2 * features > self.rows or self._compute_unexplained(found) > POOR_FIT_SHARE:
            return found  # so few rows are explained by anything
        # The better the target is explained without a ridge, the less of it the fit needs.
        free = self._solve_ridge(0.0)
        if free is None:
            return found
        share = max(0.0, self._compute_unexplained(free) - ROUNDING_SHARE) / (1 - features / self.rows)
        exact = self._solve_ridge(full * share / EXACT_FIT_SHARE) if share < EXACT_FIT_SHARE else None
        return exact or found

    def _solve_ridge(self, ridge: float) -> WeightChange | None:
        found = _factor_with_ridge(self.xx, self.xx.diagonal() + VARIANCE_TOLERANCE * self.mean.square(), ridge)
        return None if found is None else WeightChange(torch.cholesky_solve(self.xt, found[0]).T, found[1])

    def _compute_unexplained(self, change: WeightChange) -> float:
        """The share of the target's variance that is not explained."""
        errors = []
        for outputs in _chunk_outputs(len(self.tt)):
            part, own = self.part(outputs), change.part(outputs)
            errors.append(part.error(part.compute_effect(own.weight, own.load)))
        return float(torch.cat(errors).clamp(min=0).sum() / self.tt.sum().clamp(min=1e-30))

    def part(self, own: slice) -> JointMoments:
        """The same for some of the outputs."""
        return replace(self, target=self.target[own], xt=self.xt[:, own], tt=self.tt[own], yy=self.yy[own])

    def error(self, change: WeightEffect) -> Tensor:
        """Expected square of what each output is off, its mean set right."""
        return self.tt - 2 * (change.weight * self.xt.T).sum(1) + self.variance(change)

    def variance(self, effect: WeightEffect) -> Tensor:
        """Of what a layer with this weight puts out."""
        return (effect.weight * effect.image).sum(1)

    @classmethod
    def of(cls, mean: Tensor, cov: Tensor, weight: Tensor, kept: Tensor) -> JointMoments:
        """From the statistics of everything that the rows of `weight` read, of which `kept` stays."""
        gone = torch.ones(len(mean), dtype=torch.bool, device=mean.device)
        gone[kept] = False
        lost = weight[:, gone]
        return cls(
            mean=mean[kept],
            target=lost @ mean[gone],
            xx=cov[kept][:, kept],
            xt=cov[kept][:, gone] @ lost.T,
            tt=((lost @ cov[gone][:, gone]) * lost).sum(1),
            yy=((weight @ cov) * weight).sum(1),
        )


@dataclass
class RowAccumulator:
    """Rows of features, targets and outputs themselves, up to `MAX_ROWS` of them."""

    parts: list[tuple[Tensor, Tensor, Tensor]] = field(default_factory=list)
    count: int = 0

    def add(self, x: Tensor, t: Tensor, y: Tensor | None = None) -> None:
        """As many as there is still room for."""
        left = MAX_ROWS - self.count
        if left > 0:
            self.parts.append((x[:left].float(), t[:left].float(), _default_outputs(y, t)[:left].float()))
            self.count += len(x[:left])

    def to_fit_statistics(self) -> CenteredRows:
        x, t, y = (torch.cat(parts) for parts in zip(*self.parts, strict=True))
        return CenteredRows.of(x, t, y)


@dataclass(frozen=True)
class CenteredRows:
    """Rows of features and targets around their means; variances of the outputs."""

    x: Tensor
    t: Tensor
    yy: Tensor
    mean: Tensor
    target: Tensor

    @classmethod
    def of(cls, x: Tensor, t: Tensor, y: Tensor) -> CenteredRows:
        """From rows as they are."""
        return cls(x - x.mean(0), t - t.mean(0), (y - y.mean(0)).square().mean(0), x.mean(0), t.mean(0))

    def with_output_variance(self, weight: Tensor) -> CenteredRows:
        """With the variance of outputs, where none were given: the target, and what the kept columns `weight` make."""
        return self if len(self.yy) else replace(self, yy=(self.t + self.x @ weight.to(self.x).T).square().mean(0))

    def uncenter(self) -> CenteredRows:
        """The same for a fit that has no offset."""
        zero = replace(self, mean=torch.zeros_like(self.mean), target=torch.zeros_like(self.target))
        return replace(zero, x=self.x + self.mean, t=self.t + self.target)

    @property
    def tt(self) -> Tensor:
        return self.t.square().mean(0)

    def part(self, own: slice) -> CenteredRows:
        """The same for some of the outputs."""
        return replace(self, t=self.t[:, own], yy=self.yy[own], target=self.target[own])

    def compute_effect(self, weight: Tensor, load: Tensor | None = None) -> WeightEffect:
        return WeightEffect(weight, weight @ self.x.T)

    def change(self, ridge: float) -> WeightChange | None:
        """What is added to the weights, with a ridge for as few rows as there are."""
        rows, features = self.x.shape
        diagonal = self.x.square().mean(0)
        scale = ridge * (1 + RIDGE_GROWTH * features / rows) * diagonal + 1e-6 * diagonal.mean().clamp(min=1e-30)
        system = _compute_gram(self.x * scale.rsqrt())
        system.diagonal().add_(rows)
        factor = _factor_in_place(system)
        if factor is None:
            return None
        solved = torch.cholesky_solve(self.t.double(), factor).float()
        return WeightChange((self.x.T @ solved / scale[:, None]).T)

    def error(self, change: WeightEffect) -> Tensor:
        """Mean square of what each output is off."""
        return (self.t.T - change.image).square().mean(1)

    def variance(self, effect: WeightEffect) -> Tensor:
        """Of what a layer with this weight puts out."""
        return effect.image.square().mean(1)


@dataclass(frozen=True)
class FitSolution:
    """New weights (outputs × features), the offset, and the share of variance that is lost; None where none is."""

    weight: Tensor
    offset: Tensor
    error: float | None


FitStatistics = JointMoments | CenteredRows
"""What is known of what a layer reads."""


def average_statistics(one: FitStatistics, other: FitStatistics) -> FitStatistics:
    """The mean of what two sources say; where one has rows themselves, which have no mean, that is the second."""
    if not isinstance(one, JointMoments) or not isinstance(other, JointMoments):
        return other
    names = (part.name for part in fields(JointMoments) if part.name != "rows")
    means = {name: (getattr(one, name) + getattr(other, name).to(getattr(one, name))) / 2 for name in names}
    return JointMoments(**means, rows=2 * min(one.rows, other.rows))


def solve_fit(
    weight: Tensor, given: FitStatistics, ridge: float, restore: bool, centred: bool = True
) -> FitSolution | None:
    """New weights for the kept columns `weight`, or None where the statistics give none.

    `restore` scales each output around its mean to the variance that it had, unless the output is
    then expected to be further off than with the removed channels dropped; without it, the fit is
    at least as good as that by construction. What is not `centred` fits the mean with the columns, and is
    not scaled; its offset is what they leave.
    """
    joint = given if centred else given.uncenter()
    change = joint.change(ridge)
    if change is None:
        return None
    found, offsets, error = torch.empty_like(change.weight), torch.empty_like(given.target), 0.0
    for own in _chunk_outputs(len(found)):
        old = weight[own].to(found)
        added, off = _choose_weight_change(old, joint.part(own), change.part(own), restore and centred)
        if not bool(torch.isfinite(added).all()):
            return None
        found[own] = old + added
        offsets[own] = given.target[own] - added @ given.mean
        error += float(off.clamp(min=0).sum())
    total = float(joint.yy.sum())
    return FitSolution(found, offsets, error / total if total > 0 else None)


def _choose_weight_change(
    weight: Tensor, joint: FitStatistics, change: WeightChange, restore: bool
) -> tuple[Tensor, Tensor]:
    """What is added to the weights of some outputs in the end, and what each of them is then off."""
    added = joint.compute_effect(change.weight, change.load)
    error = joint.error(added)
    if not restore:
        return added.weight, error
    old = joint.compute_effect(weight)
    ratio = joint.yy / joint.variance(old + added).clamp(min=1e-30)
    scaled = (old + added).scale_outputs(
        torch.nan_to_num(ratio, nan=1.0).clamp(1 / MAX_VARIANCE_RATIO, MAX_VARIANCE_RATIO).sqrt()
    ) - old
    far = joint.error(scaled)
    better = far <= joint.tt
    return torch.where(better[:, None], scaled.weight, added.weight), torch.where(better, far, error)


def solve_scaling_matrix(basis: Tensor, targets: Tensor, ridge: float, floor: float = 1e-30) -> Tensor:
    """The matrix Z by which the rows of `basis` come nearest to those of `targets`: Zᵀ · basis, by ridge regression.

    Parameters
    ----------
    basis
        Rows to combine.
    targets
        Rows to approach, each with a column of Z.
    ridge
        Relative to the mean square of the basis.
    floor
        What the ridge has at least, so that a basis of zeros can be solved too.
    """
    gram = basis @ basis.T
    gram.diagonal().add_(ridge * float(gram.diagonal().mean()) + floor)
    solved: Tensor = torch.linalg.solve(gram, basis @ targets.T)
    return solved


def _chunk_outputs(outputs: int) -> list[slice]:
    return [slice(start, start + OUTPUT_CHUNK) for start in range(0, outputs, OUTPUT_CHUNK)]


def _to_covariance(products: Tensor, count: float, one: Tensor, other: Tensor) -> Tensor:
    """In double precision, and in one matrix beside the sum of products."""
    return products.to(torch.float64, copy=True).div_(count).addr_(one, other, alpha=-1)


def _compute_gram(rows: Tensor) -> Tensor:
    return (rows @ rows.T).double()


def _factor_with_ridge(system: Tensor, diagonal: Tensor, ridge: float) -> tuple[Tensor, Tensor] | None:
    """The factor with this diagonal and the ridge, and with more of it where the statistics are singular.

    Also what the diagonal then has beyond the system's own.
    """
    scale = diagonal.mean().clamp(min=1e-30)
    for extra in (1e-8, 1e-6, 1e-4, 1e-2, 1.0):
        loaded, load = system.clone(), diagonal + ridge * diagonal + extra * scale
        loaded.diagonal().copy_(load)
        factor = _factor_in_place(loaded)
        del loaded
        if factor is not None:
            return factor, load - system.diagonal()
    return None


def _factor_in_place(system: Tensor) -> Tensor | None:
    """The factor takes the system's place: a wide layer's matrices are large."""
    factor, info = system.mT, torch.empty((), dtype=torch.int32, device=system.device)
    torch.linalg.cholesky_ex(factor, out=(factor, info))
    return factor if int(info) == 0 else None
