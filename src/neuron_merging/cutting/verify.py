"""verify: does the smaller network compute what the merges say?

The smaller network runs beside the original at full size, in which every removed unit is zero (`reference`). They are
compared on the example and on fresh inputs, in double precision where that fits, output by output. How much is at
stake is measured: what the outputs move when the removed units alone are zeroed. Where that is nothing, equal outputs
prove nothing. So the same cut is also compared in a copy with fresh weights (`raising`), in which nothing is hidden;
a costly network only where it has to be.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from neuron_merging.channels.analysis import Analysis
from neuron_merging.channels.labels import Mask
from neuron_merging.cutting.plan import Plan
from neuron_merging.cutting.probes import Inputs, fresh_inputs
from neuron_merging.cutting.raising import hiding, raised
from neuron_merging.cutting.reference import Reference, Zeroing, of_merges, of_small
from neuron_merging.errors import MergingError, VerificationError, told
from neuron_merging.graph.copying import bare_copy
from neuron_merging.graph.double import Doubled, double_copy, wide
from neuron_merging.graph.execution import run
from neuron_merging.graph.macs import total_macs
from neuron_merging.graph.quiet import alone, plain_attention
from neuron_merging.graph.trees import called, copied, flat, flatten_outputs
from neuron_merging.graph.usercode import place_of
from neuron_merging.graph.values import Graph
from neuron_merging.mergers.interface import Merged

TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3, torch.float16: 5e-2, torch.bfloat16: 2e-1}
"""Per entry, relative to its own scale; in double precision rounding is far below that."""
HALF = (torch.float16, torch.bfloat16)
FLOOR = {torch.float64: 1e-6}
"""Of the largest entry: smaller ones may be what is left when large ones cancel."""
STAKES = 1e-4
"""Outputs that move less than that when channels are zeroed say little about them."""
MASK = 1e8
"""Entries beyond that stand for minus infinity."""
CHEAP = 2**31
"""Multiply-accumulates of an example on which the original is run again and again; beyond, fresh inputs do more."""
LARGEST = 2**24
"""Parameters of a network that is still worth a copy in double precision."""

UNEXPLAINED = (
    "Either the model's code branches on the number of channels, or they were misread here: "
    "leave layers out with ignore=, and report the network."
)


@dataclass(frozen=True)
class Verified:
    """How near the smaller network came to what it must compute, and what that is worth.

    `distance` is the largest difference of an output entry, relative to the entry's own scale; None if the network
    returns whole numbers only. `power` is how far the outputs move when the removed channels are zeroed in the
    original; `raised` is the same in a copy with fresh weights, where the original's hide what was cut. `inputs` says
    on what the two were compared, `precision` in which one.
    """

    distance: float | None
    power: float | None
    inputs: tuple[str, ...]
    precision: str
    raised: float | None = None
    independent: bool = True
    """Whether the reference was made from the original and the merges, not from the smaller network's own weights."""

    @property
    def powerless(self) -> bool:
        """Whether equal outputs prove nothing."""
        return self.power is not None and max(self.power, self.raised or 0.0) < STAKES

    def __str__(self) -> str:
        if self.distance is None:
            return "not verified: the network returns whole numbers only"
        return f"equals the original with removed channels zeroed within {self.distance:.1e} ({self.compared})"

    @property
    def compared(self) -> str:
        """In which precision, on what, and what that is worth; in words."""
        return f"{self.precision}, {' and '.join(self.inputs)}{self._stakes()}"

    def _stakes(self) -> str:
        if self.power is None:
            return ""
        if self.powerless:
            return "; without power: the outputs do not depend on what was cut"
        if self.raised is not None:
            return "; also with fresh weights, because the network's own hide what was cut"
        return f"; zeroing alone moves the outputs by {min(self.power, 9.99):.1%}"


def verify(analysis: Analysis, plan: Plan, stays: Mask, small: nn.Module, merged: Merged | None = None) -> Verified:
    """Compare the small network with the original whose removed units are zero.

    Without `merged` the weights of the reference are the small network's own.

    Raises
    ------
    VerificationError
        They differ, or the small network does not run.
    """
    with alone(), torch.no_grad():
        return _Check(analysis, plan, stays, small, merged).verified()


def run_small(small: nn.Module, inputs: Sequence[Any]) -> Any:
    """What a network that was made here returns; that it does not run is an error of its making."""
    return _forward(bare_copy(small).eval(), inputs)


def _forward(own: nn.Module, inputs: Sequence[Any]) -> Any:
    try:
        with torch.no_grad(), plain_attention():
            return called(own, copied(inputs))
    except Exception as error:
        raise VerificationError(
            f"the smaller network does not run: {told(error)}",
            where=place_of(error),
            fix="A constant in the model's code probably fixes a size there: derive it from x.shape, "
            "or keep the layer with ignore=.",
        ) from error


@dataclass(frozen=True)
class _Check:
    """One verification."""

    analysis: Analysis
    plan: Plan
    stays: Mask
    small: nn.Module
    merged: Merged | None

    def verified(self) -> Verified:
        graph, example = self.analysis.graph, self.analysis.inputs
        try:
            native = _outputs(lambda: run_small(self.small, example))
        except VerificationError:
            _graph_runs(graph, example)  # it may be the example that does not run
            raise
        reference = of_small(graph, self.plan, self.small) if self.merged is None else of_merges(graph, self.merged)
        compare = _Comparison(self._zeroing(graph), reference, self.small, self._fits())
        inputs, whole, fresh = next(self._fresh(), (example, None, False))
        if whole is None or total_macs(graph) <= CHEAP:
            known = _outputs(lambda: _graph_runs(graph, example))
            _check_numbers(native, known)
            whole, distance = whole or known, compare.distance(example)
        else:
            _check_numbers(native, native)
            distance = self._cheaply(compare, native)
        power = self._power(graph, inputs, whole)
        if fresh:
            distance = _largest(distance, compare.distance(inputs, strict=False, power=power))
        found = Verified(
            distance=distance,
            power=None if distance is None else power,
            inputs=("on the example", *(["on fresh inputs"] if fresh else [])),
            precision=_precision(graph, compare),
            independent=self.merged is not None,
        )
        return found if distance is None else self._with_other_weights(found, inputs)

    def _cheaply(self, compare: _Comparison, native: Sequence[Tensor]) -> float | None:
        """The example in the network's own precision; doubles decide where its rounding may be all the difference."""
        if any(output.dtype in HALF for output in native):  # in a deep network it always is
            return None
        try:
            replace(compare, double=False).distance(self.analysis.inputs, native=native)
        except VerificationError:
            return compare.distance(self.analysis.inputs)
        return None

    def _with_other_weights(self, found: Verified, inputs: Inputs) -> Verified:
        """The same cut with fresh weights everywhere: what is dead or hidden in the network's own comes to light.

        A costly network is only put to that if its own weights hide what was cut.
        """
        graph = self.analysis.graph
        hidden = found.power is not None and (found.power < STAKES or bool(hiding(graph)))
        if not hidden and total_macs(graph) > CHEAP:
            return found
        trial = raised(self.analysis, self.plan, self.merged or Merged(()))
        reference = of_merges(trial.graph, trial.merged)
        compare = _Comparison(self._zeroing(trial.graph), reference, trial.small, self._fits())
        with trial.within:
            stakes = self._power(trial.graph, inputs) if hidden else 0.0
            distance = compare.distance(inputs, strict=False, power=stakes)
        return replace(found, distance=_largest(found.distance, distance), raised=stakes if hidden else None)

    def _zeroing(self, graph: Graph) -> Zeroing:
        return Zeroing(graph, self.analysis.channels, self.stays)

    def _fits(self) -> bool:
        """Whether the device has doubles."""
        return all(tensor.device.type != "mps" for tensor in self.analysis.graph.tensors.values())

    def _fresh(self) -> Iterator[tuple[Inputs, list[Tensor], bool]]:
        """Other inputs that the network takes and for which the captured graph is still its graph; its outputs."""
        module, graph = bare_copy(self.analysis.model).eval(), self.analysis.graph
        for inputs in fresh_inputs(self.analysis):
            try:
                wanted = _outputs(lambda i=inputs: called(module, copied(i)))  # type: ignore[misc]
                whole = _outputs(lambda i=inputs: run(graph, flat(i), graph.tensors))  # type: ignore[misc]
            except Exception:  # noqa: BLE001 (the network's own code, which may refuse what was made up)
                continue
            if _same(whole, wanted):
                yield inputs, whole, True

    def _power(self, graph: Graph, inputs: Inputs, whole: Sequence[Tensor] | None = None) -> float:
        """How far the outputs move when the removed units of the original are zeroed, and nothing else."""
        whole = whole or _outputs(lambda: run(graph, flat(inputs), graph.tensors))
        zeroed = _outputs(lambda: self._zeroing(graph).run(Reference(graph.tensors), inputs))
        return max((_moved(a, b) for a, b in zip(zeroed, whole, strict=True) if _is_number(b)), default=0.0)


@dataclass
class _Comparison:
    """The small network and its reference on the same inputs; `double` says in which precision they run."""

    zeroing: Zeroing
    reference: Reference
    small: nn.Module
    double: bool

    def distance(
        self, inputs: Inputs, *, strict: bool = True, power: float = 0.0, native: Sequence[Tensor] = ()
    ) -> float | None:
        """The largest difference; `strict` asks for outputs that are numbers, a small `power` for a smaller one."""
        got, want = self._doubled(inputs) or self._plain(inputs, native)
        return _compare(got, want, strict=strict, limit=1e-3 * power if power and self.double else None)

    def _doubled(self, inputs: Inputs) -> tuple[list[Tensor], list[Tensor]] | None:
        """In double precision; some operators have none, and then the network's own precision decides."""
        if not self.double:
            return None
        given, reference = tree_map(wide, inputs), self._wide
        try:
            with Doubled():  # type: ignore[no-untyped-call]
                want = _outputs(lambda: self.zeroing.run(reference, given))
                return _outputs(lambda: _forward(self._twin(), given)), want
        except (RuntimeError, TypeError, NotImplementedError, ValueError, VerificationError):
            self.double = False
            return None

    @cached_property
    def _wide(self) -> Reference:
        """The reference in doubles from the start: a convolution wants input and bias alike before it asks us.

        The weights of a large one become doubles one by one, as they are used.
        """
        both = (self.reference.tensors, self.reference.biases)
        tensors, biases = ({name: self._widened(tensor) for name, tensor in found.items()} for found in both)
        return replace(self.reference, tensors=tensors, biases=biases)

    def _widened(self, tensor: Tensor) -> Tensor:
        found: Tensor = wide(tensor.detach()) if self._copies or tensor.ndim < 2 else tensor
        return found

    @cached_property
    def _double(self) -> nn.Module:
        return double_copy(self.small).eval()

    def _twin(self) -> nn.Module:
        """The small network in double precision; a fresh one where it writes into buffers of its own.

        Of a large one no copy is made: its weights become doubles one by one, as they are used.
        """
        if self.zeroing.graph.written:
            return double_copy(self.small).eval()
        return self._double if self._copies else double_copy(self.small, weights=False).eval()

    @property
    def _copies(self) -> bool:
        return _size(self.zeroing.graph) <= LARGEST

    def _plain(self, inputs: Inputs, native: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        want = _outputs(lambda: self.zeroing.run(self.reference, inputs))
        return list(native) or _outputs(lambda: run_small(self.small, inputs)), want


def _outputs(compute: Callable[[], Any]) -> list[Tensor]:
    """All tensors of what is returned; the same random numbers every time."""
    torch.manual_seed(0)
    with plain_attention():
        return flatten_outputs(compute())


def _graph_runs(graph: Graph, inputs: Sequence[Any]) -> list[Any]:
    try:
        return run(graph, flat(inputs), graph.tensors)
    except (RuntimeError, TypeError, IndexError, ValueError) as error:
        raise MergingError(
            f"the model does not run on the example inputs: {told(error)}",
            where="example_inputs",
            fix="Check each example input's shape and dtype.",
        ) from error


def _size(graph: Graph) -> int:
    return sum(tensor.numel() for tensor in graph.tensors.values())


def _precision(graph: Graph, compare: _Comparison) -> str:
    kinds = {str(t.dtype).removeprefix("torch.") for t in graph.tensors.values() if t.is_floating_point()}
    return "float64" if compare.double else " and ".join(sorted(kinds)) or "whole numbers"


def _largest(*distances: float | None) -> float | None:
    return max((d for d in distances if d is not None), default=None)


# Comparing outputs


def _compare(got: Sequence[Tensor], want: Sequence[Tensor], *, strict: bool, limit: float | None) -> float | None:
    errors = []
    if len(got) != len(want):
        raise VerificationError(f"the smaller network returns {len(got)} tensors, the original {len(want)}")
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        if a.shape != b.shape:
            raise VerificationError(
                f"output {i} has shape {tuple(a.shape)}, the original's is {tuple(b.shape)}", fix=UNEXPLAINED
            )
        if not _is_number(a):
            continue
        error = _distance(a, b, i, strict)
        usual = TOLERANCE.get(a.dtype, 1e-3)
        if not error <= (usual if limit is None else max(1e-9, min(usual, limit))):
            raise VerificationError(
                f"output {i} differs from the original with the removed channels zeroed by {error:.2g} "
                "(relative to the entry's own scale)",
                fix=UNEXPLAINED,
            )
        errors.append(error)
    return max(errors, default=None)


def _is_number(value: Tensor) -> bool:
    return value.is_floating_point() or value.is_complex()


def _real(value: Tensor) -> Tensor:
    return torch.view_as_real(value.resolve_conj()).double() if value.is_complex() else value.double()


def _check_numbers(native: Sequence[Tensor], whole: Sequence[Tensor]) -> None:
    """In its own precision the small network must return numbers, as the original does; masks may be infinite."""
    for i, (new, old) in enumerate(zip(native, whole, strict=False)):
        if not _is_number(new) or not new.numel() or new.shape != old.shape:
            continue
        a, b = _real(new), _real(old)
        lost = bool((b.isfinite() & ~a.isfinite()).any())
        if lost or bool(a.isnan().any()) or not bool(a.isfinite().any()):
            raise _not_finite(i)


def _not_finite(output: int) -> VerificationError:
    return VerificationError(
        f"output {output} is not finite in the smaller network or in the original",
        where="example_inputs",
        fix="Look for very large weights, or give example inputs on which all outputs are numbers.",
    )


def _distance(got: Tensor, want: Tensor, output: int, strict: bool) -> float:
    """The largest difference of an entry, relative to its scale over the batch; masked entries aside."""
    floor = FLOOR.get(got.dtype, 1e-2)
    a, b = _real(got), _real(want)
    finite = a.isfinite() & b.isfinite()
    equal = (a == b) | (a.isnan() & b.isnan())
    if not bool((finite | equal).all()) or (strict and b.numel() and not bool(finite.any())):
        raise _not_finite(output)
    used = _unmasked(a, b, finite)
    if not bool(used.any()):
        return 0.0
    scale = _scale(b, used, floor)
    return float(((a - b).abs() / scale)[used].max())


def _unmasked(a: Tensor, b: Tensor, finite: Tensor) -> Tensor:
    """Entries that are numbers; where some are, those that are huge on both sides stand for minus infinity."""
    masked = (a.abs() >= MASK) & (b.abs() >= MASK)
    used = finite & ~masked
    return used if bool(used.any()) else finite


def _scale(value: Tensor, used: Tensor, floor: float) -> Tensor:
    """For every entry, the largest of the same place over the batch, and at least a share of the largest of all."""
    size = torch.where(used, value.abs(), 0.0)
    own = size.amax(0, keepdim=True).expand_as(size) if size.ndim else size
    return own.clamp(min=max(floor * float(size.max()), 1e-30))


def _moved(new: Tensor, old: Tensor) -> float:
    """The largest change, relative to the largest entry."""
    a, b = _real(new), _real(old)
    used = _unmasked(a, b, a.isfinite() & b.isfinite())
    if not bool(used.any()):
        return 0.0
    return float((a - b)[used].abs().max() / b[used].abs().max().clamp(min=1e-30))


def _same(got: Sequence[Tensor], want: Sequence[Tensor]) -> bool:
    """Whether two runs in the network's own precision gave the same, and numbers among it."""
    if [t.shape for t in got] != [t.shape for t in want]:
        return False
    pairs = [(a, b) for a, b in zip(got, want, strict=True) if _is_number(b)]
    finite = all(not b.numel() or bool(_real(b).isfinite().any()) for _, b in pairs)
    return finite and all(_moved(a, b) <= TOLERANCE.get(b.dtype, 1e-3) for a, b in pairs)
