"""Quantise ONNX files to int8 with onnxruntime's quantiser, and measure what that changes.

Networks of convolutions are quantised statically: weights per output channel, activations per tensor, with ranges that
are measured on calibration inputs (QDQ format), and biases make up for what rounded weights change in the mean of the
outputs ("Data-Free Quantization Through Weight Equalization and Bias Correction", Nagel et al. 2019). Networks with
attention, and those without convolutions, are quantised
dynamically: only the weights of matrix products, and activations at run time. If the outputs change too much, the
layers that cause most of the change stay in float.
"""

from __future__ import annotations

import logging
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from neuron_merging import atomic, progress
from neuron_merging.errors import MergingError, ModelError, describe_error
from neuron_merging.graph.compare import ErrorSums, compute_error_share
from neuron_merging.graph.example_inputs import (
    flatten_inputs,
    infer_batch_size,
    map_batched,
    repeat_entries,
    split_samples,
)
from neuron_merging.onnx import Array, onnx, onnx_version_converter, ort_quantization
from neuron_merging.onnx.model_file import open_ort_session

InputBatch = tuple[Any, ...]
DEFAULT_INT8_LOSS = 0.02
"""Largest change of the outputs by quantisation, as a share of their variance, up to which all layers are quantised."""
MAX_CALIBRATION_SAMPLES, MAX_TRIAL_SAMPLES, MAX_MEAN_SAMPLES = 64, 8, 16
"""Inputs on which ranges are measured, on which files are compared, and on which mean activations are measured."""
WEIGHT_LEVELS = 127
"""The largest int8 weight: onnxruntime rounds weights to -127..127 steps of their largest absolute value."""
LAYER_TYPES = ("Conv", "ConvTranspose", "Gemm", "MatMul")
"""Operators with weights that are quantised; these can stay in float."""
PASSING_TYPES = (
    *("Relu", "Clip", "LeakyRelu", "Add", "Mul", "Concat", "Split", "MaxPool", "AveragePool", "GlobalAveragePool"),
    *("Reshape", "Transpose", "Resize", "Squeeze", "Unsqueeze", "Gather", "Slice", "Pad"),
)
"""Operators between layers that compute in int8 if their inputs are. Normalisations and the exponential functions of a
sigmoid or softmax stay in float: they are a small share of the work and lose much."""
PER_CHANNEL_OPSET = 13
"""The version of ONNX from which on a weight may have one scale per output channel."""
MIN_TIMED_RUNS, TIMING_SECONDS = 3, 0.5
"""Runs by which the float and the int8 file are timed, at least, and for how long, if that allows more."""
SLOWER_FACTOR = 1.1
"""Ratio of latencies from which int8 counts as slower; less is noise."""
MAX_BLAMED_LAYERS = 64
"""Layers that are quantised alone to find those that lose most."""


@dataclass(frozen=True)
class Int8Network:
    """A quantised file, how it was made, and how far its outputs are from the float file's.

    Attributes
    ----------
    data
        The content of the int8 file.
    method
        "static" or "dynamic".
    bytes
        Sizes of the float file and of the int8 file.
    error
        Squared change of the outputs by quantisation, relative to their variance, of the worst output.
    float_layers
        Layers that stay in float, because they lose most.
    samples
        The number of calibration inputs; 0 for dynamic quantisation.
    seconds
        Median time of one input in onnxruntime on this machine, of the float file and of the int8 file. Small networks
        with depthwise convolutions may be slower in int8.
    """

    data: bytes = field(repr=False)
    method: str
    bytes: tuple[int, int]
    error: float
    float_layers: tuple[str, ...] = ()
    samples: int = 0
    seconds: tuple[float, float] = (0.0, 0.0)

    def __str__(self) -> str:
        return "\n".join(f"{name}: {value}" for name, value in self.facts().items())

    def write(self, path: str | Path) -> None:
        """Write the file, whole or not at all."""
        atomic.check_output_file(Path(path))
        with atomic.stage_file(Path(path)) as part:
            atomic.write_file(part, self.data)

    def facts(self) -> dict[str, Any]:
        """Return the fields with readable names, for printing."""
        kept = f"{len(self.float_layers)} ({', '.join(self.float_layers[:3])}{' …' if self.float_layers[3:] else ''})"
        before, after = (1e3 * own for own in self.seconds)
        slower = ": int8 is slower here, the float file may serve you better" if after > SLOWER_FACTOR * before else ""
        return {
            "int8": f"{self.method} quantisation"
            + (f", ranges of {self.samples} inputs" if self.method == "static" else ""),
            "bytes, float → int8": f"{self.bytes[0]:,} → {self.bytes[1]:,}",
            "change of the outputs by int8": f"{self.error:.4f} of their variance",
            "latency in onnxruntime, float → int8": f"{before:.3g} ms → {after:.3g} ms{slower}",
            **({"layers left in float": kept} if self.float_layers else {}),
        }


@dataclass(frozen=True)
class _SharedSession:
    """A session of onnxruntime, which copies of a module share."""

    value: Any

    def __deepcopy__(self, memo: Any) -> _SharedSession:
        return self


class OrtNetwork(nn.Module):
    """Runs an ONNX file in onnxruntime as a module, so that it can be compared with other networks."""

    def __init__(self, data: bytes, threads: int = 0) -> None:
        super().__init__()
        self.session = _SharedSession(open_ort_session(data, threads))
        inputs = self.session.value.get_inputs()
        self.names = [value.name for value in inputs]
        sizes = inputs[0].shape if inputs else []
        self.batch = sizes[0] if sizes and isinstance(sizes[0], int) else None

    def forward(self, *values: Any) -> tuple[Tensor, ...]:
        count = infer_batch_size(values)
        parts = [values] if self.batch is None else split_samples(fill_last_batch(values, self.batch), self.batch)
        runs = [self._run(part) for part in parts]
        return tuple(torch.cat(own)[:count] if own[0].ndim else own[0] for own in zip(*runs, strict=True))

    def _run(self, values: Sequence[Any]) -> list[Tensor]:
        return [torch.from_numpy(np.array(out)) for out in self.session.value.run(None, make_feed(self.names, values))]


def fill_last_batch(values: Sequence[Any], size: int) -> InputBatch:
    """Return the inputs with samples repeated, so that their number is a multiple of `size`."""
    whole = -(-infer_batch_size(values) // size) * size
    return map_batched(values, lambda _, value: repeat_entries(value, (whole, *value.shape[1:])))


def make_feed(names: Sequence[str], values: Sequence[Any]) -> dict[str, Any]:
    """Return inputs by name, as onnxruntime takes them."""
    tensors = [value for value in flatten_inputs(values) if isinstance(value, Tensor)]
    return {name: value.detach().cpu().contiguous().numpy() for name, value in zip(names, tensors, strict=True)}


def check_quantizable(model: nn.Module) -> None:
    """Raise an error for a network in half precision: onnxruntime's quantiser finds no weights in its file."""
    dtypes = {weight.dtype for weight in model.parameters() if weight.ndim > 1 and weight.is_floating_point()}
    if dtypes and not dtypes & {torch.float32, torch.float64}:
        name = str(next(iter(dtypes))).removeprefix("torch.")
        what = f"the network's weights are {name}, onnxruntime's quantiser takes float32"
        raise MergingError(what, where="int8=", fix="Give the float32 network or file, or leave --int8 out.")


def quantize_onnx_file(
    source: str | Path,
    fit: Sequence[InputBatch],
    heldout: Sequence[InputBatch],
    *,
    max_loss: float = DEFAULT_INT8_LOSS,
) -> Int8Network:
    """Quantise a float file; `fit` are calibration inputs, `heldout` those on which the change is measured.

    Raises
    ------
    MergingError
        onnxruntime's quantiser cannot quantise the file, or does not find a layer to quantise.
    """
    with tempfile.TemporaryDirectory() as folder, _silence_quantizer():
        try:
            job = _QuantizationJob(Path(source), Path(folder), fit, heldout)
            return job.run(max_loss)
        except MergingError:
            raise
        except Exception as error:  # the quantiser raises errors of any class
            what = f"onnxruntime's quantiser failed: {describe_error(error)}"
            raise MergingError(what, where=str(source), fix="Write the float file: leave --int8 out.") from error


class _QuantizationJob:
    """Quantises one file several times: whole, single layers, and without the layers that lose most."""

    def __init__(self, source: Path, folder: Path, fit: Sequence[InputBatch], heldout: Sequence[InputBatch]) -> None:
        self.source, self.folder = source, folder
        self.prepared = _prepare_file(source, folder / "prepared.onnx")
        model = onnx.load(str(self.prepared))
        stored = {tensor.name for tensor in model.graph.initializer}  # older files list these among the inputs
        self.names = [value.name for value in model.graph.input if value.name not in stored]
        self.layers = _list_layers(model)
        self.static = _has_convolutions(model) and not _has_attention(model)
        self.per_channel = _get_opset_version(model) >= PER_CHANNEL_OPSET
        if not self.layers:
            what = "there is no layer with weights to quantise"
            raise MergingError(what, where=str(source), fix="Write the float file: leave --int8 out.")
        self.fit = _take_single_inputs(fit, MAX_CALIBRATION_SAMPLES, self._find_batch_size(model))
        self.trials = _take_single_inputs(heldout or fit, MAX_TRIAL_SAMPLES, self._find_batch_size(model))
        if not self.fit:
            raise MergingError("there is no input to calibrate on", where="int8=", fix="Give calibration=.")
        self.original = self._run_file(self.prepared)
        feeds = [make_feed(self.names, values) for values in self.fit[:MAX_MEAN_SAMPLES]]
        self.corrections = measure_rounding_offsets(model, feeds) if self.static and self.per_channel else {}

    @staticmethod
    def _find_batch_size(model: Any) -> int:
        """Return the fixed batch size of the file's first input; 1 if it is free."""
        dims = model.graph.input[0].type.tensor_type.shape.dim
        return max(1, int(dims[0].dim_value)) if dims else 1

    def run(self, max_loss: float) -> Int8Network:
        file = self._quantize(())
        kept: tuple[str, ...] = ()
        error = self._measure_error(file)
        if error > max_loss and len(self.layers) > 1:
            order = self._order_by_loss()
            count = 1
            # Doubling: a few trials reach any number of layers. Half of them in float is no int8 network any more.
            while error > max_loss and count <= len(self.layers) // 2:
                other = self._quantize(order[:count])
                found = self._measure_error(other)
                if found < error:
                    file, error, kept = other, found, tuple(order[:count])
                count *= 2
        samples = len(self.fit) if self.static else 0
        sizes = self.source.stat().st_size, file.stat().st_size
        method, seconds = "static" if self.static else "dynamic", self._time_files(self.source, file)
        return Int8Network(file.read_bytes(), method, sizes, error, kept, samples, seconds)

    def _quantize(self, excluded: Sequence[str], only: Sequence[str] | None = None) -> Path:
        """Quantise all layers but some, or only some."""
        number = len(list(self.folder.glob("int8-*.onnx")))
        target = self.folder / f"int8-{number}.onnx"
        kinds = ort_quantization.QuantType
        if not self.static:
            ort_quantization.quantize_dynamic(
                self.prepared,
                target,
                op_types_to_quantize=["MatMul", "Gemm"],
                per_channel=True,
                weight_type=kinds.QInt8,
                nodes_to_quantize=None if only is None else list(only),
                nodes_to_exclude=list(excluded),
                extra_options={"MatMulConstBOnly": True},
            )
            return target
        ort_quantization.quantize_static(
            self._correct_biases([own for own in only or self.layers if own not in excluded]),
            target,
            _make_reader(self.names, self.fit),
            quant_format=ort_quantization.QuantFormat.QDQ,
            op_types_to_quantize=[*LAYER_TYPES, *PASSING_TYPES],
            per_channel=self.per_channel,
            activation_type=kinds.QUInt8,
            weight_type=kinds.QInt8,
            nodes_to_quantize=None if only is None else list(only),
            nodes_to_exclude=list(excluded),
            # A ReLU must not be replaced by the lower end of a range: `keep_outputs_float` may remove the rounding.
            extra_options={"QDQKeepRemovableActivations": True},
            calibration_cache_path=self.folder / "ranges.json",
        )
        model = onnx.load(str(target))
        keep_outputs_float(model)
        onnx.save_model(model, str(target))
        return target

    def _correct_biases(self, layers: Sequence[str]) -> Path:
        """Return the prepared file, with the corrected biases of the layers that will be quantised."""
        corrected = {own.name: own for layer in layers if (own := self.corrections.get(layer)) is not None}
        if not corrected:
            return self.prepared
        model, target = onnx.load(str(self.prepared)), self.folder / "corrected.onnx"
        for tensor in model.graph.initializer:
            if tensor.name in corrected:
                tensor.CopyFrom(corrected[tensor.name])
        onnx.save_model(model, str(target))
        return target

    def _order_by_loss(self) -> list[str]:
        """Order the layers by the change of the outputs if each alone is quantised, the worst first."""
        tried = self.layers[:MAX_BLAMED_LAYERS]
        losses = {
            name: self._measure_error(self._quantize((), only=[name]))
            for name in progress.track_progress(tried, "quantising layer by layer")
        }
        return sorted(losses, key=lambda name: -losses[name])

    def _measure_error(self, file: Path) -> float:
        """Return the squared change of the outputs relative to their variance, of the worst output."""
        sums: dict[int, ErrorSums] = {}
        for before, after in zip(self.original, self._run_file(file), strict=True):
            for i, (x, y) in enumerate(zip(before, after, strict=True)):
                if x.is_floating_point() and x.numel():
                    sums.setdefault(i, ErrorSums()).add(*((x, y) if x.ndim else (x[None], y[None])))
        return max((compute_error_share([own]) for own in sums.values() if own.variance > 0), default=0.0)

    def _time_files(self, *files: Path) -> tuple[float, float]:
        """Return the median seconds of one input in each of two files, which take turns."""
        sessions = [open_ort_session(str(file)) for file in files]
        feed, times = make_feed(self.names, self.trials[0]), [list[float](), list[float]()]
        deadline = time.perf_counter() + TIMING_SECONDS
        # The first round warms up.
        while len(times[0]) < MIN_TIMED_RUNS + 1 or time.perf_counter() < deadline:
            for session, own in zip(sessions, times, strict=True):
                start = time.perf_counter()
                session.run(None, feed)
                own.append(time.perf_counter() - start)
        return float(np.median(times[0][1:])), float(np.median(times[1][1:]))

    def _run_file(self, file: Path) -> list[list[Tensor]]:
        try:
            session = open_ort_session(str(file))
        except ModelError as error:  # files with control flow, whose nodes the quantiser may write in the wrong order
            what = f"the file that onnxruntime's quantiser wrote is unusable: {error.what}"
            raise MergingError(what, where=str(self.source), fix="Write the float file: leave --int8 out.") from error
        feeds = (make_feed(self.names, values) for values in self.trials)
        return [[torch.from_numpy(np.array(out)) for out in session.run(None, feed)] for feed in feeds]


def measure_rounding_offsets(model: Any, feeds: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the biases of convolutions that make up for rounded weights, as tensors, by the name of the node.

    Rounding a weight W to Q changes the mean output by (Q - W) times the mean input, which the bias takes back.
    """
    stored = {tensor.name: tensor for tensor in model.graph.initializer}
    uses = Counter(name for node in model.graph.node for name in node.input)
    layers = [
        node
        for node in model.graph.node
        if node.op_type == "Conv" and len(node.input) > 2 and all(n in stored and uses[n] == 1 for n in node.input[1:])
    ]
    if not layers:
        return {}
    means = _measure_channel_means(model, sorted({node.input[0] for node in layers}), feeds)
    corrected = {}
    for node in layers:
        weight, bias = (onnx.numpy_helper.to_array(stored[name]) for name in node.input[1:])
        groups = next((own.i for own in node.attribute if own.name == "group"), 1)
        offset = compute_rounding_offset(weight, means[node.input[0]], groups)
        corrected[node.name] = onnx.numpy_helper.from_array((bias + offset).astype(bias.dtype), node.input[2])
    return corrected


def compute_rounding_offset(weight: Array, mean: Array, groups: int) -> Array:
    """Return what rounding the weight takes from the mean output, for inputs with these means per channel.

    >>> compute_rounding_offset(np.array([[[1.0]], [[0.5]]]), np.array([2.0]), 1).round(3)
    array([0., 0.])
    """
    axes = tuple(range(1, weight.ndim))
    step = np.abs(weight).max(axes, keepdims=True) / WEIGHT_LEVELS
    step[step == 0] = 1
    lost = (weight - np.round(weight / step) * step).reshape(*weight.shape[:2], -1).sum(2)
    # Each output reads the channels of its own group.
    read = mean.reshape(groups, -1).repeat(len(weight) // groups, 0)
    return np.asarray((lost * read).sum(1))


def _measure_channel_means(model: Any, names: Sequence[str], feeds: Sequence[Mapping[str, Any]]) -> dict[str, Array]:
    """Return the mean of each channel of these values over samples and positions."""
    probe = onnx.ModelProto()
    probe.CopyFrom(model)
    del probe.graph.output[:]
    for i, name in enumerate(names):
        probe.graph.node.append(onnx.helper.make_node("GlobalAveragePool", [name], [f"{name}_mean_{i}"]))
        probe.graph.output.append(onnx.helper.make_empty_tensor_value_info(f"{name}_mean_{i}"))
    session = open_ort_session(probe.SerializeToString())
    runs = [session.run(None, feed) for feed in feeds]
    return {
        name: np.mean([own.reshape(*own.shape[:2]).mean(0) for own in found], 0)
        for name, found in zip(names, zip(*runs, strict=True), strict=True)
    }


def keep_outputs_float(model: Any) -> None:
    """Remove the rounding of what the last layers return.

    Calibration inputs seldom excite the highest scores, and a range that misses them would cut them off. Only the
    values between the last layers and the outputs of the file are concerned; no layer reads them.
    """
    makers = {name: node for node in model.graph.node for name in node.output}
    bypassed: dict[str, str] = {}
    waiting, seen = [value.name for value in model.graph.output], set[str]()
    while waiting:
        name = waiting.pop()
        node = makers.get(name)
        if node is None or name in seen:
            continue
        seen.add(name)
        before = makers.get(node.input[0]) if node.op_type == "DequantizeLinear" else None
        if before is not None and before.op_type == "QuantizeLinear":
            bypassed[name] = before.input[0]
            waiting.append(before.input[0])
        elif node.op_type not in LAYER_TYPES:
            waiting.extend(node.input)
    _bypass_values(model, bypassed)


def _bypass_values(model: Any, bypassed: Mapping[str, str]) -> None:
    """Let every reader of a rounded value read the value before rounding; outputs of the file keep their names."""
    outputs = {value.name for value in model.graph.output}
    for node in list(model.graph.node):
        if set(node.output) & bypassed.keys():
            if set(node.output) & outputs:
                node.CopyFrom(onnx.helper.make_node("Identity", [bypassed[node.output[0]]], list(node.output)))
            continue
        for i, name in enumerate(node.input):
            while name in bypassed:
                name = bypassed[name]
            node.input[i] = name
    _remove_unread_nodes(model, outputs)


def _remove_unread_nodes(model: Any, outputs: set[str]) -> None:
    """Remove the nodes whose outputs nothing reads."""
    read = outputs | {name for node in model.graph.node for name in node.input}
    unread = [node for node in model.graph.node if not read & set(node.output)]
    for node in unread:
        model.graph.node.remove(node)
    if unread:
        return _remove_unread_nodes(model, outputs)
    for tensor in [own for own in model.graph.initializer if own.name not in read]:
        model.graph.initializer.remove(tensor)


def _prepare_file(source: Path, target: Path) -> Path:
    """Fold constants and batch norms, and infer shapes, as the quantiser needs them; else return the file itself."""
    preprocess: Callable[..., None] = ort_quantization.shape_inference.quant_pre_process
    try:
        preprocess(str(_upgrade_file(source, target)), str(target), skip_symbolic_shape=True)
    except Exception:  # noqa: BLE001 (an optimisation; the quantiser also takes files as they are)
        return source
    # The quantiser transposes weights of Gemm nodes; a shape that is stored beside a weight would then be wrong.
    model = onnx.load(str(target))
    weights = {tensor.name for tensor in model.graph.initializer}
    for value in [value for value in model.graph.value_info if value.name in weights]:
        model.graph.value_info.remove(value)
    onnx.save_model(model, str(target))
    return target


def _upgrade_file(source: Path, target: Path) -> Path:
    """Return the file in a version of ONNX that has scales per channel."""
    model = onnx.load(str(source))
    if _get_opset_version(model) >= PER_CHANNEL_OPSET:
        return source
    onnx.save_model(onnx_version_converter.convert_version(model, PER_CHANNEL_OPSET), str(target))
    return target


def _get_opset_version(model: Any) -> int:
    return max((own.version for own in model.opset_import if own.domain in ("", "ai.onnx")), default=1)


def _list_layers(model: Any) -> list[str]:
    """Return the names of nodes that have a stored weight."""
    stored = {tensor.name for tensor in model.graph.initializer}
    return [
        node.name
        for node in model.graph.node
        if node.op_type in LAYER_TYPES and node.name and any(name in stored for name in node.input[1:2])
    ]


def _has_convolutions(model: Any) -> bool:
    return any(node.op_type in ("Conv", "ConvTranspose") for node in model.graph.node)


def _has_attention(model: Any) -> bool:
    """Return whether two activations are multiplied, as queries and keys are."""
    stored = {tensor.name for tensor in model.graph.initializer}
    return any(node.op_type == "MatMul" and not stored & set(node.input) for node in model.graph.node)


def _take_single_inputs(batches: Sequence[InputBatch], count: int, size: int) -> list[InputBatch]:
    """Return inputs of the file's batch size, from the beginnings of all batches in turn."""
    parts = [split_samples(fill_last_batch(batch, size), size) for batch in batches]
    rounds = max((len(own) for own in parts), default=0)
    return [own[i] for i in range(rounds) for own in parts if i < len(own)][: max(1, count // size)]


def _make_reader(names: Sequence[str], batches: Sequence[InputBatch]) -> Any:
    """Return the quantiser's reader of calibration inputs."""
    feeds: Iterator[dict[str, Any]] = (make_feed(names, values) for values in batches)

    class Reader(ort_quantization.CalibrationDataReader):  # type: ignore[misc]
        def get_next(self) -> dict[str, Any] | None:
            return next(feeds, None)

    return Reader()


@contextmanager
def _silence_quantizer() -> Iterator[None]:
    """Hide the quantiser's hints in the log, for instance to preprocess a file that was preprocessed."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)
