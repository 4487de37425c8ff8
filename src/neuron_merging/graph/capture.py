"""Capture a module with torch.export: turn a module and example inputs into a `Graph` of named operators.

An einsum that is a plain matrix product is rewritten as `linear` or `matmul`.
"""

from __future__ import annotations

import inspect
import math
import operator
import os
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_structure, tree_unflatten

from neuron_merging.errors import ModelError, describe_error
from neuron_merging.graph.compare import outputs_match
from neuron_merging.graph.copying import (
    copy_with_own_tensors,
    copy_without_hooks,
    has_float64,
    list_dropped_hooks,
    named_tensors,
    named_tensors_with_aliases,
    remove_backward_hooks,
)
from neuron_merging.graph.example_inputs import (
    call_model,
    clone_inputs,
    flatten_inputs,
    flatten_outputs,
    get_leaf_names,
    infer_batch_size,
    normalize_inputs,
    resample_inputs,
)
from neuron_merging.graph.graph import Graph, Node, Ref, Shape, iter_refs
from neuron_merging.graph.module_rewrites import make_heads_prunable
from neuron_merging.graph.process_state import (
    disable_fused_attention,
    record_all_source_lines,
    restore_rng,
    seed_rng,
    silence_logging,
    silence_stdout,
)
from neuron_merging.graph.user_code import find_user_line, parse_source_line

EINSUM_ELLIPSIS = "..."
SHARDED_CLASSES = ("FullyShardedDataParallel", "FSDPModule")
"""What torch's two ways of sharding make of a module's class."""
FIX_WEIGHTS = "Load a sound checkpoint: no merge can repair such a network."
CONTROL_FLOW_OPERATORS = ("cond", "while_loop", "map", "map_impl", "scan", "associative_scan")
"""Operators that run graphs of their own, which ones or how often the data decide."""


def parse_einsum_letters(equation: str, dims: Sequence[int]) -> tuple[list[str], str]:
    """Return one letter per dimension for each operand and for the result. Dimensions behind `...` get Greek capitals.

    >>> parse_einsum_letters("b...d,df", (3, 2))
    (['bΑd', 'df'], 'Αbf')
    """
    left, arrow, right = equation.replace(" ", "").partition("->")
    terms = left.split(",")
    hidden = [
        dim - len(term.replace(EINSUM_ELLIPSIS, "")) if EINSUM_ELLIPSIS in term else 0
        for term, dim in zip(terms, dims, strict=True)
    ]
    # Greek capitals, since an equation uses Latin letters only. Ellipses broadcast: they align at their last dimension.
    behind = "".join(chr(ord("Α") + i) for i in range(max(hidden, default=0)))
    spelt = [
        term.replace(EINSUM_ELLIPSIS, behind[len(behind) - count :]) for term, count in zip(terms, hidden, strict=True)
    ]
    if not arrow:  # implicit output: all letters that occur once, in alphabetical order, as in numpy
        every = "".join(terms).replace(EINSUM_ELLIPSIS, "")
        right = EINSUM_ELLIPSIS + "".join(sorted(letter for letter in set(every) if every.count(letter) == 1))
    return spelt, right.replace(EINSUM_ELLIPSIS, behind)


def simplify_einsum(node: Node) -> Node:
    """Rewrite an einsum of a value and a matrix as `linear` or `matmul`; return any other node unchanged.

    >>> args = {"equation": "bnd,fd->bnf", "tensors": [1, 2]}
    >>> node = Node("y", "einsum", torch.ops.aten.einsum.default, args, (), False, "", "", "")
    >>> simplify_einsum(node).op
    'linear'
    """
    if "equation" not in node.args or len(node.args["tensors"]) != 2 or "->" not in node.args["equation"]:
        return node
    left, _, out = node.args["equation"].replace(" ", "").partition("->")
    terms, values = left.split(","), list(node.args["tensors"])
    if len(terms[1]) != 2 or EINSUM_ELLIPSIS in terms[1]:  # the matrix may be the first operand
        terms, values = terms[::-1], values[::-1]
    (x, w), aten = terms, torch.ops.aten
    # x and w must share exactly one letter, the last one of x: that is the contracted dimension.
    if len(w) != 2 or EINSUM_ELLIPSIS in w or len(set(x + w)) != len(x) + 1 or x[-1] not in w:
        return node
    new_dim = w.replace(x[-1], "")
    if out != x[:-1] + new_dim:
        return node
    if w[0] == new_dim:  # outputs × inputs, as nn.Linear stores its weight
        return replace(node, op="linear", fn=aten.linear.default, args={"input": values[0], "weight": values[1]})
    return replace(node, op="matmul", fn=aten.matmul.default, args={"self": values[0], "other": values[1]})


def capture(model: nn.Module, example_inputs: Any) -> Graph:
    """Export the model and return it as a `Graph`. The model itself is not changed.

    >>> graph = capture(nn.Linear(3, 2), torch.zeros(1, 3))
    >>> [node.op for node in graph.nodes]
    ['linear']
    """
    check_model(model)
    inputs = normalize_inputs(example_inputs, model)
    _check_example_inputs(model, inputs)
    graph = trace_graph(model, inputs)
    _check_norm_variances(graph)
    return graph


def trace_graph(model: nn.Module, inputs: tuple[Any, ...]) -> Graph:
    """Return the graph of a model without checking it: it was checked before, or its tensors are fake."""
    return _build_graph(_export_program(make_heads_prunable(copy_without_hooks(model)).eval(), inputs), model)


def check_model(model: object) -> None:
    """Raise a ModelError unless this is an initialised module whose weights are finite."""
    if not isinstance(model, nn.Module):
        raise ModelError(
            f"expected a torch.nn.Module, got {type(model).__name__}", fix=_explain_how_to_get_module(model)
        )
    for name, module in model.named_modules():
        _check_is_plain_module(module, name or type(model).__name__)
    for name, tensor in named_tensors(model).items():
        if nn.parameter.is_lazy(tensor):
            raise ModelError(
                "a lazy module has not been initialised",
                where=name,
                fix="Call the model once on an example input first.",
            )
        if tensor.is_meta:
            raise ModelError(
                "the model is on the meta device, so there are no weights to merge",
                where=name,
                fix="Load the weights onto a real device first.",
            )
        if tensor.is_floating_point() and not _has_valid_values(
            tensor.detach(), mask=not isinstance(tensor, nn.Parameter)
        ):
            raise ModelError(
                "the weights contain NaN or infinity",
                where=name,
                fix=FIX_WEIGHTS,
            )


def _explain_how_to_get_module(given: object) -> str:
    if isinstance(given, str | os.PathLike):
        return "Give a module, or the path of an .onnx or .pt2 file; load() opens a folder that save() wrote."
    if isinstance(getattr(given, "model", None), nn.Module):
        return "Give the module that it holds: .model."
    return "Give the module itself, not its state dict or a class."


def _check_is_plain_module(module: nn.Module, where: str) -> None:
    """Refuse wrappers whose code cannot be captured, and layers whose weights cannot be merged."""
    if isinstance(module, torch.jit.ScriptModule):
        what, fix = "a TorchScript module has no Python code to capture", "Give the module that it was made from."
    elif isinstance(module, nn.parallel.DistributedDataParallel):
        what, fix = "DistributedDataParallel wraps a part of the model", "Give the model without it: .module."
    elif any(kind.__name__ in SHARDED_CLASSES for kind in type(module).__mro__):
        what = "the weights are sharded over processes (FSDP)"
        fix = "Load the full state dict into a model of the plain class, and give that."
    elif ".quantized" in type(module).__module__:
        what, fix = "the layer is quantised", "Compress the float network, and quantise the result."
    elif (weight := module._parameters.get("weight")) is not None and _is_unmergeable(weight):
        what = f"weights of type {str(weight.dtype).removeprefix('torch.')} cannot be merged"
        fix = "Give a network with real weights in float32, float16 or bfloat16."
    else:
        return
    raise ModelError(what, where=where, fix=fix)


def _is_unmergeable(weight: Tensor) -> bool:
    """Return whether a weight is complex or in float8, which torch cannot compute with."""
    return weight.is_complex() or (weight.is_floating_point() and weight.itemsize == 1)


def _has_valid_values(tensor: Tensor, mask: bool) -> bool:
    """Return whether all entries are finite. An attention `mask` may also hold minus infinity."""
    # One sum finds NaN and infinity without a mask the size of the tensor; float64, so that float16 cannot overflow.
    tensor = tensor if has_float64(tensor.device) else tensor.cpu()
    if math.isfinite(float(tensor.sum(dtype=torch.float64))):
        return True
    return mask and bool((tensor.isfinite() | tensor.isneginf()).all())


def _check_example_inputs(model: nn.Module, inputs: tuple[Any, ...]) -> None:
    devices = {t.device for t in model.parameters()}
    for value in flatten_inputs(inputs):
        if isinstance(value, Tensor) and value.ndim and not len(value):
            what = f"an example input is an empty batch, of shape {tuple(value.shape)}"
            raise ModelError(what, where="example_inputs", fix="Give a batch of at least one.")
        if isinstance(value, Tensor) and value.layout is not torch.strided:
            what = f"an example input is sparse ({str(value.layout).removeprefix('torch.')})"
            raise ModelError(what, where="example_inputs", fix="Give a dense one: .to_dense().")
        if isinstance(value, Tensor) and devices and value.device not in devices:
            raise ModelError(
                f"an example input is on {value.device}, the model on {devices.pop()}",
                where="example_inputs",
                fix="Move the example input to the model's device.",
            )


def _check_norm_variances(graph: Graph) -> None:
    """Refuse a batch norm that takes the root of a negative number, or divides by zero: its channel is never finite."""
    for node in graph.nodes:
        stored = node.args.get("running_var")
        name = graph.parameters.get(stored.name) if isinstance(stored, Ref) else None
        if name is None:
            continue
        variance = graph.tensors[name].double()
        lost = (variance + float(node.args.get("eps", 0.0)) <= 0).nonzero().flatten().tolist()
        if lost:
            what = f"the stored variance of channel {lost[0]} is {float(variance[lost[0]]):.3g}, which has no root"
            raise ModelError(what, where=name, fix=FIX_WEIGHTS)


def check_hooks_only_observe(model: nn.Module, inputs: tuple[Any, ...]) -> None:
    """Refuse a model whose hooks change its outputs: a smaller network without them would answer otherwise.

    The example and noise like it are compared: a hook may leave an example of zeros as it is.
    """
    if not (hooked := list_dropped_hooks(model)):
        return
    fix = "Write what the hook does into forward(), or remove it to compress the network without it."
    for batch in (inputs, resample_inputs(inputs, infer_batch_size(inputs))):
        try:
            plain = _run_with_fixed_seed(copy_without_hooks(copy_with_own_tensors(model)), batch)
        except Exception:  # noqa: BLE001 (the network's own code, which may refuse noise)
            continue
        try:
            found = _run_with_fixed_seed(remove_backward_hooks(copy_with_own_tensors(model)), batch)
        except Exception as error:
            what = f"the model does not run with its hooks: {describe_error(error)}"
            raise ModelError(what, where=", ".join(hooked), fix=fix) from error
        if not outputs_match(found, plain):
            raise ModelError("a forward hook changes the model's outputs", where=", ".join(hooked), fix=fix)


def _run_with_fixed_seed(model: nn.Module, inputs: tuple[Any, ...]) -> list[Tensor]:
    """Outputs in evaluation mode. Gradients are on: hooks that watch them ask for that."""
    with disable_fused_attention(), restore_rng(), torch.enable_grad():
        seed_rng(0)
        return [tensor.detach() for tensor in flatten_outputs(call_model(model.eval(), clone_inputs(inputs)))]


def _map_to_first_names(model: nn.Module) -> dict[str, str]:
    """Map every name of every tensor to its first name: tied weights have several."""
    first_names = {id(tensor): name for name, tensor in named_tensors(model).items()}
    return {name: first_names[id(tensor)] for name, tensor in named_tensors_with_aliases(model).items()}


def _export_program(model: nn.Module, inputs: tuple[Any, ...]) -> torch.export.ExportedProgram:
    try:
        with (
            silence_logging(),
            disable_fused_attention(),
            silence_stdout(),
            record_all_source_lines(),
            # Grad mode is off outside already, so that a no_grad() inside forward() is not exported as a subgraph.
            torch.no_grad(),
        ):
            return torch.export.export(
                _flatten_forward(model, inputs), tuple(flatten_inputs(clone_inputs(inputs))), strict=False
            )
    except ModelError:
        raise
    except Exception as error:
        raise ModelError(
            f"the model could not be captured: {describe_error(error)}",
            where=find_user_line(error) or "example_inputs",
            fix=_suggest_capture_fix(flatten_inputs(inputs)),
        ) from error


def _suggest_capture_fix(leaves: list[Any]) -> str:
    """Return what to do if a model cannot be captured: usual mistakes in the example inputs come first."""
    if any(type(leaf).__module__ == "numpy" for leaf in leaves):
        return "Give tensors as example inputs: torch.from_numpy(array)."
    if leaves and all(type(leaf) is int for leaf in leaves):
        return f"Give a tensor, not its shape: torch.randn({', '.join(map(str, leaves))})."
    return (
        "Check the number, shapes and dtypes of the example inputs, which are passed by position, or by name "
        "if they are a dict; data-dependent control flow in forward() has to be removed or replaced by torch operators."
    )


def _flatten_forward(model: nn.Module, inputs: tuple[Any, ...]) -> nn.Module:
    """Give the module a forward that takes flat inputs and returns a flat list of output tensors. Return the module."""
    structure, nested_forward = tree_structure(inputs), model.forward

    def forward(*leaves: Any) -> list[Tensor]:
        outputs = flatten_outputs(call_model(nested_forward, tree_unflatten(leaves, structure)))
        if not outputs:
            what, fix = "the network returns no tensor", "Return what it computes: a tensor, or a tuple, list or dict."
            raise ModelError(what, where=f"{type(model).__name__}.forward", fix=fix)
        return outputs

    # torch.export names the graph's inputs after the signature: keep the names of the user's arguments.
    names = get_leaf_names(model, inputs)
    # Inputs of `*args` have no names; the exporter numbers them.
    if len(set(names)) == len(flatten_inputs(inputs)):
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        forward.__signature__ = inspect.Signature([inspect.Parameter(name, kind) for name in names])  # type: ignore[attr-defined]
    model.forward = forward
    return model


def _build_graph(program: torch.export.ExportedProgram, model: nn.Module) -> Graph:
    signature = program.graph_signature
    first = _map_to_first_names(model)
    stored = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
    names = {value: first[name] for value, name in stored.items()}
    lifted = dict(signature.inputs_to_lifted_tensor_constants)
    constants = {value: program.constants[key] for value, key in lifted.items()}
    shapes: dict[str, Shape] = {}
    dtypes: dict[str, torch.dtype] = {}
    subgraphs: dict[str, Any] = {}
    nodes: list[Node] = []
    outputs: tuple[Ref, ...] = ()
    for fx in _select_used_nodes(program.graph, signature.inputs_to_parameters):
        if fx.op == "call_function":
            nodes.append(simplify_einsum(_build_node(fx)))
        elif fx.op == "get_attr":
            subgraphs[fx.name] = getattr(program.graph_module, str(fx.target))
        elif fx.op == "output":
            # The exporter puts mutated buffers first; only the outputs of forward() follow.
            count = len(signature.output_specs) - len(signature.user_outputs)
            outputs = tuple(iter_refs([_convert_argument(fx.args[0])]))[count:]
        if fx.op != "output":
            shapes[fx.name] = (_get_output_shapes(fx.meta.get("val")) or ((),))[0]
            if isinstance(value := fx.meta.get("val"), Tensor):
                dtypes[fx.name] = value.dtype
    return Graph(
        nodes=tuple(nodes),
        # Flags and None among the inputs have no node: None keeps their positions.
        inputs=tuple(n if isinstance(n, str) and n in shapes else None for n in signature.user_inputs),
        outputs=outputs,
        parameters=names,
        constants=constants,
        shapes=shapes,
        dtypes=dtypes,
        tensors=named_tensors(model),
        subgraphs=subgraphs,
    )


def _select_used_nodes(graph: torch.fx.Graph, parameters: Collection[str]) -> list[torch.fx.Node]:
    """Return the nodes without those whose result is unused, such as attention weights that are returned and dropped.

    A layer with unused result stays: the model's code runs it, so its weight must fit the pruned channels. An unused
    pooler is an example.
    """
    layers = _find_layer_nodes(graph, parameters)
    dropped: set[torch.fx.Node] = set()
    for fx in reversed(graph.nodes):  # users come before the nodes that they use
        pure = fx.op == "call_function" and not fx.is_impure() and fx not in layers
        if pure and dropped.issuperset(fx.users):
            dropped.add(fx)
    return [fx for fx in graph.nodes if fx not in dropped]


def _find_layer_nodes(graph: torch.fx.Graph, parameters: Collection[str]) -> set[torch.fx.Node]:
    """Return the nodes that combine an activation with a parameter, or with a value computed from parameters alone."""
    stored = {fx for fx in graph.nodes if fx.op == "placeholder" and fx.name in parameters}
    layers: set[torch.fx.Node] = set()
    for fx in graph.nodes:
        if fx.op == "call_function" and not stored.isdisjoint(fx.all_input_nodes):
            (stored if stored.issuperset(fx.all_input_nodes) else layers).add(fx)
    return layers


def _build_node(fx: torch.fx.Node) -> Node:
    source = parse_source_line(fx.meta.get("stack_trace") or "")
    try:
        shapes = _get_output_shapes(fx.meta.get("val"))
    except (RuntimeError, TypeError) as error:
        raise ModelError(
            f"the size of what {_get_op_name(fx.target)} returns depends on the data",
            where=source or fx.name,
            fix="Use a mask of fixed size (torch.where), or do this outside of forward().",
        ) from error
    if isinstance(fx.target, torch._ops.HigherOrderOperator) and _get_op_name(fx.target) in CONTROL_FLOW_OPERATORS:
        what = f"torch's {_get_op_name(fx.target)} decides by the data which operators run"
        raise ModelError(what, where=source or fx.name, fix="Compute both ways and choose with torch.where.")
    stack = list((fx.meta.get("nn_module_stack") or {}).values())
    path, kind = stack[-1] if stack else ("", "")
    full = _get_op_name(fx.target)
    return Node(
        name=fx.name,
        op=full.rstrip("_") or full,  # relu and relu_ share one rule
        fn=fx.target,  # type: ignore[arg-type]
        args=_name_arguments(fx),
        shapes=shapes,
        inplace=full.endswith("_") and not full.startswith("__"),
        module=path,
        module_type=kind if isinstance(kind, str) else f"{kind.__module__}.{kind.__qualname__}",
        source=source,
        returns_list=isinstance(fx.meta.get("val"), (list, tuple)),
    )


def _get_op_name(target: Any) -> str:
    if target is operator.getitem:
        return "getitem"
    if isinstance(target, torch._ops.OpOverload):
        return str(target.overloadpacket.__name__)
    return str(getattr(target, "__name__", target))


def _name_arguments(fx: torch.fx.Node) -> dict[str, Any]:
    """Return the arguments by the names of the operator's schema, so that rules need not count positions."""
    schema = getattr(fx.target, "_schema", None)
    if schema is None:
        names: list[str] = ["self", "index"] if fx.target is operator.getitem else []
        names += [f"arg{i}" for i in range(len(names), len(fx.args))]
    else:
        names = [a.name for a in schema.arguments]
    bound = {name: _convert_argument(arg) for name, arg in zip(names, fx.args, strict=False)}
    return bound | {name: _convert_argument(arg) for name, arg in fx.kwargs.items()}


def _convert_argument(arg: Any) -> Any:
    if isinstance(arg, torch.fx.Node):
        return Ref(arg.name)
    if isinstance(arg, (list, tuple)):
        return [_convert_argument(item) for item in arg]
    if isinstance(arg, dict):
        return [_convert_argument(item) for item in arg.values()]
    return arg


def _get_output_shapes(value: Any) -> tuple[Shape, ...]:
    if isinstance(value, Tensor):
        return (tuple(int(s) for s in value.shape),)
    if isinstance(value, (list, tuple)):
        return tuple(shape for item in value for shape in _get_output_shapes(item))
    return ()
