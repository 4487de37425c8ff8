"""metrics: what a network costs, how well it predicts, and how far two networks are apart."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from neuron_merging.capture import as_inputs, bare_copy, capture, copied, plain_attention, quiet
from neuron_merging.channels import Channels
from neuron_merging.errors import MergingError
from neuron_merging.plan import Plan, unit_mask
from neuron_merging.probe import analyse
from neuron_merging.task import unit_rows

Kept = Mapping[int, Tensor]
"""By dimension of a layer's output, the indices that the smaller network still has."""


def count_parameters(model: nn.Module) -> int:
    """Trainable and frozen parameters, shared ones once."""
    return sum(p.numel() for p in model.parameters())


def count_macs(model: nn.Module, example_inputs: Any) -> int:
    """Multiply-accumulates of one forward pass, counted by torch's flop counter (two flops each)."""
    # The counter asks for gradients of parameters that modules hand on, so it gets parameters without any.
    frozen = {id(p): nn.Parameter(p.detach(), requires_grad=False) for p in model.parameters()}
    twin = bare_copy(model, frozen).eval()
    with FlopCounterMode(display=False) as counter, torch.no_grad(), quiet(), plain_attention():
        twin(*copied(as_inputs(example_inputs)))
    return int(counter.get_total_flops()) // 2


# Predictions


@torch.no_grad()
def predict(model: nn.Module, batches: Iterable[Any]) -> tuple[Tensor, Tensor]:
    """All outputs and all labels of (input, label) batches."""
    model.eval()
    outputs, labels = [], []
    for x, y in batches:
        outputs.append(model(x).cpu())
        labels.append(y.cpu())
    if not outputs:
        raise _nothing("predict()")
    return torch.cat(outputs), torch.cat(labels)


def accuracy(outputs: Tensor, labels: Tensor, top: int = 1) -> float:
    """Share of samples, in percent, whose label is among the `top` largest outputs.

    >>> accuracy(torch.tensor([[0.1, 0.7, 0.2], [0.5, 0.4, 0.1]]), torch.tensor([1, 1]))
    50.0
    """
    if not len(labels):
        raise _nothing("accuracy()")
    return 100 * _hits(outputs, labels, top) / len(labels)


@torch.no_grad()
def accuracies(model: nn.Module, batches: Iterable[Any], tops: Sequence[int] = (1, 5)) -> dict[int, float]:
    """Top-k accuracies in percent from one pass, of which only counts are kept.

    >>> network = nn.Linear(4, 3)
    >>> accuracies(network, [(torch.zeros(2, 4), torch.tensor([0, 2]))], tops=(3,))
    {3: 100.0}
    """
    model.eval()
    hits, total = dict.fromkeys(tops, 0), 0
    for x, y in batches:
        outputs = model(x)
        total += len(y)
        for top in tops:
            hits[top] += _hits(outputs, y, top)
    if not total:
        raise _nothing("accuracies()")
    return {top: 100 * count / total for top, count in hits.items()}


def _nothing(where: str) -> MergingError:
    return MergingError("there is nothing to predict", where=where, fix="Give at least one batch.")


def _hits(outputs: Tensor, labels: Tensor, top: int) -> int:
    best = outputs.topk(min(top, outputs.shape[1]), dim=1).indices
    return int((best == labels.to(best.device)[:, None]).any(1).sum())


# Two networks, layer by layer


def ware(original: Tensor, changed: Tensor) -> float:
    """Weighted average reconstruction error (equation 8, all weights one).

    Responses that are exactly zero in the original have no relative error and do not count.

    >>> ware(torch.tensor([[1.0, 2.0]]), torch.tensor([[1.5, 1.0]]))
    0.5
    """
    total, count = _relative(original, changed)
    return _mean(total, count)


@torch.no_grad()
def ware_at(
    original: nn.Module, small: nn.Module, batches: Iterable[Any], layer: str = "", plan: Plan | None = None
) -> float:
    """WARE of a layer's output, by the layer's dotted name; "" is what the network returns.

    A layer that has lost channels is compared on those that it kept, which the plan tells.

    >>> network = nn.Sequential(nn.Linear(4, 3), nn.Tanh())
    >>> ware_at(network, network, [torch.ones(2, 4)], layer="0")
    0.0
    """
    total, count = 0.0, 0
    for before, after in _paired(original, small, batches, (layer,), plan):
        _check_called((layer,), before)
        more, entries = _relative(before[layer], after[layer])
        total, count = total + more, count + entries
    return _mean(total, count)


def _relative(original: Tensor, changed: Tensor) -> tuple[float, int]:
    """The sum of relative errors, and how many there are."""
    if original.shape != changed.shape:
        what = f"the responses have shapes {tuple(original.shape)} and {tuple(changed.shape)}"
        raise MergingError(what, where="WARE", fix="Compare outputs of the same layer for the same inputs.")
    counts = original != 0
    ratio = ((changed - original).abs() / original.abs())[counts]
    return float(ratio.double().sum()), int(counts.sum())


def _mean(total: float, count: int) -> float:
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
    """For every layer ‖ŷ − y‖ / ‖y‖ over all batches, on the channels that the layer kept.

    `layers` are dotted names; without them, all modules that own a weight and are called.

    >>> network = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
    >>> reconstruction_errors(network, network, [torch.ones(2, 4)])
    {'0': 0.0, '2': 0.0}
    """
    names = tuple(layers) if layers is not None else tuple(_weighted(original))
    error, size, called = dict.fromkeys(names, 0.0), dict.fromkeys(names, 0.0), dict[str, None]()
    for before, after in _paired(original, small, batches, names, plan):
        _check_called([] if layers is None else names, before)
        for name in before:
            error[name] += float((after[name] - before[name]).double().square().sum())
            size[name] += float(before[name].double().square().sum())
            called[name] = None
    if not called:
        raise _nothing("reconstruction_errors()")
    return {name: (error[name] / size[name]) ** 0.5 if size[name] else float(error[name] > 0) for name in called}


def _check_called(layers: Iterable[str], seen: Mapping[str, Tensor]) -> None:
    for name in layers:
        if name not in seen:
            raise MergingError("the network does not call this layer", where=name, fix="Name one that it runs through.")


def _weighted(model: nn.Module) -> Iterator[str]:
    return (name for name, module in model.named_modules() if module._parameters.get("weight") is not None)


def _paired(
    original: nn.Module, small: nn.Module, batches: Iterable[Any], layers: Sequence[str], plan: Plan | None
) -> Iterator[tuple[dict[str, Tensor], dict[str, Tensor]]]:
    """The layers' outputs in both networks, batch by batch, the original's cut to what was kept."""
    original.eval()
    small.eval()
    queue = (batch[0] if isinstance(batch, (list, tuple)) else batch for batch in batches)
    first = next(queue, None)
    if first is None:
        return
    kept = {} if plan is None else _kept_channels(original, plan, first[:1])
    with _watched(original, layers) as before, _watched(small, layers) as after:
        for x in chain([first], queue):
            original(x)
            small(x)
            cut = {name: _cut(before[name], after[name], kept.get(name, {}), name) for name in before}
            yield cut, dict(after)


@contextmanager
def _watched(model: nn.Module, layers: Sequence[str]) -> Iterator[dict[str, Tensor]]:
    """The output of each layer's latest call, by name."""
    seen: dict[str, Tensor] = {}
    handles = []
    try:
        for name in layers:
            handles.append(_layer(model, name).register_forward_hook(_note(seen, name)))
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def _layer(model: nn.Module, name: str) -> nn.Module:
    try:
        return model.get_submodule(name)
    except AttributeError as error:
        known = ", ".join(list(_weighted(model))[:8])
        raise MergingError(f"there is no layer {name!r}", where="layer=", fix=f"For instance {known}.") from error


def _note(seen: dict[str, Tensor], name: str) -> Any:
    def hook(module: nn.Module, inputs: Any, output: Any) -> None:
        if not isinstance(output, Tensor):
            what = f"the layer returns a {type(output).__name__}, not a tensor"
            raise MergingError(what, where=name, fix="Name a layer inside it.")
        seen[name] = output.clone()  # an in-place activation may follow

    return hook


def _cut(before: Tensor, after: Tensor, kept: Kept, layer: str) -> Tensor:
    for dim, index in kept.items():
        before = before.index_select(dim, index.to(before.device))
    if before.shape != after.shape:
        raise MergingError(
            f"the outputs have shapes {tuple(before.shape)} and {tuple(after.shape)}",
            where=layer or "output",
            fix="Give plan=, which tells the channels that were kept, and networks that belong together.",
        )
    return before


def _kept_channels(model: nn.Module, plan: Plan, inputs: Tensor) -> dict[str, Kept]:
    """What every module's output keeps; the output of a module is the last value made inside it."""
    graph = capture(model, inputs)
    channels = analyse(model, graph, inputs)
    stays = unit_mask(channels, {choice.name: np.array(choice.kept) for choice in plan.groups})
    found: dict[str, Kept] = {}
    for node in graph.nodes:
        kept = _kept_of(channels, stays, node.name)
        parts = node.module.split("@")[0].split(".")
        found |= {".".join(parts[:depth]): kept for depth in range(len(parts) + 1)}
    return found


def _kept_of(channels: Channels, stays: np.ndarray, value: str) -> Kept:
    units = channels.units.get(value, {})
    return {dim: torch.from_numpy(np.flatnonzero(stays[unit] | (unit < 0))) for dim, unit in units.items()}


# The channels of one layer


def max_cosine(rows: Tensor) -> Tensor:
    """For every row the largest cosine to another row; a row of zeros is similar to none.

    >>> max_cosine(torch.tensor([[1.0, 0.0], [2.0, 0.0], [0.0, 3.0]]))
    tensor([1., 1., 0.])
    """
    if len(rows) < 2:
        raise MergingError(f"{len(rows)} rows have no pair", where="max_cosine()", fix="Give at least two.")
    unit = rows / rows.norm(dim=1, keepdim=True).clamp(min=torch.finfo(rows.dtype).tiny)
    step, best = max(1, 2**24 // len(rows)), []
    for start in range(0, len(rows), step):
        cosine = unit[start : start + step] @ unit.T
        own = torch.arange(len(cosine), device=rows.device)
        cosine[own, own + start] = -torch.inf
        best.append(cosine.amax(1))
    return torch.cat(best)


@torch.no_grad()
def max_similarities(model: nn.Module, example_inputs: Any, scope: str = "internal") -> dict[str, Tensor]:
    """For every channel of every layer that can be cut, the largest cosine to another channel.

    Channels are rows as the paper takes them: flattened filters, with the bias where no norm follows.

    >>> network = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> {name: len(values) for name, values in max_similarities(network, torch.zeros(1, 4)).items()}
    {'0': 8}
    """
    graph = capture(model, example_inputs)
    groups = analyse(model, graph, example_inputs).groups
    chosen = (g for g in groups if g.producers and g.size > 1 and (scope == "all" or not g.residual))
    return {group.name: max_cosine(unit_rows(graph, group)) for group in chosen}
