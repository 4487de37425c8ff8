"""Nested inputs and outputs: flatten, clone and name them, and call a model on them. Example inputs: infer the batch
size, slice samples, and draw similar inputs in other sizes.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.utils._pytree import register_pytree_node, tree_leaves, tree_map, tree_structure, tree_unflatten

from neuron_merging.graph.half_precision import fast_half_precision

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
        # As a tokenizer returns them.
        given = (KeywordInputs(given[0]),)
    return _disable_cache(given, model, names)


def get_forward_parameters(model: object) -> dict[str, inspect.Parameter]:
    """Return the arguments of a network's forward() that can be passed by name."""
    try:
        parameters = inspect.signature(model.forward).parameters if isinstance(model, nn.Module) else {}
    except (TypeError, ValueError):
        return {}
    return {name: p for name, p in parameters.items() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}


def get_input_names(model: object) -> list[str]:
    """Return the names of a network's inputs in order: those of its file, else the arguments of its forward()."""
    names = getattr(model, "input_names", None)
    return list(get_forward_parameters(model)) if names is None else list(names)


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
    with fast_half_precision(network.parameters() if isinstance(network, nn.Module) else ()):
        return network(*positional, **named)


def flatten_outputs(value: Any) -> list[Tensor]:
    """Return all tensors of a network's output, in order, also those inside objects of its own classes."""
    return list(_iter_nested_tensors(value, set()))


def _iter_nested_tensors(value: Any, above: set[int]) -> Iterator[Tensor]:
    # Outputs of transformers are objects with `to_tuple`, which drops fields that are None.
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


InputTuple = tuple[Any, ...]


def infer_batch_size(inputs: Sequence[Any]) -> int:
    """Return the length of the first input tensor that has a dimension; 1 if there is none.

    >>> infer_batch_size((torch.zeros(()), {"image": torch.zeros(4, 3)}))
    4
    """
    return next((len(value) for value in flatten_inputs(inputs) if isinstance(value, Tensor) and value.ndim), 1)


def has_batch_axis(value: Any, batch: int) -> TypeGuard[Tensor]:
    """Return whether an input has one entry per sample: a tensor whose first dimension has the batch size."""
    return isinstance(value, Tensor) and value.ndim > 0 and len(value) == batch


def map_batched(inputs: Sequence[Any], change: Callable[[int, Tensor], Tensor], batch: int | None = None) -> InputTuple:
    """Apply `change` to every input with a batch axis. It gets the position among the flat inputs, and the tensor."""
    size = infer_batch_size(inputs) if batch is None else batch
    values = [change(i, v) if has_batch_axis(v, size) else v for i, v in enumerate(flatten_inputs(inputs))]
    return tuple(tree_unflatten(values, tree_structure(list(inputs))))


def add_batch_axis(inputs: Sequence[Any]) -> InputTuple:
    """Return a single sample as a batch of one."""
    return tuple(tree_map(lambda value: value[None] if isinstance(value, Tensor) else value, list(inputs)))


def take_sample(inputs: Sequence[Any], i: int) -> InputTuple:
    """Return sample `i` of a batch, without the batch dimension."""
    return map_batched(inputs, lambda _, value: value[i])


def slice_samples(inputs: Sequence[Any], part: slice) -> InputTuple:
    """Return a slice of a batch."""
    return map_batched(inputs, lambda _, value: value[part])


def take_samples(inputs: Sequence[Any], count: int) -> InputTuple:
    """Return the first `count` samples of a batch; the same tensors if it has no more."""
    return tuple(inputs) if infer_batch_size(inputs) <= count else slice_samples(inputs, slice(count))


def split_samples(inputs: Sequence[Any], size: int) -> list[InputTuple]:
    """Split a batch into batches of `size` samples; a remainder that is smaller is left out.

    >>> [len(x) for x, in split_samples((torch.zeros(7, 3),), 2)]
    [2, 2, 2]
    """
    count = infer_batch_size(inputs)
    if count == size:
        return [tuple(inputs)]
    return [slice_samples(inputs, slice(i, i + size)) for i in range(0, count - size + 1, size)]


def resample_inputs(inputs: Sequence[Any], count: int, batch: int | None = None) -> InputTuple:
    """Return `count` samples similar to these, by repeating them with noise.

    `batch` is the current batch size; left out, it is inferred.
    """
    generator = torch.Generator("cpu").manual_seed(0)
    return map_batched(inputs, lambda _, value: _repeat_with_noise(value, count, generator), batch)


def _repeat_with_noise(value: Tensor, count: int, generator: torch.Generator) -> Tensor:
    repeated = repeat_entries(value, (count, *value.shape[1:]))
    if not value.is_floating_point() or not bool(value.isfinite().all()):
        return repeated
    # Drawn in float64 on the CPU: the same noise on every device and in every dtype.
    noise = torch.randn(repeated.shape, generator=generator, dtype=torch.float64, device="cpu")
    return repeated + noise.to(repeated)


def repeat_entries(value: Tensor, shape: Sequence[int]) -> Tensor:
    """Repeat or crop a tensor to another shape, cyclically.

    No new values appear: integers and masks may only be valid as they are in the example.
    """
    for dim, size in enumerate(shape):
        if size != value.shape[dim]:
            value = value.index_select(dim, torch.arange(size, device=value.device) % value.shape[dim])
    return value


def draw_example(
    shape: Sequence[int], dtype: torch.dtype, pick: torch.Generator, *, kinds: int = 2, positive: bool = False
) -> Tensor:
    """Draw an input of which only shape and dtype are known.

    Floats are standard normal, or uniform in [0, 1) if `positive`. Integers are uniform below `kinds`.
    """
    if not dtype.is_floating_point:
        return torch.randint(kinds, tuple(shape), generator=pick, device="cpu").to(dtype)
    draw = torch.rand if positive else torch.randn
    return draw(tuple(shape), generator=pick, device="cpu").to(dtype)


def draw_like(value: Tensor, shape: Sequence[int], pick: torch.Generator, tokens: int | None = None) -> Tensor:
    """Draw fresh entries similar to an input's, in another shape.

    `tokens` is the size of the vocabulary if the input holds row numbers of an embedding table.
    """
    if tokens is not None:
        return draw_tokens(value, shape, pick, tokens)
    if not value.is_floating_point() or not bool(value.isfinite().all()):
        return repeat_entries(value, shape)
    if _is_categorical(value):
        index = torch.randint(value.numel(), tuple(shape), generator=pick, device="cpu").to(value.device)
        return value.flatten()[index]
    return _draw_noise(value, shape, pick)


def draw_tokens(value: Tensor, shape: Sequence[int], pick: torch.Generator, tokens: int) -> Tensor:
    """Draw row numbers of an embedding table uniformly."""
    return torch.randint(tokens, tuple(shape), generator=pick, device="cpu").to(value)


def _is_categorical(value: Tensor) -> bool:
    """Return whether a float tensor holds integers, not all equal: flags or counts."""
    return bool((value == value.round()).all()) and bool((value != value.flatten()[0]).any())


def _draw_noise(value: Tensor, shape: Sequence[int], pick: torch.Generator) -> Tensor:
    """Draw Gaussian noise with the example's mean and standard deviation, clamped to its range.

    A constant example, such as `torch.zeros`, tells neither: then the noise is standard normal.
    """
    noise = torch.randn(tuple(shape), generator=pick, dtype=torch.float64, device="cpu").to(value.device)
    example = value.double()
    if not bool((example != example.flatten()[0]).any()):
        return noise.to(value.dtype)
    return (example.mean() + example.std() * noise).clamp(example.min(), example.max()).to(value.dtype)


def find_batch_size_change(example: Sequence[Any], inputs: Sequence[Any]) -> tuple[int, int] | None:
    """Return the batch sizes of two lists of flat inputs whose shapes differ only in that; else None."""
    pairs = [(a.shape, b.shape) for a, b in zip(example, inputs, strict=True) if isinstance(a, Tensor)]
    sizes = {(a[0] if a else 0, b[0] if b else 0) for a, b in pairs if a != b}
    return next(iter(sizes)) if len(sizes) == 1 and all(a[1:] == b[1:] for a, b in pairs) else None
