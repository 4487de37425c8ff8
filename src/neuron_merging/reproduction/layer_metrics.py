"""The paper's metrics of layers: WARE and reconstruction errors between two networks, and the largest cosine
similarity of each channel to another one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from neuron_merging.channels.groups import Channels
from neuron_merging.channels.masked_run import build_keep_mask
from neuron_merging.channels.weight_views import filters_of
from neuron_merging.errors import MergingError
from neuron_merging.evaluation.predictions import make_empty_data_error
from neuron_merging.pruning.plan import Plan
from neuron_merging.pruning.trial_prune import analyse

KeptIndices = Mapping[int, Tensor]
"""The indices that remain in the small network, by dimension of a layer's output."""


def ware(original: Tensor, changed: Tensor) -> float:
    """Compute the weighted average reconstruction error (equation 8 of the paper, with all weights one).

    Parameters
    ----------
    original
        Responses of the original network. Exact zeros have no relative error and are left out.
    changed
        Responses of the changed network, of the same shape.

    Returns
    -------
    float
        The mean of |changed − original| / |original|.

    Raises
    ------
    MergingError
        The shapes differ, or all responses of the original are zero.

    Examples
    --------
    >>> ware(torch.tensor([[1.0, 2.0]]), torch.tensor([[1.5, 1.0]]))
    0.5
    """
    total, count = _sum_relative_errors(original, changed)
    return _compute_mean_error(total, count)


@torch.no_grad()
def ware_at(
    original: nn.Module, small: nn.Module, batches: Iterable[Any], layer: str = "", plan: Plan | None = None
) -> float:
    """Compute the WARE of a layer's output over batches.

    Parameters
    ----------
    original
        The network before compression.
    small
        The compressed network.
    batches
        Inputs, or tuples whose first entry is the input.
    layer
        The layer's dotted name; "" for the network's output.
    plan
        The plan of the compression. Only the kept channels are compared.

    Returns
    -------
    float
        The WARE over all batches.

    Raises
    ------
    MergingError
        The layer does not exist or is not called, its outputs differ in shape, or all responses are zero.

    Examples
    --------
    >>> network = nn.Sequential(nn.Linear(4, 3), nn.Tanh())
    >>> ware_at(network, network, [torch.ones(2, 4)], layer="0")
    0.0
    """
    total, count = 0.0, 0
    for before, after in _run_side_by_side(original, small, batches, (layer,), plan):
        _check_layers_called((layer,), before)
        more, entries = _sum_relative_errors(before[layer], after[layer])
        total, count = total + more, count + entries
    return _compute_mean_error(total, count)


def _sum_relative_errors(original: Tensor, changed: Tensor) -> tuple[float, int]:
    """Return the sum and the number of relative errors."""
    if original.shape != changed.shape:
        what = f"the responses have shapes {tuple(original.shape)} and {tuple(changed.shape)}"
        raise MergingError(what, where="WARE", fix="Compare outputs of the same layer for the same inputs.")
    counts = original != 0
    ratio = ((changed - original).abs() / original.abs())[counts]
    return float(ratio.double().sum()), int(counts.sum())


def _compute_mean_error(total: float, count: int) -> float:
    if not count:
        what = "no response to compare: the original's are all zero, or there is no batch"
        raise MergingError(what, where="WARE", fix="Give batches, and a layer that responds.")
    return total / count


@torch.no_grad()
def reconstruction_errors(
    original: nn.Module,
    small: nn.Module,
    batches: Iterable[Any],
    plan: Plan | None = None,
    layers: Sequence[str] | None = None,
) -> dict[str, float]:
    """Compute ‖ŷ − y‖ / ‖y‖ of every layer over all batches, on the kept channels.

    Parameters
    ----------
    original
        The network before compression.
    small
        The compressed network.
    batches
        Inputs, or tuples whose first entry is the input.
    plan
        The plan of the compression, with the kept channels of each layer.
    layers
        Dotted names. Default: all modules that have a weight and are called.

    Returns
    -------
    dict[str, float]
        The error by layer name.

    Raises
    ------
    MergingError
        There is no batch, a layer does not exist, or its outputs differ in shape.

    Examples
    --------
    >>> network = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
    >>> reconstruction_errors(network, network, [torch.ones(2, 4)])
    {'0': 0.0, '2': 0.0}
    """
    names = tuple(layers) if layers is not None else tuple(_list_weighted_layers(original))
    error, size, called = dict.fromkeys(names, 0.0), dict.fromkeys(names, 0.0), dict[str, None]()
    for before, after in _run_side_by_side(original, small, batches, names, plan):
        _check_layers_called([] if layers is None else names, before)
        for name in before:
            error[name] += float((after[name] - before[name]).double().square().sum())
            size[name] += float(before[name].double().square().sum())
            called[name] = None
    if not called:
        raise make_empty_data_error("reconstruction_errors()")
    # A layer that responds with zeros alone has no scale: 0 if it still does, else 1.
    return {name: (error[name] / size[name]) ** 0.5 if size[name] else float(error[name] > 0) for name in called}


def _check_layers_called(layers: Iterable[str], seen: Mapping[str, Tensor]) -> None:
    for name in layers:
        if name not in seen:
            raise MergingError(
                "the network does not call this layer", where=name, fix="Name a layer that the forward pass uses."
            )


def _list_weighted_layers(model: nn.Module) -> Iterator[str]:
    return (name for name, module in model.named_modules() if module._parameters.get("weight") is not None)


def _run_side_by_side(
    original: nn.Module, small: nn.Module, batches: Iterable[Any], layers: Sequence[str], plan: Plan | None
) -> Iterator[tuple[dict[str, Tensor], dict[str, Tensor]]]:
    """Yield the layers' outputs of both networks for each batch, the original's reduced to the kept channels."""
    original.eval()
    small.eval()
    queue = (batch[0] if isinstance(batch, (list, tuple)) else batch for batch in batches)
    first = next(queue, None)
    if first is None:
        return
    # One sample is enough to capture the network.
    kept = {} if plan is None else _find_kept_channels(original, plan, first[:1])
    with _record_outputs(original, layers) as before, _record_outputs(small, layers) as after:
        for x in chain([first], queue):
            original(x)
            small(x)
            cut = {name: _select_kept_channels(before[name], after[name], kept.get(name, {}), name) for name in before}
            yield cut, dict(after)


@contextmanager
def _record_outputs(model: nn.Module, layers: Sequence[str]) -> Iterator[dict[str, Tensor]]:
    """Record the output of each layer's latest call, by name, with forward hooks."""
    seen: dict[str, Tensor] = {}
    handles = []
    try:
        for name in layers:
            handles.append(_get_layer(model, name).register_forward_hook(_make_recording_hook(seen, name)))
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def _get_layer(model: nn.Module, name: str) -> nn.Module:
    try:
        return model.get_submodule(name)
    except AttributeError as error:
        known = ", ".join(list(_list_weighted_layers(model))[:8])
        raise MergingError(f"there is no layer {name!r}", where="layer=", fix=f"For instance {known}.") from error


def _make_recording_hook(seen: dict[str, Tensor], name: str) -> Any:
    def hook(module: nn.Module, inputs: Any, output: Any) -> None:
        if not isinstance(output, Tensor):
            what = f"the layer returns a {type(output).__name__}, not a tensor"
            raise MergingError(what, where=name, fix="Name a layer inside it.")
        seen[name] = output.clone()  # a following in-place activation would overwrite it

    return hook


def _select_kept_channels(before: Tensor, after: Tensor, kept: KeptIndices, layer: str) -> Tensor:
    for dim, index in kept.items():
        before = before.index_select(dim, index.to(before.device))
    if before.shape != after.shape:
        raise MergingError(
            f"the outputs have shapes {tuple(before.shape)} and {tuple(after.shape)}",
            where=layer or "output",
            fix="Give plan=, which contains the kept channels, and the networks that it belongs to.",
        )
    return before


def _find_kept_channels(model: nn.Module, plan: Plan, inputs: Tensor) -> dict[str, KeptIndices]:
    """Return the kept indices of every module's output, which is the last value computed inside the module."""
    analysis = analyse(model, inputs)
    graph, channels = analysis.graph, analysis.channels
    stays = build_keep_mask(channels, {choice.name: np.array(choice.kept) for choice in plan.groups})
    found: dict[str, KeptIndices] = {}
    for node in graph.nodes:
        kept = _find_kept_indices(channels, stays, node.name)
        parts = node.module.split("@")[0].split(".")
        # Later nodes overwrite earlier ones, so the last value inside each module remains.
        found |= {".".join(parts[:depth]): kept for depth in range(len(parts) + 1)}
    return found


def _find_kept_indices(channels: Channels, stays: np.ndarray, value: str) -> KeptIndices:
    return {
        dim: torch.from_numpy(np.flatnonzero(stay)) for dim, stay in channels.get_kept_indices(value, stays).items()
    }


def max_cosine(rows: Tensor) -> Tensor:
    """Return the largest cosine of every row to another row; rows of zeros have cosine 0.

    Parameters
    ----------
    rows
        A matrix with at least two rows.

    Returns
    -------
    Tensor
        One cosine per row.

    Raises
    ------
    MergingError
        There are fewer than two rows.

    Examples
    --------
    >>> max_cosine(torch.tensor([[1.0, 0.0], [2.0, 0.0], [0.0, 3.0]]))
    tensor([1., 1., 0.])
    """
    if len(rows) < 2:
        raise MergingError(f"{len(rows)} rows are too few to compare", where="max_cosine()", fix="Give at least two.")
    unit = rows / rows.norm(dim=1, keepdim=True).clamp(min=torch.finfo(rows.dtype).tiny)
    # Blocks of at most 2^24 cosines (64 MiB in float32) bound the memory of wide layers.
    step, best = max(1, 2**24 // len(rows)), []
    for start in range(0, len(rows), step):
        cosine = unit[start : start + step] @ unit.T
        index = torch.arange(len(cosine), device=rows.device)
        cosine[index, index + start] = -torch.inf  # not the cosine of a row to itself
        best.append(cosine.amax(1))
    return torch.cat(best)


@torch.no_grad()
def max_similarities(model: nn.Module, example_inputs: Any, scope: str = "internal") -> dict[str, Tensor]:
    """Return the largest cosine of every channel to another channel, for every prunable layer.

    A channel is represented as in the paper: its flattened filter, with the bias if no norm follows.

    Parameters
    ----------
    model
        The network.
    example_inputs
        As for `analyse`.
    scope
        "internal", or "all" for residual streams too.

    Returns
    -------
    dict[str, Tensor]
        One cosine per channel, by the group's name.

    Raises
    ------
    ModelError
        The model cannot be captured.

    Examples
    --------
    >>> network = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> {name: len(values) for name, values in max_similarities(network, torch.zeros(1, 4)).items()}
    {'0': 8}
    """
    analysis = analyse(model, example_inputs)
    graph, groups = analysis.graph, analysis.channels.groups
    chosen = (g for g in groups if g.producers and g.size > 1 and (scope == "all" or not g.residual))
    return {group.name: max_cosine(filters_of(graph, group)) for group in chosen}
