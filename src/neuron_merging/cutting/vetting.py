"""vetting: whether a plan, which anyone may have written, fits a network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

from torch import Tensor, nn

from neuron_merging.cutting.plan import Cut, Plan, Sizes
from neuron_merging.errors import MergingError
from neuron_merging.graph.copying import all_tensors

OTHER_NETWORK = "Give a fresh network of the class and sizes that the plan was made for."
BY_HAND = "The plan was changed by hand or damaged: use the one that compress() made."


def check_fit(model: nn.Module, plan: Plan) -> dict[str, Tensor]:
    """The tensors of a network that the plan was made for: every name and number of the plan is one of its own."""
    tensors = all_tensors(model)
    rows = {cut.tensor: len(cut.kept) for cut in plan.cuts if cut.dim == 0}
    for cut in plan.cuts:
        _check_cut(cut, tensors)
        if cut.blocks > 1:
            _check_blocks(cut, tensors[cut.tensor], rows.get(cut.tensor, 0))
    if len({(cut.tensor, cut.dim) for cut in plan.cuts}) < len(plan.cuts):
        raise MergingError("the plan cuts the same axis twice", where="plan", fix=BY_HAND)
    layers = dict(model.named_modules(remove_duplicate=False))
    for path, attributes in plan.modules.items():
        for name, value in attributes.items():
            _check_attribute(layers.get(path), path, name, value)
    for name, size in plan.biases.items():
        _check_bias(layers, tensors, name, size)
    return tensors


def check_indices(kept: Sequence[int], size: int, where: str) -> None:
    """Refuse what is not a choice out of `size`: in order, each once, at least one."""
    if not kept or any(not 0 <= i < size for i in kept) or any(a >= b for a, b in pairwise(kept)):
        raise MergingError("the plan's indices are not in order or not in range", where=where, fix=BY_HAND)


def _check_cut(cut: Cut, tensors: Mapping[str, Tensor]) -> None:
    known = tensors.get(cut.tensor)
    size = known.shape[cut.dim] * cut.blocks if known is not None and 0 <= cut.dim < known.ndim else -1
    if size != cut.size:
        what = "has no such tensor" if known is None else f"has it in shape {tuple(known.shape)}"
        raise MergingError(f"the plan does not fit this network, which {what}", where=cut.tensor, fix=OTHER_NETWORK)
    check_indices(cut.kept, size, cut.tensor)


def _check_blocks(cut: Cut, known: Tensor, rows: int) -> None:
    """Blocks lie along the rows of a weight, and each keeps as many channels as the next."""
    each = cut.size // cut.blocks
    shares = {i // each: 0 for i in cut.kept}
    for i in cut.kept:
        shares[i // each] += 1
    even = len(shares) == cut.blocks and len(set(shares.values())) == 1
    if cut.dim != 1 or known.shape[0] % cut.blocks or rows % cut.blocks or not even:
        raise MergingError("the plan's blocks do not fit this network", where=cut.tensor, fix=BY_HAND)


def _check_attribute(layer: nn.Module | None, path: str, name: str, value: Sizes) -> None:
    """A size that a layer holds may become another one of the same form that is no larger; what is no size stays."""
    known = vars(layer).get(name) if layer is not None else None
    pairs = list(zip(_sizes(known), _sizes(value), strict=False))
    several = isinstance(known, (tuple, list)) == isinstance(value, tuple)
    named = isinstance(known, dict) == isinstance(value, dict) and _names(known) == _names(value)
    same_form = several and named and len(_sizes(known)) == len(_sizes(value)) > 0
    if not same_form or not all(new == old or 1 <= new <= old for old, new in pairs):
        what = "has no such layer" if layer is None else f"has {name} {known!r} there; the plan says {value}"
        raise MergingError(f"the plan does not fit this network, which {what}", where=path, fix=OTHER_NETWORK)


def _sizes(value: object) -> tuple[int, ...]:
    """A size or several as numbers; nothing for what is neither."""
    parts = tuple(value.values()) if isinstance(value, dict) else value
    parts = tuple(parts) if isinstance(parts, (tuple, list)) else (parts,)
    return parts if all(isinstance(part, int) and not isinstance(part, bool) for part in parts) else ()


def _names(value: object) -> list[object]:
    return list(value) if isinstance(value, dict) else []


def _check_bias(layers: Mapping[str, nn.Module], tensors: Mapping[str, Tensor], name: str, size: int) -> None:
    """Merging gives a bias to a layer with a weight and without one, as long as the layer has outputs."""
    path, _, attribute = name.rpartition(".")
    layer, weight = layers.get(path), tensors.get(name.removesuffix("bias") + "weight")
    sizes: set[int] = set()
    if attribute == "bias" and weight is not None and weight.ndim > 1 and getattr(layer, "bias", None) is None:
        transposed = bool(getattr(layer, "transposed", False))
        sizes = {weight.shape[transposed] * (int(getattr(layer, "groups", 1)) if transposed else 1)}
    if size not in sizes:
        what = f"the plan does not fit this network: no layer takes this bias of {size}"
        raise MergingError(what, where=name, fix=OTHER_NETWORK)
