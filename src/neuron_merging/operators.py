"""The table of operator rules: how each operator carries channel labels from inputs to outputs.

A value's labels say, for each of its dimensions that is made of channels, which channel stands at
which index: `{dimension: vector of labels}`. Label `FIXED` marks entries that can never be
removed, `ANY` marks a broadcast that adapts to whatever it meets. A rule reads the labels of a
node's inputs, tells the walk which labels stand and fall together, and returns the output's
labels. An operator without a row refuses every label that reaches it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from neuron_merging.capture import Node, Ref

if TYPE_CHECKING:
    from neuron_merging.channels import Walk

Vector = np.ndarray
Labels = dict[int, Vector]
Rule = Callable[["Walk", Node], Labels | list[Labels]]
FIXED, ANY = 0, -1


@dataclass(frozen=True)
class Operator:
    """One row: the label rule, and what the operator does to the values of a channel.

    `kind` is "pointwise" (one function for every entry), "move", "pool" (an average or maximum
    over positions), "affine" (per-channel scale and shift) or "other". `homogeneous` says that
    f(s·x) = s·f(x) for s > 0, the condition of the paper's Theorem 1.
    """

    rule: Rule
    kind: str = "other"
    homogeneous: bool = False


# --- moving data -----------------------------------------------------------------------------


def move(walk: Walk, node: Node) -> Labels | list[Labels]:
    """Execute the operator itself on label tensors."""
    if len(list(node.refs())) > 1:
        return unknown(walk, node)
    return _execute(walk, node, walk.of(node.args["self"]))


def _execute(walk: Walk, node: Node, labels: Labels) -> Labels | list[Labels]:
    shape = walk.shape(node.args["self"])
    results: list[Labels] = [{} for _ in node.shapes]
    for dim, vector in labels.items():
        moved = node.compute({**node.args, "self": _spread(vector, dim, shape)})
        for result, tensor in zip(results, _as_list(moved), strict=True):
            where, found = _factorise(walk, node, tensor, vector)
            if where is None:
                continue
            if where in result:
                walk.refuse(np.concatenate([result.pop(where), found]), node, "mixes two channel axes")
            else:
                result[where] = found
    return results if len(node.shapes) != 1 else results[0]


def _as_list(value: Any) -> list[Tensor]:
    return [value] if isinstance(value, Tensor) else list(value)


def _spread(vector: Vector, dim: int, shape: Sequence[int]) -> Tensor:
    """The label of every entry of a tensor, without allocating it (strides of zero)."""
    view = [1] * len(shape)
    view[dim] = -1
    return torch.from_numpy(vector).to(torch.float64).view(view).expand(tuple(shape))


def _factorise(walk: Walk, node: Node, tensor: Tensor, source: Vector) -> tuple[int | None, Vector]:
    """Write a tensor of labels as one vector along one dimension, tying labels where it must.

    A channel can be cut out of a tensor only as a whole slice. Where labels vary along several
    dimensions the labels that share an index of the chosen dimension are tied together. A view that
    splits the channel axis usually fixes the leading sizes (groups, heads): the last dimension is
    chosen, and the probe checks it. Otherwise it is the dimension that leaves the most units.
    """
    dims = [d for d in range(tensor.ndim) if _varies(tensor, d)]
    if not dims:
        walk.refuse(source, node, "takes single channels out by their position")
        return None, source
    if len(dims) == 1:
        return dims[0], _line(tensor, dims[0])
    ties = {d: _slices(tensor, d, dims) for d in dims}
    best = max(dims, key=lambda d: d if node.fn is torch.reshape else _classes(ties[d]))
    for other in range(1, ties[best].shape[1]):
        walk.unite(ties[best][:, 0], ties[best][:, other])
    return best, ties[best][:, 0].copy()


def _varies(tensor: Tensor, dim: int) -> bool:
    if tensor.shape[dim] < 2 or tensor.stride(dim) == 0:
        return False
    return not bool((tensor == tensor.narrow(dim, 0, 1)).all())


def _line(tensor: Tensor, dim: int) -> Vector:
    index = tuple(slice(None) if d == dim else 0 for d in range(tensor.ndim))
    return tensor[index].to(torch.int64).numpy().copy()


def _slices(tensor: Tensor, dim: int, dims: Sequence[int]) -> Vector:
    """One row per index of `dim`, with every label that occurs there."""
    index = tuple(slice(None) if d in dims else 0 for d in range(tensor.ndim))
    small = tensor[index].movedim(list(dims).index(dim), 0)
    return small.reshape(small.shape[0], -1).to(torch.int64).numpy()


def _classes(rows: Vector) -> int:
    """How many units remain when the labels of each row are tied."""
    seen: dict[int, int] = {}
    for i, row in enumerate(rows):
        first = next((seen[label] for label in row.tolist() if label in seen), i)
        seen.update(dict.fromkeys(row.tolist(), first))
    return len(set(seen.values()))


def reshape(walk: Walk, node: Node) -> Labels:
    """A view; sizes written as numbers may be constants of the model's code, so they are probed."""
    view = replace(node, fn=torch.reshape, args={"self": node.args["self"], "shape": node.shape})
    result = _execute(walk, view, walk.of(node.args["self"]))
    assert isinstance(result, dict)
    sizes = node.args.get("size", node.args.get("shape", node.args.get("sizes", [])))
    offset = _dim(node, walk) if node.op == "unflatten" else 0
    if any(0 <= dim - offset < len(sizes) and sizes[dim - offset] != -1 for dim in result):
        walk.doubt(node)
    return result


def _dim(node: Node, walk: Walk, name: str = "dim") -> int:
    return int(node.args.get(name, 0)) % max(len(walk.shape(node.args["self"])), 1)


def expand(walk: Walk, node: Node) -> Labels:
    """Broadcast dimensions adapt to what they meet; the others keep their labels."""
    before, after = walk.shape(node.args["self"]), node.shape
    shift = len(after) - len(before)
    result = {dim + shift: vector for dim, vector in walk.of(node.args["self"]).items()}
    for dim, size in enumerate(after):
        if size > 1 and (dim < shift or before[dim - shift] == 1):
            result[dim] = np.full(size, ANY)
            if node.op == "expand":
                walk.doubt(node)
    sizes = node.args.get("size", [])
    if any(sizes[dim] != -1 for dim in result if dim < len(sizes)):
        walk.doubt(node)
    return result


def cat(walk: Walk, node: Node) -> Labels:
    parts = [walk.of(ref) for ref in node.args["tensors"]]
    shapes = [walk.shape(ref) for ref in node.args["tensors"]]
    along = int(node.args.get("dim", 0)) % len(node.shape)
    result = meet(walk, node, list(zip(parts, shapes, strict=True)), skip={along})
    if any(along in part for part in parts):
        lines = [
            part.get(along, np.full(shape[along], FIXED))
            for part, shape in zip(parts, shapes, strict=True)
            if len(shape) == len(node.shape)
        ]
        result[along] = np.concatenate(lines)
    return result


def stack(walk: Walk, node: Node) -> Labels:
    parts = [(walk.of(ref), walk.shape(ref)) for ref in node.args["tensors"]]
    along = int(node.args.get("dim", 0)) % len(node.shape)
    met = meet(walk, node, parts, shape=parts[0][1])
    return {dim + (dim >= along): vector for dim, vector in met.items()}


def split(walk: Walk, node: Node) -> Labels | list[Labels]:
    """Pieces by size. The sizes may be constants of the model's code, so they are probed."""
    dim, labels = _dim(node, walk), walk.of(node.args["self"])
    if dim in labels:
        sizes = [shape[dim] for shape in node.shapes]
        _balance_pieces(walk, node, labels[dim], sizes)
        walk.doubt(node)
    return move(walk, node)


def chunk(walk: Walk, node: Node) -> Labels | list[Labels]:
    dim, labels = _dim(node, walk), walk.of(node.args["self"])
    if dim in labels:
        _balance_pieces(walk, node, labels[dim], [shape[dim] for shape in node.shapes])
    return move(walk, node)


def _balance_pieces(walk: Walk, node: Node, vector: Vector, sizes: Iterable[int]) -> None:
    block = math.gcd(*sizes, len(vector))
    if block == 1:
        walk.refuse(vector, node, "cuts the channels at positions that no smaller network shares")
    else:
        walk.balance(vector, len(vector) // block)


def take_slice(walk: Walk, node: Node) -> Labels | list[Labels]:
    dim, labels = _dim(node, walk), walk.of(node.args["self"])
    if dim in labels and node.shape[dim] != len(labels[dim]):
        size = len(labels[dim])
        start = int(node.args.get("start") or 0)
        start = max(start + size, 0) if start < 0 else start
        if int(node.args.get("step") or 1) != 1:
            walk.refuse(labels[dim], node, "takes every k-th channel")
        else:
            _balance_pieces(walk, node, labels[dim], [s for s in (start, node.shape[dim]) if s])
        walk.doubt(node)
    return move(walk, node)


def position(walk: Walk, node: Node) -> Labels | list[Labels]:
    """Select and unbind: fine on other dimensions, by fixed position on the channels'."""
    dim, labels = _dim(node, walk), walk.of(node.args["self"])
    if dim in labels:
        walk.refuse(labels.pop(dim), node, "takes single channels out by their position")
    return _execute(walk, node, labels)


def index(walk: Walk, node: Node) -> Labels | list[Labels]:
    """Indexing with tensors: channels may not be indexed, other dimensions may."""
    labels = walk.of(node.args["self"])
    indices = node.args["indices"] if "indices" in node.args else None
    if indices is None:
        indexed = {_dim(node, walk)}
        stand_in: dict[str, Any] = {"index": torch.zeros(walk.shape(node.args["index"]), dtype=torch.int64)}
    else:
        indexed = _indexed_dims(walk, indices)
        stand_in = {"indices": [_stand_in(walk, item) for item in indices]}
    for dim in indexed & set(labels):
        walk.refuse(labels.pop(dim), node, "picks channels with an index tensor")
    if any(isinstance(i, Ref) and walk.dtype_is_bool(i) for i in indices or []):
        for dim in list(labels):
            walk.refuse(labels.pop(dim), node, "indexes with a mask")
        return {}
    return _execute(walk, replace(node, args={**node.args, **stand_in}), labels)


def _indexed_dims(walk: Walk, indices: Sequence[Any]) -> set[int]:
    dims: set[int] = set()
    at = 0
    for item in indices:
        width = len(walk.shape(item)) if item is not None and walk.dtype_is_bool(item) else 1
        if item is not None:
            dims |= set(range(at, at + width))
        at += width
    return dims


def _stand_in(walk: Walk, item: Any) -> Any:
    return torch.zeros(walk.shape(item), dtype=torch.int64) if isinstance(item, Ref) else item


def pad(walk: Walk, node: Node) -> Labels:
    """Padding keeps channels in place; constant padding of the channel axis adds fixed entries."""
    labels, amounts = same(walk, node), [int(a) for a in node.args.get("pad", node.args.get("padding"))]
    constant = node.op == "constant_pad_nd" or node.args.get("mode", "constant") == "constant"
    constant &= not node.op.startswith(("reflection", "replication"))
    for i, (before, after) in enumerate(zip(amounts[::2], amounts[1::2], strict=True)):
        dim = len(node.shape) - 1 - i
        if dim in labels and (before or after):
            if not constant or min(before, after) < 0:
                walk.refuse(labels.pop(dim), node, "pads or crops channels by position")
            else:
                labels[dim] = np.pad(labels[dim], (before, after), constant_values=FIXED)
    return labels


def flip(walk: Walk, node: Node) -> Labels:
    labels = same(walk, node)
    dims = {d % len(node.shape) for d in node.args["dims"]}
    return {dim: vector[::-1].copy() if dim in dims else vector for dim, vector in labels.items()}


def roll(walk: Walk, node: Node) -> Labels:
    labels = same(walk, node)
    dims = node.args.get("dims") or range(len(node.shape))
    for dim in {d % len(node.shape) for d in dims} & set(labels):
        walk.refuse(labels.pop(dim), node, "rolls channels by a fixed number")
    return labels


def channel_shuffle(walk: Walk, node: Node) -> Labels | list[Labels]:
    labels = walk.of(node.args["self"])
    if 1 in labels:
        _tie_across(walk, labels[1], int(node.args["groups"]))
    return move(walk, node)


def _tie_across(walk: Walk, vector: Vector, blocks: int) -> None:
    rows = vector.reshape(blocks, -1)
    for row in rows[1:]:
        walk.unite(rows[0], row)


# --- element by element ----------------------------------------------------------------------


def pointwise(walk: Walk, node: Node) -> Labels:
    """Operands meet entry by entry after broadcasting."""
    operands = [(walk.of(ref), walk.shape(ref)) for ref in node.refs()]
    if node.op in ("add", "sub", "rsub"):
        walk.note_sum([ref for ref in node.refs() if not walk.is_weight(ref)])
    return meet(walk, node, operands)


def meet(
    walk: Walk,
    node: Node,
    operands: Sequence[tuple[Labels, Sequence[int]]],
    *,
    skip: Iterable[int] = (),
    shape: Sequence[int] | None = None,
) -> Labels:
    """Unite what stands at the same index; a dimension without labels fixes what it meets."""
    shape = node.shape if shape is None else shape
    result: Labels = {}
    for dim in set(range(len(shape))) - set(skip):
        lines: list[Vector] = []
        for labels, size in operands:
            own = dim - (len(shape) - len(size))
            if own >= 0 and size[own] > 1:
                lines.append(labels.get(own, np.full(size[own], FIXED)))
        if any((line != FIXED).any() for line in lines):
            result[dim] = _join(walk, node, lines)
    return result


def _join(walk: Walk, node: Node, lines: Sequence[Vector]) -> Vector:
    joined = lines[0].copy()
    for line in lines[1:]:
        walk.unite(joined, line, node)
        joined = np.where(joined > FIXED, joined, np.where(line == ANY, joined, line))
    return joined


def same(walk: Walk, node: Node) -> Labels:
    """One input, one output of the same layout."""
    return dict(walk.of(next(node.refs())))


def dropout(walk: Walk, node: Node) -> Labels:
    """Nothing happens in evaluation, unless the model's code says otherwise."""
    return drawn(walk, node) if node.args.get("train") else same(walk, node)


def drawn(walk: Walk, node: Node) -> Labels:
    """With fewer channels other numbers would be drawn for those that stay."""
    labels = same(walk, node)
    for vector in labels.values():
        walk.refuse(vector, node, "draws at random, entry by entry")
    return labels


def glu(walk: Walk, node: Node) -> Labels:
    dim, labels = _dim(node, walk) if "dim" in node.args else len(node.shape) - 1, same(walk, node)
    if dim in labels:
        first, second = np.split(labels[dim], 2)
        walk.unite(first, second)
        labels[dim] = first
    return labels


def prelu(walk: Walk, node: Node) -> Labels:
    labels = walk.of(node.args["self"])
    weight = walk.of(node.args["weight"])
    if 0 in weight:
        walk.unite(weight[0], labels.get(1, np.full(len(weight[0]), FIXED)), node)
    return dict(labels)


# --- pooling and reductions ------------------------------------------------------------------


def pool(walk: Walk, node: Node) -> Labels | list[Labels]:
    """Windows over the trailing dimensions; channels must not be among them."""
    digits = [c for c in node.op if c.isdigit()]
    ref = next(node.refs())
    labels, ndim = dict(walk.of(ref)), len(walk.shape(ref))
    for dim in [d for d in labels if d >= ndim - int(digits[0])]:
        walk.refuse(labels.pop(dim), node, "pools over channels")
    return labels if len(node.shapes) == 1 else [labels, *({} for _ in node.shapes[1:])]


def reduce(walk: Walk, node: Node) -> Labels | list[Labels]:
    ref = next(node.refs())
    labels, ndim = dict(walk.of(ref)), len(walk.shape(ref))
    dims = node.args.get("dim")
    dims = range(ndim) if dims in (None, []) else [dims] if isinstance(dims, int) else dims
    gone = {d % ndim for d in dims} if ndim else set()
    for dim in gone & set(labels):
        walk.refuse(labels.pop(dim), node, "reduces over channels")
    if not node.args.get("keepdim", False):
        labels = {d - sum(g < d for g in gone): v for d, v in labels.items()}
    return labels if len(node.shapes) == 1 else [labels, *({} for _ in node.shapes[1:])]


def extreme(walk: Walk, node: Node) -> Labels | list[Labels]:
    """torch.max and torch.min: of two tensors entry by entry, or of one over a dimension."""
    return pointwise(walk, node) if "other" in node.args else reduce(walk, node)


def along(walk: Walk, node: Node) -> Labels:
    """Softmax and its kin mix the entries of one dimension and keep the others apart."""
    labels = same(walk, node)
    dim = _dim(node, walk)
    if dim in labels:
        walk.refuse(labels.pop(dim), node, "mixes all channels")
    return labels


# --- normalisation ---------------------------------------------------------------------------


def channel_norm(walk: Walk, node: Node) -> Labels:
    """Batch norm and instance norm: per channel, with per-channel tensors."""
    labels = dict(walk.of(node.args["input"]))
    for dim in [d for d in labels if d != 1]:
        walk.refuse(labels.pop(dim), node, "takes statistics over these channels")
    for name in ("weight", "bias", "running_mean", "running_var"):
        _attach(walk, node, labels, 1, node.args.get(name))
    return labels


def _attach(walk: Walk, node: Node, labels: Labels, dim: int, ref: Any) -> None:
    if isinstance(ref, Ref) and (own := walk.of(ref).get(0)) is not None:
        walk.unite(own, labels.get(dim, np.full(len(own), FIXED)), node)


def group_norm(walk: Walk, node: Node) -> Labels:
    """Statistics are shared inside a group of channels, so whole groups stand and fall."""
    labels = dict(walk.of(node.args["input"]))
    for dim in [d for d in labels if d > 1]:
        walk.refuse(labels.pop(dim), node, "takes statistics over these channels")
    for name in ("weight", "bias"):
        _attach(walk, node, labels, 1, node.args.get(name))
    if 1 in labels:
        rows = labels[1].reshape(int(node.args["num_groups"]), -1)
        _tie_across(walk, rows.T.ravel(), rows.shape[1])
        if not node.module_type.endswith(".GroupNorm"):
            walk.doubt(node)
    return labels


def layer_norm(walk: Walk, node: Node) -> Labels:
    """Statistics over all channels: the kept ones define them anew, which merging must know."""
    labels = dict(walk.of(node.args["input"]))
    start = len(node.shape) - len(node.args["normalized_shape"])
    parts = [(labels, node.shape)]
    for name in ("weight", "bias"):
        if isinstance(ref := node.args.get(name), Ref):
            parts.append((walk.of(ref), walk.shape(ref)))
    result = meet(walk, node, parts)
    for dim in [d for d in result if d >= start]:
        walk.note_mixing(result[dim], node)
        if not node.module_type.endswith("Norm"):
            walk.doubt(node)
    return result


# --- layers with weights ---------------------------------------------------------------------


def linear(walk: Walk, node: Node) -> Labels:
    return _contract(walk, node, node.args["input"], node.args["weight"], node.args.get("bias"), (0, 1))


def matmul(walk: Walk, node: Node) -> Labels:
    """A product of a value and a parameter is a layer; of two values, it mixes channels."""
    left, right = node.args.get("mat1", node.args.get("self")), node.args.get("mat2", node.args.get("other"))
    if walk.is_weight(right) and len(walk.shape(right)) == 2:
        return _contract(walk, node, left, right, None, (1, 0))
    if walk.is_weight(left) and len(walk.shape(left)) == 2 and len(walk.shape(right)) >= 2:
        return _contract_left(walk, node, left, right)
    return _product(walk, node, left, right)


def addmm(walk: Walk, node: Node) -> Labels:
    bias, left, right = node.args["self"], node.args["mat1"], node.args["mat2"]
    if walk.is_weight(right) and walk.is_weight(bias):
        return _contract(walk, node, left, right, bias, (1, 0))
    return unknown(walk, node)


def _contract(walk: Walk, node: Node, x: Ref, weight: Ref, bias: Any, axes: tuple[int, int]) -> Labels:
    """y[…, o] = Σ_i x[…, i] W[o, i] (+ b[o]): reads the last dimension, makes a new one."""
    labels, weights = dict(walk.of(x)), walk.of(weight)
    last = len(walk.shape(x)) - 1
    size = walk.shape(x)[-1]
    taken = labels.pop(last, np.full(size, FIXED))
    walk.consume(node, x, taken, weight, axes[1])
    made = weights.get(axes[0])
    if made is not None:
        labels[len(node.shape) - 1] = made
        _attach(walk, node, {0: made}, 0, bias)
        walk.produce(node, made, weight, bias)
    return labels


def _contract_left(walk: Walk, node: Node, weight: Ref, x: Ref) -> Labels:
    labels, weights = dict(walk.of(x)), walk.of(weight)
    dim = len(walk.shape(x)) - 2
    taken = labels.pop(dim, np.full(walk.shape(x)[dim], FIXED))
    walk.consume(node, x, taken, weight, 1)
    if 0 in weights:
        labels[len(node.shape) - 2] = weights[0]
        walk.produce(node, weights[0], weight, None)
    return labels


def _product(walk: Walk, node: Node, left: Ref, right: Ref) -> Labels:
    if min(len(walk.shape(left)), len(walk.shape(right))) < 2:
        return unknown(walk, node)
    result: Labels = {}
    for ref, free, contracted in ((left, -2, -1), (right, -1, -2)):
        ndim = len(walk.shape(ref))
        for dim, vector in walk.of(ref).items():
            if dim - ndim == free:
                result[len(node.shape) + free] = vector
            else:
                why = "multiplies channels with each other" if dim - ndim == contracted else "batches over channels"
                walk.refuse(vector, node, why)
    return result


def attention(walk: Walk, node: Node) -> Labels:
    """Queries and keys are scaled by their width, so only the values' channels are free."""
    for name in ("query", "key", "attn_mask"):
        if isinstance(ref := node.args.get(name), Ref):
            for vector in walk.of(ref).values():
                walk.refuse(vector, node, "scales attention by the number of channels")
    labels = dict(walk.of(node.args["value"]))
    last = len(node.shape) - 1
    for dim in [d for d in labels if d != last]:
        walk.refuse(labels.pop(dim), node, "batches over channels")
    return labels


def embedding(walk: Walk, node: Node) -> Labels:
    made = walk.of(node.args["weight"]).get(1)
    for vector in walk.of(node.args["indices"]).values():
        walk.refuse(vector, node, "uses channels as indices")
    if made is None:
        return {}
    walk.produce(node, made, node.args["weight"], None)
    return {len(node.shape) - 1: made}


def convolution(walk: Walk, node: Node) -> Labels:
    x, weight = node.args["input"], node.args["weight"]
    transposed = "transpose" in node.op
    groups = int(node.args.get("groups", 1))
    labels = dict(walk.of(x))
    dim = len(walk.shape(x)) - len(walk.shape(weight)) + 1
    channels = walk.shape(x)[dim]
    taken = labels.pop(dim, np.full(channels, FIXED))
    for other in [d for d in labels if d > dim]:
        walk.refuse(labels.pop(other), node, "convolves over channels")
    if groups > 1 and not node.module_type.startswith("torch.nn.modules.conv."):
        walk.doubt(node)
    if groups > 1 and groups == channels:
        made = _depthwise(walk, node, taken, transposed)
    else:
        made = _dense(walk, node, taken, groups, transposed)
    if made is not None:
        _attach(walk, node, {0: made}, 0, node.args.get("bias"))
        labels[dim] = made
    return labels


def _depthwise(walk: Walk, node: Node, taken: Vector, transposed: bool) -> Vector | None:
    """Every channel has filters of its own: they fall with it, and `groups` shrinks."""
    own = walk.of(node.args["weight"]).get(0)
    if own is None:
        return None
    repeat = node.shape[len(node.shape) - len(walk.shape(node.args["weight"])) + 1] // len(taken)
    spread = np.repeat(taken, repeat)
    if (taken == FIXED).all():
        walk.produce(node, own, node.args["weight"], node.args.get("bias"))
    walk.unite(own, taken if transposed else spread, node)
    return np.repeat(own, repeat) if transposed else own


def _dense(walk: Walk, node: Node, taken: Vector, groups: int, transposed: bool) -> Vector | None:
    weight = node.args["weight"]
    into, out = (0, 1) if transposed else (1, 0)
    if groups == 1:
        made = walk.of(weight).get(out)
    else:
        blocked = walk.blocked(weight, 1, groups)
        if blocked is None:
            walk.refuse(taken, node, "has grouped weights that are computed, not stored")
            return None
        plain = walk.of(weight)[0]
        made = blocked if transposed else plain
        walk.balance(made, groups)
        walk.balance(taken, groups)
    walk.consume(node, node.args["input"], taken, weight, into, groups)
    if made is not None:
        walk.produce(node, made, weight, node.args.get("bias"))
    return made


def weight_norm(walk: Walk, node: Node) -> Labels:
    """w = g·v/‖v‖: the norm runs over everything but `dim`."""
    v, g = walk.of(node.args["v"]), walk.of(node.args["g"])
    dim = int(node.args.get("dim", 0))
    for other in [d for d in v if d != dim]:
        walk.refuse(v[other], node, "takes a norm over these channels")
    if dim in v and dim in g:
        walk.unite(v[dim], g[dim])
    return {dim: v[dim]} if dim in v else {}


# --- the rest --------------------------------------------------------------------------------


def fresh(walk: Walk, node: Node) -> Labels:
    """A new tensor of fixed size, unrelated to its arguments' channels."""
    return {}


def getitem(walk: Walk, node: Node) -> Labels:
    return dict(walk.item(node.args["self"], int(node.args["index"])))


def unknown(walk: Walk, node: Node) -> Labels:
    for ref in node.refs():
        for vector in walk.of(ref).values():
            walk.refuse(vector, node, "is not known to act channel by channel")
    return {}


def _rows(names: str, rule: Rule, kind: str = "other", homogeneous: bool = False) -> dict[str, Operator]:
    return {name: Operator(rule, kind, homogeneous) for name in names.split()}


OPERATORS: dict[str, Operator] = {
    # moving data
    **_rows("view reshape _unsafe_view unflatten view_as reshape_as", reshape, "move", True),
    **_rows(
        "permute transpose t swapaxes swapdims movedim moveaxis flatten squeeze unsqueeze repeat tile "
        "repeat_interleave pixel_shuffle pixel_unshuffle numpy_T adjoint mT",
        move,
        "move",
        True,
    ),
    **_rows("expand expand_as broadcast_to", expand, "move", True),
    **_rows("cat concat concatenate", cat, "move", True),
    **_rows("stack", stack, "move", True),
    **_rows("split split_with_sizes unsafe_split tensor_split", split, "move", True),
    **_rows("chunk unsafe_chunk", chunk, "move", True),
    **_rows("slice narrow", take_slice, "move", True),
    **_rows("select unbind", position, "move", True),
    **_rows("index index_select", index, "move", True),
    **_rows("channel_shuffle", channel_shuffle, "move", True),
    **_rows("flip", flip, "move", True),
    **_rows("roll", roll, "move", True),
    **_rows(
        "pad constant_pad_nd reflection_pad1d reflection_pad2d reflection_pad3d replication_pad1d "
        "replication_pad2d replication_pad3d",
        pad,
        "move",
        True,
    ),
    **_rows(
        "clone contiguous alias detach to _to_copy type_as float half double bfloat16 lift_fresh lift_fresh_copy "
        "identity positive",
        same,
        "move",
        True,
    ),
    **_rows("dropout feature_dropout alpha_dropout feature_alpha_dropout native_dropout", dropout, "move", True),
    **_rows("getitem", getitem, "move", True),
    # activations
    **_rows("relu leaky_relu rrelu", same, "pointwise", True),
    **_rows(
        "relu6 hardtanh elu selu celu gelu silu mish hardswish hardsigmoid sigmoid log_sigmoid "
        "softplus softshrink hardshrink tanh threshold exp exp2 expm1 log log2 log10 log1p sqrt rsqrt square "
        "sin cos tan erf erfc ceil floor round trunc sign reciprocal atan asin acos sinh cosh asinh "
        "acosh atanh logit nan_to_num isnan isinf isfinite logical_not bitwise_not sgn frac special_expit",
        same,
        "pointwise",
    ),
    **_rows("abs neg negative", same, "pointwise", True),
    **_rows("zeros_like ones_like full_like empty_like", same),
    **_rows("rand_like randn_like bernoulli", drawn),
    **_rows("glu", glu),
    **_rows("prelu", prelu, "affine"),
    # operands that meet
    **_rows("add sub rsub mul div", pointwise, "affine"),
    **_rows(
        "multiply divide true_divide subtract floor_divide remainder fmod pow maximum minimum "
        "clamp clamp_min clamp_max clip where masked_fill eq ne lt le gt ge logical_and logical_or "
        "logical_xor bitwise_and bitwise_or bitwise_xor atan2 lerp addcmul addcdiv copy hypot xlogy",
        pointwise,
    ),
    # pooling, resampling and reductions
    **_rows(
        "max_pool1d max_pool2d max_pool3d max_pool1d_with_indices max_pool2d_with_indices "
        "max_pool3d_with_indices avg_pool1d avg_pool2d avg_pool3d adaptive_avg_pool1d adaptive_avg_pool2d "
        "adaptive_avg_pool3d adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d _adaptive_avg_pool2d "
        "_adaptive_avg_pool3d fractional_max_pool2d fractional_max_pool3d upsample_nearest1d "
        "upsample_nearest2d upsample_nearest3d upsample_linear1d upsample_bilinear2d upsample_bicubic2d "
        "upsample_trilinear3d _upsample_nearest_exact1d _upsample_nearest_exact2d _upsample_nearest_exact3d "
        "_upsample_bilinear2d_aa _upsample_bicubic2d_aa",
        pool,
        "pool",
        True,
    ),
    **_rows("mean sum amax amin", reduce, "pool", True),
    **_rows("max min", extreme),
    **_rows("var std prod argmax argmin any all logsumexp norm linalg_vector_norm median", reduce),
    **_rows("softmax _softmax log_softmax _log_softmax cumsum cumprod", along),
    # normalisation
    **_rows("batch_norm _native_batch_norm_legit_no_training", channel_norm, "affine"),
    **_rows("instance_norm", channel_norm),
    **_rows("group_norm", group_norm),
    **_rows("layer_norm rms_norm", layer_norm),
    # layers with weights
    **_rows("linear", linear),
    **_rows("matmul mm bmm", matmul),
    **_rows("addmm", addmm),
    **_rows("scaled_dot_product_attention", attention),
    **_rows("embedding", embedding),
    **_rows("conv1d conv2d conv3d convolution conv_transpose1d conv_transpose2d conv_transpose3d", convolution),
    **_rows("_weight_norm", weight_norm),
    # new tensors
    **_rows(
        "zeros ones full empty arange linspace eye rand randn new_zeros new_ones new_full new_empty "
        "scalar_tensor sym_size _assert_tensor_metadata _assert_async",
        fresh,
    ),
}
