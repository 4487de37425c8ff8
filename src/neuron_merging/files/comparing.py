"""Comparing: whether torch computes what onnxruntime does, step by step.

Every step is given what onnxruntime's own step was given, so that only steps that compute something else are found, not
those behind which a difference of the last digit grows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from neuron_merging.errors import ModelError
from neuron_merging.files.examples import feed
from neuron_merging.files.needed import message, onnx
from neuron_merging.files.network import FileNetwork
from neuron_merging.files.reading import session
from neuron_merging.graph.double import Doubled, double_copy, wide
from neuron_merging.graph.trees import called, flatten_outputs

ENOUGH = {torch.float16: 5e-2, torch.float32: 2e-3}
"""Of the largest entry: sums are taken in another order."""
LEAST = {torch.float16: 1e-3, torch.float32: 1e-6}
"""onnxruntime's sigmoid and its like are exact to that."""
ROUNDED = 16.0
"""How many times as far as its own rounding takes a network two runs of it may lie apart."""


def agrees(mine: Tensor, theirs: Any, rounding: float = 0.0) -> bool:
    """Whether two results are the same, but for the order of sums."""
    other = torch.from_numpy(np.array(theirs))
    if mine.shape != other.shape or (mine.dtype != other.dtype and not _fractions(mine, other)):
        return False
    if not mine.is_floating_point():
        return True  # where a whole number turns on the last digit of a sum, both are right
    a, b = mine.double(), other.double()
    finite = a.isfinite() & b.isfinite()
    if not bool((finite | (a == b) | (a.isnan() & b.isnan())).all()):
        return False
    if not bool(finite.any()):
        return True
    limit = ENOUGH.get(mine.dtype, 1e-4) * float(b[finite].abs().max()) + LEAST.get(mine.dtype, 1e-9)
    return float((a - b)[finite].abs().max()) <= max(limit, ROUNDED * rounding)


def _fractions(*values: Tensor) -> bool:
    return all(value.is_floating_point() for value in values)


@torch.no_grad()
def rounding(network: nn.Module, inputs: Sequence[Any]) -> list[float]:
    """How far the precision that a network computes in takes each of its results from those in double precision."""
    plain, copy = flatten_outputs(called(network, inputs)), double_copy(network, weights=False)
    with Doubled():  # type: ignore[no-untyped-call]
        exact = flatten_outputs(called(copy, tree_map(wide, tuple(inputs))))
    return [_apart(a.double(), b.double()) for a, b in zip(plain, exact, strict=True)]


def _apart(a: Tensor, b: Tensor) -> float:
    if a.shape != b.shape or not a.numel():
        return 0.0
    return float((a - b).abs().nan_to_num(0.0, 0.0).max())


@torch.no_grad()
def first_wrong(network: FileNetwork, inputs: Sequence[Tensor]) -> str | None:
    """The first step whose results are not those of onnxruntime; None if the network's are."""
    file, outputs = network.origin.file, list(network.program.outputs)
    if outputs:
        wanted = file.session.run(outputs, feed(file, inputs))
        if all(agrees(mine, theirs) for mine, theirs in zip(network(*inputs), wanted, strict=False)):
            return None
    values = network.values(*inputs, every=True)
    named = [name for step in network.program.steps for name in step.makes if isinstance(values.get(name), Tensor)]
    known = dict(zip(named, _every(network, named).run(named, feed(file, inputs)), strict=True))
    return _first_apart(network, values, known)


def _first_apart(network: FileNetwork, values: Mapping[str, Any], known: Mapping[str, Any]) -> str | None:
    """The first step that does not make of what onnxruntime's was given what that made of it."""
    given = {**values, **{name: torch.from_numpy(np.array(value)) for name, value in known.items()}}
    for module in network.running:
        step = module.step.value
        made = module([given.get(name) for name in step.reads], network.sizes)
        pairs = [(value, known[name]) for name, value in zip(step.makes, made, strict=False) if name in known]
        if not all(isinstance(mine, Tensor) and agrees(mine, theirs) for mine, theirs in pairs):
            return step.name
    return None


def _every(network: FileNetwork, names: Sequence[str]) -> Any:
    """The tidy model with these values as its outputs, not optimised: so each is there."""
    model = onnx.ModelProto()
    model.CopyFrom(network.program.model)
    known = {value.name for value in model.graph.output}
    model.graph.output.extend(onnx.helper.make_empty_tensor_value_info(name) for name in names if name not in known)
    try:
        return session(model.SerializeToString())
    except message.EncodeError as error:  # beyond two gigabytes there is no looking at it step by step
        where = str(network.origin.file.path)
        raise ModelError(
            "torch does not compute what onnxruntime does, and it is too large to see why", where=where
        ) from error
