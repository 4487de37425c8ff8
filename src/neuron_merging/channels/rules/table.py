"""The rows of the operator registry. An operator without a row refuses every channel that reaches it."""

from __future__ import annotations

from neuron_merging.channels.rules.common import (
    OPERATORS,
    Operator,
    constant_tensor_rule,
    dropout_rule,
    glu_rule,
    keep_labels,
    lookup_operator,
    new_tensor_rule,
    operator,
    pointwise_rule,
    prelu_rule,
    random_rule,
    refuse_all_labels,
    sum_rule,
)
from neuron_merging.channels.rules.data_movement import (
    cat_rule,
    channel_shuffle_rule,
    chunk_rule,
    col2im_rule,
    edge_pad_rule,
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
    select_channels_rule,
    select_rule,
    slice_rule,
    split_rule,
    stack_rule,
    tensor_unfold_rule,
    unflatten_rule,
)
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

__all__ = ["OPERATORS", "Operator", "lookup_operator", "operator"]

# Facts that many rows share
MOVE_FACTS = {"moves": True, "homogeneous": True}
VIEW_FACTS = {**MOVE_FACTS, "view": True}
SAME_FACTS = {**MOVE_FACTS, "layout": "same"}
SAME_VIEW_FACTS = {**SAME_FACTS, "view": True}
POINTWISE_FACTS = {"moments": "pointwise"}
OPERAND_FACTS = {**POINTWISE_FACTS, "scalar_operands": True}

# Moving data
operator("view reshape _unsafe_view", **VIEW_FACTS, moments="reshape", sizes="shape")(reshape_rule)
operator("unflatten", **VIEW_FACTS, moments="reshape")(unflatten_rule)
operator("view_as reshape_as flatten squeeze", **VIEW_FACTS, moments="reshape")(reshape_rule)
operator("permute transpose", **VIEW_FACTS, layout="permuted", moments="execute")(rearrange_rule)
operator("t swapaxes swapdims movedim moveaxis numpy_T mT", **VIEW_FACTS, layout="permuted")(rearrange_rule)
operator("unsqueeze adjoint", **VIEW_FACTS)(rearrange_rule)
operator("repeat tile", **MOVE_FACTS)(rearrange_rule)
operator("repeat_interleave", **MOVE_FACTS)(repeat_interleave_rule)
operator("pixel_shuffle pixel_unshuffle", **MOVE_FACTS)(pixel_shuffle_rule)
operator("expand", **VIEW_FACTS, sizes="shape")(expand_rule)
operator("expand_as broadcast_to", **VIEW_FACTS)(expand_rule)
operator("cat concat concatenate", **MOVE_FACTS, joins=True, concatenates=True)(cat_rule)
operator("stack", **MOVE_FACTS, joins=True)(stack_rule)
operator("split split_with_sizes unsafe_split", **VIEW_FACTS, sizes="pieces")(split_rule)
operator("tensor_split", **VIEW_FACTS)(split_rule)
operator("chunk unsafe_chunk", **VIEW_FACTS)(chunk_rule)
operator("slice", **VIEW_FACTS, sizes="range")(slice_rule)
operator("narrow", **VIEW_FACTS)(slice_rule)
operator("select unbind", **VIEW_FACTS)(select_rule)
operator("index index_select", **MOVE_FACTS)(index_rule)
operator("select_channels", **MOVE_FACTS)(select_channels_rule)
operator("channel_shuffle", **MOVE_FACTS)(channel_shuffle_rule)
operator("flip", **MOVE_FACTS)(flip_rule)
operator("roll", **MOVE_FACTS)(roll_rule)
operator("unfold", **VIEW_FACTS)(tensor_unfold_rule)
operator("im2col", homogeneous=True)(im2col_rule)
operator("col2im", homogeneous=True)(col2im_rule)
operator("pad constant_pad_nd", **MOVE_FACTS)(pad_rule)
operator(
    "reflection_pad1d reflection_pad2d reflection_pad3d replication_pad1d replication_pad2d replication_pad3d",
    **MOVE_FACTS,
)(edge_pad_rule)
operator("alias detach identity contiguous to _to_copy", **SAME_VIEW_FACTS, moments="keep")(keep_labels)
operator("clone", **SAME_FACTS, moments="keep")(keep_labels)
operator("type_as float half double bfloat16 lift_fresh lift_fresh_copy positive", **SAME_VIEW_FACTS)(keep_labels)
operator("dropout", **VIEW_FACTS, moments="keep")(dropout_rule)
operator("feature_dropout alpha_dropout feature_alpha_dropout native_dropout", **VIEW_FACTS)(dropout_rule)
operator("getitem", **VIEW_FACTS, picks=True)(getitem_rule)
# Activations
operator("relu", **POINTWISE_FACTS, homogeneous=True, rectifies=True)(keep_labels)
operator("tanh", **POINTWISE_FACTS, bounds=True)(keep_labels)
operator("leaky_relu rrelu abs neg negative", **POINTWISE_FACTS, homogeneous=True)(keep_labels)
operator("sigmoid", **POINTWISE_FACTS, probabilities="sigmoid")(keep_labels)
operator("sqrt rsqrt reciprocal", **POINTWISE_FACTS, inside_norms=True)(keep_labels)
operator(
    "relu6 hardtanh elu selu celu gelu silu mish hardswish hardsigmoid log_sigmoid softplus softshrink hardshrink "
    "threshold exp exp2 expm1 log log2 log10 log1p square sin cos tan erf erfc ceil floor round trunc sign atan asin "
    "acos sinh cosh asinh acosh atanh logit nan_to_num sgn frac special_expit isnan isinf isfinite logical_not "
    "bitwise_not",
    **POINTWISE_FACTS,
)(keep_labels)
# The values are constant, but the size follows the operand, so its labels stay.
operator("zeros_like ones_like full_like empty_like")(keep_labels)
operator("rand_like randn_like bernoulli")(random_rule)
operator("glu")(glu_rule)
operator("prelu", **POINTWISE_FACTS)(prelu_rule)
# Arithmetic and comparisons of several operands
operator("add", **OPERAND_FACTS, arithmetic="add", joins=True, inside_norms=True)(sum_rule)
operator("sub", **OPERAND_FACTS, arithmetic="sub")(sum_rule)
operator("rsub", **OPERAND_FACTS)(sum_rule)
operator("mul", **OPERAND_FACTS, arithmetic="mul")(pointwise_rule)
operator("div", **OPERAND_FACTS, arithmetic="div")(pointwise_rule)
operator("pow clamp clamp_min", **OPERAND_FACTS, inside_norms=True)(pointwise_rule)
operator("clamp_max maximum minimum", **OPERAND_FACTS)(pointwise_rule)
operator(
    "multiply divide true_divide subtract floor_divide remainder fmod clip where masked_fill eq ne lt le gt ge "
    "logical_and logical_or logical_xor bitwise_and bitwise_or bitwise_xor atan2 lerp addcmul addcdiv copy hypot xlogy",
    scalar_operands=True,
)(pointwise_rule)
# Pooling, resampling and reductions
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
operator("mean", homogeneous=True, averages=True)(reduce_rule)
operator("sum amax amin", homogeneous=True)(reduce_rule)
operator("max min")(max_min_rule)
operator("var std", averages=True)(reduce_rule)
operator("prod argmax argmin any all logsumexp norm linalg_vector_norm median")(reduce_rule)
operator("softmax _softmax", probabilities="softmax")(softmax_rule)
operator("log_softmax _log_softmax", probabilities="log softmax")(softmax_rule)
operator("cumsum cumprod")(softmax_rule)
# Normalisation
operator("batch_norm", norm="batch", moments="batch norm")(channel_norm_rule)
operator("_native_batch_norm_legit_no_training")(channel_norm_rule)
operator("instance_norm", norm="instance")(channel_norm_rule)
operator("group_norm", norm="group", sizes="groups")(group_norm_rule)
operator("layer_norm", norm="layer", moments="span norm", sizes="normalized shape")(layer_norm_rule)
operator("rms_norm", norm="rms", moments="span norm", sizes="normalized shape")(layer_norm_rule)
# Layers with weights, and products
operator("linear", layer="linear", moments="execute")(linear_rule)
operator("matmul mm bmm", layer="product")(matmul_rule)
operator("addmm", layer="product")(addmm_rule)
operator("baddbmm")(baddbmm_rule)
operator("_grouped_mm grouped_mm_fallback")(grouped_mm_rule)
operator("einsum", contraction="einsum")(einsum_rule)
operator("scaled_dot_product_attention", contraction="attention")(attention_rule)
operator("embedding", layer="table")(embedding_rule)
operator("embedding_bag _embedding_bag _embedding_bag_forward_only", layer="table")(refuse_all_labels)
operator("conv1d conv2d conv3d", layer="convolution", moments="execute", sizes="groups")(convolution_rule)
operator("convolution", layer="convolution", sizes="groups")(convolution_rule)
operator("conv_transpose1d conv_transpose2d conv_transpose3d", layer="transposed", sizes="groups")(convolution_rule)
operator("_weight_norm")(weight_norm_rule)
# New tensors
operator("zeros ones full new_zeros new_ones new_full", fills=True, sizes="shape")(constant_tensor_rule)
operator("empty arange linspace eye rand randn new_empty scalar_tensor sym_size _assert_tensor_metadata _assert_async")(
    new_tensor_rule
)
# Blocks of operators that the exporter keeps as subgraphs
operator("wrap_with_set_grad_enabled wrap_with_autocast", hides_operators=True)(refuse_all_labels)
