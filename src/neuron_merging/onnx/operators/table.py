"""The table of ONNX operators, one row each.

onnxruntime runs operators without a handler and those that are used in a way that torch does not support.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F

from neuron_merging.onnx.operators import OnnxOperator, elementwise, layers, shape_ops
from neuron_merging.onnx.operators.elementwise import make_binary, make_commutative, make_unary, make_variadic

ONNX_OPERATORS: dict[str, OnnxOperator] = {
    # layers and norms
    "Conv": OnnxOperator(layers.run_conv, layer=True, small_weights=True, macs=layers.count_conv_macs),
    "ConvTranspose": OnnxOperator(
        layers.run_conv_transpose, layer=True, small_weights=True, macs=layers.count_conv_transpose_macs
    ),
    "Gemm": OnnxOperator(layers.run_gemm, layer=True, small_weights=True),
    "Linear": OnnxOperator(layers.run_linear, layer=True, small_weights=True),
    "MatMul": OnnxOperator(layers.run_matmul, layer=True, small_weights=True),
    "Gather": OnnxOperator(layers.run_gather, layer=True),
    "Einsum": OnnxOperator(elementwise.run_einsum, layer=True),
    "BatchNormalization": OnnxOperator(layers.run_batch_norm, small_weights=True, statistics_inputs=(3, 4)),
    "InstanceNormalization": OnnxOperator(layers.run_instance_norm, small_weights=True),
    "LayerNormalization": OnnxOperator(layers.run_layer_norm),
    "GroupNormalization": OnnxOperator(layers.run_group_norm),
    # moving data
    "Shape": OnnxOperator(shape_ops.run_shape),
    "Size": OnnxOperator(shape_ops.run_size),
    "SelectChannels": OnnxOperator(shape_ops.run_select_channels, statistics_inputs=(1,)),
    "Reshape": OnnxOperator(shape_ops.run_reshape),
    "Flatten": OnnxOperator(shape_ops.run_flatten),
    "Transpose": OnnxOperator(shape_ops.run_transpose),
    "Squeeze": OnnxOperator(shape_ops.run_squeeze),
    "Unsqueeze": OnnxOperator(shape_ops.run_unsqueeze),
    "Concat": OnnxOperator(shape_ops.run_concat),
    "Split": OnnxOperator(shape_ops.run_split),
    "Slice": OnnxOperator(shape_ops.run_slice),
    "Expand": OnnxOperator(shape_ops.run_expand),
    "Tile": OnnxOperator(shape_ops.run_tile),
    "Pad": OnnxOperator(shape_ops.run_pad, numeric_inputs=(1, 2, 3)),
    "DepthToSpace": OnnxOperator(shape_ops.run_depth_to_space),
    "SpaceToDepth": OnnxOperator(shape_ops.run_space_to_depth),
    "Cast": OnnxOperator(shape_ops.run_cast),
    "CastLike": OnnxOperator(shape_ops.run_cast_like),
    "Identity": OnnxOperator(shape_ops.run_identity),
    "Dropout": OnnxOperator(shape_ops.run_dropout, numeric_inputs=(1, 2)),
    "Where": OnnxOperator(shape_ops.run_where),
    "Trilu": OnnxOperator(shape_ops.run_trilu),
    # pooling and reductions
    "MaxPool": OnnxOperator(layers.run_max_pool),
    "AveragePool": OnnxOperator(layers.run_average_pool),
    "GlobalAveragePool": OnnxOperator(layers.run_global_average_pool),
    "GlobalMaxPool": OnnxOperator(layers.run_global_max_pool),
    "Resize": OnnxOperator(layers.run_resize, numeric_inputs=(1, 2, 3)),
    "Upsample": OnnxOperator(layers.run_upsample, numeric_inputs=(1,)),
    "ReduceMean": OnnxOperator(layers.make_reduction(torch.mean)),
    "ReduceSum": OnnxOperator(layers.make_reduction(torch.sum)),
    "ReduceMax": OnnxOperator(layers.make_reduction(torch.amax)),
    "ReduceMin": OnnxOperator(layers.make_reduction(torch.amin)),
    "ReduceL2": OnnxOperator(
        layers.make_reduction(lambda x, dims, keepdim: torch.linalg.vector_norm(x, 2, dims, keepdim))
    ),
    "ReduceL1": OnnxOperator(
        layers.make_reduction(lambda x, dims, keepdim: torch.linalg.vector_norm(x, 1, dims, keepdim))
    ),
    "ReduceLogSumExp": OnnxOperator(layers.make_reduction(torch.logsumexp)),
    "ReduceSumSquare": OnnxOperator(
        layers.make_reduction(lambda x, dims, keepdim: torch.sum(torch.square(x), dims, keepdim))
    ),
    "ArgMax": OnnxOperator(layers.make_arg_reduction(torch.argmax)),
    "ArgMin": OnnxOperator(layers.make_arg_reduction(torch.argmin)),
    "Softmax": OnnxOperator(layers.make_softmax(torch.softmax)),
    "LogSoftmax": OnnxOperator(layers.make_softmax(torch.log_softmax)),
    "CumSum": OnnxOperator(layers.run_cumsum),
    # operands that meet
    "Add": OnnxOperator(make_commutative(torch.add)),
    "Mul": OnnxOperator(make_commutative(torch.mul)),
    "Sub": OnnxOperator(elementwise.run_sub),
    "Div": OnnxOperator(elementwise.run_div),
    "Pow": OnnxOperator(elementwise.run_pow),
    "Mod": OnnxOperator(elementwise.run_mod),
    "Max": OnnxOperator(make_variadic(torch.maximum)),
    "Min": OnnxOperator(make_variadic(torch.minimum)),
    "Sum": OnnxOperator(make_variadic(torch.add)),
    "Mean": OnnxOperator(elementwise.run_mean),
    "Equal": OnnxOperator(make_commutative(torch.eq)),
    "Greater": OnnxOperator(make_binary(torch.gt)),
    "GreaterOrEqual": OnnxOperator(make_binary(torch.ge)),
    "Less": OnnxOperator(make_binary(torch.lt)),
    "LessOrEqual": OnnxOperator(make_binary(torch.le)),
    "And": OnnxOperator(make_variadic(torch.logical_and)),
    "Or": OnnxOperator(make_variadic(torch.logical_or)),
    "Xor": OnnxOperator(make_variadic(torch.logical_xor)),
    # activations
    "Relu": OnnxOperator(make_unary(F.relu)),
    "Sigmoid": OnnxOperator(make_unary(torch.sigmoid)),
    "Tanh": OnnxOperator(make_unary(torch.tanh)),
    "Softplus": OnnxOperator(make_unary(F.softplus)),
    "Softsign": OnnxOperator(elementwise.run_softsign),
    "HardSwish": OnnxOperator(make_unary(F.hardswish)),
    "Mish": OnnxOperator(make_unary(F.mish)),
    "Swish": OnnxOperator(elementwise.run_swish),
    "HardSigmoid": OnnxOperator(elementwise.run_hard_sigmoid),
    "Gelu": OnnxOperator(elementwise.run_gelu),
    "LeakyRelu": OnnxOperator(elementwise.run_leaky_relu),
    "Elu": OnnxOperator(elementwise.run_elu),
    "Selu": OnnxOperator(elementwise.run_selu),
    "Celu": OnnxOperator(elementwise.run_celu),
    "ThresholdedRelu": OnnxOperator(elementwise.run_thresholded_relu),
    "Shrink": OnnxOperator(elementwise.run_shrink),
    "PRelu": OnnxOperator(elementwise.run_prelu, small_weights=True),
    "Clip": OnnxOperator(elementwise.run_clip, numeric_inputs=(1, 2)),
    "Abs": OnnxOperator(make_unary(torch.abs)),
    "Neg": OnnxOperator(make_unary(torch.neg)),
    "Exp": OnnxOperator(make_unary(torch.exp)),
    "Log": OnnxOperator(make_unary(torch.log)),
    "Sqrt": OnnxOperator(make_unary(torch.sqrt)),
    "Reciprocal": OnnxOperator(make_unary(torch.reciprocal)),
    "Erf": OnnxOperator(make_unary(torch.erf)),
    "Floor": OnnxOperator(make_unary(torch.floor)),
    "Ceil": OnnxOperator(make_unary(torch.ceil)),
    "Round": OnnxOperator(make_unary(torch.round)),
    "Sign": OnnxOperator(make_unary(torch.sign)),
    "Sin": OnnxOperator(make_unary(torch.sin)),
    "Cos": OnnxOperator(make_unary(torch.cos)),
    "Tan": OnnxOperator(make_unary(torch.tan)),
    "Sinh": OnnxOperator(make_unary(torch.sinh)),
    "Cosh": OnnxOperator(make_unary(torch.cosh)),
    "Atan": OnnxOperator(make_unary(torch.atan)),
    "Asin": OnnxOperator(make_unary(torch.asin)),
    "Acos": OnnxOperator(make_unary(torch.acos)),
    "Not": OnnxOperator(make_unary(torch.logical_not)),
    "IsNaN": OnnxOperator(make_unary(torch.isnan)),
    # run by onnxruntime, or (data_dependent) not run at all
    "LSTM": OnnxOperator(macs=layers.count_recurrent_macs),
    "GRU": OnnxOperator(macs=layers.count_recurrent_macs),
    "RNN": OnnxOperator(macs=layers.count_recurrent_macs),
    "NonZero": OnnxOperator(data_dependent=True),
    "NonMaxSuppression": OnnxOperator(data_dependent=True),
    "Unique": OnnxOperator(data_dependent=True),
    "Compress": OnnxOperator(data_dependent=True),
    "If": OnnxOperator(data_dependent=True),
    "Loop": OnnxOperator(data_dependent=True),
    "Scan": OnnxOperator(data_dependent=True),
    "RoiAlign": OnnxOperator(data_dependent=True),
    "StringNormalizer": OnnxOperator(data_dependent=True),
    "SequenceConstruct": OnnxOperator(data_dependent=True),
    "SplitToSequence": OnnxOperator(data_dependent=True),
    "SequenceAt": OnnxOperator(data_dependent=True),
    "SequenceInsert": OnnxOperator(data_dependent=True),
    "ConcatFromSequence": OnnxOperator(data_dependent=True),
    "SequenceEmpty": OnnxOperator(data_dependent=True),
    "Optional": OnnxOperator(data_dependent=True),
    "OptionalGetElement": OnnxOperator(data_dependent=True),
    "OptionalHasElement": OnnxOperator(data_dependent=True),
    "TfIdfVectorizer": OnnxOperator(data_dependent=True),
}
UNKNOWN_ONNX_OPERATOR = OnnxOperator()
"""The row of an operator that the table does not have: onnxruntime runs it, and its channels are not prunable."""


def lookup_onnx_operator(op: str) -> OnnxOperator:
    """Return the row of an operator."""
    return ONNX_OPERATORS.get(op, UNKNOWN_ONNX_OPERATOR)
