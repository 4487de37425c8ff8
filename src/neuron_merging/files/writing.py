"""Writing: the smaller network as an edit of the file that it came from.

Constants take the values of the network's tensors, sizes that hold numbers of channels are replaced, and everything
else stays as it was: names, inputs and outputs, free sizes, versions, notes. The file is run by onnxruntime and
compared with the network before it takes its place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, count
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from neuron_merging import atomic
from neuron_merging.errors import VerificationError, told
from neuron_merging.files.comparing import agrees, rounding
from neuron_merging.files.examples import feed, free_batch
from neuron_merging.files.needed import onnx
from neuron_merging.files.network import FileNetwork, array_of
from neuron_merging.files.operators.moving import reshaped
from neuron_merging.files.program import Step
from neuron_merging.files.reading import session, weights_beside
from neuron_merging.files.tidying import Array, tensors_of, untidied, weighs_more_than
from neuron_merging.graph.resizing import Sizes

BATCHES = (1, 3, 16)
"""Batch sizes at which a file whose batch is free is compared."""
LARGEST = 2**31 - 2**20
"""Bytes that one file of this format can have; with more, the weights lie beside it."""
LEAST_APART = 1024
"""Bytes of a weight that is written into a file of its own, where weights are."""
OPTIMISED = "onnxruntime's own optimisation changes what this file computes: it was compared without"


@dataclass(frozen=True)
class Written:
    """What was written, and how it compares with the network."""

    path: Path
    difference: float
    batches: tuple[int, ...]
    size: int
    note: str = ""
    """What is to be known of it, if anything is."""


@torch.no_grad()
def write(network: FileNetwork, target: str | Path) -> Written:
    """Write the network as an ONNX file, whole and checked, or not at all.

    Raises
    ------
    VerificationError
        The file does not compute what the network does.
    """
    atomic.check_file(target)
    place = atomic.place_of(target)
    inputs = network.origin.inputs
    model = _edited(network, inputs)
    apart = bool(network.origin.file.external) or weighs_more_than(model, LARGEST)
    if apart:
        _set_apart(model, _beside(place, network.origin.file.external))
    with atomic.beside(place) as part:
        onnx.save_model(model, str(part))
        difference, batches, note = _checked(network, part, inputs)
    return Written(place, difference, batches, place.stat().st_size, note)


def _set_apart(model: Any, name: str) -> None:
    """Have all but small weights written into a file of this name, beside the model's."""
    for tensor in model.graph.initializer:
        if len(tensor.raw_data) >= LEAST_APART:
            onnx.external_data_helper.set_external_data(tensor, name)


def _beside(place: Path, held: frozenset[Path]) -> str:
    """The name of the file for weights: a free one, or that of the file that is replaced; not the original's."""
    names = chain([f"{place.name}.data"], (f"{place.name}.{n}.data" for n in count(1)))
    own = weights_beside(place) - held
    return next(path.name for path in map(place.with_name, names) if path in own or not path.exists())


def _edited(network: FileNetwork, inputs: Sequence[Tensor]) -> Any:
    model = onnx.ModelProto()
    model.CopyFrom(network.program.model)
    tensors, own = tensors_of(model), dict(network.own())
    for name, tensor in own.items():
        value = array_of(tensor)
        known = network.program.constants[name]
        if value.shape != known.shape or not np.array_equal(value, known, equal_nan=True):
            tensors[name].CopyFrom(onnx.numpy_helper.from_array(value, name))
    values = network.values(*inputs, every=True)
    _Sizes(network, model, values).write()
    _describe(model, values, own)
    untidied(model)
    return model


def _describe(model: Any, values: dict[str, Any], own: dict[str, Tensor]) -> None:
    """The shapes that a file notes for values, where they have changed; notes on values that are not known go."""
    for entry in list(model.graph.value_info):
        if entry.name in values:
            _set_shape(entry, values[entry.name])
        else:
            model.graph.value_info.remove(entry)
    for entry in model.graph.input:
        if entry.name in own:
            _set_shape(entry, own[entry.name])


def _set_shape(entry: Any, value: Any) -> None:
    dims = entry.type.tensor_type.shape.dim
    for dim, size in zip(dims, np.shape(value) if not isinstance(value, Tensor) else value.shape, strict=False):
        if dim.dim_value > 0:
            dim.dim_value = int(size)


class _Sizes:
    """Writes new sizes into a model."""

    def __init__(self, network: FileNetwork, model: Any, values: dict[str, Any]) -> None:
        self.network, self.model, self.values = network, model, values
        self.nodes = {node.output[0]: node for node in model.graph.node if node.output}
        self.steps = {module.path: module.step.value for module in network.running}
        self.inserted: list[tuple[str, list[Any]]] = []

    def write(self) -> None:
        for key, sizes in self.network.sizes.items():
            path, _, kind = key.rpartition("|")
            step = self.steps[path]
            node = self.nodes.get(step.makes[0]) if step.node is not None else None
            if step.inside and sizes[0] is not None:
                view, norm, _ = (self.nodes[name] for name in step.inside)
                self._taken_apart(view, norm, sizes[0])
            elif node is not None:
                self._ways[kind.partition(".")[0]](node, step, sizes, kind)
        for step in (step for step in self.steps.values() if step.inside):
            self._given_back(self.nodes[step.inside[-1]], self.values[step.makes[0]].shape[1])
        self._put_in()

    @property
    def _ways(self) -> dict[str, Callable[[Any, Step, Sizes, str], None]]:
        return {"size": self._shape, "pieces": self._pieces, "range": self._range, "groups": self._groups}

    def _shape(self, node: Any, step: Step, sizes: Sizes, kind: str) -> None:
        if node.op_type in ("Reshape", "Expand") and len(node.input) > 1:
            own = np.asarray(self.values[step.reads[1]]).ravel()
            inferred = (0, -1) if node.op_type == "Reshape" else ()
            new = [None if a in inferred else b for a, b in zip(own[-len(sizes) :], sizes[-len(own) :], strict=True)]
            if node.op_type == "Reshape":
                filled = reshaped(own.tolist(), [a if b is None else b for a, b in zip(own.tolist(), new, strict=True)])
                new = [None if b is None else a for a, b in zip(filled, new, strict=True)]
            self._input(node, 1, own, new)
        elif node.op_type == "Reshape":
            self._attribute(node, "shape", sizes)

    def _pieces(self, node: Any, step: Step, sizes: Sizes, kind: str) -> None:
        if len(node.input) > 1 and node.input[1]:
            self._input(node, 1, np.asarray(self.values[step.reads[1]]).ravel(), sizes)
        else:
            self._attribute(node, "split", sizes)

    def _range(self, node: Any, step: Step, sizes: Sizes, kind: str) -> None:
        """Starts and ends lie in two lists, one entry for each axis that is named."""
        dim = int(kind.partition(".")[2])
        ndim = self.values[step.makes[0]].ndim
        axes = self._listed(node, step, 3, "axes")
        starts = self._listed(node, step, 1, "starts")
        axes = list(range(len(starts))) if axes is None or not len(axes) else [int(axis) % ndim for axis in axes]
        for slot, name, size in ((1, "starts", sizes[0]), (2, "ends", sizes[1])):
            new = tuple(size if axis == dim else None for axis in axes)
            if len(node.input) > 1:
                self._input(node, slot, np.asarray(self._listed(node, step, slot, name)), new)
            else:
                self._attribute(node, name, new)

    def _listed(self, node: Any, step: Step, slot: int, name: str) -> Any:
        if len(step.reads) > slot and step.reads[slot]:
            return np.asarray(self.values[step.reads[slot]]).ravel()
        return step.attributes.get(name, ())

    def _groups(self, node: Any, step: Step, sizes: Sizes, kind: str) -> None:
        name = "num_groups" if node.op_type == "GroupNormalization" else "group"
        for attribute in node.attribute:
            if attribute.name == name and sizes[0] is not None:
                attribute.i = sizes[0]

    def _taken_apart(self, view: Any, norm: Any, groups: int) -> None:
        """A group norm as a view and an instance norm, with a one and a zero for every group."""
        known = self.network.program.constants
        self._input(view, 1, np.asarray(known[view.input[1]]).ravel(), (None, groups, None))
        for slot in (1, 2):
            here = f"{norm.input[slot]}_of_{norm.output[0]}"
            self.inserted.append((norm.output[0], [_constant(here, np.resize(known[norm.input[slot]], groups))]))
            norm.input[slot] = here

    def _given_back(self, view: Any, channels: int) -> None:
        """The view behind it, where that holds all sizes as numbers."""
        own = self.network.program.constants.get(view.input[1])
        if own is not None and own[1] > 0:
            self._input(view, 1, own, (None, channels, *(None for _ in own[2:])))

    def _attribute(self, node: Any, name: str, sizes: Sizes) -> None:
        for attribute in node.attribute:
            if attribute.name == name:
                new = [a if b is None else b for a, b in zip(attribute.ints, sizes, strict=True)]
                del attribute.ints[:]
                attribute.ints.extend(new)

    def _input(self, node: Any, slot: int, own: Array, sizes: Sequence[int | None]) -> None:
        """Another constant in place of this one, or, of what is computed, other entries."""
        wrong = np.array([new is not None and new != old for old, new in zip(own, sizes, strict=True)])
        if not wrong.any():
            return
        name = node.input[slot]
        new = np.array([b if bad else a for a, b, bad in zip(own, sizes, wrong, strict=True)], own.dtype)
        here = f"{name}_of_{node.output[0]}"
        if name in self.network.program.constants:
            self.inserted.append((node.output[0], [_constant(here, new)]))
        else:
            parts = [_constant(f"{here}_where", wrong), _constant(f"{here}_new", new)]
            inputs = [f"{here}_where", f"{here}_new", name]
            self.inserted.append((node.output[0], [*parts, onnx.helper.make_node("Where", inputs, [here], name=here)]))
        node.input[slot] = here

    def _put_in(self) -> None:
        """New nodes stand right before those that read them."""
        if not self.inserted:
            return
        before: dict[str, list[Any]] = {}
        for reader, nodes in self.inserted:
            before.setdefault(reader, []).extend(nodes)
        old = [onnx.NodeProto.FromString(node.SerializeToString()) for node in self.model.graph.node]
        del self.model.graph.node[:]
        for node in old:
            self.model.graph.node.extend([*before.get(node.output[0] if node.output else "", ()), node])


def _constant(name: str, value: Array) -> Any:
    return onnx.helper.make_node("Constant", [], [name], name=name, value=onnx.numpy_helper.from_array(value, name))


# Checking


def _checked(network: FileNetwork, part: Path, inputs: Sequence[Tensor]) -> tuple[float, tuple[int, ...], str]:
    """The comparison, without onnxruntime's optimisation where that changes the original file as well."""
    try:
        return *_compared(network, part, inputs), ""
    except VerificationError:
        if not _changed_by_optimising(network, inputs):
            raise
    return *_compared(network, part, inputs, plain=True), OPTIMISED


def _changed_by_optimising(network: FileNetwork, inputs: Sequence[Tensor]) -> bool:
    file = network.origin.file
    runs = (file.session, session(str(file.path), plain=True))
    optimised, plain = (run.run(None, feed(file, inputs)) for run in runs)
    pairs = zip(optimised, plain, strict=True)
    return not all(agrees(torch.from_numpy(a), b) for a, b in pairs if isinstance(a, np.ndarray))


def _compared(
    network: FileNetwork, part: Path, inputs: Sequence[Tensor], *, plain: bool = False
) -> tuple[float, tuple[int, ...]]:
    """The largest difference between the file and the network, at every batch size that both take."""
    run, names = _opened(network, part, plain=plain)
    worst, done = 0.0, list[int]()
    for batch, values in _batches(network, inputs):
        try:
            found = run.run(names or None, feed(network.origin.file, values))
        except Exception as error:  # onnxruntime has a class for every fault, and no common one
            raise VerificationError(f"the written file does not run: {told(error)}", where=str(part.name)) from error
        where = f"{part.name}, batch size {batch}"
        worst = max(worst, _largest_difference(network, values, dict(zip(names, found, strict=False)), where))
        done.append(batch)
    return worst, tuple(done)


def _opened(network: FileNetwork, part: Path, *, plain: bool) -> tuple[Any, list[str]]:
    """The file in onnxruntime, and what it is asked for: also what nodes read behind which it is left as it is."""
    run, names, ends = session(str(part), plain=plain), list(network.program.outputs), list(network.program.ends)
    model = onnx.load(str(part)) if ends else None
    if model is None or weighs_more_than(model, LARGEST):
        return run, names
    model.graph.output.extend(onnx.helper.make_empty_tensor_value_info(name) for name in ends)
    return session(model.SerializeToString(), plain=plain), [*names, *ends]


def _largest_difference(network: FileNetwork, inputs: Sequence[Tensor], found: dict[str, Any], where: str) -> float:
    """The largest difference of any output, none of which may be more than the order of sums or rounding makes."""
    wanted = network(*inputs)
    wrong = [name for name, mine in zip(found, wanted, strict=False) if not agrees(mine, found[name])]
    if wrong:  # few networks make much of their rounding: what it is, is found out where it matters
        own = rounding(network, inputs)
        triples = zip(found, wanted, own, strict=False)
        wrong = [name for name, mine, least in triples if not agrees(mine, found[name], least)]
    if wrong:
        what = f"the written file's output {wrong[0]} is not the network's"
        raise VerificationError(what, where=where, fix="Report the file.")
    return max((_difference(mine, theirs) for mine, theirs in zip(wanted, found.values(), strict=False)), default=0.0)


def _difference(mine: Tensor, theirs: Any) -> float:
    a, b = mine.double(), torch.from_numpy(np.array(theirs)).double()
    both = a.isfinite() & b.isfinite()
    return float((a - b)[both].abs().max()) if bool(both.any()) else 0.0


def _batches(network: FileNetwork, inputs: Sequence[Tensor]) -> Iterator[tuple[int, tuple[Tensor, ...]]]:
    """The example itself, and other batch sizes if the file's is free and the original takes them."""
    own = inputs[0].shape[0] if inputs and inputs[0].ndim else 1
    yield own, tuple(inputs)
    file = network.origin.file
    for batch in BATCHES if free_batch(file) else ():
        values = tuple(_repeated(value, batch) for value in inputs)
        if batch == own:
            continue
        try:
            file.session.run(None, feed(file, values))
        except Exception:  # noqa: BLE001 (a file may say that its batch is free and mean one)
            continue
        yield batch, values


def _repeated(value: Tensor, batch: int) -> Tensor:
    """So many samples like these, no two the same."""
    longer = value[torch.arange(batch) % len(value)].clone()
    if not value.is_floating_point():
        return longer
    return longer * torch.linspace(1, 0.5, batch).view(-1, *(1 for _ in value.shape[1:])).to(value.dtype)
