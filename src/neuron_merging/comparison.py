"""Compare two networks of any kind: how alike are their outputs?

A file is run by its own runtime, so that a converted, quantised or pruned file is judged as it will be used. The inputs
are the user's data, else they are synthesised from what the first network stores.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from neuron_merging.channels.analysis import Analysis
from neuron_merging.checkpoint.compressed import Compressed
from neuron_merging.checkpoint.load_folder import load
from neuron_merging.config import CompressConfig
from neuron_merging.errors import FidelityError, MergingError, ModelError, describe_error, raise_if_out_of_memory
from neuron_merging.evaluation.fidelity import SAMPLE_LIMITS, EvalSet, Fidelity
from neuron_merging.evaluation.verdict import Verdict, make_verdict
from neuron_merging.graph.capture import check_hooks_only_observe
from neuron_merging.graph.copying import copy_with_own_tensors, unwrap_model
from neuron_merging.graph.example_inputs import (
    call_model,
    clone_inputs,
    flatten_inputs,
    flatten_outputs,
    infer_batch_size,
    map_batched,
    normalize_inputs,
    resample_inputs,
)
from neuron_merging.graph.process_state import exclusive_access
from neuron_merging.onnx.formats import FileFormat, find_format
from neuron_merging.pipeline import open_eval_set
from neuron_merging.progress import show_progress_bar
from neuron_merging.pruning.trial_prune import analyse

Network = nn.Module | Analysis | Compressed | str | Path
EQUAL_FIDELITY = 0.9999
"""Networks that agree this closely are equal up to rounding, on whatever inputs: a guess of the inputs is enough."""
SAME_INPUTS_FIX = "Give example inputs that both networks take."


@dataclass(frozen=True, repr=False)
class Comparison:
    """How alike two networks answer. `str` returns the verdict as a sentence.

    Attributes
    ----------
    verdict
        The fidelity of the second network's outputs to the first one's, its level, and what it was measured on.
    fidelity
        Further scores: the share of inputs with the same top class, the agreement of outputs, the accuracy.
    outputs
        Positions of the compared outputs of the first and of the second network.
    note
        What was not compared; empty if everything was.

    Examples
    --------
    >>> import neuron_merging as nm
    >>> net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> compare(net, net, torch.zeros(1, 4)).verdict.level
    'good'
    """

    verdict: Verdict
    fidelity: Fidelity
    outputs: tuple[tuple[int, int], ...]
    note: str = ""

    def __str__(self) -> str:
        """The words of a verdict; its advice on how to compress is left out."""
        text = str(self.verdict)
        text = text.removesuffix(f". {self.verdict.advice}") if self.verdict.advice else text
        text = text.replace("the original's", "the first network's").replace("the original", "the first network")
        return text + (f" ({self.note})" if self.note else "")

    def __repr__(self) -> str:
        """One line, for notebooks."""
        return f"<Comparison: {self}>"


def compare(
    first: Network,
    second: Network,
    example_inputs: Any = None,
    *,
    evaluate: Iterable[Any] | None = None,
    effort: str = "normal",
    seed: int = 0,
    require: float | None = None,
    trust: bool = False,
    progress: bool | None = None,
) -> Comparison:
    """Measure how alike two networks answer: is this converted, quantised or pruned file still my network?

    Parameters
    ----------
    first
        The reference: a module, an analysis, a result of `compress`, a folder that `save` wrote, or an .onnx or .pt2
        file. Files are run by onnxruntime or torch, as they are.
    second
        The network to judge, of any of these kinds.
    example_inputs
        As for `analyse`. Left out, those of an analysis, a result or a file are used.
    evaluate
        Data to compare on, with or without labels, as for `compress`. Left out, inputs are synthesised.
    effort
        How much work goes into synthesised inputs: "fast", "normal" or "best".
    seed
        Seeds the synthesised inputs.
    require
        The least acceptable fidelity; a lower one raises an error.
    trust
        As for `load`, if a network is a folder.
    progress
        As for `compress`.

    Returns
    -------
    Comparison
        The verdict, and further scores.

    Raises
    ------
    FidelityError
        The fidelity is below `require`.
    ModelError
        A network cannot be opened or does not run.
    MergingError
        The networks take different inputs or return different shapes, or an argument is invalid.

    Examples
    --------
    >>> net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> small = nm.compress(net, torch.zeros(1, 4), ratio=0.25)
    >>> compare(net, small).fidelity.scores[1].network
    'second'
    """
    settings = CompressConfig(evaluate=evaluate, effort=effort, seed=seed, require=require)
    settings.check()
    with show_progress_bar("comparing", progress), exclusive_access():
        sides = [_open_network(network, example_inputs, trust) for network in (first, second)]
        inputs = next((side.inputs for side in sides if side.inputs is not None), None)
        if inputs is None:
            what = "neither network has example inputs"
            raise MergingError(what, where="example_inputs", fix="Give a tensor or a tuple of tensors.")
        networks, outputs, note = _match_outputs([side.make_module(inputs) for side in sides], inputs)
        eval_set = _make_eval_set(sides, inputs, settings, whole=not note)
        compared = eval_set.compare(dict(zip(("first", "second"), networks, strict=True)))
    guessed = eval_set.guessed and (compared.scores[-1].fidelity or 0.0) < EQUAL_FIDELITY
    verdict = make_verdict(compared, data=eval_set.data, guessed=guessed)
    found = Comparison(verdict, compared, outputs, note)
    if require is not None and (verdict.fidelity is None or verdict.fidelity < require):
        raise FidelityError(f"{found}; {require:g} is required", where="require=", fix="See where the outputs differ.")
    return found


# Opening networks


@dataclass(frozen=True)
class _Side:
    """One of the two networks: a module, or a file that its own runtime runs."""

    name: str
    module: nn.Module | None
    file: FileFormat | None
    inputs: tuple[Any, ...] | None
    analysis: Analysis | None = None

    def make_module(self, inputs: tuple[Any, ...]) -> nn.Module:
        if self.file is not None:
            return _FileNetwork(self.file, self.name, inputs)
        assert self.module is not None
        try:
            check_hooks_only_observe(self.module, inputs)
        except ModelError:
            return _HookedNetwork(self.module)
        return self.module

    def analyse(self, inputs: tuple[Any, ...]) -> Analysis:
        """Return the analysis of the network, which may be impossible (a quantised file)."""
        if self.analysis is not None:
            return self.analysis
        return analyse(self.module if self.module is not None else Path(self.name), inputs)


def _open_network(network: Network, example_inputs: Any, trust: bool) -> _Side:
    if isinstance(network, Analysis):
        given = network.inputs if example_inputs is None else normalize_inputs(example_inputs, network.model)
        return _Side(type(network.model).__name__, network.model, None, given, network)
    if isinstance(network, Compressed):
        network, example_inputs = network.model, network.inputs if example_inputs is None else example_inputs
    if (form := find_format(network)) is not None:
        if not Path(str(network)).is_file():
            raise ModelError("there is no such file", where=str(network), fix="Give the path of a file.")
        return _Side(str(network), None, form, _find_file_inputs(form, str(network), example_inputs))
    if isinstance(network, str | Path):
        network = load(network, trust=trust)
    module = unwrap_model(network)
    if not isinstance(module, nn.Module):
        what = f"a {type(module).__name__} is no network"
        raise MergingError(what, where="compare", fix="Give a module, a folder, or an .onnx or .pt2 file.")
    own = None if example_inputs is None else clone_inputs(normalize_inputs(example_inputs, module))
    # With tensors of its own: running a network may change its weights, and the user's must stay as they are.
    return _Side(type(module).__name__, copy_with_own_tensors(module).eval(), None, own)


def _find_file_inputs(form: FileFormat, path: str, example_inputs: Any) -> tuple[Any, ...] | None:
    """Return the given inputs, else those that the file stores or that its shapes allow; None if there are none."""
    if example_inputs is not None:
        return normalize_inputs(example_inputs)
    return None if form.find_inputs is None else form.find_inputs(path)


class _SharedRunner:
    """Holds what must not be copied: a session of a runtime, or a network with hooks."""

    def __init__(self, run: Callable[..., Any]) -> None:
        self.run = run

    def __deepcopy__(self, memo: Any) -> _SharedRunner:
        return self


class _HookedNetwork(nn.Module):
    """A network whose hooks change its outputs. They run here, while copies of a network drop them."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.runner = _SharedRunner(network)

    def forward(self, *inputs: Any, **named: Any) -> Any:
        return self.runner.run(*inputs, **named)


class _FileNetwork(nn.Module):
    """A file as a module. A batch that the file does not take whole is run in pieces of the example's batch size."""

    def __init__(self, form: FileFormat, path: str, inputs: tuple[Any, ...]) -> None:
        super().__init__()
        # The names first: reading them also checks an untrusted file.
        self.names = tuple(form.list_input_names(path)) if form.list_input_names is not None else ()
        self.runner, self.path = _SharedRunner(form.open_runner(Path(path), False)), path
        shapes = [tuple(value.shape) for value in flatten_inputs(inputs) if isinstance(value, Tensor)]
        try:
            typed = () if form.make_inputs is None else form.make_inputs(path, shapes)
        except MergingError as error:
            what = f"the networks take different inputs: {error.what}"
            raise MergingError(what, where=path, fix=SAME_INPUTS_FIX) from error
        self.dtypes, self.batch = tuple(value.dtype for value in typed), infer_batch_size(inputs)

    def forward(self, *inputs: Any, **named: Any) -> list[Tensor]:
        values = self._order_inputs(inputs, named)
        try:
            found: list[Tensor] = self.runner.run(values)
            return found
        except Exception as error:  # the runtime's own, which have no common class
            raise_if_out_of_memory(error)
            if infer_batch_size(values) == self.batch:
                raise
        return self._run_in_pieces(values)

    def _order_inputs(self, inputs: Sequence[Any], named: Mapping[str, Any]) -> list[Tensor]:
        """Return the inputs in the file's order and dtypes."""
        if named and set(self.names) <= named.keys():
            flat = [named[name] for name in self.names]
        else:
            flat = flatten_outputs([list(inputs), list(named.values())])
        dtypes = self.dtypes if len(self.dtypes) == len(flat) else [value.dtype for value in flat]
        return [value.to(dtype) for value, dtype in zip(flat, dtypes, strict=True)]

    def _run_in_pieces(self, values: list[Tensor]) -> list[Tensor]:
        count, found = infer_batch_size(values), []
        for start in range(0, count, self.batch):
            places = torch.arange(start, start + self.batch).clamp(max=count - 1)  # the last piece repeats its end
            piece = map_batched(values, lambda _, value, at=places: value[at])  # type: ignore[misc]
            found.append(self.runner.run(list(piece)))
        return [torch.cat(parts)[:count] for parts in zip(*found, strict=True)]


# Outputs


@torch.no_grad()
def _match_outputs(
    networks: Sequence[nn.Module], inputs: tuple[Any, ...]
) -> tuple[list[nn.Module], tuple[tuple[int, int], ...], str]:
    """Run both networks once, and pair outputs of equal shape in order. Return networks with these outputs alone."""
    first, second = (_list_output_shapes(network, inputs, place) for place, network in enumerate(networks))
    pairs = _pair_shapes(first, second)
    if not pairs:
        what = f"the networks return different shapes: {_format_shapes(first)} and {_format_shapes(second)}"
        raise MergingError(what, where="compare", fix="Give networks for the same task.")
    whole = len(pairs) == len(first) == len(second)
    note = "" if whole else f"compared {len(pairs)} of {len(first)} and {len(second)} outputs"
    if whole:
        return list(networks), pairs, note
    chosen = [_SelectedOutputs(net, [pair[i] for pair in pairs]) for i, net in enumerate(networks)]
    return list(chosen), pairs, note


def _list_output_shapes(network: nn.Module, inputs: tuple[Any, ...], place: int) -> list[tuple[int, ...]]:
    try:
        return [tuple(value.shape) for value in flatten_outputs(call_model(network, clone_inputs(inputs)))]
    except Exception as error:
        raise_if_out_of_memory(error)
        which = ("first", "second")[place]
        what = f"the {which} network does not run on the example inputs: {describe_error(error)}"
        raise ModelError(what, where=getattr(network, "path", type(network).__name__), fix=SAME_INPUTS_FIX) from error


def _pair_shapes(first: Sequence[tuple[int, ...]], second: Sequence[tuple[int, ...]]) -> tuple[tuple[int, int], ...]:
    """Pair equal shapes in order.

    >>> _pair_shapes([(1, 3), (1, 8)], [(1, 8)]), _pair_shapes([(1, 3), (1, 3)], [(1, 3), (1, 3)])
    (((1, 0),), ((0, 0), (1, 1)))
    """
    pairs, start = [], 0
    for i, shape in enumerate(first):
        found = next((j for j in range(start, len(second)) if second[j] == shape), None)
        if found is not None:
            pairs.append((i, found))
            start = found + 1
    return tuple(pairs)


def _format_shapes(shapes: Sequence[tuple[int, ...]]) -> str:
    return ", ".join(str(shape) for shape in shapes) or "nothing"


class _SelectedOutputs(nn.Module):
    """A network that returns some of its outputs."""

    def __init__(self, network: nn.Module, places: Sequence[int]) -> None:
        super().__init__()
        self.network, self.places = network, tuple(places)

    def forward(self, *inputs: Any, **named: Any) -> list[Tensor]:
        found = flatten_outputs(self.network(*inputs, **named))
        return [found[place] for place in self.places]


# Inputs


def _make_eval_set(sides: Sequence[_Side], inputs: tuple[Any, ...], settings: CompressConfig, whole: bool) -> EvalSet:
    """Make inputs from the first network that can be analysed; from the example, if none can."""
    failures = []
    for side in sides:
        try:
            analysis = side.analyse(inputs)
        except MergingError as error:
            raise_if_out_of_memory(error)
            failures.append(f"{side.name}: {error.what}")
            continue
        found = open_eval_set(analysis, settings)
        # Parts of outputs and stored outputs are those of the analysed network: they hold if it is compared whole.
        return found if whole and side.file is None and side is sides[0] else replace(found, parts=(), original=None)
    if settings.evaluate is not None:
        raise ModelError(f"no network can be analysed: {'; '.join(failures)}", where="evaluate=", fix="Leave it out.")
    pairs = [(resample_inputs(inputs, SAMPLE_LIMITS[1]), None)]
    words = f"{SAMPLE_LIMITS[1]} noisy copies of the example"
    return EvalSet(lambda: pairs, words, data=False, length=1, guessed=True)
