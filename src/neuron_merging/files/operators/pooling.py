"""Pooling, resampling, reductions, and what mixes the entries of one dimension."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from neuron_merging.files.operators.calls import Call, Handler, Unsupported
from neuron_merging.files.operators.layers import ints, spread, window_pads

MAXIMUM = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}
AVERAGE = {1: F.avg_pool1d, 2: F.avg_pool2d, 3: F.avg_pool3d}
EVERYWHERE: dict[int, Callable[..., Tensor]] = {
    1: F.adaptive_avg_pool1d,
    2: F.adaptive_avg_pool2d,
    3: F.adaptive_avg_pool3d,
}


def max_pool(call: Call) -> Tensor:
    x, kernel = call.tensor(0), ints(call, "kernel_shape", ())
    count = len(kernel)
    if call.results > 1 or count not in MAXIMUM:
        raise Unsupported
    before, after = window_pads(call, x, kernel)
    strides, dilations = ints(call, "strides", [1] * count), ints(call, "dilations", [1] * count)
    if before != after or any(2 * n > k for n, k in zip(before, kernel, strict=True)):
        x = F.pad(x, spread(before, after), value=float("-inf"))
        before = [0] * count
    return MAXIMUM[count](x, kernel, strides, before, dilations, bool(call.attribute("ceil_mode", 0)))


def average_pool(call: Call) -> Tensor:
    x, kernel = call.tensor(0), ints(call, "kernel_shape", ())
    count = len(kernel)
    before, after = window_pads(call, x, kernel)
    counted = bool(call.attribute("count_include_pad", 0))
    if count not in AVERAGE or set(ints(call, "dilations", [1])) != {1}:
        raise Unsupported
    if before != after and counted:
        x, before = F.pad(x, spread(before, after)), [0] * count
    elif before != after or any(2 * n > k for n, k in zip(before, kernel, strict=True)):
        raise Unsupported
    strides, ceiling = ints(call, "strides", [1] * count), bool(call.attribute("ceil_mode", 0))
    return AVERAGE[count](x, kernel, strides, before, ceiling, counted)


def global_average(call: Call) -> Tensor:
    x = call.tensor(0)
    if x.ndim - 2 not in EVERYWHERE:
        raise Unsupported
    return EVERYWHERE[x.ndim - 2](x, 1)


def global_maximum(call: Call) -> Tensor:
    x = call.tensor(0)
    return x.amax(tuple(range(2, x.ndim)), keepdim=True)


WHOLE = (torch.sum, torch.amax, torch.amin)
"""Reductions that torch has for whole numbers as well."""


def reduction(compute: Callable[..., Tensor]) -> Handler:
    def handler(call: Call) -> Any:
        x, axes = call.tensor(0), call.numbers(1, "axes")
        if axes is None or not axes:
            if call.attribute("noop_with_empty_axes", 0):
                return x
            axes = list(range(x.ndim))
        if not x.is_floating_point() and compute not in WHOLE:
            raise Unsupported
        found = compute(x, [a % x.ndim for a in axes], keepdim=bool(call.attribute("keepdims", 1)))
        return found if found.dtype == x.dtype else found.to(x.dtype)

    return handler


def chosen(compute: Callable[..., Tensor]) -> Handler:
    def handler(call: Call) -> Tensor:
        if call.attribute("select_last_index", 0):
            raise Unsupported
        return compute(call.tensor(0), int(call.attribute("axis", 0)), bool(call.attribute("keepdims", 1)))

    return handler


def soft(compute: Callable[..., Tensor]) -> Handler:
    """Before version 13, all dimensions from the axis on were one."""

    def handler(call: Call) -> Tensor:
        x = call.tensor(0)
        axis = int(call.attribute("axis", -1 if call.version >= 13 else 1)) % x.ndim
        if call.version >= 13 or all(size == 1 for size in x.shape[axis + 1 :]):
            return compute(x, axis)
        if all(size == 1 for size in x.shape[axis:-1]):
            return compute(x, x.ndim - 1)
        return compute(x.flatten(axis), axis).reshape(x.shape)

    return handler


def cumulative(call: Call) -> Tensor:
    if call.attribute("exclusive", 0) or call.attribute("reverse", 0):
        raise Unsupported
    return torch.cumsum(call.tensor(0), int(call.known(1).reshape(()).item()))


# Resampling


def resize(call: Call) -> Tensor:
    x, mode = call.tensor(0), call.attribute("mode", "nearest")
    where = call.attribute("coordinate_transformation_mode", "half_pixel" if call.version > 10 else "asymmetric")
    sizes, scales = _target(call, x)
    if sizes == list(x.shape):
        return x
    if sizes[:2] != list(x.shape[:2]) and mode != "nearest":
        raise Unsupported
    if mode == "nearest":
        return _nearest(call, x, sizes, scales, where)
    kinds = {("linear", 3): "linear", ("linear", 4): "bilinear", ("linear", 5): "trilinear", ("cubic", 4): "bicubic"}
    plain = not call.attribute("antialias", 0) and float(call.attribute("cubic_coeff_a", -0.75)) == -0.75
    if (mode, x.ndim) not in kinds or where not in ("half_pixel", "align_corners", "pytorch_half_pixel") or not plain:
        raise Unsupported
    return F.interpolate(x, sizes[2:], mode=kinds[mode, x.ndim], align_corners=where == "align_corners")


def upsample(call: Call) -> Tensor:
    x, scales = call.tensor(0), call.attribute("scales") or [float(n) for n in call.known(1)]
    sizes = [int(size * scale) for size, scale in zip(x.shape, scales, strict=True)]
    if call.attribute("mode", "nearest") == "nearest":
        return _nearest(call, x, sizes, list(scales), "asymmetric", "floor")
    raise Unsupported


def _target(call: Call, x: Tensor) -> tuple[list[int], list[float]]:
    """The sizes that come out, and the scales that places are computed with."""
    if call.has(3) and call.known(3).size:
        if call.attribute("keep_aspect_ratio_policy", "stretch") != "stretch":
            raise Unsupported
        sizes, axes = [int(n) for n in call.known(3)], call.attribute("axes")
        if axes is not None:
            given = dict(zip(axes, sizes, strict=True))
            sizes = [given.get(dim, size) for dim, size in enumerate(x.shape)]
        sizes = [int(x.shape[0]), int(x.shape[1]), *sizes[2:]] if sizes[:2] != list(x.shape[:2]) else sizes
        return sizes, [new / old for new, old in zip(sizes, x.shape, strict=True)]
    slot = 2 if call.version > 10 else 1
    if call.attribute("axes") is not None:
        raise Unsupported
    scales = [float(n) for n in call.known(slot)]
    return [int(size * scale) for size, scale in zip(x.shape, scales, strict=True)], scales


def _nearest(
    call: Call, x: Tensor, sizes: Sequence[int], scales: Sequence[float], where: str, rounding: str | None = None
) -> Tensor:
    rounding = rounding or call.attribute("nearest_mode", "round_prefer_floor" if call.version > 10 else "floor")
    chosen = [_chosen(old, new, scale, where, rounding) for old, new, scale in zip(x.shape, sizes, scales, strict=True)]
    whole = [
        np.array_equal(index, np.arange(new) * old // new)
        for index, old, new in zip(chosen, x.shape, sizes, strict=True)
    ]
    if x.ndim in (3, 4, 5) and all(whole) and list(sizes[:2]) == list(x.shape[:2]):
        return F.interpolate(x, list(sizes[2:]), mode="nearest")
    for dim, index in enumerate(chosen):
        if len(index) != x.shape[dim] or not np.array_equal(index, np.arange(len(index))):
            x = torch.index_select(x, dim, torch.from_numpy(index))
    return x


def _chosen(old: int, new: int, scale: float, where: str, rounding: str) -> NDArray[np.int64]:
    """For each place that comes out, the one that it is taken from."""
    at = np.arange(new, dtype=np.float64)
    if where in ("half_pixel", "pytorch_half_pixel"):
        at = (at + 0.5) / scale - 0.5 if new > 1 or where == "half_pixel" else at * 0
    elif where == "align_corners":
        at = at * (old - 1) / max(new - 1, 1)
    elif where == "asymmetric":
        at = at / scale
    else:
        raise Unsupported
    ways: dict[str, Callable[[NDArray[np.float64]], NDArray[np.float64]]] = {
        "floor": np.floor,
        "ceil": np.ceil,
        "round_prefer_floor": lambda places: np.ceil(places - 0.5),
        "round_prefer_ceil": lambda places: np.floor(places + 0.5),
    }
    return np.clip(ways[rounding](at), 0, old - 1).astype(np.int64)
