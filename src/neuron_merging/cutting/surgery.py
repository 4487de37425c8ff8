"""surgery: a plan, merges and a model in, a new and smaller model out."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from neuron_merging.channels.groups import Axis
from neuron_merging.cutting.plan import Cut, Plan, bias_name
from neuron_merging.cutting.sizes import set_sizes
from neuron_merging.cutting.vetting import check_fit
from neuron_merging.errors import MergingError
from neuron_merging.graph.attention import with_free_heads
from neuron_merging.graph.baking import baked
from neuron_merging.graph.copying import bare_copy, own_tensors
from neuron_merging.graph.hollow import Hollow
from neuron_merging.graph.values import Shape
from neuron_merging.mergers.interface import Merge, Merged

Hold = Callable[[Tensor, Shape, Callable[[], Tensor]], Tensor]
"""What a smaller network is given in place of a tensor: its new shape, and how its values are made."""


def apply_plan(model: nn.Module, plan: Plan, merged: Merged | None = None) -> nn.Module:
    """A new, smaller module of the same class; `model` is not touched.

    Parameters
    ----------
    model
        A network of the class and sizes that the plan was made for.
    plan
        What stays.
    merged
        New values for the weights that stay. Left out, this is plain pruning: the way to give a fresh network the
        plan's shape.

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
    return smaller(model, plan, merged, lambda old, _, make: make())


def smaller(model: nn.Module, plan: Plan, merged: Merged | None, hold: Hold) -> nn.Module:
    """As `apply_plan` does it; `hold` may make the values later."""
    model = baked(model) if plan.baked and isinstance(model, nn.Module) else model
    tensors = _fitting(model, plan)
    cuts: dict[str, list[Cut]] = defaultdict(list)
    for cut in plan.cuts:
        cuts[cut.tensor].append(cut)
    merges, shifted = (merged.merges, merged.tensors) if merged else ((), {})
    folded: dict[Axis, list[Merge]] = defaultdict(list)
    for merge in merges:
        if merge.columns is not None and merge.consumer.axis is not None:
            folded[merge.consumer.axis].append(merge)
    replace: dict[int, Tensor] = {}
    for name in {**cuts, **shifted}:
        make = partial(cut_tensor, shifted.get(name, tensors[name]), cuts[name], folded, name)
        shape = _cut_shape(tensors[name], cuts[name], name)
        replace[id(tensors[name])] = hold(tensors[name], shape, partial(_like, tensors[name], make))
    for tensor in own_tensors(model):
        if id(tensor) not in replace:
            make = partial(cut_tensor, tensor, (), {}, "")
            replace[id(tensor)] = hold(tensor, tuple(tensor.shape), partial(_like, tensor, make))
    small = bare_copy(model, replace)
    _set_attributes(small, plan.modules)
    set_sizes(small, plan.sizes)
    with_free_heads(small, _attentions(small, plan))
    made = {bias_name(m.consumer): m.bias for m in merges if m.bias is not None}
    for name, size in plan.biases.items():
        _make_bias(small, name, made.get(name, torch.zeros(size, device="cpu")), cuts)
    return small


def _attentions(model: nn.Module, plan: Plan) -> set[str]:
    """The attentions of torch's own class that the plan cuts."""
    owners = {cut.tensor.rpartition(".")[0].removesuffix("out_proj").rstrip(".") for cut in plan.cuts}
    modules = dict(model.named_modules(remove_duplicate=False))
    return {path for path in owners if isinstance(modules.get(path), nn.MultiheadAttention)}


def hollow(model: nn.Module, plan: Plan, exported: bool = False) -> Hollow:
    """The smaller network without its weights, to see whether the model's code copes with it."""
    sizes: dict[int, dict[int, int]] = defaultdict(dict)
    tensors = _fitting(model, plan)
    for cut in plan.cuts:
        sizes[id(tensors[cut.tensor])][cut.dim] = len(cut.kept) // cut.blocks

    def shape(tensor: Tensor) -> Shape:
        own = sizes.get(id(tensor), {})
        return tuple(own.get(dim, size) for dim, size in enumerate(tensor.shape))

    def prepare(small: nn.Module) -> None:
        _set_attributes(small, plan.modules)
        set_sizes(small, plan.sizes)

    return Hollow(model, shape, prepare, exported)


def _make_bias(small: nn.Module, name: str, values: Tensor, cuts: Mapping[str, list[Cut]]) -> None:
    """Give a layer the bias that it did not have, cut like the layer's outputs."""
    path, _, attribute = name.rpartition(".")
    layer = small.get_submodule(path)
    weight = layer.get_parameter("weight")
    out = 1 if getattr(layer, "transposed", False) else 0
    for cut in cuts.get(name.removesuffix("bias") + "weight", ()):
        if cut.dim == out:
            values = values[list(cut.kept)]
    setattr(layer, attribute, nn.Parameter(values.to(weight), requires_grad=weight.requires_grad))


def _fitting(model: nn.Module, plan: Plan) -> dict[str, Tensor]:
    """The tensors of a network that the plan was made for."""
    if not isinstance(model, nn.Module):
        what = f"expected a torch.nn.Module, got {type(model).__name__}"
        raise MergingError(what, where="apply_plan", fix="Give the network itself.")
    return check_fit(model, plan)


def _cut_shape(tensor: Tensor, cuts: Iterable[Cut], name: str) -> Shape:
    return tuple(cut_tensor(torch.empty(tensor.shape, device="meta"), cuts, {}, name).shape)


def _like(old: Tensor, make: Callable[[], Tensor]) -> Tensor:
    new = make().to(old.dtype)
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    if new.ndim in formats and not old.is_contiguous() and old.is_contiguous(memory_format=formats[new.ndim]):
        new = new.contiguous(memory_format=formats[new.ndim])
    if isinstance(old, nn.Parameter):
        return nn.Parameter(new, requires_grad=old.requires_grad)
    return new


def cut_tensor(tensor: Tensor, cuts: Iterable[Cut], folded: Mapping[Axis, list[Merge]], name: str) -> Tensor:
    """Keep what the cuts keep; columns that a merge has rewritten take their new values."""
    tensor = tensor.detach()
    pending = {Axis(name, cut.dim, cut.blocks): cut for cut in cuts}
    order = sorted(pending, key=lambda axis: axis not in folded)
    for axis in order:
        kept = torch.tensor(pending[axis].kept, dtype=torch.int64, device=tensor.device)
        wide = axis.expose(tensor)
        wide = wide.index_select(axis.dim, kept)
        for merge in folded.get(axis, ()):
            assert merge.columns is not None
            where = torch.searchsorted(kept, merge.positions.to(kept.device))
            wide.index_copy_(axis.dim, where, merge.columns.to(wide.dtype))
        tensor = axis.restore(wide)
    return tensor.clone() if not order else tensor


def _set_attributes(model: nn.Module, modules: Mapping[str, Mapping[str, Any]]) -> None:
    for path, attributes in modules.items():
        module = model.get_submodule(path)
        for name, value in attributes.items():
            kind = list if isinstance(getattr(module, name, None), list) else tuple
            _set_attribute(module, name, kind(value) if isinstance(value, (list, tuple)) else value)


def _set_attribute(module: nn.Module, name: str, value: Any) -> None:
    """A module that says itself what it is made from is made anew: it may keep more that follows from that."""
    own: Any = module
    says = any("__getstate__" in vars(kind) for kind in type(module).__mro__ if kind is not object)
    state = own.__getstate__() if says else {}
    if isinstance(state, dict) and name in state:
        training = module.training
        own.__setstate__({**state, name: value})
        module.train(training)
    else:
        setattr(module, name, value)
