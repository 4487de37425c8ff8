"""Flatten, clone and name nested inputs and outputs, and call a model on them."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import register_pytree_node, tree_leaves, tree_map

USE_CACHE_ARGUMENT = "use_cache"
"""The argument of decoders in `transformers` that makes them return key-value caches, which are no real outputs."""


class KeywordInputs(dict[str, Any]):
    """Inputs that are passed by name. They are the last item of a tuple of inputs."""


register_pytree_node(
    KeywordInputs,
    lambda named: (list(named.values()), list(named)),
    lambda values, names: KeywordInputs(zip(names, values, strict=True)),
)


def flatten_inputs(inputs: Any) -> list[Any]:
    """Return the leaves of nested tuples, lists and mappings, in the order of `Graph.inputs`.

    >>> flatten_inputs(({"image": 1, "boxes": [2, 3]}, None))
    [1, 2, 3, None]
    """
    return tree_leaves(inputs)


def clone_inputs(inputs: Any) -> Any:
    """Return the inputs with cloned tensors: a network may write into its inputs."""
    return tree_map(lambda value: value.clone() if isinstance(value, Tensor) else value, inputs)


def move_tensors(values: Any, device: torch.device) -> Any:
    """Return nested values with their tensors on a device."""
    return tree_map(lambda value: value.to(device) if isinstance(value, Tensor) else value, values)


def normalize_inputs(example_inputs: Any, model: object = None) -> tuple[Any, ...]:
    """Return example inputs as a tuple.

    They may be a tensor, a tuple or list of positional inputs, or a mapping by the names of forward()'s arguments.
    """
    if isinstance(example_inputs, (tuple, list)):
        given = tuple(example_inputs)
    else:
        given = (example_inputs,)
    names = get_forward_parameters(model)
    # A mapping with other keys is a single argument that happens to be a dict.
    if len(given) == 1 and isinstance(given[0], Mapping) and names and set(given[0]) <= set(names):
        given = (KeywordInputs(given[0]),)
    return _disable_cache(given, model, names)


def get_forward_parameters(model: object) -> dict[str, inspect.Parameter]:
    """Return the arguments of a network's forward() that can be passed by name."""
    try:
        parameters = inspect.signature(model.forward).parameters if isinstance(model, nn.Module) else {}
    except (TypeError, ValueError):
        return {}
    return {name: p for name, p in parameters.items() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}


def _disable_cache(inputs: tuple[Any, ...], model: object, names: Mapping[str, inspect.Parameter]) -> tuple[Any, ...]:
    """Add `use_cache=False` to the inputs if the network would return a cache otherwise."""
    returns_cache = USE_CACHE_ARGUMENT in names or bool(
        getattr(getattr(model, "config", None), USE_CACHE_ARGUMENT, False)
    )
    positional, named = split_keyword_inputs(inputs)
    if not returns_cache or USE_CACHE_ARGUMENT in named or USE_CACHE_ARGUMENT in list(names)[: len(positional)]:
        return inputs
    return (*positional, KeywordInputs({**named, USE_CACHE_ARGUMENT: False}))


def get_leaf_names(model: object, inputs: Sequence[Any]) -> list[str]:
    """Return a name for each leaf of the inputs, after the arguments of the network's forward()."""
    positional, named = split_keyword_inputs(inputs)
    given = [*zip(get_forward_parameters(model), positional, strict=False), *named.items()]
    leaf_counts = [(name, len(flatten_inputs(value))) for name, value in given]
    return [name if count == 1 else f"{name}_{i}" for name, count in leaf_counts for i in range(count)]


def split_keyword_inputs(inputs: Sequence[Any]) -> tuple[tuple[Any, ...], KeywordInputs]:
    """Split inputs into positional ones and those passed by name."""
    if inputs and isinstance(inputs[-1], KeywordInputs):
        return tuple(inputs[:-1]), inputs[-1]
    return tuple(inputs), KeywordInputs()


def call_model(network: Any, inputs: Sequence[Any]) -> Any:
    """Call a network on these inputs and return its outputs.

    >>> call_model(lambda x, times=1: x * times, (2, KeywordInputs(times=3)))
    6
    """
    positional, named = split_keyword_inputs(inputs)
    return network(*positional, **named)


def flatten_outputs(value: Any) -> list[Tensor]:
    """Return all tensors of a network's output, in order, also those inside objects of its own classes."""
    return list(_iter_nested_tensors(value, set()))


def _iter_nested_tensors(value: Any, above: set[int]) -> Iterator[Tensor]:
    for leaf in flatten_inputs(value.to_tuple() if hasattr(value, "to_tuple") else value):
        if isinstance(leaf, Tensor):
            yield leaf
        elif id(leaf) not in above:  # objects may refer to each other in a cycle
            yield from _iter_nested_tensors(_get_object_contents(leaf), {*above, id(leaf)})


def _get_object_contents(value: Any) -> list[Any]:
    """Return the contents of an object that is no pytree to torch; nothing for classes, modules and functions."""
    if isinstance(value, Mapping):
        return list(value.values())
    if is_dataclass(value) and not isinstance(value, type):
        return [getattr(value, field.name) for field in fields(value)]
    if isinstance(value, (type, nn.Module)) or not hasattr(value, "__dict__") or callable(value):
        return []
    return list(vars(value).values())
