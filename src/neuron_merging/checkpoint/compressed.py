"""`Compressed`: the result of `compress`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from neuron_merging.checkpoint.recipe import Recipe
from neuron_merging.checkpoint.save_folder import check_new_file, save
from neuron_merging.evaluation.fidelity import Fidelity
from neuron_merging.evaluation.figures import Figures
from neuron_merging.evaluation.summary import Summary
from neuron_merging.inputs.batchnorm_inversion import InputBatch
from neuron_merging.inputs.input_sets import make_fallback_inputs
from neuron_merging.merging.protocol import MergeResult
from neuron_merging.onnx.export import check_int8_target, export_model, quantize_model
from neuron_merging.onnx.formats import find_format
from neuron_merging.onnx.quantize import DEFAULT_INT8_LOSS, MAX_CALIBRATION_SAMPLES, Int8Network
from neuron_merging.pruning.plan import Plan
from neuron_merging.pruning.trial_prune import analyse
from neuron_merging.selection.budget import LossCurve


@dataclass(frozen=True, repr=False)
class Compressed:
    """The smaller network, the plan that rebuilds it, and the summary.

    Attributes
    ----------
    model
        The smaller network, an ordinary module of the original's class.
    plan
        The indices that stay, by tensor.
    summary
        Sizes before and after, group by group, and what is not prunable and why. `str` returns it as a text.
    merged
        The merges; their new weights are in `model`. Empty for a network that was loaded from a folder.
    inputs
        The example inputs.
    compared
        The comparison with the original that the verdict in the summary is based on.
    recipe
        The settings, as far as a recipe can express them.
    remarks
        Settings that a recipe cannot express, such as functions.
    curves
        With a budget: the measured loss over the number of kept channels, by group.
    figures
        The measurements that the page and the card show; None for a network that was loaded.
    int8
        With `int8=True`: the quantised network.
    calibration_inputs
        Inputs of the fit and held-out inputs, from which `export` calibrates an int8 file.

    Examples
    --------
    >>> import neuron_merging as nm
    >>> net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> small = nm.compress(net, torch.zeros(1, 4), ratio=0.5)
    >>> small.summary.parameters
    (58, 30)
    """

    model: nn.Module
    plan: Plan
    summary: Summary
    merged: MergeResult = field(default=MergeResult(()))
    inputs: tuple[Any, ...] = ()
    compared: Fidelity | None = None
    recipe: Recipe | None = None
    remarks: tuple[str, ...] = ()
    curves: Mapping[str, LossCurve] = field(default_factory=dict)
    figures: Figures | None = None
    int8: Int8Network | None = None
    calibration_inputs: tuple[Sequence[InputBatch], Sequence[InputBatch]] = ((), ())

    def __repr__(self) -> str:
        sizes = ", ".join(
            f"{what} {before} -> {after} ({change})" for what, before, after, change in self.summary.sizes
        )
        verdict = self.summary.verdict
        return f"<Compressed {type(self.model).__name__}: {sizes}{f', {verdict.measured}' if verdict else ''}>"

    def _repr_html_(self) -> str:
        """The verdict and the tables of the summary, for notebooks."""
        return self.summary._repr_html_()

    def save(self, folder: str | Path, overwrite: bool = False, inputs: Iterable[InputBatch] | None = None) -> None:
        """Write the folder that `load` reads: weights, plan, recipe, card and figures. Or export an .onnx or .pt2 file.

        Parameters
        ----------
        folder
            Path of a folder, or of a file that ends with .onnx or .pt2. It is written completely or not at all.
        overwrite
            Whether a folder that neuron-merging wrote may be replaced.
        inputs
            Batches for the folder's inputs.safetensors, as `synthesize_inputs` returns them; a result stores none.

        Raises
        ------
        MergingError
            The path exists already.

        Examples
        --------
        >>> import tempfile, neuron_merging as nm
        >>> net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> with tempfile.TemporaryDirectory() as place:
        ...     nm.compress(net, torch.zeros(1, 4)).save(f"{place}/small")
        """
        if find_format(folder) is not None:
            self.export(folder, int8=self.int8 is not None, overwrite=overwrite)
        else:
            save(self, folder, overwrite=overwrite, inputs=inputs)

    def export(
        self, path: str | Path, *, int8: bool = False, int8_loss: float = DEFAULT_INT8_LOSS, overwrite: bool = False
    ) -> None:
        """Write the smaller network as an .onnx or .pt2 file, run the file, and compare it with the module.

        Parameters
        ----------
        path
            The file. It is written completely or not at all.
        int8
            Quantise it with onnxruntime, calibrated on the inputs that the merges were fitted on; .onnx only.
        int8_loss
            The largest change of the outputs by int8, as a share of their variance; above it, the layers that lose most
            stay in float.
        overwrite
            Whether an existing file may be replaced.

        Raises
        ------
        MergingError
            The file exists already, or has another suffix.

        Examples
        --------
        >>> import tempfile, neuron_merging as nm
        >>> net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 2, 3))
        >>> with tempfile.TemporaryDirectory() as place:
        ...     nm.compress(net, torch.zeros(1, 3, 8, 8)).export(f"{place}/small.onnx", int8=True)
        """
        check_new_file(path, overwrite)
        if not int8:
            export_model(self.model, self.inputs, path)
            return
        check_int8_target(path)
        (self.int8 or self.quantize(int8_loss)).write(path)

    def quantize(self, int8_loss: float = DEFAULT_INT8_LOSS) -> Int8Network:
        """Quantise the smaller network to int8; `export` writes it.

        Parameters
        ----------
        int8_loss
            As for `export`.

        Returns
        -------
        Int8Network
            The int8 file's content, how it was quantised, and how far the outputs changed.

        Examples
        --------
        >>> import neuron_merging as nm
        >>> net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 2, 3))
        >>> nm.compress(net, torch.zeros(1, 3, 8, 8)).quantize().method
        'static'
        """
        fit, heldout = self.calibration_inputs
        if not fit:
            fit = make_fallback_inputs(analyse(self.model, self.inputs), MAX_CALIBRATION_SAMPLES, seed=0).batches
        return quantize_model(self.model, self.inputs, fit, heldout, max_loss=int8_loss)
