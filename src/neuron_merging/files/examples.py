"""Example inputs of a file: the sizes that it fixes, and for free ones some that onnxruntime accepts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any

import torch
from torch import Tensor

from neuron_merging.errors import ModelError, told
from neuron_merging.files.operators.moving import DTYPES
from neuron_merging.files.reading import File

PLANES = ((224, 224), (64, 64), (48, 160), (32, 128), (320, 320), (640, 640), (28, 28), (32, 32), (8, 8))
"""Heights and widths of images, in the order in which they are tried."""
LENGTHS = (16, 128, 8, 1, 32, 64, 512, 576, 1024, 4096, 16000)
"""Lengths of sequences, the last ones of sound."""
Shape = tuple[int, ...]


def example_inputs(file: File) -> tuple[Tensor, ...]:
    """Random inputs that the file takes; the first sizes that run.

    Raises
    ------
    ModelError
        None of those that are tried do.
    """
    _check_sizes(file)
    session, problem = file.session, "no shapes were tried"
    for shapes in _candidates(file):
        inputs = made(file, shapes)
        try:
            session.run(None, feed(file, inputs))
        except Exception as error:  # noqa: BLE001 (onnxruntime has a class for every fault, and no common one)
            problem = told(error)
            continue
        return inputs
    raise ModelError(
        f"the file leaves sizes open, and none of those that were tried run: {problem}",
        where=str(file.path),
        fix=f"Give the shape of each input, as in --input 1,3,224,224: {'; '.join(map(_described, file.inputs))}.",
    )


def made(file: File, shapes: Sequence[Shape]) -> tuple[Tensor, ...]:
    """Random inputs of these shapes, of the file's types."""
    if len(shapes) != len(file.inputs):
        names = ", ".join(value.name for value in file.inputs)
        what = f"the file takes {len(file.inputs)} inputs ({names}), and {len(shapes)} shapes were given"
        raise ModelError(what, where="--input", fix="Give one for each, in this order.")
    pick = torch.Generator("cpu").manual_seed(0)
    return tuple(_random(shape, dtype_of(value), pick) for value, shape in zip(file.inputs, shapes, strict=True))


def feed(file: File, inputs: Sequence[Tensor]) -> dict[str, Any]:
    """Inputs by name, as onnxruntime takes them."""
    values = [tensor.detach().cpu().numpy() for tensor in inputs]
    return dict(zip([value.name for value in file.inputs], values, strict=True))


def dtype_of(value: Any) -> torch.dtype:
    """The type of an input."""
    found = DTYPES.get(value.type.tensor_type.elem_type)
    if found is None:
        fix = "Give a file whose inputs are tensors of numbers: what turns text into them belongs before it."
        raise ModelError("the input is no tensor of numbers", where=value.name, fix=fix)
    return found


def free_batch(file: File) -> bool:
    """Whether every input leaves its first size open, and all under one name."""
    firsts = [next(iter(_sizes(value)), None) for value in file.inputs]
    return bool(firsts) and all(size is None or isinstance(size, str) for size in firsts) and len(set(firsts)) == 1


def _sizes(value: Any) -> list[int | str | None]:
    """The sizes of an input: numbers, names of free ones, or nothing at all."""
    dims = value.type.tensor_type.shape.dim
    return [dim.dim_value if dim.dim_value > 0 else dim.dim_param or None for dim in dims]


def _described(value: Any) -> str:
    """An input with its sizes, as the file names them."""
    return f"{value.name} ({', '.join(str(size or '?') for size in _sizes(value))})"


def _check_sizes(file: File) -> None:
    """A size of zero is one that is fixed: nothing goes in, and nothing can be seen."""
    for value in file.inputs:
        if any(dim.HasField("dim_value") and dim.dim_value == 0 for dim in value.type.tensor_type.shape.dim):
            fix = "Write a name in its place, which leaves it open, or the size that the network is used with."
            raise ModelError(
                f"the file fixes a size of its input {value.name!r} as zero", where=str(file.path), fix=fix
            )


def _candidates(file: File) -> Iterator[list[Shape]]:
    """Shapes of all inputs. Besides the first there may be states, the open sizes of which are those of the batch."""
    sizes = [_without_batch(_sizes(value), file) for value in file.inputs]
    planes = PLANES if any(_open(own) for own in sizes if len(own) == 4) else PLANES[:1]
    lengths = LENGTHS if any(_open(own) for own in sizes if len(own) != 4) else LENGTHS[:1]
    states = (False, True) if any(_open(own) for own in sizes[1:]) else (False,)
    for plane, length, state in product(planes, lengths, states):
        first = [_filled(own, plane, length) for own in sizes[:1]]
        yield first + [_filled(own, plane, 1 if state else length) for own in sizes[1:]]


def _without_batch(own: list[int | str | None], file: File) -> list[int | str | None]:
    """The sizes of an input with a batch of one, under whichever name it stands first in any of them."""
    batches = {next(iter(_sizes(value)), None) for value in file.inputs}
    return [1 if isinstance(size, str) and size in batches else size for size in own]


def _open(own: list[int | str | None]) -> bool:
    return any(not isinstance(size, int) for size in own[1:])


def _filled(own: list[int | str | None], plane: tuple[int, int], length: int) -> Shape:
    """A batch of one; images by height and width, everything else by length."""
    if len(own) == 4:
        last = own[3] if isinstance(own[3], int) else 0
        high = (2, 3) if last not in (1, 3, 4) else (1, 2)
        guesses = {high[0]: plane[0], high[1]: plane[1]}
    else:
        guesses = {}
    fill = {dim: guesses.get(dim, 3 if len(own) == 4 else length) for dim in range(len(own))} | {0: 1}
    return tuple(size if isinstance(size, int) else fill[dim] for dim, size in enumerate(own))


def _random(shape: Shape, dtype: torch.dtype, pick: torch.Generator) -> Tensor:
    if dtype.is_floating_point:
        return torch.rand(shape, generator=pick).to(dtype)
    return torch.randint(2, shape, generator=pick).to(dtype)
