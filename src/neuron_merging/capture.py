"""capture: a module and example inputs in, a `Graph` of named operators out."""

from __future__ import annotations

import copy
import io
import logging
import math
import operator
import sysconfig
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from neuron_merging import progress
from neuron_merging.errors import MergingError, told

Shape = tuple[int, ...]
STANDARD_LIBRARY = Path(sysconfig.get_path("stdlib")).as_posix() + "/"


@dataclass(frozen=True)
class Ref:
    """The value that another node computes, or a graph input, parameter or constant."""

    name: str


@dataclass(frozen=True)
class Node:
    """One operator call: what it is, what it reads, and which line of the model wrote it."""

    name: str
    op: str
    fn: Callable[..., Any]
    args: Mapping[str, Any]
    shapes: tuple[Shape, ...]
    inplace: bool
    module: str
    module_type: str
    source: str

    @property
    def shape(self) -> Shape:
        return self.shapes[0] if self.shapes else ()

    @property
    def place(self) -> str:
        """`layer.name, file.py:12: the code` for messages."""
        return ", ".join(part for part in (self.module, self.source) if part)

    def refs(self) -> Iterator[Ref]:
        yield from _refs(self.args.values())

    def compute(self, args: Mapping[str, Any]) -> Any:
        """Run the operator on bound arguments."""
        named = hasattr(self.fn, "_schema")
        return self.fn(**args) if named else self.fn(*args.values())


def _refs(values: Any) -> Iterator[Ref]:
    for value in values:
        if isinstance(value, Ref):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _refs(value)


@dataclass(frozen=True)
class Graph:
    """A network as data: operators in order of execution, parameters by dotted name.

    `inputs` has one entry for each example input, None for one that is no tensor.
    """

    nodes: tuple[Node, ...]
    inputs: tuple[str | None, ...]
    outputs: tuple[Ref, ...]
    parameters: Mapping[str, str]
    constants: Mapping[str, Tensor] = field(repr=False)
    shapes: Mapping[str, Shape] = field(repr=False)
    tensors: Mapping[str, Tensor] = field(repr=False)
    subgraphs: Mapping[str, Any] = field(repr=False, default_factory=dict)
    """The insides of `with torch.no_grad():` and its like, which are operators of their own."""

    def node(self, name: str) -> Node | None:
        return self._by_name.get(name)

    def users(self, name: str) -> list[Node]:
        return self._users.get(name, [])

    def macs(self) -> int:
        """Roughly, the multiply-accumulates of one run: what layers with stored weights cost."""
        total = 0
        for node in self.nodes:
            for ref in node.refs():
                shape = self.shapes.get(ref.name, ())
                if (
                    ref.name in self.parameters
                    and len(shape) > 1
                    and node.op.startswith(("conv", "linear", "mat", "mm", "addmm"))
                ):
                    total += math.prod(shape) * math.prod(node.shape) // max(1, shape[0])
        return total

    @cached_property
    def written(self) -> frozenset[str]:
        """Stored tensors that the network writes into while it runs: counters, moving averages, caches."""
        ends = (self._origin(node.name) for node in self.nodes if node.inplace)
        return frozenset(name for name in ends if name in self.parameters or name in self.constants)

    def _origin(self, name: str) -> str:
        """The value at the start of a chain of first operands."""
        while (node := self.node(name)) is not None and (first := next(node.refs(), None)) is not None:
            name = first.name
        return name

    @cached_property
    def _by_name(self) -> dict[str, Node]:
        return {node.name: node for node in self.nodes}

    @cached_property
    def _users(self) -> dict[str, list[Node]]:
        found: dict[str, list[Node]] = {}
        for node in self.nodes:
            for ref in dict.fromkeys(node.refs()):
                found.setdefault(ref.name, []).append(node)
        return found

    def run(
        self,
        inputs: Sequence[Any],
        tensors: Mapping[str, Tensor],
        call: Callable[[Node, dict[str, Any]], Any],
        watch: Callable[[Node, Any], Any] | None = None,
    ) -> list[Any]:
        """Execute the graph node by node; `call` computes a node from its bound arguments."""
        execution = Execution(self, inputs, tensors)
        for node in progress.each(self.nodes, "running the network"):
            value = execution.step(node, call(node, execution.arguments(node)))
            if watch is not None:
                watch(node, value)
        return execution.outputs()


class Execution:
    """A run of a graph, node by node; values are dropped after their last use."""

    def __init__(self, graph: Graph, inputs: Sequence[Any], tensors: Mapping[str, Tensor]) -> None:
        given = zip(graph.inputs, copied(inputs), strict=True)
        self.values: dict[str, Any] = {name: value for name, value in given if name is not None}
        self.values |= {**graph.constants, **graph.subgraphs}
        self.values |= {value: tensors[name] for value, name in graph.parameters.items()}
        self.values |= {value: self.values[value].clone() for value in graph.written}
        self._last = {ref.name: node.name for node in graph.nodes for ref in node.refs()}
        self._results = [ref.name for ref in graph.outputs]

    def arguments(self, node: Node) -> dict[str, Any]:
        return bound(node, self.values)

    def step(self, node: Node, value: Any) -> Any:
        """Take note of a node's value."""
        self.values[node.name] = value
        for ref in node.refs():
            if self._last[ref.name] == node.name and ref.name not in self._results:
                self.values.pop(ref.name, None)
        return value

    def outputs(self) -> list[Any]:
        return [self.values[name] for name in self._results]


def bound(node: Node, values: Mapping[str, Any]) -> dict[str, Any]:
    """The node's arguments with values in place of references."""
    return {name: _fill(value, values) for name, value in node.args.items()}


def _fill(value: Any, env: Mapping[str, Any]) -> Any:
    if isinstance(value, Ref):
        return env[value.name]
    if isinstance(value, (list, tuple)):
        return type(value)(_fill(item, env) for item in value)
    return value


def flat(inputs: Any) -> list[Any]:
    """What tuples, lists and mappings hold, in the order of `Graph.inputs`.

    >>> flat(({"image": 1, "boxes": [2, 3]}, None))
    [1, 2, 3, None]
    """
    return tree_leaves(inputs)


def copied(inputs: Any) -> Any:
    """A network may write into its inputs, which are not its own."""
    return tree_map(lambda value: value.clone() if isinstance(value, Tensor) else value, inputs)


def as_inputs(example_inputs: Any) -> tuple[Any, ...]:
    """A tensor, or a tuple or list of positional inputs, as a tuple."""
    if isinstance(example_inputs, (tuple, list)):
        return tuple(example_inputs)
    return (example_inputs,)


def bare_copy(model: nn.Module, replace: Mapping[int, Tensor] | None = None) -> nn.Module:
    """A copy of the module tree without the user's hooks.

    Tensors are those in `replace` (by identity). Otherwise parameters are the model's own; all that its code may write
    into is copied.
    """
    known = replace or {}
    own = [t for t in own_tensors(model) if id(t) not in known]
    tensors: dict[int, Any] = {id(t): t if isinstance(t, nn.Parameter) else t.detach().clone() for t in own}
    tensors |= known
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            twin = copy.deepcopy(model, tensors)
    except Exception as error:
        raise MergingError(
            f"the model cannot be copied: {told(error)}",
            where=type(model).__name__,
            fix="Remove the attribute that cannot be deep-copied (a lock, a file, a generator).",
        ) from error
    for module in twin.modules():
        _drop_hooks(module)
    return twin


def own_tensors(model: nn.Module) -> Iterator[Tensor]:
    """Parameters, buffers and plain tensor attributes of every submodule."""
    for module in model.modules():
        yield from (t for t in module._parameters.values() if t is not None)
        yield from (t for t in module._buffers.values() if t is not None)
        yield from (t for t in vars(module).values() if isinstance(t, Tensor))


def dropped_hooks(model: nn.Module) -> list[str]:
    """The modules whose forward hooks a copy does not carry."""
    tables = ("_forward_hooks", "_forward_pre_hooks")
    return [
        name or type(model).__name__
        for name, module in model.named_modules()
        if any(not _computes_weight(hook) for t in tables for hook in getattr(module, t).values())
    ]


def _drop_hooks(module: nn.Module) -> None:
    module._forward_hooks.clear()
    module._backward_hooks.clear()
    module._backward_pre_hooks.clear()
    for key, hook in list(module._forward_pre_hooks.items()):
        if not _computes_weight(hook):
            del module._forward_pre_hooks[key]


def _computes_weight(hook: Any) -> bool:
    """torch's own weight_norm and spectral_norm live in a pre-hook: they are part of the network."""
    return type(hook).__module__.startswith("torch.nn.utils")


def capture(model: nn.Module, example_inputs: Any) -> Graph:
    """Export the model and describe it as a `Graph`; the model itself is left as it was.

    >>> graph = capture(nn.Linear(3, 2), torch.zeros(1, 3))
    >>> [node.op for node in graph.nodes]
    ['linear']
    """
    _check_model(model)
    inputs = as_inputs(example_inputs)
    _check_inputs(model, inputs)
    program = _export(bare_copy(model).eval(), inputs)
    return _graph_of(program, model)


def _check_model(model: object) -> None:
    if not isinstance(model, nn.Module):
        raise MergingError(
            f"expected a torch.nn.Module, got {type(model).__name__}",
            fix="Give the module itself, not its state dict or a class.",
        )
    for name, tensor in _named(model).items():
        if nn.parameter.is_lazy(tensor):
            raise MergingError(
                "a lazy module has not been initialised",
                where=name,
                fix="Call the model once on an example input first.",
            )
        if tensor.is_meta:
            raise MergingError(
                "the model is on the meta device, so there are no weights to merge",
                where=name,
                fix="Load the weights onto a real device first.",
            )
        if tensor.is_floating_point() and not _sound(tensor.detach(), mask=not isinstance(tensor, nn.Parameter)):
            raise MergingError(
                "the weights contain NaN or infinity",
                where=name,
                fix="Load a sound checkpoint: no merge can repair such a network.",
            )


def _sound(tensor: Tensor, mask: bool) -> bool:
    """Whether all entries are numbers; what masks an attention may have minus infinities."""
    if math.isfinite(float(tensor.sum(dtype=torch.float64))):
        return True
    return mask and bool((tensor.isfinite() | tensor.isneginf()).all())


def _check_inputs(model: nn.Module, inputs: tuple[Any, ...]) -> None:
    devices = {t.device for t in model.parameters()}
    for value in flat(inputs):
        if isinstance(value, Tensor) and value.ndim and not len(value):
            what = f"an example input is an empty batch, of shape {tuple(value.shape)}"
            raise MergingError(what, where="example_inputs", fix="Give a batch of at least one.")
        if isinstance(value, Tensor) and devices and value.device not in devices:
            raise MergingError(
                f"an example input is on {value.device}, the model on {devices.pop()}",
                where="example_inputs",
                fix="Move the example input to the model's device.",
            )


def _named(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by name; a tensor with two names is listed under its first."""
    return dict([*model.named_parameters(), *model.named_buffers()])


def _first_names(model: nn.Module) -> dict[str, str]:
    """Every name of every tensor → the name under which it is known here."""
    known = {id(tensor): name for name, tensor in _named(model).items()}
    return {name: known[id(tensor)] for name, tensor in all_tensors(model).items()}


def all_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers under all their names."""
    buffers = model.named_buffers(remove_duplicate=False)
    return dict(model.named_parameters(remove_duplicate=False)) | dict(buffers)


def _export(model: nn.Module, inputs: tuple[Any, ...]) -> torch.export.ExportedProgram:
    try:
        with quiet(), plain_attention(), redirect_stderr(io.StringIO()):
            return torch.export.export(model, copied(inputs), strict=False)
    except Exception as error:
        raise MergingError(
            f"the model could not be captured: {told(error)}",
            where=place_of(error) or "example_inputs",
            fix="Check the number, shapes and dtypes of the example inputs, which are passed by position; "
            "data-dependent Python control flow in forward() has to be removed or replaced by torch operators; outputs "
            "are tensors in tuples, lists, dicts, or dataclasses that torch.export.register_dataclass knows.",
        ) from error


@contextmanager
def quiet() -> Iterator[None]:
    """The exporter logs as errors and warnings what is reported here."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


@contextmanager
def plain_attention() -> Iterator[None]:
    """Attention as its module's code says: torch's fused one leaves other values at masked places."""
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)


def place_of(error: BaseException) -> str:
    """The innermost line of the traceback that belongs to the user's own code."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not _internal(f.filename)]
    if not frames:
        return ""
    return f"{Path(frames[-1].filename).name}:{frames[-1].lineno}: {frames[-1].line}"


def _internal(filename: str) -> bool:
    path = Path(filename).as_posix()
    own = Path(__file__).parent.as_posix()
    here = path.startswith(own) and "/networks/" not in path
    standard = path.startswith(STANDARD_LIBRARY) and "-packages/" not in path
    return "/torch/" in path or "/onnxruntime/" in path or filename.startswith("<") or standard or here


def _graph_of(program: torch.export.ExportedProgram, model: nn.Module) -> Graph:
    signature = program.graph_signature
    first = _first_names(model)
    stored = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
    names = {value: first[name] for value, name in stored.items()}
    lifted = dict(signature.inputs_to_lifted_tensor_constants)
    constants = {value: program.constants[key] for value, key in lifted.items()}
    shapes: dict[str, Shape] = {}
    subgraphs: dict[str, Any] = {}
    nodes: list[Node] = []
    outputs: tuple[Ref, ...] = ()
    for fx in program.graph.nodes:
        if fx.op == "call_function":
            nodes.append(_node_of(fx))
        elif fx.op == "get_attr":
            subgraphs[fx.name] = getattr(program.graph_module, str(fx.target))
        elif fx.op == "output":
            count = len(signature.output_specs) - len(signature.user_outputs)
            outputs = tuple(_refs([_value(fx.args[0])]))[count:]
        if fx.op != "output":
            shapes[fx.name] = (_shapes(fx.meta.get("val")) or ((),))[0]
    return Graph(
        nodes=tuple(nodes),
        inputs=tuple(n if isinstance(n, str) and n in shapes else None for n in signature.user_inputs),
        outputs=outputs,
        parameters=names,
        constants=constants,
        shapes=shapes,
        tensors=_named(model),
        subgraphs=subgraphs,
    )


def _node_of(fx: torch.fx.Node) -> Node:
    source = _source(fx.meta.get("stack_trace") or "")
    try:
        shapes = _shapes(fx.meta.get("val"))
    except (RuntimeError, TypeError) as error:
        raise MergingError(
            f"the size of what {_op_name(fx.target)} returns depends on the data",
            where=source or fx.name,
            fix="Use a mask of fixed size (torch.where), or do this outside of forward().",
        ) from error
    stack = list((fx.meta.get("nn_module_stack") or {}).values())
    path, kind = stack[-1] if stack else ("", "")
    full = _op_name(fx.target)
    return Node(
        name=fx.name,
        op=full.rstrip("_") or full,
        fn=fx.target,  # type: ignore[arg-type]
        args=_bind(fx),
        shapes=shapes,
        inplace=full.endswith("_") and not full.startswith("__"),
        module=path,
        module_type=kind if isinstance(kind, str) else f"{kind.__module__}.{kind.__qualname__}",
        source=source,
    )


def _op_name(target: Any) -> str:
    if target is operator.getitem:
        return "getitem"
    if isinstance(target, torch._ops.OpOverload):
        return str(target.overloadpacket.__name__)
    return str(getattr(target, "__name__", target))


def _bind(fx: torch.fx.Node) -> dict[str, Any]:
    """Arguments by the names of the operator's schema, so that rules need not count positions."""
    schema = getattr(fx.target, "_schema", None)
    if schema is None:
        names: list[str] = ["self", "index"] if fx.target is operator.getitem else []
        names += [f"arg{i}" for i in range(len(names), len(fx.args))]
    else:
        names = [a.name for a in schema.arguments]
    bound = {name: _value(arg) for name, arg in zip(names, fx.args, strict=False)}
    return bound | {name: _value(arg) for name, arg in fx.kwargs.items()}


def _value(arg: Any) -> Any:
    if isinstance(arg, torch.fx.Node):
        return Ref(arg.name)
    if isinstance(arg, (list, tuple)):
        return [_value(item) for item in arg]
    if isinstance(arg, dict):
        return [_value(item) for item in arg.values()]
    return arg


def _shapes(value: Any) -> tuple[Shape, ...]:
    if isinstance(value, Tensor):
        return (tuple(int(s) for s in value.shape),)
    if isinstance(value, (list, tuple)):
        return tuple(shape for item in value for shape in _shapes(item))
    return ()


def _source(trace: str) -> str:
    """`file.py:12: code` of the innermost frame outside torch."""
    found = ""
    lines = trace.splitlines()
    for here, after in zip(lines, [*lines[1:], ""], strict=False):
        if here.lstrip().startswith('File "'):
            file, line = here.split('"')[1], here.split("line ")[-1].split(",")[0]
            if not _internal(file):
                code = after.strip() if not after.lstrip().startswith('File "') else ""
                found = f"{Path(file).name}:{line}" + (f": {code}" if code else "")
    return found
