"""Extract the network's inputs, and labels, from the batches of a user's data loader."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from neuron_merging.channels.analysis import Analysis
from neuron_merging.errors import MergingError
from neuron_merging.graph.example_inputs import (
    KeywordInputs,
    get_input_names,
    infer_batch_size,
    split_keyword_inputs,
)

LABEL_KEYS = ("label", "labels", "target", "targets", "y")
"""Usual keys of the labels in a batch that is a dict."""
FIRST_INPUT_KEY = "x"
"""The key that may stand for the first of several inputs."""
BATCHES_FIX = "Give a list or a data loader of batches that are like the example inputs."


def check_batches(batches: object, where: str = "calibration=") -> None:
    """Raise an error for a value that cannot be an iterable of batches."""
    if not isinstance(batches, Iterable) or isinstance(batches, (str, Mapping)):
        what = f"{type(batches).__name__} is not a list or loader of batches"
        raise MergingError(what, where=where, fix=BATCHES_FIX)


def extract_inputs(
    batches: Iterable[Any], analysis: Analysis, max_batches: int | None = None
) -> Iterator[tuple[Any, ...]]:
    """Yield the network's inputs of each batch."""
    return (inputs for inputs, _ in extract_inputs_and_labels(batches, analysis, max_batches=max_batches))


def extract_inputs_and_labels(
    batches: Iterable[Any], analysis: Analysis, where: str = "calibration=", max_batches: int | None = None
) -> Iterator[tuple[tuple[Any, ...], Tensor | None]]:
    """Yield the network's inputs of each batch, with its labels: the entry behind the inputs, if it holds one integer
    per sample, else None.

    Batches are split for a network of one fixed batch size. `max_batches` limits the number of the user's batches.
    """
    given = [batches] if isinstance(batches, Tensor) else batches
    for inputs, labels in _iterate_whole_batches(islice(given, max_batches), analysis, where):
        yield from _split_labelled(inputs, labels, analysis, where)


def _split_labelled(
    inputs: tuple[Any, ...], labels: Tensor | None, analysis: Analysis, where: str
) -> Iterator[tuple[tuple[Any, ...], Tensor | None]]:
    parts, size = analysis.split_batch(inputs), analysis.fixed_batch_size
    if not parts:
        what = f"a batch has {infer_batch_size(inputs)} samples, the network takes only batches of {size}"
        raise MergingError(what, where=where, fix=f"Give batches of {size}, or of a multiple.")
    for i, part in enumerate(parts):
        yield part, labels if labels is None or size is None else labels[i * size : (i + 1) * size]


def _iterate_whole_batches(
    batches: Iterable[Any], analysis: Analysis, where: str
) -> Iterator[tuple[tuple[Any, ...], Tensor | None]]:
    positional, named = split_keyword_inputs(analysis.inputs)
    wanted = {key: value for key, value in named.items() if isinstance(value, Tensor)}
    examples = [*positional, *wanted.values()]
    names = [*get_input_names(analysis.model)[: len(positional)], *wanted]
    for batch in batches:
        values, count = _list_entries(batch, examples, names), len(examples)
        if len(values) < count:
            raise MergingError(
                f"a batch has {len(values)} entries, the network takes {count} inputs",
                where=where,
                fix="Yield the inputs first, in the network's order.",
            )
        found = [_convert_to_example(v, e, where) for v, e in zip(values, examples, strict=False)]
        by_name = dict(zip(wanted, found[len(positional) :], strict=True))
        inputs = (*found[: len(positional)], *([KeywordInputs({**named, **by_name})] if named else []))
        yield inputs, _extract_labels(values[count] if len(values) > count else None, inputs)


def _extract_labels(value: Any, inputs: tuple[Any, ...]) -> Tensor | None:
    whole = isinstance(value, Tensor) and value.ndim == 1 and not value.is_floating_point()
    return value if whole and len(value) == infer_batch_size(inputs) else None


def _list_entries(batch: Any, examples: Sequence[Any], names: Sequence[str]) -> list[Any]:
    """Return the entries of a batch in order; those of a dict by the names of the network's inputs, if it has all."""
    if isinstance(batch, Mapping):
        if len(examples) == 1 and isinstance(examples[0], Mapping):
            return [batch]
        if len(names) > 1 and names[0] not in batch and FIRST_INPUT_KEY in batch:
            batch = {names[0]: batch[FIRST_INPUT_KEY], **batch}
        if len(names) != len(examples) or not all(name in batch for name in names):
            return list(batch.values())
        return [batch[name] for name in names] + [value for name, value in batch.items() if name in LABEL_KEYS]
    return list(batch) if isinstance(batch, (list, tuple)) else [batch]


def _convert_to_example(value: Any, example: Any, where: str) -> Any:
    """Convert a value to the device and dtype of the example; raise an error if its structure differs."""
    if isinstance(example, Mapping) and isinstance(value, Mapping) and example.keys() <= value.keys():
        return {key: _convert_to_example(value[key], part, where) for key, part in example.items()}
    if isinstance(example, (list, tuple)) and isinstance(value, (list, tuple)) and len(value) == len(example):
        parts = [_convert_to_example(v, e, where) for v, e in zip(value, example, strict=True)]
        return type(example)(*parts) if hasattr(example, "_fields") else type(example)(parts)
    if isinstance(example, (Mapping, list, tuple)):
        what = f"a batch has an entry that is not built like the example input, a {type(example).__name__}"
        raise MergingError(what, where=where, fix=BATCHES_FIX)
    if not isinstance(example, Tensor):
        return value
    if not isinstance(value, Tensor) or value.ndim != example.ndim:
        what = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"type {type(value).__name__}"
        raise MergingError(
            f"a batch has an entry of {what}, the example input is a tensor of shape {tuple(example.shape)}",
            where=where,
            fix=BATCHES_FIX,
        )
    if not value.numel() or bool((value.isnan() | value.isposinf()).any()):
        what = "contains NaN or infinity" if value.numel() else "is empty"
        raise MergingError(f"a batch {what}", where=where, fix="Leave it out.")
    return value.to(example.device, example.dtype if torch.is_floating_point(example) else value.dtype)
