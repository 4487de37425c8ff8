"""Layers with weights, norms, pooling, reductions, softmax and resampling."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from neuron_merging.onnx.operators import OpCall, OpHandler, Shapes, UnsupportedUsage

CONV_FUNCTIONS = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
CONV_TRANSPOSE_FUNCTIONS = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}


def read_int_attribute(call: OpCall, name: str, default: Sequence[int]) -> list[int]:
    return [int(n) for n in call.get_attribute(name, default)]


def compute_window_pads(call: OpCall, x: Tensor, kernel: Sequence[int]) -> tuple[list[int], list[int]]:
    """Return the padding of a window before and after each dimension, with `auto_pad` resolved."""
    count, auto_pad = len(kernel), call.get_attribute("auto_pad", "NOTSET")
    pads = read_int_attribute(call, "pads", [0] * 2 * count)
    if auto_pad in ("NOTSET", "VALID"):
        return (pads[:count], pads[count:]) if auto_pad == "NOTSET" else ([0] * count, [0] * count)
    before, after = [], []
    strides, dilations = (
        read_int_attribute(call, "strides", [1] * count),
        read_int_attribute(call, "dilations", [1] * count),
    )
    for size, width, stride, dilation in zip(x.shape[-count:], kernel, strides, dilations, strict=True):
        # SAME: ceil(size / stride) outputs. An odd padding puts the extra entry last (UPPER) or first (LOWER).
        extent = (width - 1) * dilation + 1
        total = max((math.ceil(size / stride) - 1) * stride + extent - size, 0)
        small, large = total // 2, total - total // 2
        before.append(small if auto_pad == "SAME_UPPER" else large)
        after.append(large if auto_pad == "SAME_UPPER" else small)
    return before, after


def to_torch_padding(before: Sequence[int], after: Sequence[int]) -> list[int]:
    """Interleave paddings in the order of `F.pad`: the last dimension first."""
    return [n for pair in zip(reversed(before), reversed(after), strict=True) for n in pair]


def run_conv(call: OpCall) -> Tensor:
    x, weight = call.get_tensor(0), call.get_tensor(1)
    count = weight.ndim - 2
    if count not in CONV_FUNCTIONS:
        raise UnsupportedUsage
    before, after = compute_window_pads(call, x, weight.shape[2:])
    padding: Any = before
    if before != after:  # torch's convolutions pad both sides equally
        x, padding = F.pad(x, to_torch_padding(before, after)), 0
    (groups,) = call.apply_new_sizes("groups", [int(call.get_attribute("group", 1))])
    strides, dilations = (
        read_int_attribute(call, "strides", [1] * count),
        read_int_attribute(call, "dilations", [1] * count),
    )
    return CONV_FUNCTIONS[count](x, weight, call.get_optional_tensor(2), strides, padding, dilations, groups)


def run_conv_transpose(call: OpCall) -> Tensor:
    x, weight = call.get_tensor(0), call.get_tensor(1)
    count = weight.ndim - 2
    before, after = compute_window_pads(call, x, weight.shape[2:])
    computes_pads = call.get_attribute("output_shape") is not None or call.get_attribute("auto_pad", "NOTSET") not in (
        "NOTSET",
        "VALID",
    )
    if count not in CONV_TRANSPOSE_FUNCTIONS or before != after or computes_pads:
        raise UnsupportedUsage
    strides, dilations = (
        read_int_attribute(call, "strides", [1] * count),
        read_int_attribute(call, "dilations", [1] * count),
    )
    output_padding = read_int_attribute(call, "output_padding", [0] * count)
    (groups,) = call.apply_new_sizes("groups", [int(call.get_attribute("group", 1))])
    return CONV_TRANSPOSE_FUNCTIONS[count](
        x, weight, call.get_optional_tensor(2), strides, before, output_padding, groups, dilations
    )


def run_gemm(call: OpCall) -> Tensor:
    x, weight = call.get_tensor(0), call.get_tensor(1)
    alpha, beta = float(call.get_attribute("alpha", 1.0)), float(call.get_attribute("beta", 1.0))
    x = x.t() if call.get_attribute("transA", 0) else x
    bias = call.get_optional_tensor(2)
    rows = weight if call.get_attribute("transB", 0) else weight.t()  # one row per output, as in nn.Linear
    if alpha == 1.0 and (bias is None or (beta == 1.0 and bias.ndim == 1 and len(bias) == rows.shape[0])):
        return F.linear(x, rows, bias)
    product = F.linear(x, rows) * alpha
    return product if bias is None else product + bias * beta


def run_linear(call: OpCall) -> Tensor:
    return F.linear(call.get_tensor(0), call.get_tensor(1).t(), call.get_tensor(2))


def run_matmul(call: OpCall) -> Tensor:
    x, weight = call.get_tensor(0), call.get_tensor(1)
    return torch.matmul(x, weight)


def run_batch_norm(call: OpCall) -> Tensor:
    if call.output_count > 1 or call.get_attribute("training_mode", 0):
        raise UnsupportedUsage
    x, weight, bias, mean, variance = (call.get_tensor(i) for i in range(5))
    return F.batch_norm(x, mean, variance, weight, bias, False, 0.0, float(call.get_attribute("epsilon", 1e-5)))


def run_instance_norm(call: OpCall) -> Tensor:
    x, weight, bias = (call.get_tensor(i) for i in range(3))
    return F.instance_norm(x, weight=weight, bias=bias, eps=float(call.get_attribute("epsilon", 1e-5)))


def run_layer_norm(call: OpCall) -> Tensor:
    x = call.get_tensor(0)
    axis = int(call.get_attribute("axis", -1)) % x.ndim
    if call.output_count > 1:
        raise UnsupportedUsage
    shape = list(x.shape[axis:])
    return F.layer_norm(
        x, shape, call.get_tensor(1), call.get_optional_tensor(2), float(call.get_attribute("epsilon", 1e-5))
    )


def run_group_norm(call: OpCall) -> Tensor:
    x, weight, bias = call.get_tensor(0), call.get_tensor(1).flatten(), call.get_tensor(2).flatten()
    (groups,) = call.apply_new_sizes("groups", [int(call.get_attribute("num_groups"))])
    if weight.shape[0] != x.shape[1]:  # before opset 21, weight and bias have one entry per group
        raise UnsupportedUsage
    return F.group_norm(x, groups, weight, bias, float(call.get_attribute("epsilon", 1e-5)))


def run_gather(call: OpCall) -> Tensor:
    """Map Gather to the torch operator of its use: embedding lookup, one index, or several indices."""
    x, axis = call.get_tensor(0), int(call.get_attribute("axis", 0))
    axis %= x.ndim
    known_index = call.inputs[1]
    if isinstance(known_index, np.ndarray):
        index = np.where(known_index < 0, known_index + x.shape[axis], known_index)
        if index.ndim == 0:
            return torch.select(x, axis, int(index))
        if index.ndim == 1 and np.array_equal(index, np.arange(x.shape[axis])):
            return x
        selected = torch.index_select(x, axis, torch.from_numpy(index.ravel().astype(np.int64)))
        return selected if index.ndim == 1 else selected.unflatten(axis, index.shape)  # type: ignore[no-untyped-call]
    index_tensor = call.get_tensor(1).long()
    if axis == 0 and x.ndim == 2:
        return F.embedding(index_tensor, x)
    if index_tensor.ndim == 1:
        return torch.index_select(x, axis, index_tensor)
    raise UnsupportedUsage


MAX_POOL_FUNCTIONS = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}
AVG_POOL_FUNCTIONS = {1: F.avg_pool1d, 2: F.avg_pool2d, 3: F.avg_pool3d}
ADAPTIVE_AVG_POOL_FUNCTIONS: dict[int, Callable[..., Tensor]] = {
    1: F.adaptive_avg_pool1d,
    2: F.adaptive_avg_pool2d,
    3: F.adaptive_avg_pool3d,
}


def run_max_pool(call: OpCall) -> Tensor:
    x, kernel = call.get_tensor(0), read_int_attribute(call, "kernel_shape", ())
    count = len(kernel)
    if call.output_count > 1 or count not in MAX_POOL_FUNCTIONS:
        raise UnsupportedUsage
    before, after = compute_window_pads(call, x, kernel)
    strides, dilations = (
        read_int_attribute(call, "strides", [1] * count),
        read_int_attribute(call, "dilations", [1] * count),
    )
    # torch pads both sides equally, by at most half of the kernel.
    if before != after or any(2 * n > k for n, k in zip(before, kernel, strict=True)):
        x = F.pad(x, to_torch_padding(before, after), value=float("-inf"))
        before = [0] * count
    return MAX_POOL_FUNCTIONS[count](x, kernel, strides, before, dilations, bool(call.get_attribute("ceil_mode", 0)))


def run_average_pool(call: OpCall) -> Tensor:
    x, kernel = call.get_tensor(0), read_int_attribute(call, "kernel_shape", ())
    count = len(kernel)
    before, after = compute_window_pads(call, x, kernel)
    count_padding = bool(call.get_attribute("count_include_pad", 0))
    if count not in AVG_POOL_FUNCTIONS or set(read_int_attribute(call, "dilations", [1])) != {1}:
        raise UnsupportedUsage
    # Explicit zeros count in the mean, so padding by hand is right with count_include_pad only.
    if before != after and count_padding:
        x, before = F.pad(x, to_torch_padding(before, after)), [0] * count
    elif before != after or any(2 * n > k for n, k in zip(before, kernel, strict=True)):
        raise UnsupportedUsage
    strides, ceiling = read_int_attribute(call, "strides", [1] * count), bool(call.get_attribute("ceil_mode", 0))
    return AVG_POOL_FUNCTIONS[count](x, kernel, strides, before, ceiling, count_padding)


def run_global_average_pool(call: OpCall) -> Tensor:
    x = call.get_tensor(0)
    if x.ndim - 2 not in ADAPTIVE_AVG_POOL_FUNCTIONS:
        raise UnsupportedUsage
    return ADAPTIVE_AVG_POOL_FUNCTIONS[x.ndim - 2](x, 1)


def run_global_max_pool(call: OpCall) -> Tensor:
    x = call.get_tensor(0)
    return x.amax(tuple(range(2, x.ndim)), keepdim=True)


INTEGER_REDUCTIONS = (torch.sum, torch.amax, torch.amin)
"""Reductions that torch also supports for integers."""


def make_reduction(compute: Callable[..., Tensor]) -> OpHandler:
    """Make the handler of a reduction over axes."""

    def handler(call: OpCall) -> Any:
        x, axes = call.get_tensor(0), call.get_integers(1, "axes")
        if axes is None or not axes:
            if call.get_attribute("noop_with_empty_axes", 0):
                return x
            axes = list(range(x.ndim))
        if not x.is_floating_point() and compute not in INTEGER_REDUCTIONS:
            raise UnsupportedUsage
        reduced = compute(x, [a % x.ndim for a in axes], keepdim=bool(call.get_attribute("keepdims", 1)))
        return reduced if reduced.dtype == x.dtype else reduced.to(x.dtype)  # torch.sum turns integers into int64

    return handler


def make_arg_reduction(compute: Callable[..., Tensor]) -> OpHandler:
    """Make the handler of an ArgMax or ArgMin."""

    def handler(call: OpCall) -> Tensor:
        if call.get_attribute("select_last_index", 0):
            raise UnsupportedUsage
        return compute(call.get_tensor(0), int(call.get_attribute("axis", 0)), bool(call.get_attribute("keepdims", 1)))

    return handler


def make_softmax(compute: Callable[..., Tensor]) -> OpHandler:
    """Make the handler of a softmax. Before opset 13, it flattens all dimensions from the axis on."""

    def handler(call: OpCall) -> Tensor:
        x = call.get_tensor(0)
        axis = int(call.get_attribute("axis", -1 if call.version >= 13 else 1)) % x.ndim
        # Where at most one of the flattened dimensions is longer than 1, a softmax over that one is the same.
        if call.version >= 13 or all(size == 1 for size in x.shape[axis + 1 :]):
            return compute(x, axis)
        if all(size == 1 for size in x.shape[axis:-1]):
            return compute(x, x.ndim - 1)
        return compute(x.flatten(axis), axis).reshape(x.shape)

    return handler


def run_cumsum(call: OpCall) -> Tensor:
    if call.get_attribute("exclusive", 0) or call.get_attribute("reverse", 0):
        raise UnsupportedUsage
    return torch.cumsum(call.get_tensor(0), int(call.get_known_array(1).reshape(()).item()))


# Resampling


def run_resize(call: OpCall) -> Tensor:
    x, mode = call.get_tensor(0), call.get_attribute("mode", "nearest")
    coordinates = call.get_attribute(
        "coordinate_transformation_mode", "half_pixel" if call.version > 10 else "asymmetric"
    )
    sizes, scales = _compute_target_size(call, x)
    if sizes == list(x.shape):
        return x
    if sizes[:2] != list(x.shape[:2]) and mode != "nearest":
        raise UnsupportedUsage
    if mode == "nearest":
        return _resize_nearest(call, x, sizes, scales, coordinates)
    torch_modes = {
        ("linear", 3): "linear",
        ("linear", 4): "bilinear",
        ("linear", 5): "trilinear",
        ("cubic", 4): "bicubic",
    }
    torch_supports = (
        not call.get_attribute("antialias", 0) and float(call.get_attribute("cubic_coeff_a", -0.75)) == -0.75
    )
    if (
        (mode, x.ndim) not in torch_modes
        or coordinates not in ("half_pixel", "align_corners", "pytorch_half_pixel")
        or not torch_supports
    ):
        raise UnsupportedUsage
    return F.interpolate(x, sizes[2:], mode=torch_modes[mode, x.ndim], align_corners=coordinates == "align_corners")


def run_upsample(call: OpCall) -> Tensor:
    x, scales = call.get_tensor(0), call.get_attribute("scales") or [float(n) for n in call.get_known_array(1)]
    sizes = [int(size * scale) for size, scale in zip(x.shape, scales, strict=True)]
    if call.get_attribute("mode", "nearest") == "nearest":
        return _resize_nearest(call, x, sizes, list(scales), "asymmetric", "floor")
    raise UnsupportedUsage


def _compute_target_size(call: OpCall, x: Tensor) -> tuple[list[int], list[float]]:
    """Return the output shape of a Resize and the scale of every dimension."""
    if call.has_input(3) and call.get_known_array(3).size:
        if call.get_attribute("keep_aspect_ratio_policy", "stretch") != "stretch":
            raise UnsupportedUsage
        sizes, axes = [int(n) for n in call.get_known_array(3)], call.get_attribute("axes")
        if axes is not None:
            size_by_axis = dict(zip(axes, sizes, strict=True))
            sizes = [size_by_axis.get(dim, size) for dim, size in enumerate(x.shape)]
        # Batch and channels are never resized; the file's count of channels is outdated after pruning.
        sizes = [int(x.shape[0]), int(x.shape[1]), *sizes[2:]] if sizes[:2] != list(x.shape[:2]) else sizes
        return sizes, [new / old for new, old in zip(sizes, x.shape, strict=True)]
    slot = 2 if call.version > 10 else 1
    if call.get_attribute("axes") is not None:
        raise UnsupportedUsage
    scales = [float(n) for n in call.get_known_array(slot)]
    return [int(size * scale) for size, scale in zip(x.shape, scales, strict=True)], scales


def _resize_nearest(
    call: OpCall,
    x: Tensor,
    sizes: Sequence[int],
    scales: Sequence[float],
    coordinates: str,
    rounding: str | None = None,
) -> Tensor:
    rounding = rounding or call.get_attribute("nearest_mode", "round_prefer_floor" if call.version > 10 else "floor")
    source_indices = [
        _compute_source_indices(old, new, scale, coordinates, rounding)
        for old, new, scale in zip(x.shape, sizes, scales, strict=True)
    ]
    # F.interpolate(mode="nearest") reads floor(i * old / new). Other rules need explicit indices.
    as_in_torch = [
        np.array_equal(index, np.arange(new) * old // new)
        for index, old, new in zip(source_indices, x.shape, sizes, strict=True)
    ]
    if x.ndim in (3, 4, 5) and all(as_in_torch) and list(sizes[:2]) == list(x.shape[:2]):
        return F.interpolate(x, list(sizes[2:]), mode="nearest")
    for dim, index in enumerate(source_indices):
        if len(index) != x.shape[dim] or not np.array_equal(index, np.arange(len(index))):
            x = torch.index_select(x, dim, torch.from_numpy(index))
    return x


def _compute_source_indices(old: int, new: int, scale: float, coordinates: str, rounding: str) -> NDArray[np.int64]:
    """Return the input index of every output index (ONNX Resize, mode "nearest")."""
    position = np.arange(new, dtype=np.float64)
    if coordinates in ("half_pixel", "pytorch_half_pixel"):
        position = (position + 0.5) / scale - 0.5 if new > 1 or coordinates == "half_pixel" else position * 0
    elif coordinates == "align_corners":
        position = position * (old - 1) / max(new - 1, 1)
    elif coordinates == "asymmetric":
        position = position / scale
    else:
        raise UnsupportedUsage
    roundings: dict[str, Callable[[NDArray[np.float64]], NDArray[np.float64]]] = {
        "floor": np.floor,
        "ceil": np.ceil,
        "round_prefer_floor": lambda x: np.ceil(x - 0.5),
        "round_prefer_ceil": lambda x: np.floor(x + 0.5),
    }
    return np.clip(roundings[rounding](position), 0, old - 1).astype(np.int64)


def count_recurrent_macs(input_shapes: Shapes, output_shape: Sequence[int]) -> int:
    """Count both weight matrices once per time step and sample."""
    return math.prod(input_shapes[0][:2]) * (math.prod(input_shapes[1]) + math.prod(input_shapes[2]))


def count_conv_macs(input_shapes: Shapes, output_shape: Sequence[int]) -> int:
    """Count every entry of the kernel once per output position."""
    return math.prod(input_shapes[1]) * math.prod(output_shape) // output_shape[1]


def count_conv_transpose_macs(input_shapes: Shapes, output_shape: Sequence[int]) -> int:
    """Count every entry of the kernel once per input position."""
    return math.prod(input_shapes[1]) * math.prod(input_shapes[0]) // input_shapes[0][1]
