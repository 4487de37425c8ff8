"""Mean and covariance of the values in a network, in closed form.

`GaussianStats` holds the mean and the covariance of the entries of one sample. A linear operator is executed on the
mean and on both sides of the covariance. A pointwise function assumes a jointly Gaussian input and is expanded in
Hermite polynomials. Norms determine the scale of their output. The output of an operator without a rule has no
statistics, and neither has anything computed from it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor

from neuron_merging.channels.rules.table import lookup_operator
from neuron_merging.graph.graph import Graph, Node, Ref
from neuron_merging.graph.interpreter import bind_arguments
from neuron_merging.inputs.input_scale import UNKNOWN, InputScale, is_signal
from neuron_merging.inputs.synthetic import COLOR_CORRELATION, IMAGE_VARIANCE, compute_signal_correlation

MAX_GAUSSIAN_ENTRIES = 4096
"""Entries of one sample up to which a covariance is computed: 4096² float64 values take 128 MiB."""
HERMITE_ORDERS = 16
"""Highest order of the series. The term of order k has the factor ρᵏ, so higher ones matter only near |ρ| = 1."""
SERIES_TOLERANCE = 1e-9
"""Share of the variance that the terms may leave out before the series stops early."""
COVARIANCE_ROW_CHUNK = 256
"""Rows of a covariance for which the series is summed at once; bounds its temporary copies."""


@dataclass(frozen=True)
class GaussianStats:
    """Mean of a value, in the shape of one sample, and covariance of its flattened entries."""

    mean: Tensor
    cov: Tensor

    @property
    def var(self) -> Tensor:
        return self.cov.diagonal()


def propagate_gaussian(
    graph: Graph, given: Mapping[str, GaussianStats], wanted: Iterable[str]
) -> Iterator[tuple[str, GaussianStats]]:
    """Yield the statistics of the wanted values, one by one, computed from those of the inputs.

    A layer norm determines its output, so the values behind one have statistics even where the inputs have none.
    Covariances are dropped after their last use: those of all layers together may exceed the weights many times.
    """
    constants = {name: graph.tensors[own].detach() for name, own in graph.parameters.items()} | dict(graph.constants)
    walk, asked = _GaussianPropagation(constants, dict(given)), set(wanted)
    # Backwards from what is wanted, so that nothing else is computed.
    needed = set(asked)
    for node in reversed(graph.nodes):
        if node.name in needed:
            needed |= {ref.name for ref in node.refs()}
    nodes = [node for node in graph.nodes if node.name in needed]
    last = {ref.name: node.name for node in nodes for ref in node.refs()}
    yield from ((name, own) for name, own in given.items() if name in asked)
    for node in nodes:
        walk.step(node)
        if node.name in asked and node.name in walk.found:
            yield node.name, walk.found[node.name]
        near = (node.name, *(ref.name for ref in node.refs()))
        walk.drop_unused(name for name in near if last.get(name, node.name) == node.name)


def make_input_prior(example: Tensor, smoothness: float = 1.0, scale: InputScale | None = None) -> GaussianStats | None:
    """Return the prior for an input: a smooth signal, or white noise for other tensors, at its known scale.

    >>> make_input_prior(torch.zeros(1, 1, 8, 8)).cov.shape
    torch.Size([64, 64])
    """
    shape = example.shape[1:]
    if not example.is_floating_point() or not 0 < shape.numel() <= MAX_GAUSSIAN_ENTRIES:
        return None
    known = scale is not None and scale.source != UNKNOWN
    mean = torch.zeros(shape, dtype=torch.float64, device=example.device)
    deviation = torch.ones_like(mean)
    if scale is not None and known:
        mean, deviation = (part.to(mean).expand(1, *shape)[0].contiguous() for part in (scale.mean, scale.deviation))
    outer = torch.outer(deviation.flatten(), deviation.flatten())
    if not is_signal(example):
        return GaussianStats(mean, outer * torch.eye(mean.numel(), dtype=torch.float64, device=example.device))
    grid = torch.meshgrid(*(torch.arange(s, dtype=torch.float64, device="cpu") for s in shape[1:]), indexing="ij")
    positions = torch.stack([g.flatten() for g in grid], 1)
    space = compute_signal_correlation(torch.cdist(positions, positions), smoothness)
    # Colours and positions are separable: the covariance of (colour, position) is a Kronecker product.
    colours = torch.full((shape[0], shape[0]), COLOR_CORRELATION, dtype=torch.float64, device="cpu").fill_diagonal_(1.0)
    variance = 1.0 if known else IMAGE_VARIANCE
    return GaussianStats(mean, outer * variance * torch.kron(colours, space).to(example.device))


def apply_pointwise(function: Callable[[Tensor], Tensor], before: GaussianStats) -> GaussianStats:
    """Propagate Gaussian statistics through a function that is applied entry by entry.

    With f(μ + σz) = Σ cₖ hₖ(z) in normalised Hermite polynomials, the mean is c₀ and the covariance
    Σ cₖcₖ'ρᵏ over k ≥ 1 (Mehler's formula). The variance that the series leaves out gets the correlation of the next
    term.

    >>> white = GaussianStats(torch.zeros(1, dtype=torch.float64), torch.eye(1, dtype=torch.float64))
    >>> round(float(apply_pointwise(torch.relu, white).mean), 4)
    0.3989
    """
    nodes, weights, polynomials = _build_quadrature()
    shape, deviation = before.mean.shape, before.var.clamp(min=0).sqrt()
    points = before.mean.flatten() + nodes.to(deviation)[:, None] * deviation
    values = function(points.view(-1, *shape)).double().reshape(len(nodes), -1)
    # cₖ = E[f(μ + σz) hₖ(z)], by quadrature for all entries at once.
    coefficients = polynomials.to(deviation) @ (weights.to(deviation)[:, None] * values)
    mean = coefficients[0]
    left = (weights.to(deviation) @ (values - mean).square()).clamp(min=0)
    # Parseval: Σₖ cₖ² is the variance, so `left` is the part that the terms so far do not explain.
    variance, scale = left.clone(), deviation.clamp(min=1e-150)
    terms = []
    for c in coefficients[1:]:
        terms.append(c)
        left = (left - c.square()).clamp(min=0)
        if bool((left <= SERIES_TOLERANCE * variance).all()):
            break
    cov = torch.empty_like(before.cov)
    for start in range(0, len(cov), COVARIANCE_ROW_CHUNK):
        rows = slice(start, start + COVARIANCE_ROW_CHUNK)
        # Covariances of a constant entry are 0, and 0 / 1e-150 stays 0. Rounding may leave |ρ| slightly above 1.
        rho = (before.cov[rows] / scale / scale[rows, None]).clamp_(-1, 1)
        cov[rows] = _sum_hermite_series([*terms, left.sqrt()], rows, rho)
    cov.diagonal().copy_(variance)  # the exact variance, free of the truncation
    return GaussianStats(mean.view(shape), cov)


def _sum_hermite_series(terms: Sequence[Tensor], rows: slice, rho: Tensor) -> Tensor:
    """Sum Σ cₖcₖ'ρᵏ for some rows of the covariance."""
    power, total = torch.ones_like(rho), torch.zeros_like(rho)
    for c in terms:
        total.addcmul_(power.mul_(rho), torch.outer(c[rows], c))
    return total


@cache
def _build_quadrature() -> tuple[Tensor, Tensor, Tensor]:
    """Return nodes, Gaussian weights and normalised Hermite polynomials at the nodes."""
    # The trapezium rule on a fine grid: Gauss-Hermite nodes are too few around a kink such as ReLU's.
    nodes = torch.linspace(-8.5, 8.5, 1701, dtype=torch.float64, device="cpu")
    weights = torch.exp(-nodes.square() / 2) / math.sqrt(2 * math.pi) * (nodes[1] - nodes[0])
    rows = [torch.ones_like(nodes), nodes]
    for k in range(1, HERMITE_ORDERS):
        # Recurrence of normalised polynomials hₖ = Heₖ/√k!: √(k+1) hₖ₊₁ = z hₖ − √k hₖ₋₁.
        rows.append((nodes * rows[k] - math.sqrt(k) * rows[k - 1]) / math.sqrt(k + 1))
    return nodes, weights, torch.stack(rows)


def apply_linear(function: Callable[[Tensor], Tensor], before: GaussianStats) -> GaussianStats:
    """Propagate statistics through an affine function: mean Aμ + b, covariance A C Aᵀ.

    The function runs on batches, here the rows of C and then of (AC)ᵀ, so its matrix A is never built.
    """
    shape = before.mean.shape
    at_zero = function(before.mean.new_zeros(1, *shape))
    half = (function(before.cov.view(-1, *shape)) - at_zero).flatten(1).T.reshape(-1, *shape)
    # Both runs round differently, and a Cholesky factorisation needs symmetry.
    cov = (function(half) - at_zero).flatten(1)
    return GaussianStats(function(before.mean[None])[0], (cov + cov.T).div_(2))


def apply_window_max(windows: Tensor, shape: Sequence[int], before: GaussianStats) -> GaussianStats:
    """Propagate statistics through the maximum of each window (rows of flat positions), by Clark's formulas (1961).

    The maximum of two Gaussians is approximated by a Gaussian again. Its covariance with other entries is that of a
    mixture of the two, each weighted by its probability of being the larger one.
    """
    mean, cov = before.mean.flatten(), before.cov
    # share[w, i] is the probability that entry i is the maximum of window w, over the entries seen so far.
    share = torch.zeros(len(windows), len(mean), dtype=cov.dtype, device=cov.device)
    share.scatter_(1, windows[:, :1], 1.0)
    m, v = mean[windows[:, 0]], before.var[windows[:, 0]]
    for new in windows.T[1:]:
        # θ² = Var(X − Y), α = (μ_X − μ_Y)/θ and p = Φ(α) = P(X > Y), X the maximum so far and Y the next entry.
        both = (share @ cov).gather(1, new[:, None])[:, 0]
        spread = (v + before.var[new] - 2 * both).clamp(min=1e-12).sqrt()
        alpha = (m - mean[new]) / spread
        p, density = torch.special.ndtr(alpha), torch.exp(-alpha.square() / 2) / math.sqrt(2 * math.pi)
        largest = m * p + mean[new] * (1 - p) + spread * density
        square = (v + m**2) * p + (before.var[new] + mean[new] ** 2) * (1 - p) + (m + mean[new]) * spread * density
        m, v = largest, (square - largest**2).clamp(min=0)
        share *= p[:, None]
        share.scatter_add_(1, new[:, None], (1 - p)[:, None])
    after = share @ cov @ share.T
    # The mixture varies less than the maximum itself. A larger diagonal keeps the matrix positive semidefinite.
    after.diagonal().copy_(torch.maximum(v, after.diagonal()))
    return GaussianStats(m.view(tuple(shape)), after)


# --- one operator of a graph -----------------------------------------------------------------

GaussianRule = Callable[[Node, dict[str, Any], str, GaussianStats], GaussianStats | None]
PointwiseFunction = Callable[[Tensor], Tensor]


@dataclass
class _GaussianPropagation:
    """Statistics found so far. `functions` maps a value to the value that it is an entrywise function of.

    A chain of entrywise operators is thus one function of a Gaussian value, not of an approximation of one.
    """

    constants: Mapping[str, Tensor]
    found: dict[str, GaussianStats]
    functions: dict[str, tuple[str, PointwiseFunction]] = field(default_factory=dict)
    done: set[str] = field(default_factory=set)

    def drop_unused(self, names: Iterable[str]) -> None:
        """Drop values after their last use, unless a value that is still needed is a function of them."""
        self.done |= set(names)
        self.functions = {name: own for name, own in self.functions.items() if name not in self.done}
        bases = {base for base, _ in self.functions.values()}
        self.found = {name: own for name, own in self.found.items() if name in bases or name not in self.done}

    def step(self, node: Node) -> None:
        after = self._compute_output_stats(node)
        if (
            after is None
            or not 0 < after.mean.numel() <= MAX_GAUSSIAN_ENTRIES
            or not bool(torch.isfinite(after.cov).all())
        ):
            return
        # A rule that took another dimension for the batch shows in the shape.
        if after.mean.shape == torch.Size(node.shape[len(node.shape) - after.mean.ndim :]):
            self.found[node.name] = after

    def _compute_output_stats(self, node: Node) -> GaussianStats | None:
        """Apply the rule that the operator table names under `moments`."""
        rule_name = lookup_operator(node).moments
        if rule_name == "span norm":
            return _apply_layer_norm(node, self.found.get(node.args["input"].name), self.constants)
        known = self._find_known_operands(node)
        if not known:
            return None
        if rule_name == "pointwise":
            return self._propagate_pointwise(node, known)
        if rule_name == "maximum" and known[0] in self.functions:
            return self._propagate_maximum(node, known[0])
        return self._apply_rule(node, known, GAUSSIAN_RULES.get(rule_name))

    def _find_known_operands(self, node: Node) -> list[str]:
        """Return the operands with statistics; none if another one is not constant, or if the result is too wide."""
        refs = dict.fromkeys(ref.name for ref in node.refs())
        known = [name for name in refs if name in self.found]
        if (
            not known
            or node.has_several_outputs
            or any(name not in self.found and name not in self.constants for name in refs)
        ):
            return []
        own = node.shape[max(1, len(node.shape) - self.found[known[0]].mean.ndim) :]  # for tokens, only the features
        return [] if math.prod(own) > MAX_GAUSSIAN_ENTRIES else known

    def _get_constants(self, node: Node) -> dict[str, Tensor]:
        return {ref.name: self.constants[ref.name] for ref in node.refs() if ref.name in self.constants}

    def _apply_rule(self, node: Node, known: Sequence[str], rule: GaussianRule | None) -> GaussianStats | None:
        """Apply the rule of an operator that reads one value with statistics."""
        keys = [key for key, value in node.args.items() if isinstance(value, Ref) and value.name in known]
        if rule is None or len(keys) != 1:
            return None
        values = {**self._get_constants(node), known[0]: None}
        args = {name: _to_float64(value) for name, value in bind_arguments(node, values).items()}
        before = self.found[known[0]]
        return rule(node, args, keys[0], before) if _can_apply_rule(node, args, keys[0], before) else None

    def _propagate_pointwise(self, node: Node, known: Sequence[str]) -> GaussianStats | None:
        """Compose an entrywise operator with those before it, back to one Gaussian value, and propagate the result."""
        own = {name: self.functions.get(name, (name, _clone_batch)) for name in known}
        bases = {base for base, _ in own.values()}
        if len(bases) != 1:
            return None
        (base,) = bases
        constants = {name: _to_float64(value) for name, value in self._get_constants(node).items()}
        if any(not _is_batch_independent(value, self.found[base].mean) for value in constants.values()):
            return None

        def function(batch: Tensor) -> Tensor:
            values = {**constants, **{name: f(batch) for name, (_, f) in own.items()}}
            return node.compute(bind_arguments(node, values))  # type: ignore[no-any-return]

        self.functions[node.name] = base, function
        return apply_pointwise(function, self.found[base])

    def _propagate_maximum(self, node: Node, name: str) -> GaussianStats | None:
        """Propagate max pooling behind an entrywise function f.

        Where f rises, max f(x) = f(max x), and the maximum of x is closer to Gaussian than that of f(x).
        """
        base, function = self.functions[name]
        before = self.found[base]
        steps = torch.linspace(-6, 6, 121, dtype=torch.float64, device=before.cov.device)
        steps = steps.view(-1, *(1 for _ in before.mean.shape))
        values = function(before.mean + steps * before.var.clamp(min=0).sqrt().view(before.mean.shape))
        rises = bool((values.diff(dim=0) >= 0).all())
        args = {key: _to_float64(value) for key, value in bind_arguments(node, {**self.constants, name: None}).items()}
        largest = _apply_max_pool(node, args, "self", before if rises else self.found[name])
        return largest if largest is None or not rises else apply_pointwise(function, largest)


def _clone_batch(batch: Tensor) -> Tensor:
    return batch.clone()


def _to_float64(value: Any) -> Any:
    return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value


def _is_batch_independent(constant: Tensor, mean: Tensor) -> bool:
    """Return whether a constant is the same for every sample of the batch."""
    return constant.ndim <= mean.ndim or (constant.ndim == mean.ndim + 1 and constant.shape[0] == 1)


def _can_apply_rule(node: Node, args: dict[str, Any], key: str, before: GaussianStats) -> bool:
    """Return whether the statistics describe one sample of the batch that the layer reads."""
    row, shape, weight = lookup_operator(node), before.mean.shape, args.get("weight")
    if not shape or key not in ("input", "self"):
        return False
    if row.layer == "linear":
        return bool(shape[-1] == weight.shape[1])  # type: ignore[union-attr]
    if row.layer == "convolution":
        inside = weight.shape[1] * int(args.get("groups", 1))  # type: ignore[union-attr]
        return bool(len(shape) == weight.ndim - 1 and shape[0] == inside)  # type: ignore[union-attr]
    if row.moments == "execute" and len(shape) != len(node.shape) - 1:
        return False  # for tokens, only the features have statistics
    own = next((args[name] for name in ("weight", "running_mean") if args.get(name) is not None), None)
    return row.norm != "batch" or own is None or len(own) == shape[0]


def _execute_linear(node: Node, args: dict[str, Any], key: str, before: GaussianStats) -> GaussianStats | None:
    # A batch size that no other dimension has shows whether the output keeps the batch as its first dimension.
    count = next(n for n in range(2, 100) if n not in before.mean.shape)
    tried = node.compute({**args, key: before.mean.new_zeros(count, *before.mean.shape)})
    if tried.ndim < 2 or len(tried) != count:
        return None  # the batch is not the first dimension of the output, or is split
    return apply_linear(lambda batch: node.compute({**args, key: batch}), before)  # type: ignore[no-any-return]


def _keep_stats(node: Node, args: dict[str, Any], key: str, before: GaussianStats) -> GaussianStats:
    return before


def _reshape_stats(node: Node, args: dict[str, Any], key: str, before: GaussianStats) -> GaussianStats | None:
    """Rearrange the entries of one sample; None if entries move between samples."""
    shape = node.shape[1:]
    return GaussianStats(before.mean.reshape(shape), before.cov) if math.prod(shape) == before.mean.numel() else None


def _apply_batch_norm(node: Node, args: dict[str, Any], key: str, before: GaussianStats) -> GaussianStats:
    """Give the output the mean β and the deviation γ of training; the input contributes only its correlations.

    The scale of the input follows from a prior and is less reliable than γ and β.
    """
    spatial = tuple(range(1, before.mean.ndim))
    var = before.var.view(before.mean.shape)
    centre = before.mean.mean(spatial, keepdim=True) if spatial else before.mean
    # The norm's variance runs over positions too, so means that differ between positions add to it.
    spread = var + (before.mean - centre).square()
    spread = spread.mean(spatial, keepdim=True) if spatial else spread
    gain = (spread + args["eps"]).rsqrt()
    side = [-1, *(1 for _ in spatial)]
    if args.get("weight") is not None:
        gain = gain * args["weight"].view(side)
    mean = (before.mean - centre) * gain
    if args.get("bias") is not None:
        mean = mean + args["bias"].view(side)
    factor = gain.expand_as(before.mean).flatten()
    return GaussianStats(mean, before.cov * factor * factor[:, None])


def _apply_layer_norm(
    node: Node, before: GaussianStats | None, constants: Mapping[str, Tensor]
) -> GaussianStats | None:
    """Propagate statistics through a layer or RMS norm: mean β, covariance diag(γ) R diag(γ).

    R holds the correlations of the normalised input, or is the identity where the input has no statistics.
    """
    shape = tuple(node.args["normalized_shape"])
    size = math.prod(shape)
    refs = {name: node.args.get(name) for name in ("weight", "bias")}
    given = {name: constants.get(ref.name) for name, ref in refs.items() if isinstance(ref, Ref)}
    if size > MAX_GAUSSIAN_ENTRIES or any(value is None for value in given.values()):
        return None
    own = {name: value.double() for name, value in given.items() if value is not None}
    like = next(iter(own.values()), torch.zeros(0, dtype=torch.float64, device="cpu"))
    if before is not None and before.mean.shape == shape:
        mean, cov = _normalize_stats(before, centre=lookup_operator(node).norm == "layer")
    else:
        mean, cov = like.new_zeros(size), torch.eye(size, dtype=like.dtype, device=like.device)
    if "weight" in own:
        gain = own["weight"].flatten()
        mean, cov = mean * gain, cov * gain * gain[:, None]
    if "bias" in own:
        mean = mean + own["bias"].flatten()
    return GaussianStats(mean.view(shape), cov)


def _normalize_stats(before: GaussianStats, centre: bool) -> tuple[Tensor, Tensor]:
    mean, cov = before.mean.flatten(), before.cov
    if centre:
        mean = mean - mean.mean()
        # Subtracting the mean over features is a projection on both sides of C.
        cov = cov - cov.mean(0) - cov.mean(1)[:, None] + cov.mean()
    power = (mean.square().mean() + cov.diagonal().mean()).clamp(min=1e-150)
    return mean / power.sqrt(), cov / power


def _apply_max_pool(node: Node, args: dict[str, Any], key: str, before: GaussianStats) -> GaussianStats | None:
    spatial = before.mean.ndim - 1
    size, stride, padding, dilation = (
        _expand_to_list(args.get(name), spatial) for name in ("kernel_size", "stride", "padding", "dilation")
    )
    # Clark's formulas need windows of entries that all exist and lie side by side.
    if any(p for p in padding or ()) or any(d != 1 for d in dilation or ()) or args.get("ceil_mode") or not size:
        return None
    positions = torch.arange(before.mean.numel(), device=before.cov.device).view(before.mean.shape)
    for i, (width, step) in enumerate(zip(size, stride or size, strict=True)):
        positions = positions.unfold(1 + i, width, step)
    shape = positions.shape[: 1 + spatial]
    return apply_window_max(positions.reshape(math.prod(shape), -1), shape, before)


def _expand_to_list(value: Any, count: int) -> list[int]:
    listed = [value] if isinstance(value, int) else list(value or ())
    return [int(v) for v in (listed * count if len(listed) == 1 else listed)]


GAUSSIAN_RULES: dict[str, GaussianRule] = {
    "reshape": _reshape_stats,
    "keep": _keep_stats,
    "execute": _execute_linear,
    "maximum": _apply_max_pool,
    "batch norm": _apply_batch_norm,
}
"""Rules by the entry `moments` of the operator table. "pointwise" and "span norm" are handled separately."""
