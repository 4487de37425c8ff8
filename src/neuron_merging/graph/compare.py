"""Compare the outputs of two networks: the largest difference of single entries, and squared errors over samples."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from neuron_merging.errors import VerificationError

TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3, torch.float16: 5e-2, torch.bfloat16: 2e-1}
"""Largest relative difference between runs of equivalent networks, by dtype. They differ by rounding alone: sums are
taken in another order, or a runtime fuses operators. Far above one rounding step, since deep networks amplify it."""
OTHER_TOLERANCE = 1e-3
"""The same for all other floating-point dtypes."""
ROUNDING_FACTOR = 16.0
"""Two runs may differ by this multiple of the network's measured rounding error."""
ENTRY_SCALE_FLOOR = {torch.float64: 1e-6}
OTHER_ENTRY_SCALE_FLOOR = 1e-2
"""Least scale of an entry, relative to the largest entry of its output. A smaller entry may be what remains after large
numbers cancel, so its relative error says nothing."""
MASK_MAGNITUDE = 1e8
"""Entries of at least this magnitude stand for minus infinity: networks add -1e9 or so to mask scores."""
MIN_SCALE = 1e-30
"""Replaces a scale of zero in a division."""
MAX_ENTRIES_AT_ONCE = 2**20
"""Output entries that are converted to float64 at once (8 MiB): a language model returns a vocabulary per token."""
NON_FINITE_FAULT = "entries that are finite on one side only"
MIN_SAMPLES_FOR_MEANS = 8
"""With fewer samples the mean of each entry is too uncertain, and the mean over all entries is used."""
ROUNDING_VARIANCE = 1e-12
"""A variance below this share of the sum of squares counts as rounding: Σx² − (Σx)²/n cancels in float64."""


@dataclass(frozen=True)
class OutputDifference:
    """The difference between one output of a network and the same output of a reference network.

    Attributes
    ----------
    output
        Its position among the outputs.
    dtype
        The dtype of the reference output.
    absolute
        The largest absolute difference over entries that are finite on both sides.
    relative
        The same, divided by the scale: the largest reference entry, or the entry's own largest over the batch.
    scale
        The largest absolute entry of the reference output.
    fault
        Why the outputs differ whatever their values: another shape, another kind of dtype, or entries that are finite
        on one side only. Empty if there is no such reason.
    finite
        Whether any entry is finite on both sides, or there is no entry at all.
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
        """Whether the output holds integers, which must be equal."""
        return not (self.dtype.is_floating_point or self.dtype.is_complex)

    @property
    def tolerance(self) -> float:
        """The largest `relative` at which both networks count as equivalent."""
        return 0.0 if self.is_integer else TOLERANCE.get(self.dtype, OTHER_TOLERANCE)

    def is_close(self, slack: float = 0.0) -> bool:
        """Return whether both agree up to rounding. `slack` is an absolute difference that is known to be rounding."""
        return not self.fault and (self.relative <= self.tolerance or self.absolute <= slack)


def compare_outputs(got: Sequence[Tensor], want: Sequence[Tensor], *, by_entry: bool = False) -> list[OutputDifference]:
    """Return the difference of every output, in order.

    With `by_entry` each entry is measured on its own scale, its largest value over the batch. Small entries then count
    as much as large ones. Entries count as equal if they are NaN on both sides, the same infinity, or huge on both
    sides (`MASK_MAGNITUDE`).

    >>> [found] = compare_outputs([torch.tensor([1.0, 4.0])], [torch.tensor([1.5, 4.0])])
    >>> found.absolute, found.relative, found.is_close()
    (0.5, 0.125, False)
    """
    if len(got) != len(want):
        return [OutputDifference(0, torch.float32, fault=f"{len(got)} outputs in place of {len(want)}", finite=False)]
    return [_compare_output(i, a, b, by_entry) for i, (a, b) in enumerate(zip(got, want, strict=True))]


def outputs_match(got: Sequence[Tensor], want: Sequence[Tensor], strictest: float = math.inf) -> bool:
    """Return whether all outputs agree up to rounding, and within the relative difference `strictest`."""
    return all(found.is_close() and found.relative <= strictest for found in compare_outputs(got, want))


def _compare_output(output: int, got: Tensor, want: Tensor, by_entry: bool) -> OutputDifference:
    if got.shape != want.shape:
        what = f"shape {tuple(got.shape)} in place of {tuple(want.shape)}"
        return OutputDifference(output, want.dtype, fault=what, finite=False)
    if got.dtype != want.dtype and not (_is_inexact(got) and _is_inexact(want)):
        return OutputDifference(output, want.dtype, fault=f"{got.dtype} in place of {want.dtype}", finite=False)
    if not want.numel():
        return OutputDifference(output, want.dtype)
    fault = "" if all(_are_finite_alike(a, b) for a, b in _split_entries(got, want)) else NON_FINITE_FAULT
    scale = _find_scale(got, want, unmasked=True)
    # Entries that stand for minus infinity are left out, unless there are no others: then they are real values.
    unmasked = scale is not None
    scale = scale if unmasked else _find_scale(got, want, unmasked=False)
    if scale is None:
        return OutputDifference(output, want.dtype, fault=fault, finite=False)
    floor = ENTRY_SCALE_FLOOR.get(got.dtype, OTHER_ENTRY_SCALE_FLOOR) * scale
    absolute = relative = 0.0
    for a, b in _split_entries(got, want):
        used, apart = _select_entries(a, b, unmasked), (a - b).abs()
        absolute = _take_larger(absolute, apart[used])
        if by_entry:
            relative = _take_larger(relative, (apart / _scale_entries(b, used, floor))[used])
    relative = relative if by_entry else absolute / max(scale, MIN_SCALE)
    return OutputDifference(output, want.dtype, absolute, relative, scale, fault)


def _split_entries(got: Tensor, want: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield parts of both outputs in float64, each with all samples; a large output would fill the memory."""
    if got.ndim < 2:
        yield to_real_doubles(got), to_real_doubles(want)
        return
    count = max(1, MAX_ENTRIES_AT_ONCE * got.shape[1] // got.numel())
    for start in range(0, got.shape[1], count):
        yield to_real_doubles(got[:, start : start + count]), to_real_doubles(want[:, start : start + count])


def _are_finite_alike(a: Tensor, b: Tensor) -> bool:
    """Return whether entries that are not finite on both sides are equal."""
    both = a.isfinite() & b.isfinite()
    return bool((both | (a == b) | (a.isnan() & b.isnan())).all())


def _select_entries(a: Tensor, b: Tensor, unmasked: bool) -> Tensor:
    """Return the mask of finite entries; `unmasked` leaves out those that stand for minus infinity on both sides."""
    finite = a.isfinite() & b.isfinite()
    return finite & ~((a.abs() >= MASK_MAGNITUDE) & (b.abs() >= MASK_MAGNITUDE)) if unmasked else finite


def _find_scale(got: Tensor, want: Tensor, unmasked: bool) -> float | None:
    """Return the largest magnitude of the selected entries of the reference; None if there are none."""
    selected = (b[_select_entries(a, b, unmasked)] for a, b in _split_entries(got, want))
    return max((float(values.abs().max()) for values in selected if len(values)), default=None)


def _take_larger(largest: float, values: Tensor) -> float:
    return max(largest, float(values.max())) if len(values) else largest


def _is_inexact(value: Tensor) -> bool:
    return value.is_floating_point() or value.is_complex()


def to_real_doubles(value: Tensor) -> Tensor:
    """Return a tensor in float64. Complex entries become their real and imaginary parts."""
    return torch.view_as_real(value.resolve_conj()).double() if value.is_complex() else value.double()


def _scale_entries(value: Tensor, used: Tensor, floor: float) -> Tensor:
    """Return each entry's largest absolute value over the batch, at least `floor`."""
    size = torch.where(used, value.abs(), 0.0)
    largest = size.amax(0, keepdim=True).expand_as(size) if size.ndim else size
    return largest.clamp(min=max(floor, MIN_SCALE))


# Squared errors over samples


@dataclass
class ErrorSums:
    """Running sums over the samples of one output: the original's variance and the other network's squared error.

    Samples may come in batches of any size, even of one. The variance is over all samples, not within batches.
    """

    count: int = 0
    error: float = 0.0
    total: Tensor | float = 0.0
    squares: Tensor | float = 0.0
    known: bool = False
    """Whether the original gave any finite entry."""
    broken: bool = False
    """Whether the other network gave NaN or infinity where the original was finite."""
    entries: int = field(default=1, repr=False)

    def add(self, original: Tensor, other: Tensor) -> None:
        """Add a batch of one output of both networks, samples first. Entries not finite in the original are skipped."""
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
        """Return Σ(x − x̄)(y − ȳ) over samples and entries, given the sums of x, y and x·y over samples.

        With too few samples for the mean of each entry, the mean over all entries is used.
        """
        # Σ(x − x̄)(y − ȳ) = Σxy − Σx·Σy / n, entry by entry.
        count, sums = self.count, [as_plain_tensor(value) for value in (first, second, products)]
        if count < MIN_SAMPLES_FOR_MEANS:
            count, sums = count * self.entries, [value.sum() for value in sums]
        return float((sums[2] - sums[0] * sums[1] / max(count, 1)).sum())

    @property
    def variance(self) -> float:
        """The original's variance, summed over samples and entries. Zero if it is below rounding."""
        variance = self.sum_products(self.total, self.total, self.squares)
        return variance if variance > ROUNDING_VARIANCE * self.power else 0.0

    @property
    def power(self) -> float:
        """The sum of the original's squared entries."""
        return float(as_plain_tensor(self.squares).sum())


def compute_error_share(parts: Sequence[ErrorSums]) -> float:
    """Return the squared error of one output relative to the original's variance: Σ‖y − ŷ‖² / Σ‖y − ȳ‖².

    A constant output has no variance; its error is relative to the sum of squares. Each part holds samples of one
    shape. The result is infinite if finite entries became NaN or infinite.
    """
    if any(part.broken for part in parts):
        return float("inf")
    scale = sum(part.variance for part in parts) or sum(part.power for part in parts)
    return sum(part.error for part in parts) / max(scale, MIN_SCALE)


def as_plain_tensor(value: Tensor | float) -> Tensor:
    """Return a tensor unchanged, a number as a float64 tensor on the CPU.

    `torch.as_tensor` would put the number on the user's default device.
    """
    return value if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float64, device="cpu")


NOT_FINITE_NETWORK = "in the smaller network or in the original"


def check_outputs_finite(
    native: Sequence[Tensor], original: Sequence[Tensor], network: str = NOT_FINITE_NETWORK
) -> None:
    """Refuse NaN, and infinities where the original is finite: float64 would hide an overflow in native precision.

    Infinite entries of the original, such as masked scores, may stay.
    """
    for i, (new, old) in enumerate(zip(native, original, strict=False)):
        if not (new.is_floating_point() or new.is_complex()) or not new.numel() or new.shape != old.shape:
            continue
        lost = bool((old.isfinite() & ~new.isfinite()).any())
        if lost or bool(new.isnan().any()) or not bool(new.isfinite().any()):
            raise make_not_finite_error(i, network)


def make_not_finite_error(output: int, network: str = NOT_FINITE_NETWORK) -> VerificationError:
    """Return the error for an output that is not finite."""
    return VerificationError(
        f"output {output} is not finite {network}",
        where="example_inputs",
        fix="Look for very large weights, or give example inputs on which all outputs are numbers.",
    )
