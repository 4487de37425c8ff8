"""suitability: whether data are what a network was made for: their sizes, their classes, their range."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from neuron_merging.errors import MergingError, told
from neuron_merging.graph.copying import bare_copy
from neuron_merging.graph.quiet import plain_attention
from neuron_merging.graph.trees import called, copied, flat, flatten_outputs

ODD, WRONG = 4.0, 100.0
"""How many times more or less variance than in training the first batch norm may see before a word, and an error."""
OTHER_DATA = "Give the data that it was trained on."
OTHER_RANGE = "Normalise them as in training: --mean and --std, or mean= and std=."


@torch.no_grad()
def check_data(
    model: nn.Module, batch: tuple[Any, ...], labels: Tensor | None = None, classes: int = 0, *, where: str
) -> list[str]:
    """Refuse data that the network cannot be meant for; what is merely odd is returned as notes."""
    for value in flat(batch):
        if isinstance(value, Tensor) and (not value.numel() or bool((value.isnan() | value.isposinf()).any())):
            what = "a batch has entries that are no numbers" if value.numel() else "a batch is empty"
            raise MergingError(what, where=where, fix="Leave it out.")
    copy = bare_copy(model).eval()
    with _first_norm(copy) as seen:
        outputs = _run(copy, batch, where)
    notes = _check_range(seen, where)
    if labels is not None:
        notes += _check_classes(outputs, labels, classes, where)
    return notes


def _run(model: nn.Module, batch: tuple[Any, ...], where: str) -> Any:
    try:
        with plain_attention():
            return called(model, copied(batch))
    except Exception as error:
        shapes = ", ".join(str(tuple(v.shape)) for v in flat(batch) if isinstance(v, Tensor))
        what = f"the network does not take a batch of {shapes or 'these'}: {told(error)}"
        raise MergingError(what, where=where, fix=OTHER_DATA) from error


@contextmanager
def _first_norm(model: nn.Module) -> Iterator[list[tuple[str, float, float]]]:
    """Name, shift and spread of what the first trained batch norm sees, against what it saw in training."""
    seen: list[tuple[str, float, float]] = []
    handles = []
    for name, module in model.named_modules():
        if isinstance(module, _BatchNorm) and _is_trained(module):

            def look(norm: _BatchNorm, args: tuple[Any, ...], name: str = name) -> None:
                if not seen and args and args[0].ndim > 1:
                    seen.append((name, *_against_training(norm, args[0])))

            handles.append(module.register_forward_pre_hook(look))
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def _is_trained(norm: _BatchNorm) -> bool:
    mean, var = norm.running_mean, norm.running_var
    if mean is None or var is None or mean.is_meta:
        return False
    return bool(mean.isfinite().all() and var.isfinite().all()) and bool(mean.any() or (var != 1).any())


def _against_training(norm: _BatchNorm, value: Tensor) -> tuple[float, float]:
    """In units of the stored deviation and variance, the mean over channels."""
    assert norm.running_mean is not None and norm.running_var is not None
    rows = value.transpose(0, 1).flatten(1).double()
    mean, var = norm.running_mean.double(), norm.running_var.double().clamp(min=1e-12)
    shift = (rows.mean(1) - mean).abs() / var.sqrt()
    return float(shift.mean()), float((rows.var(1, unbiased=False) / var).mean())


def _check_range(seen: list[tuple[str, float, float]], where: str) -> list[str]:
    for name, shift, spread in seen:
        said = f"{name} sees {spread:.2g} times the variance of its training, and a mean {shift:.2g} deviations off"
        if not 1 / WRONG < spread < WRONG:
            raise MergingError(
                f"the range of the data is not that of the training: {said}", where=where, fix=OTHER_RANGE
            )
        if not 1 / ODD < spread < ODD or shift > 1:
            return [f"the data of {where} may not be normalised as in training: {said}"]
    return []


def _check_classes(outputs: Any, labels: Tensor, classes: int, where: str) -> list[str]:
    """Labels only mean something to a network that has as many answers."""
    found = flatten_outputs(outputs)
    if not found or found[0].ndim != 2 or len(found[0]) != len(labels) or labels.ndim != 1:
        shape = tuple(found[0].shape) if found else "nothing"
        what = f"accuracy needs one row of class scores for each label; the network returns {shape}"
        raise MergingError(what, where=where, fix="Leave the labels out, or give a metric of your own.")
    answers, seen = found[0].shape[1], max(classes, int(labels.max()) + 1)
    what = f"the images have {seen} classes, the network has {answers} answers"
    if seen > answers or int(labels.min()) < 0:
        raise MergingError(what if seen > answers else "a label is negative", where=where, fix=OTHER_DATA)
    if 0 < classes < answers:
        return [f"{what}: the accuracy is right only if the first {classes} answers mean these classes"]
    return []
