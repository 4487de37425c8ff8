"""The operator table: one row per operator, with all that is known of it. The rule says how labels pass through;
the other columns are facts for later stages: whether a scale commutes with the operator, how moments pass
through it, which kind of layer or norm it is. An operator without a row refuses every channel that reaches it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from neuron_merging.channels.labels import Labels
from neuron_merging.channels.propagation import LabelWalk
from neuron_merging.channels.rules.common import constant_tensor_rule, keep_labels, new_tensor_rule, refuse_all_labels
from neuron_merging.channels.rules.data_movement import (
    cat_rule,
    channel_shuffle_rule,
    chunk_rule,
    col2im_rule,
    expand_rule,
    flip_rule,
    getitem_rule,
    im2col_rule,
    index_rule,
    pad_rule,
    pixel_shuffle_rule,
    rearrange_rule,
    repeat_interleave_rule,
    reshape_rule,
    roll_rule,
    select_rule,
    slice_rule,
    split_rule,
    stack_rule,
    tensor_unfold_rule,
)
from neuron_merging.channels.rules.elementwise import dropout_rule, glu_rule, pointwise_rule, prelu_rule, random_rule
from neuron_merging.channels.rules.layers import (
    addmm_rule,
    attention_rule,
    baddbmm_rule,
    convolution_rule,
    einsum_rule,
    embedding_rule,
    grouped_mm_rule,
    linear_rule,
    matmul_rule,
)
from neuron_merging.channels.rules.norms_and_reductions import (
    channel_norm_rule,
    group_norm_rule,
    layer_norm_rule,
    max_min_rule,
    pool_rule,
    reduce_rule,
    softmax_rule,
    weight_norm_rule,
)
from neuron_merging.graph.graph import Node

OperatorRule = Callable[[LabelWalk, Node], Labels | list[Labels]]
"""Reads the labels of a node's inputs, tells the walk what belongs together, returns the labels of the output."""


@dataclass(frozen=True)
class Operator:
    """One row of the table: all that is known of one operator.

    Examples
    --------
    >>> OPERATORS["conv2d"].convolves, OPERATORS["layer_norm"].spans
    (True, True)
    """

    rule: OperatorRule
    """How channels go through."""
    homogeneous: bool = False
    """f(s·x) = s·f(x) for s > 0: the condition of the paper's Theorem 1."""
    moves: bool = False
    """Entries are moved or left out, none is changed."""
    view: bool = False
    """The result may share its memory with the input, so that writing into one writes into the other."""
    moments: Literal["", "execute", "keep", "reshape", "pointwise", "maximum", "batch norm", "span norm"] = ""
    """How a mean and a covariance go through: see `calibration.gaussian`."""
    arithmetic: Literal["", "add", "sub", "mul", "div"] = ""
    """A per-channel tensor as the other operand is a scale or a shift."""
    fills: bool = False
    """Makes a tensor with one value everywhere."""
    joins: bool = False
    """Branches meet and none is scaled."""
    norm: Literal["", "batch", "instance", "group", "layer", "rms"] = ""
    """Which statistics it normalises by."""
    layer: Literal["", "linear", "product", "convolution", "transposed", "table"] = ""
    """How it reads its weight: outputs × inputs, inputs × outputs, with a kernel, or by row numbers."""

    @property
    def convolves(self) -> bool:
        """Whether it has a kernel."""
        return self.layer in ("convolution", "transposed")

    @property
    def spans(self) -> bool:
        """A norm whose statistics run over the channels themselves."""
        return self.norm in ("layer", "rms")


OPERATORS: dict[str, Operator] = {}
UNKNOWN_OPERATOR = Operator(refuse_all_labels)


def operator(names: str, **facts: Any) -> Callable[[OperatorRule], OperatorRule]:
    """Register the rule of one or more operators, with what else is known of them.

    Parameters
    ----------
    names
        Names of operators as the graph has them, separated by blanks: `relu`, or `squash` for `mine::squash`.
    **facts
        Fields of `Operator` other than `rule`.

    Returns
    -------
    Callable
        A decorator of rules. A rule takes the walk and the node, tells the walk which labels belong together, and
        returns the labels of the output.

    Raises
    ------
    TypeError
        A fact that `Operator` does not have.

    Examples
    --------
    >>> @operator("my_activation", homogeneous=True, moments="pointwise")
    ... def my_activation(walk, node):
    ...     return keep_labels(walk, node)
    >>> OPERATORS["my_activation"].homogeneous
    True
    """

    def register(rule: OperatorRule) -> OperatorRule:
        for name in names.split():
            OPERATORS[name] = Operator(rule, **facts)
        return rule

    return register


def lookup_operator(node: Node) -> Operator:
    """What is known of a node's operator."""
    return OPERATORS.get(node.op, UNKNOWN_OPERATOR)


MOVE_FACTS = {"moves": True, "homogeneous": True}
VIEW_FACTS = {**MOVE_FACTS, "view": True}
POINTWISE_FACTS = {"moments": "pointwise"}

# moving data
operator("view reshape _unsafe_view unflatten view_as reshape_as", **VIEW_FACTS, moments="reshape")(reshape_rule)
operator("flatten squeeze", **VIEW_FACTS, moments="reshape")(reshape_rule)
operator("permute transpose", **VIEW_FACTS, moments="execute")(rearrange_rule)
operator("t swapaxes swapdims movedim moveaxis unsqueeze numpy_T adjoint mT", **VIEW_FACTS)(rearrange_rule)
operator("repeat tile", **MOVE_FACTS)(rearrange_rule)
operator("repeat_interleave", **MOVE_FACTS)(repeat_interleave_rule)
operator("pixel_shuffle pixel_unshuffle", **MOVE_FACTS)(pixel_shuffle_rule)
operator("expand expand_as broadcast_to", **VIEW_FACTS)(expand_rule)
operator("cat concat concatenate", **MOVE_FACTS, joins=True)(cat_rule)
operator("stack", **MOVE_FACTS, joins=True)(stack_rule)
operator("split split_with_sizes unsafe_split tensor_split", **VIEW_FACTS)(split_rule)
operator("chunk unsafe_chunk", **VIEW_FACTS)(chunk_rule)
operator("slice narrow", **VIEW_FACTS)(slice_rule)
operator("select unbind", **VIEW_FACTS)(select_rule)
operator("index index_select", **MOVE_FACTS)(index_rule)
operator("channel_shuffle", **MOVE_FACTS)(channel_shuffle_rule)
operator("flip", **MOVE_FACTS)(flip_rule)
operator("roll", **MOVE_FACTS)(roll_rule)
operator("unfold", **VIEW_FACTS)(tensor_unfold_rule)
operator("im2col", homogeneous=True)(im2col_rule)
operator("col2im", homogeneous=True)(col2im_rule)
operator(
    "pad constant_pad_nd reflection_pad1d reflection_pad2d reflection_pad3d replication_pad1d replication_pad2d "
    "replication_pad3d",
    **MOVE_FACTS,
)(pad_rule)
operator("alias detach identity", **VIEW_FACTS, moments="keep")(keep_labels)
operator("to _to_copy", **VIEW_FACTS, moments="keep")(keep_labels)
operator("clone", **MOVE_FACTS, moments="keep")(keep_labels)
operator("contiguous", **VIEW_FACTS, moments="keep")(keep_labels)
operator("type_as float half double bfloat16 lift_fresh lift_fresh_copy positive", **VIEW_FACTS)(keep_labels)
operator("dropout", **VIEW_FACTS, moments="keep")(dropout_rule)
operator("feature_dropout alpha_dropout feature_alpha_dropout native_dropout", **VIEW_FACTS)(dropout_rule)
operator("getitem", **VIEW_FACTS)(getitem_rule)
# activations
operator("relu leaky_relu rrelu abs neg negative", **POINTWISE_FACTS, homogeneous=True)(keep_labels)
operator(
    "relu6 hardtanh elu selu celu gelu silu mish hardswish hardsigmoid sigmoid log_sigmoid softplus softshrink "
    "hardshrink tanh threshold exp exp2 expm1 log log2 log10 log1p sqrt rsqrt square sin cos tan erf erfc ceil floor "
    "round trunc sign reciprocal atan asin acos sinh cosh asinh acosh atanh logit nan_to_num sgn frac special_expit "
    "isnan isinf isfinite logical_not bitwise_not",
    **POINTWISE_FACTS,
)(keep_labels)
operator("zeros_like ones_like full_like empty_like")(keep_labels)
operator("rand_like randn_like bernoulli")(random_rule)
operator("glu")(glu_rule)
operator("prelu", **POINTWISE_FACTS)(prelu_rule)
# operands that meet
operator("add", **POINTWISE_FACTS, arithmetic="add", joins=True)(pointwise_rule)
operator("sub", **POINTWISE_FACTS, arithmetic="sub")(pointwise_rule)
operator("mul", **POINTWISE_FACTS, arithmetic="mul")(pointwise_rule)
operator("div", **POINTWISE_FACTS, arithmetic="div")(pointwise_rule)
operator("rsub clamp clamp_min clamp_max pow maximum minimum", **POINTWISE_FACTS)(pointwise_rule)
operator(
    "multiply divide true_divide subtract floor_divide remainder fmod clip where masked_fill eq ne lt le gt ge "
    "logical_and logical_or logical_xor bitwise_and bitwise_or bitwise_xor atan2 lerp addcmul addcdiv copy hypot xlogy"
)(pointwise_rule)
# pooling, resampling and reductions
operator("max_pool1d max_pool2d max_pool3d", homogeneous=True, moments="maximum")(pool_rule)
operator(
    "avg_pool1d avg_pool2d avg_pool3d adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d",
    homogeneous=True,
    moments="execute",
)(pool_rule)
operator(
    "max_pool1d_with_indices max_pool2d_with_indices max_pool3d_with_indices adaptive_max_pool1d adaptive_max_pool2d "
    "adaptive_max_pool3d _adaptive_avg_pool2d _adaptive_avg_pool3d fractional_max_pool2d fractional_max_pool3d "
    "upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_linear1d upsample_bilinear2d "
    "upsample_bicubic2d upsample_trilinear3d _upsample_nearest_exact1d _upsample_nearest_exact2d "
    "_upsample_nearest_exact3d _upsample_bilinear2d_aa _upsample_bicubic2d_aa",
    homogeneous=True,
)(pool_rule)
operator("mean sum amax amin", homogeneous=True)(reduce_rule)
operator("max min")(max_min_rule)
operator("var std prod argmax argmin any all logsumexp norm linalg_vector_norm median")(reduce_rule)
operator("softmax _softmax log_softmax _log_softmax cumsum cumprod")(softmax_rule)
# normalisation
operator("batch_norm", norm="batch", moments="batch norm")(channel_norm_rule)
operator("_native_batch_norm_legit_no_training")(channel_norm_rule)
operator("instance_norm", norm="instance")(channel_norm_rule)
operator("group_norm", norm="group")(group_norm_rule)
operator("layer_norm", norm="layer", moments="span norm")(layer_norm_rule)
operator("rms_norm", norm="rms", moments="span norm")(layer_norm_rule)
# layers with weights
operator("linear", layer="linear", moments="execute")(linear_rule)
operator("matmul mm bmm", layer="product")(matmul_rule)
operator("addmm", layer="product")(addmm_rule)
operator("baddbmm")(baddbmm_rule)
operator("_grouped_mm grouped_mm_fallback")(grouped_mm_rule)
operator("einsum")(einsum_rule)
operator("scaled_dot_product_attention")(attention_rule)
operator("embedding", layer="table")(embedding_rule)
operator("embedding_bag", layer="table")(refuse_all_labels)
operator("conv1d conv2d conv3d", layer="convolution", moments="execute")(convolution_rule)
operator("convolution", layer="convolution")(convolution_rule)
operator("conv_transpose1d conv_transpose2d conv_transpose3d", layer="transposed")(convolution_rule)
operator("_weight_norm")(weight_norm_rule)
# new tensors
operator("zeros ones full new_zeros new_ones new_full", fills=True)(constant_tensor_rule)
operator("empty arange linspace eye rand randn new_empty scalar_tensor sym_size _assert_tensor_metadata _assert_async")(
    new_tensor_rule
)
