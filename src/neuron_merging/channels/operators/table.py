"""The table: one row per operator, with all that is known of it.

The rule says how channels go through; the other columns are facts that later stages look up: whether a scale
commutes with the operator, how closed-form moments go through it, which kind of layer or norm it is. An operator
without a row refuses every channel that reaches it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from neuron_merging.channels.labels import Labels
from neuron_merging.channels.operators.common import filled, fresh, same, unknown
from neuron_merging.channels.operators.contraction import einsum
from neuron_merging.channels.operators.elementwise import drawn, dropout, glu, pointwise, prelu
from neuron_merging.channels.operators.layers import (
    addmm,
    attention,
    baddbmm,
    convolution,
    embedding,
    linear,
    matmul,
    sorted_experts,
)
from neuron_merging.channels.operators.moving import (
    cat,
    channel_shuffle,
    chunk,
    expand,
    flip,
    fold,
    getitem,
    index,
    interleave,
    pad,
    pixels,
    position,
    rearrange,
    reshape,
    roll,
    split,
    stack,
    take_slice,
    unfold,
    windows,
)
from neuron_merging.channels.operators.norms import channel_norm, group_norm, layer_norm, weight_norm
from neuron_merging.channels.operators.reducing import along, extreme, pool, reduce
from neuron_merging.channels.walk import Walk
from neuron_merging.graph.values import Node

Rule = Callable[[Walk, Node], Labels | list[Labels]]
"""Reads the labels of a node's inputs, tells the walk what belongs together, returns the labels of the output."""


@dataclass(frozen=True)
class Operator:
    """One row of the table: all that is known of one operator.

    Examples
    --------
    >>> OPERATORS["conv2d"].convolves, OPERATORS["layer_norm"].spans
    (True, True)
    """

    rule: Rule
    """How channels go through."""
    homogeneous: bool = False
    """f(s·x) = s·f(x) for s > 0: the condition of the paper's Theorem 1."""
    moves: bool = False
    """Entries are moved or left out, none is changed."""
    view: bool = False
    """The result may share its memory with the input, so that writing into one writes into the other."""
    moments: Literal["", "execute", "keep", "reshape", "pointwise", "maximum", "batch norm", "span norm"] = ""
    """How a mean and a covariance go through: see `statistics.gaussian`."""
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
UNKNOWN = Operator(unknown)


def operator(names: str, **facts: Any) -> Callable[[Rule], Rule]:
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
    ...     return same(walk, node)
    >>> OPERATORS["my_activation"].homogeneous
    True
    """

    def register(rule: Rule) -> Rule:
        for name in names.split():
            OPERATORS[name] = Operator(rule, **facts)
        return rule

    return register


def row_of(node: Node) -> Operator:
    """What is known of a node's operator."""
    return OPERATORS.get(node.op, UNKNOWN)


MOVES = {"moves": True, "homogeneous": True}
VIEWS = {**MOVES, "view": True}
POINTWISE = {"moments": "pointwise"}

# moving data
operator("view reshape _unsafe_view unflatten view_as reshape_as", **VIEWS, moments="reshape")(reshape)
operator("flatten squeeze", **VIEWS, moments="reshape")(reshape)
operator("permute transpose", **VIEWS, moments="execute")(rearrange)
operator("t swapaxes swapdims movedim moveaxis unsqueeze numpy_T adjoint mT", **VIEWS)(rearrange)
operator("repeat tile", **MOVES)(rearrange)
operator("repeat_interleave", **MOVES)(interleave)
operator("pixel_shuffle pixel_unshuffle", **MOVES)(pixels)
operator("expand expand_as broadcast_to", **VIEWS)(expand)
operator("cat concat concatenate", **MOVES, joins=True)(cat)
operator("stack", **MOVES, joins=True)(stack)
operator("split split_with_sizes unsafe_split tensor_split", **VIEWS)(split)
operator("chunk unsafe_chunk", **VIEWS)(chunk)
operator("slice narrow", **VIEWS)(take_slice)
operator("select unbind", **VIEWS)(position)
operator("index index_select", **MOVES)(index)
operator("channel_shuffle", **MOVES)(channel_shuffle)
operator("flip", **MOVES)(flip)
operator("roll", **MOVES)(roll)
operator("unfold", **VIEWS)(windows)
operator("im2col", homogeneous=True)(unfold)
operator("col2im", homogeneous=True)(fold)
operator(
    "pad constant_pad_nd reflection_pad1d reflection_pad2d reflection_pad3d replication_pad1d replication_pad2d "
    "replication_pad3d",
    **MOVES,
)(pad)
operator("alias detach identity", **VIEWS, moments="keep")(same)
operator("to _to_copy", **VIEWS, moments="keep")(same)
operator("clone", **MOVES, moments="keep")(same)
operator("contiguous", **VIEWS, moments="keep")(same)
operator("type_as float half double bfloat16 lift_fresh lift_fresh_copy positive", **VIEWS)(same)
operator("dropout", **VIEWS, moments="keep")(dropout)
operator("feature_dropout alpha_dropout feature_alpha_dropout native_dropout", **VIEWS)(dropout)
operator("getitem", **VIEWS)(getitem)
# activations
operator("relu leaky_relu rrelu abs neg negative", **POINTWISE, homogeneous=True)(same)
operator(
    "relu6 hardtanh elu selu celu gelu silu mish hardswish hardsigmoid sigmoid log_sigmoid softplus softshrink "
    "hardshrink tanh threshold exp exp2 expm1 log log2 log10 log1p sqrt rsqrt square sin cos tan erf erfc ceil floor "
    "round trunc sign reciprocal atan asin acos sinh cosh asinh acosh atanh logit nan_to_num sgn frac special_expit "
    "isnan isinf isfinite logical_not bitwise_not",
    **POINTWISE,
)(same)
operator("zeros_like ones_like full_like empty_like")(same)
operator("rand_like randn_like bernoulli")(drawn)
operator("glu")(glu)
operator("prelu", **POINTWISE)(prelu)
# operands that meet
operator("add", **POINTWISE, arithmetic="add", joins=True)(pointwise)
operator("sub", **POINTWISE, arithmetic="sub")(pointwise)
operator("mul", **POINTWISE, arithmetic="mul")(pointwise)
operator("div", **POINTWISE, arithmetic="div")(pointwise)
operator("rsub clamp clamp_min clamp_max pow maximum minimum", **POINTWISE)(pointwise)
operator(
    "multiply divide true_divide subtract floor_divide remainder fmod clip where masked_fill eq ne lt le gt ge "
    "logical_and logical_or logical_xor bitwise_and bitwise_or bitwise_xor atan2 lerp addcmul addcdiv copy hypot xlogy"
)(pointwise)
# pooling, resampling and reductions
operator("max_pool1d max_pool2d max_pool3d", homogeneous=True, moments="maximum")(pool)
operator(
    "avg_pool1d avg_pool2d avg_pool3d adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d",
    homogeneous=True,
    moments="execute",
)(pool)
operator(
    "max_pool1d_with_indices max_pool2d_with_indices max_pool3d_with_indices adaptive_max_pool1d adaptive_max_pool2d "
    "adaptive_max_pool3d _adaptive_avg_pool2d _adaptive_avg_pool3d fractional_max_pool2d fractional_max_pool3d "
    "upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_linear1d upsample_bilinear2d "
    "upsample_bicubic2d upsample_trilinear3d _upsample_nearest_exact1d _upsample_nearest_exact2d "
    "_upsample_nearest_exact3d _upsample_bilinear2d_aa _upsample_bicubic2d_aa",
    homogeneous=True,
)(pool)
operator("mean sum amax amin", homogeneous=True)(reduce)
operator("max min")(extreme)
operator("var std prod argmax argmin any all logsumexp norm linalg_vector_norm median")(reduce)
operator("softmax _softmax log_softmax _log_softmax cumsum cumprod")(along)
# normalisation
operator("batch_norm", norm="batch", moments="batch norm")(channel_norm)
operator("_native_batch_norm_legit_no_training")(channel_norm)
operator("instance_norm", norm="instance")(channel_norm)
operator("group_norm", norm="group")(group_norm)
operator("layer_norm", norm="layer", moments="span norm")(layer_norm)
operator("rms_norm", norm="rms", moments="span norm")(layer_norm)
# layers with weights
operator("linear", layer="linear", moments="execute")(linear)
operator("matmul mm bmm", layer="product")(matmul)
operator("addmm", layer="product")(addmm)
operator("baddbmm")(baddbmm)
operator("_grouped_mm grouped_mm_fallback")(sorted_experts)
operator("einsum")(einsum)
operator("scaled_dot_product_attention")(attention)
operator("embedding", layer="table")(embedding)
operator("embedding_bag", layer="table")(unknown)
operator("conv1d conv2d conv3d", layer="convolution", moments="execute")(convolution)
operator("convolution", layer="convolution")(convolution)
operator("conv_transpose1d conv_transpose2d conv_transpose3d", layer="transposed")(convolution)
operator("_weight_norm")(weight_norm)
# new tensors
operator("zeros ones full new_zeros new_ones new_full", fills=True)(filled)
operator("empty arange linspace eye rand randn new_empty scalar_tensor sym_size _assert_tensor_metadata _assert_async")(
    fresh
)
