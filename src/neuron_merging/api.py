"""The public functions `compress`, `inspect`, `quantize` and `synthesize_inputs`: all stages in order.

`analyse` captures the model, finds its channel groups and tries uncertain sizes. Then channels are selected, a merger
compensates the removed ones in their consumer layers, a plan records the kept ones, surgery builds the smaller network,
and verification compares it with the original.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from neuron_merging.channels.analysis import Analysis
from neuron_merging.checkpoint.compressed import Compressed
from neuron_merging.checkpoint.recipe_names import config_to_recipe
from neuron_merging.checkpoint.save_folder import check_new_file
from neuron_merging.config import CompressConfig, build_config, takes_options
from neuron_merging.evaluation.costs import Costs
from neuron_merging.evaluation.parameter_coverage import compute_parameter_coverage
from neuron_merging.evaluation.summary import Inspection, make_group_info
from neuron_merging.graph.capture import check_hooks_only_observe
from neuron_merging.graph.copying import leave_inference_mode, unwrap_model
from neuron_merging.graph.example_inputs import clone_inputs, normalize_inputs
from neuron_merging.graph.graph_module import ResizableModule, build_graph_network
from neuron_merging.graph.module_rewrites import fold_parametrizations
from neuron_merging.graph.process_state import exclusive_access
from neuron_merging.inputs.batchnorm_inversion import GeneratedInputs
from neuron_merging.inputs.input_sets import (
    make_fit_inputs,
)
from neuron_merging.onnx.export import check_int8_target, quantize_model
from neuron_merging.onnx.quantize import DEFAULT_INT8_LOSS, Int8Network, check_quantizable
from neuron_merging.pipeline import compress_analysis, prepare_calibration_inputs
from neuron_merging.progress import show_progress_bar
from neuron_merging.pruning.trial_prune import analyse

__all__ = ["CompressConfig", "Compressed", "analyse", "compress", "inspect", "quantize", "synthesize_inputs"]


def inspect(model: nn.Module | Analysis | str | Path, example_inputs: Any = None) -> Inspection:
    """List the channels that can be removed, their consumer layers, and why the others are not prunable.

    Parameters
    ----------
    model
        The network, an analysis of it, or the path of an ONNX file.
    example_inputs
        As for `analyse`.

    Returns
    -------
    Inspection
        Groups with their sizes and consumer layers, and refusals with their reasons.
        `print` shows a short table, `details()` returns each reason with its line of code.

    Raises
    ------
    ModelError
        The model cannot be captured.

    Examples
    --------
    >>> net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> print(inspect(net, torch.zeros(1, 4)))
    0: 8 channels -> 2
    not prunable: 2 channels of 1 layer: output is what the network returns
    prunable 96.6%, not prunable 3.4%, unused 0.0% of 58 parameters
    """
    analysis = analyse(model, example_inputs)
    costs, channels = Costs(analysis), analysis.channels
    groups = tuple(make_group_info(costs, group) for group in channels.groups)
    return Inspection(groups, channels.refusals, compute_parameter_coverage(analysis))


def synthesize_inputs(
    model: nn.Module | Analysis, example_inputs: Any = None, *, effort: str = "normal", seed: int = 0
) -> GeneratedInputs:
    """Synthesise the inputs that `compress` fits on without data: from batch-norm statistics, or self-generated text.

    Parameters
    ----------
    model
        The network, or an analysis of it.
    example_inputs
        As for `analyse`.
    effort
        "normal" or "best".
    seed
        Seeds the synthesis; another seed gives other inputs.

    Returns
    -------
    GeneratedInputs
        Batches like the example inputs, and how well they match; or the reason why there are none.

    Raises
    ------
    ModelError
        The model cannot be captured.
    MergingError
        The effort is unknown.

    Examples
    --------
    >>> net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> synthesize_inputs(net, torch.zeros(1, 4)).refusal
    'the network has no batch norm that stores statistics'
    """
    CompressConfig(effort=effort).check()
    return make_fit_inputs(analyse(model, example_inputs), effort, seed)


@takes_options(CompressConfig)
def compress(model: nn.Module | Analysis | str | Path, example_inputs: Any = None, **options: Any) -> Compressed:
    """Remove channels until a budget or ratio is met, and merge them into the ones that stay.

    Parameters
    ----------
    model
        The network (it is not changed), an analysis of it, or the path of an ONNX file.
    example_inputs
        As for `analyse`.
    **options
        Every option of `CompressConfig`.

    Returns
    -------
    Compressed
        The smaller network, of the same class, with the plan that rebuilds it and a summary. The summary begins with
        the verdict: how closely its outputs match the original's.

    Raises
    ------
    NothingToPrune
        No channel can be removed; the error lists the reasons.
    FidelityError
        The fidelity of the result is below `require`.
    VerificationError
        The smaller network does not compute what it should.
    ModelError
        The model cannot be captured.
    MergingError
        An argument is invalid.

    Examples
    --------
    >>> net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> compress(net, torch.zeros(1, 4), ratio=0.5).model[0]
    Linear(in_features=4, out_features=4, bias=True)
    """
    settings = build_config(options)
    settings.check()
    with show_progress_bar("compressing", settings.progress):
        model, example_inputs = (
            convert_to_graph(model, example_inputs) if settings.output == "graph" else (model, example_inputs)
        )
        analysis = analyse(model, example_inputs)
        compressed = compress_analysis(analysis, settings, verify=settings.verify)
    # From the settings as the user gave them, not as `adapt_data_to` filled them in.
    recipe, remarks = config_to_recipe(settings, analysis)
    small, inputs = analysis.move_to_user(compressed.model), analysis.move_to_user(compressed.inputs)
    return replace(compressed, model=small, inputs=inputs, recipe=recipe, remarks=remarks)


def quantize(
    model: nn.Module | str | Path,
    target: str | Path,
    example_inputs: Any = None,
    *,
    calibration: Iterable[Any] | None = None,
    int8_loss: float | None = None,
    effort: str = "normal",
    overwrite: bool = False,
) -> Int8Network:
    """Quantise a network to int8 with onnxruntime, without data if need be, and write it as an .onnx file.

    Parameters
    ----------
    model
        The network, or the path of an ONNX file.
    target
        The .onnx file to write.
    example_inputs
        As for `analyse`.
    calibration
        Batches to measure the ranges of activations on; without them, inputs are synthesised.
    int8_loss
        The largest change of the outputs by int8, as a share of their variance (default 0.02); above it, the layers
        that lose most stay in float.
    effort
        How much work goes into synthesised inputs, as for `compress`.
    overwrite
        Replace the file if it exists.

    Returns
    -------
    Int8Network
        How it was quantised, the sizes of both files, and how far the outputs changed.

    Raises
    ------
    MergingError
        onnxruntime cannot quantise the network, or the file exists and may not be replaced.

    Examples
    --------
    >>> import tempfile
    >>> net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 2, 3))
    >>> with tempfile.TemporaryDirectory() as place:
    ...     quantize(net, f"{place}/int8.onnx", torch.zeros(1, 3, 8, 8), effort="fast").method
    'static'
    """
    check_int8_target(target)
    check_new_file(target, overwrite)
    CompressConfig(effort=effort, int8_loss=int8_loss).check()
    analysis = analyse(model, example_inputs)
    check_quantizable(analysis.model)  # before inputs are synthesised, which may take minutes
    fit, heldout = prepare_calibration_inputs(analysis, calibration, effort)
    made = quantize_model(analysis.model, analysis.inputs, fit, heldout, max_loss=int8_loss or DEFAULT_INT8_LOSS)
    made.write(target)
    return made


def convert_to_graph(model: Any, example_inputs: Any) -> tuple[nn.Module, tuple[Any, ...]]:
    """Return the captured graph of a network as a module, with example inputs for it."""
    if isinstance(model, Analysis):
        model, example_inputs = model.model, model.inputs
    model = unwrap_model(model)
    if isinstance(model, ResizableModule) or not isinstance(model, nn.Module) or example_inputs is None:
        return model, example_inputs  # sizes are data already, or analyse() reports the error
    with exclusive_access():
        plain = fold_parametrizations(leave_inference_mode(model))
        found = build_graph_network(plain, clone_inputs(example_inputs))
        # The graph is captured without hooks, so `analyse` could not notice that they change the outputs.
        check_hooks_only_observe(plain, normalize_inputs(example_inputs, plain))
    return found
