"""Compare the outputs of two networks: how far single entries are apart and where, and squared errors over samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3, torch.float16: 5e-2, torch.bfloat16: 2e-1}
"""The largest difference of two computations of the same thing, relative to the scale that it is measured on. They
differ by rounding alone: sums are taken in another order, or one runtime fuses what another does not."""
OTHER_TOLERANCE = 1e-3
"""The same for other dtypes of floating point."""
ROUNDING_FACTOR = 16.0
"""How many times as far as its own rounding takes a network two runs of it may lie apart."""
ENTRY_SCALE_FLOOR = {torch.float64: 1e-6}
OTHER_ENTRY_SCALE_FLOOR = 1e-2
"""The least scale of an entry, relative to the largest of its output: a smaller entry may be what is left when large
numbers cancel."""
MASK_MAGNITUDE = 1e8
"""Entries beyond that stand for minus infinity."""
MIN_SCALE = 1e-30
NON_FINITE_FAULT = "entries that are numbers on one side only"
MIN_SAMPLES_FOR_MEANS = 8
"""Fewer samples do not tell each entry's own mean."""
ROUNDING_VARIANCE = 1e-12
"""Of the square of the outputs: a variance below that is rounding."""


@dataclass(frozen=True)
class OutputDifference:
    """How far one output of a network is from another's.

    Attributes
    ----------
    output
        Its position among the outputs.
    dtype
        That of the output which it is compared with.
    absolute
        The largest difference of an entry, where both are numbers.
    relative
        The same, relative to the scale: the largest entry, or the entry's own largest over the batch.
    scale
        The largest entry of the other output.
    fault
        Why they cannot be the same, however near the entries are: another shape, another kind of number, entries that
        are numbers on one side only.
    finite
        Whether any entry is a number on both sides, or there is no entry at all.
    """

    output: int
    dtype: torch.dtype
    absolute: float = 0.0
    relative: float = 0.0
    scale: float = 0.0
    fault: str = ""
    finite: bool = True

    @property
    def is_integer(self) -> bool:
        """Whether the output holds whole numbers, which cannot be nearly right."""
        return not (self.dtype.is_floating_point or self.dtype.is_complex)

    @property
    def tolerance(self) -> float:
        """What `relative` may be where both networks compute the same."""
        return 0.0 if self.is_integer else TOLERANCE.get(self.dtype, OTHER_TOLERANCE)

    def is_close(self, slack: float = 0.0) -> bool:
        """Whether both are the same but for rounding; `slack` is a difference that is known to be rounding."""
        return not self.fault and (self.relative <= self.tolerance or self.absolute <= slack)


def compare_outputs(got: Sequence[Tensor], want: Sequence[Tensor], *, by_entry: bool = False) -> list[OutputDifference]:
    """The difference of every output, in order.

    With `by_entry` an entry is measured on its own scale, the largest that it takes over the batch: an output of
    small numbers beside large ones counts as much as they do. Entries that are infinite or not a number on both sides,
    and entries that are huge on both sides, are the same.

    >>> [found] = compare_outputs([torch.tensor([1.0, 4.0])], [torch.tensor([1.5, 4.0])])
    >>> found.absolute, found.relative, found.is_close()
    (0.5, 0.125, False)
    """
    if len(got) != len(want):
        return [OutputDifference(0, torch.float32, fault=f"{len(got)} outputs in place of {len(want)}", finite=False)]
    return [_compare_output(i, a, b, by_entry) for i, (a, b) in enumerate(zip(got, want, strict=True))]


def outputs_match(got: Sequence[Tensor], want: Sequence[Tensor]) -> bool:
    """Whether all outputs are the same but for rounding."""
    return all(found.is_close() for found in compare_outputs(got, want))


def _compare_output(output: int, got: Tensor, want: Tensor, by_entry: bool) -> OutputDifference:
    known = OutputDifference(output, want.dtype)
    if got.shape != want.shape:
        what = f"shape {tuple(got.shape)} in place of {tuple(want.shape)}"
        return OutputDifference(output, want.dtype, fault=what, finite=False)
    if got.dtype != want.dtype and not (_is_inexact(got) and _is_inexact(want)):
        return OutputDifference(output, want.dtype, fault=f"{got.dtype} in place of {want.dtype}", finite=False)
    if not want.numel():
        return known
    a, b = to_real_doubles(got), to_real_doubles(want)
    finite = a.isfinite() & b.isfinite()
    equal = (a == b) | (a.isnan() & b.isnan())
    fault = "" if bool((finite | equal).all()) else NON_FINITE_FAULT
    used = _select_unmasked(a, b, finite)
    if not bool(used.any()):
        return OutputDifference(output, want.dtype, fault=fault, finite=False)
    apart, size = (a - b).abs(), b[used].abs().max()
    floor = ENTRY_SCALE_FLOOR.get(got.dtype, OTHER_ENTRY_SCALE_FLOOR)
    relative = (
        (apart / _scale_entries(b, used, floor))[used].max()
        if by_entry
        else apart[used].max() / size.clamp(min=MIN_SCALE)
    )
    return OutputDifference(output, want.dtype, float(apart[used].max()), float(relative), float(size), fault)


def _is_inexact(value: Tensor) -> bool:
    return value.is_floating_point() or value.is_complex()


def to_real_doubles(value: Tensor) -> Tensor:
    """A tensor's numbers in double precision; of complex ones, the real and the imaginary parts."""
    return torch.view_as_real(value.resolve_conj()).double() if value.is_complex() else value.double()


def _select_unmasked(a: Tensor, b: Tensor, finite: Tensor) -> Tensor:
    """Entries that are numbers; where some are, those that are huge on both sides stand for minus infinity."""
    masked = (a.abs() >= MASK_MAGNITUDE) & (b.abs() >= MASK_MAGNITUDE)
    used = finite & ~masked
    return used if bool(used.any()) else finite


def _scale_entries(value: Tensor, used: Tensor, floor: float) -> Tensor:
    """For every entry, the largest of the same place over the batch, and at least a share of the largest of all."""
    size = torch.where(used, value.abs(), 0.0)
    own = size.amax(0, keepdim=True).expand_as(size) if size.ndim else size
    return own.clamp(min=max(floor * float(size.max()), MIN_SCALE))


# Squared errors over samples


@dataclass
class ErrorSums:
    """Sums over the samples of one output, of which the original's variance and the other's squared error follow.

    Samples may come in batches of any size, even of one: the variance is that over all of them.
    """

    count: int = 0
    error: float = 0.0
    total: Tensor | float = 0.0
    squares: Tensor | float = 0.0
    known: bool = False
    """Whether the original gave any number."""
    broken: bool = False
    """Whether the other gave none where the original did."""
    entries: int = field(default=1, repr=False)

    def add(self, original: Tensor, other: Tensor) -> None:
        """A batch of one output of both, samples first. What is no number in the original says nothing."""
        x, y = self._take_finite(original.double(), other.double())
        self._add_sums(x, y)

    def _take_finite(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        known = x.isfinite()
        both = known & y.isfinite()
        self.known |= bool(known.any())
        if bool(both.all()):
            return x, y
        self.broken |= not bool((both == known).all())
        return torch.where(both, x, 0.0), torch.where(both, y, 0.0)

    def _add_sums(self, x: Tensor, y: Tensor) -> None:
        self.count += len(x)
        self.entries = max(x[0].numel(), 1) if len(x) else self.entries
        self.total, self.squares = self.total + x.sum(0), self.squares + (x * x).sum(0)
        self.error += float((x - y).square().sum())

    def sum_products(self, first: Tensor | float, second: Tensor | float, products: Tensor | float) -> float:
        """The sum over entries of products around the means, given the sums of both factors and of their products.

        With too few samples to know each entry's own mean, the mean over all entries takes its place.
        """
        count, sums = self.count, [as_plain_tensor(own) for own in (first, second, products)]
        if count < MIN_SAMPLES_FOR_MEANS:
            count, sums = count * self.entries, [own.sum() for own in sums]
        return float((sums[2] - sums[0] * sums[1] / max(count, 1)).sum())

    @property
    def variance(self) -> float:
        """Of the original, summed over samples and entries; zero where it is rounding."""
        found = self.sum_products(self.total, self.total, self.squares)
        return found if found > ROUNDING_VARIANCE * self.power else 0.0

    @property
    def power(self) -> float:
        """The sum of the original's squares."""
        return float(as_plain_tensor(self.squares).sum())


def compute_error_share(parts: Sequence[ErrorSums]) -> float:
    """The squared error of one output, relative to the original's variance, or to its square where it is constant.

    The parts are those of different shapes. Infinite where numbers were lost.
    """
    if any(part.broken for part in parts):
        return float("inf")
    scale = sum(part.variance for part in parts) or sum(part.power for part in parts)
    return sum(part.error for part in parts) / max(scale, MIN_SCALE)


def as_plain_tensor(value: Tensor | float) -> Tensor:
    """On its own device, or the CPU: `torch.as_tensor` would move it to the user's default device."""
    return value if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float64, device="cpu")
