"""Operators that reshape, slice, pad, cast or otherwise move data."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from neuron_merging.onnx.operators import OpCall, UnsupportedUsage

TORCH_DTYPES = {
    1: torch.float32,
    2: torch.uint8,
    3: torch.int8,
    5: torch.int16,
    6: torch.int32,
    7: torch.int64,
    9: torch.bool,
    10: torch.float16,
    11: torch.float64,
    16: torch.bfloat16,
}
"""torch dtypes by `TensorProto.DataType` number."""


@torch.library.custom_op("neuron_merging::select_channels", mutates_args=())
def select_channels(x: Tensor, selection: Tensor) -> Tensor:
    """Pick channels of `x`: the i-th one is where row i of `selection` has its one."""
    return x.index_select(1, selection.argmax(1))


@select_channels.register_fake
def _make_fake_selection(x: Tensor, selection: Tensor) -> Tensor:
    return x.new_empty((x.shape[0], selection.shape[0], *x.shape[2:]))


def _save_selection(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    x, selection = inputs
    ctx.save_for_backward(selection)
    ctx.shape = x.shape


def _differentiate_selection(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
    (selection,) = ctx.saved_tensors
    return gradient.new_zeros(ctx.shape).index_add(1, selection.argmax(1), gradient), None


select_channels.register_autograd(_differentiate_selection, setup_context=_save_selection)


def spell_out_selections(program: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    """Replace `select_channels` by operators of torch, so that a program runs where this package is not installed."""
    own = torch.ops.neuron_merging.select_channels.default
    if not any(node.target is own for node in program.graph.nodes):
        return program
    spelled_out: torch.export.ExportedProgram = program.run_decompositions(
        {own: lambda x, selection: x.index_select(1, selection.argmax(1))}
    )
    return spelled_out


def run_select_channels(call: OpCall) -> Tensor:
    selected: Tensor = select_channels(call.get_tensor(0), call.get_tensor(1))
    return selected


def run_shape(call: OpCall) -> np.ndarray[Any, Any]:
    sizes = np.array(call.get_tensor(0).shape, np.int64)
    return sizes[call.get_attribute("start", 0) : call.get_attribute("end", len(sizes))]


def run_size(call: OpCall) -> np.ndarray[Any, Any]:
    return np.array(call.get_tensor(0).numel(), np.int64)


def run_reshape(call: OpCall) -> Tensor:
    x = call.get_tensor(0)
    wanted = call.get_integers(1, "shape")
    if wanted is None:
        raise UnsupportedUsage
    if not call.get_attribute("allowzero", 0):  # 0 copies the size of the input
        wanted = [x.shape[i] if n == 0 else n for i, n in enumerate(wanted)]
    return x.reshape(infer_reshape_sizes(wanted, call.apply_new_sizes("size", wanted)))


def infer_reshape_sizes(sizes: Sequence[int], new: Sequence[int]) -> list[int]:
    """Return the sizes of a reshape after pruning.

    A size of -1 stays -1. A leading size that changed becomes -1, because it may contain the batch size as well.

    >>> infer_reshape_sizes([-1, 8, 32], [4, 6, 32]), infer_reshape_sizes([8, 16, 32], [6, 16, 32])
    ([-1, 6, 32], [-1, 16, 32])
    """
    inferred = [a if a == -1 else b for a, b in zip(sizes, new, strict=True)]
    if -1 not in inferred and inferred and inferred[0] != sizes[0]:
        inferred[0] = -1
    return inferred


def run_flatten(call: OpCall) -> Tensor:
    x, axis = call.get_tensor(0), int(call.get_attribute("axis", 1))
    axis = axis + x.ndim if axis < 0 else axis
    if axis == 1 and x.ndim > 1:
        return torch.flatten(x, 1)
    return x.reshape(int(np.prod(x.shape[:axis], dtype=np.int64)), -1)


def run_transpose(call: OpCall) -> Tensor:
    x = call.get_tensor(0)
    return x.permute(tuple(call.get_attribute("perm", tuple(reversed(range(x.ndim))))))


def run_squeeze(call: OpCall) -> Tensor:
    x, axes = call.get_tensor(0), call.get_integers(1, "axes")
    dims = [d for d, n in enumerate(x.shape) if n == 1] if axes is None else [a % x.ndim for a in axes]
    for dim in sorted(dims, reverse=True):
        x = x.squeeze(dim)
    return x


def run_unsqueeze(call: OpCall) -> Tensor:
    x, axes = call.get_tensor(0), call.get_integers(1, "axes") or []
    for axis in sorted(axis % (x.ndim + len(axes)) for axis in axes):
        x = x.unsqueeze(axis)
    return x


def run_concat(call: OpCall) -> Tensor:
    return torch.cat([call.get_tensor(i) for i in range(len(call.inputs))], int(call.get_attribute("axis", 0)))


def run_split(call: OpCall) -> Sequence[Tensor]:
    x, axis = call.get_tensor(0), int(call.get_attribute("axis", 0))
    axis %= x.ndim
    pieces = call.get_integers(1, "split")
    if pieces is None:
        if x.shape[axis] % call.output_count == 0:
            return torch.chunk(x, call.output_count, axis)
        each = -(-x.shape[axis] // call.output_count)  # ONNX rounds up and makes the last piece smaller
        pieces = [each] * (call.output_count - 1) + [x.shape[axis] - each * (call.output_count - 1)]
    return torch.split(x, call.apply_new_sizes("pieces", pieces), axis)


def run_slice(call: OpCall) -> Tensor:
    x = call.get_tensor(0)
    starts, ends = call.get_integers(1, "starts"), call.get_integers(2, "ends")
    if starts is None or ends is None:
        raise UnsupportedUsage
    axes = call.get_integers(3, "axes") or list(range(len(starts)))
    steps = call.get_integers(4, "steps") or [1] * len(starts)
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        x = _slice_dimension(call, x, axis % x.ndim, start, end, step)
    return x


def _slice_dimension(call: OpCall, x: Tensor, dim: int, start: int, end: int, step: int) -> Tensor:
    size = x.shape[dim]
    if step < 0:  # torch has no negative steps; a complete reversal is a flip
        if step != -1 or start not in (-1, size - 1) or end > -size:
            raise UnsupportedUsage
        return x.flip(dim)
    start = min(max(start + size, 0) if start < 0 else start, size)
    end = max(end + size, 0) if end < 0 else end
    end = sys.maxsize if end >= size else end  # "to the end" stays true after channels are removed
    start, end = call.apply_new_sizes(f"range.{dim}", [start, end])
    return torch.ops.aten.slice.Tensor(x, dim, start, end, step)  # type: ignore[no-any-return]


def run_expand(call: OpCall) -> Tensor:
    x, wanted = call.get_tensor(0), [int(n) for n in call.get_known_array(1)]
    missing = len(wanted) - x.ndim
    before = [1] * missing + list(x.shape) if missing > 0 else list(x.shape)
    wanted = [1] * -missing + wanted if missing < 0 else wanted
    # ONNX's Expand broadcasts both ways: the shape may have a 1 where the input is longer.
    full = [max(a, b) if b else 0 for a, b in zip(before, wanted, strict=True)]
    return x.expand(call.apply_new_sizes("size", full))


def run_tile(call: OpCall) -> Tensor:
    return call.get_tensor(0).repeat([int(n) for n in call.get_known_array(1)])


def run_pad(call: OpCall) -> Tensor:
    x, amounts = call.get_tensor(0), call.get_integers(1, "pads")
    if amounts is None or call.has_input(3):
        raise UnsupportedUsage
    half = len(amounts) // 2
    before, after = amounts[:half], amounts[half:]
    used = [n for pair in zip(reversed(before), reversed(after), strict=True) for n in pair]
    # Leave out trailing zeros: F.pad lists the last dimension first, and those stand for the batch and the channels.
    while len(used) > 2 and used[-2:] == [0, 0]:
        used = used[:-2]
    mode = call.get_attribute("mode", "constant")
    if mode == "constant":
        return torch.ops.aten.constant_pad_nd.default(x, used, call.get_number(2, "value", 0.0))  # type: ignore[no-any-return]
    if mode not in ("reflect", "edge") or len(used) > 2 * (x.ndim - 1):
        raise UnsupportedUsage
    while len(used) < 2 * (x.ndim - 2):
        used += [0, 0]
    return F.pad(x, used, "reflect" if mode == "reflect" else "replicate")


def run_depth_to_space(call: OpCall) -> Tensor:
    x, block = call.get_tensor(0), int(call.get_attribute("blocksize"))
    if call.get_attribute("mode", "DCR") == "CRD":
        return F.pixel_shuffle(x, block)
    batch, channels, height, width = x.shape
    parts = x.reshape(call.apply_new_sizes("size", [batch, block, block, channels // block**2, height, width]))
    return parts.permute(0, 3, 4, 1, 5, 2).reshape(batch, -1, height * block, width * block)


def run_space_to_depth(call: OpCall) -> Tensor:
    x, block = call.get_tensor(0), int(call.get_attribute("blocksize"))
    batch, channels, height, width = x.shape
    parts = x.reshape(batch, channels, height // block, block, width // block, block)
    return parts.permute(0, 3, 5, 1, 2, 4).reshape(batch, -1, height // block, width // block)


def run_cast(call: OpCall) -> Tensor:
    wanted = TORCH_DTYPES.get(int(call.get_attribute("to")))
    x = call.get_tensor(0)
    if wanted is None:
        raise UnsupportedUsage
    return x if x.dtype == wanted else x.to(wanted)


def run_cast_like(call: OpCall) -> Tensor:
    return call.get_tensor(0).to(call.get_tensor(1).dtype)


def run_identity(call: OpCall) -> Any:
    return call.inputs[0]


def run_dropout(call: OpCall) -> Any:
    if call.output_count > 1:
        raise UnsupportedUsage
    return call.inputs[0]


def run_where(call: OpCall) -> Tensor:
    return torch.where(call.get_tensor(0), call.get_operand(1), call.get_operand(2))  # type: ignore[arg-type]


def run_trilu(call: OpCall) -> Tensor:
    diagonal = int(call.get_known_array(1).reshape(()).item()) if call.has_input(1) else 0
    return (torch.triu if call.get_attribute("upper", 1) else torch.tril)(call.get_tensor(0), diagonal)
