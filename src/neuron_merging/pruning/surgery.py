"""Apply a plan: check that it fits the network, then build a new, smaller module of the same class. A plan may come
from an untrusted file, so every name and number in it is checked against the network first.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from neuron_merging.channels.groups import Axis
from neuron_merging.errors import MergingError
from neuron_merging.graph.copying import (
    copy_without_hooks,
    iter_module_tensors,
    named_tensors_with_aliases,
    unwrap_model,
)
from neuron_merging.graph.fake_module import FakeModule
from neuron_merging.graph.graph import Shape
from neuron_merging.graph.module_rewrites import fold_parametrizations, make_heads_prunable
from neuron_merging.merging.protocol import Merge, MergeResult
from neuron_merging.pruning.plan import AttributeValue, Cut, Plan, get_bias_name, set_operator_sizes

WRONG_NETWORK_FIX = "Give a fresh network of the class and sizes that the plan was made for."
DAMAGED_PLAN_FIX = "The plan was changed by hand or damaged: use the one that compress() made."


def check_plan_fits(model: nn.Module, plan: Plan) -> dict[str, Tensor]:
    """Check every name and number of a plan against a network, and return the network's tensors by name."""
    tensors = named_tensors_with_aliases(model)
    rows = {cut.tensor: len(cut.kept) for cut in plan.cuts if cut.dim == 0}
    for cut in plan.cuts:
        _check_cut(cut, tensors)
        if cut.blocks > 1:
            # 0 if the rows are not cut: it is divisible by any number of blocks.
            _check_blocks(cut, tensors[cut.tensor], rows.get(cut.tensor, 0))
    if len({(cut.tensor, cut.dim) for cut in plan.cuts}) < len(plan.cuts):
        raise MergingError("the plan cuts the same axis twice", where="plan", fix=DAMAGED_PLAN_FIX)
    layers = dict(model.named_modules(remove_duplicate=False))
    for path, attributes in plan.modules.items():
        for name, value in attributes.items():
            _check_attribute(layers.get(path), path, name, value)
    for name, size in plan.biases.items():
        _check_bias(layers, tensors, name, size)
    return tensors


def check_kept_indices(kept: Sequence[int], size: int, where: str) -> None:
    """Refuse indices that are not strictly increasing, not below `size`, or empty."""
    if not kept or any(not 0 <= i < size for i in kept) or any(a >= b for a, b in pairwise(kept)):
        raise MergingError("the plan's indices are not in order or not in range", where=where, fix=DAMAGED_PLAN_FIX)


def _check_cut(cut: Cut, tensors: Mapping[str, Tensor]) -> None:
    known = tensors.get(cut.tensor)
    size = known.shape[cut.dim] * cut.blocks if known is not None and 0 <= cut.dim < known.ndim else -1
    if size != cut.size:
        what = "has no such tensor" if known is None else f"has it in shape {tuple(known.shape)}"
        raise MergingError(f"the plan does not fit this network, which {what}", where=cut.tensor, fix=WRONG_NETWORK_FIX)
    check_kept_indices(cut.kept, size, cut.tensor)


def _check_blocks(cut: Cut, known: Tensor, rows: int) -> None:
    """Check a cut of a grouped weight: blocks lie along the rows, and each keeps the same number of channels."""
    each = cut.size // cut.blocks
    counts = {i // each: 0 for i in cut.kept}
    for i in cut.kept:
        counts[i // each] += 1
    even = len(counts) == cut.blocks and len(set(counts.values())) == 1
    if cut.dim != 1 or known.shape[0] % cut.blocks or rows % cut.blocks or not even:
        raise MergingError("the plan's blocks do not fit this network", where=cut.tensor, fix=DAMAGED_PLAN_FIX)


def _check_attribute(layer: nn.Module | None, path: str, name: str, value: AttributeValue) -> None:
    """Check a new attribute: it has the form of the old one, sizes do not grow, and other elements do not change."""
    known = vars(layer).get(name) if layer is not None else None
    # Not strict: a value of another length is refused below, with a better message.
    pairs = list(zip(_list_sizes(known), _list_sizes(value), strict=False))
    several = isinstance(known, (tuple, list)) == isinstance(value, tuple)
    named = isinstance(known, dict) == isinstance(value, dict) and _list_size_names(known) == _list_size_names(value)
    same_form = several and named and len(_list_sizes(known)) == len(_list_sizes(value)) > 0
    if not same_form or not all(new == old or 1 <= new <= old for old, new in pairs):
        what = "has no such layer" if layer is None else f"has {name} {known!r} there; the plan says {value}"
        raise MergingError(f"the plan does not fit this network, which {what}", where=path, fix=WRONG_NETWORK_FIX)


def _list_sizes(value: object) -> tuple[int, ...]:
    """Return the integers in an attribute: a single one, or those of a tuple, list or dict; () for anything else."""
    parts = tuple(value.values()) if isinstance(value, dict) else value
    parts = tuple(parts) if isinstance(parts, (tuple, list)) else (parts,)
    return parts if all(isinstance(part, int) and not isinstance(part, bool) for part in parts) else ()


def _list_size_names(value: object) -> list[object]:
    return list(value) if isinstance(value, dict) else []


def _check_bias(layers: Mapping[str, nn.Module], tensors: Mapping[str, Tensor], name: str, size: int) -> None:
    """Check a bias that merging adds: the layer has a weight and no bias, and the bias has one entry per output."""
    path, _, attribute = name.rpartition(".")
    layer, weight = layers.get(path), tensors.get(name.removesuffix("bias") + "weight")
    sizes: set[int] = set()
    if attribute == "bias" and weight is not None and weight.ndim > 1 and getattr(layer, "bias", None) is None:
        transposed = bool(getattr(layer, "transposed", False))
        # The weight of a transposed convolution is (in, out / groups, ...).
        sizes = {weight.shape[transposed] * (int(getattr(layer, "groups", 1)) if transposed else 1)}
    if size not in sizes:
        what = f"the plan does not fit this network: no layer takes this bias of {size}"
        raise MergingError(what, where=name, fix=WRONG_NETWORK_FIX)


TensorProvider = Callable[[Tensor, Shape, Callable[[], Tensor]], Tensor]
"""Provides the tensor of the smaller network from the old tensor, the new shape, and a function that computes the
new values. `apply_plan` calls that function at once; verification may defer it.
"""


def apply_plan(model: nn.Module, plan: Plan, merged: MergeResult | None = None) -> nn.Module:
    """Build a new, smaller module of the same class; `model` does not change.

    Parameters
    ----------
    model
        A network of the class and sizes that the plan was made for.
    plan
        The indices that stay.
    merged
        New values for the weights that stay. Without it this is plain pruning, which gives a fresh network the
        plan's shapes.

    Returns
    -------
    nn.Module
        The smaller network.

    Raises
    ------
    MergingError
        The plan does not fit the network, or was changed by hand.

    Examples
    --------
    >>> import neuron_merging as nm
    >>> net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> plan = nm.compress(net, torch.zeros(1, 4), ratio=0.5).plan
    >>> apply_plan(net, plan)[2]
    Linear(in_features=4, out_features=2, bias=True)
    """
    return build_small_network(model, plan, merged, lambda old, _, make: make())


def build_small_network(model: nn.Module, plan: Plan, merged: MergeResult | None, hold: TensorProvider) -> nn.Module:
    """Build the smaller network as `apply_plan` does, with tensors from `hold`, which may compute them later."""
    model = unwrap_model(model)
    model = fold_parametrizations(model) if plan.baked and isinstance(model, nn.Module) else model
    tensors = _get_checked_tensors(model, plan)
    cuts: dict[str, list[Cut]] = defaultdict(list)
    for cut in plan.cuts:
        cuts[cut.tensor].append(cut)
    merges, shifted = (merged.merges, merged.tensors) if merged else ((), {})
    folded: dict[Axis, list[Merge]] = defaultdict(list)
    for merge in merges:
        if merge.columns is not None and merge.consumer.axis is not None:
            folded[merge.consumer.axis].append(merge)
    # Tensors are replaced by identity, so that tied weights stay tied in the copy.
    replace: dict[int, Tensor] = {}
    for name in {**cuts, **shifted}:
        make = partial(cut_tensor, shifted.get(name, tensors[name]), cuts[name], folded, name)
        shape = _compute_cut_shape(tensors[name], cuts[name], name)
        replace[id(tensors[name])] = hold(tensors[name], shape, partial(_convert_like, tensors[name], make))
    for tensor in iter_module_tensors(model):
        if id(tensor) not in replace:
            make = partial(cut_tensor, tensor, (), {}, "")
            replace[id(tensor)] = hold(tensor, tuple(tensor.shape), partial(_convert_like, tensor, make))
    small = copy_without_hooks(model, replace)
    _set_attributes(small, plan.modules)
    set_operator_sizes(small, plan.sizes)
    make_heads_prunable(small, _find_cut_attentions(small, plan))
    biases = {get_bias_name(m.consumer): m.bias for m in merges if m.bias is not None}
    for name, size in plan.biases.items():
        # Without merges the values are unknown and come later, with the stored weights.
        _make_bias(small, name, biases.get(name, torch.zeros(size, device="cpu")), cuts)
    return small


def _find_cut_attentions(model: nn.Module, plan: Plan) -> set[str]:
    """Return the paths of `nn.MultiheadAttention` modules that the plan cuts."""
    owners = {cut.tensor.rpartition(".")[0].removesuffix("out_proj").rstrip(".") for cut in plan.cuts}
    modules = dict(model.named_modules(remove_duplicate=False))
    return {path for path in owners if isinstance(modules.get(path), nn.MultiheadAttention)}


def build_fake_module(model: nn.Module, plan: Plan, exported: bool = False) -> FakeModule:
    """Build the smaller network without weights, to test whether the model's code runs with its sizes."""
    sizes: dict[int, dict[int, int]] = defaultdict(dict)
    tensors = _get_checked_tensors(model, plan)
    for cut in plan.cuts:
        # The stored axis of a grouped weight is as long as one block.
        sizes[id(tensors[cut.tensor])][cut.dim] = len(cut.kept) // cut.blocks

    def shape(tensor: Tensor) -> Shape:
        new = sizes.get(id(tensor), {})
        return tuple(new.get(dim, size) for dim, size in enumerate(tensor.shape))

    def prepare(small: nn.Module) -> None:
        _set_attributes(small, plan.modules)
        set_operator_sizes(small, plan.sizes)

    return FakeModule(model, shape, prepare, exported)


def _make_bias(small: nn.Module, name: str, values: Tensor, cuts: Mapping[str, list[Cut]]) -> None:
    """Add a bias to a layer that has none, cut like the layer's outputs."""
    path, _, attribute = name.rpartition(".")
    layer = small.get_submodule(path)
    weight = layer.get_parameter("weight")
    out = 1 if getattr(layer, "transposed", False) else 0
    for cut in cuts.get(name.removesuffix("bias") + "weight", ()):
        if cut.dim == out:
            values = values[list(cut.kept)]
    setattr(layer, attribute, nn.Parameter(values.to(weight), requires_grad=weight.requires_grad))


def _get_checked_tensors(model: nn.Module, plan: Plan) -> dict[str, Tensor]:
    """Check that the plan fits the network, and return the network's tensors by name."""
    if not isinstance(model, nn.Module):
        what = f"expected a torch.nn.Module, got {type(model).__name__}"
        raise MergingError(what, where="apply_plan", fix="Give the network itself.")
    return check_plan_fits(model, plan)


def _compute_cut_shape(tensor: Tensor, cuts: Iterable[Cut], name: str) -> Shape:
    # On the meta device: the same code as for values, without memory.
    return tuple(cut_tensor(torch.empty(tensor.shape, device="meta"), cuts, {}, name).shape)


def _convert_like(old: Tensor, make: Callable[[], Tensor]) -> Tensor:
    """Compute a tensor and give it the dtype, the memory format and the parameter flags of the old one."""
    new = make().to(old.dtype)
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    if new.ndim in formats and not old.is_contiguous() and old.is_contiguous(memory_format=formats[new.ndim]):
        new = new.contiguous(memory_format=formats[new.ndim])
    if isinstance(old, nn.Parameter):
        return nn.Parameter(new, requires_grad=old.requires_grad)
    return new


def cut_tensor(tensor: Tensor, cuts: Iterable[Cut], folded: Mapping[Axis, list[Merge]], name: str) -> Tensor:
    """Select the kept indices of a tensor, and write the columns that merges have rewritten.

    Merged columns have full size in all other dimensions. So axes with merges are cut first.
    """
    tensor = tensor.detach()
    pending = {Axis(name, cut.dim, cut.blocks): cut for cut in cuts}
    order = sorted(pending, key=lambda axis: axis not in folded)
    for axis in order:
        kept = torch.tensor(pending[axis].kept, dtype=torch.int64, device=tensor.device)
        wide = axis.join_blocks(tensor)
        wide = wide.index_select(axis.dim, kept)
        for merge in folded.get(axis, ()):
            assert merge.columns is not None
            # Merges give positions in the original; `kept` is sorted, so this finds them in the cut tensor.
            where = torch.searchsorted(kept, merge.positions.to(kept.device))
            wide.index_copy_(axis.dim, where, merge.columns.to(wide.dtype))
        tensor = axis.split_blocks(wide)
    return tensor.clone() if not order else tensor


def _set_attributes(model: nn.Module, modules: Mapping[str, Mapping[str, Any]]) -> None:
    for path, attributes in modules.items():
        module = model.get_submodule(path)
        for name, value in attributes.items():
            # A plan stores lists as tuples: restore the type that the module had.
            kind = list if isinstance(getattr(module, name, None), list) else tuple
            _set_attribute(module, name, kind(value) if isinstance(value, (list, tuple)) else value)


def _set_attribute(module: nn.Module, name: str, value: Any) -> None:
    """Set an attribute; a module with its own `__getstate__` is restored from the changed state.

    Such a module may derive other attributes from its state, which `setattr` would leave out of date.
    """
    stateful: Any = module
    defines_state = any("__getstate__" in vars(kind) for kind in type(module).__mro__ if kind is not object)
    state = stateful.__getstate__() if defines_state else {}
    if isinstance(state, dict) and name in state:
        training = module.training
        stateful.__setstate__({**state, name: value})
        module.train(training)
    else:
        setattr(module, name, value)
