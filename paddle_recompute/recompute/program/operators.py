"""Which operators may run a second time, and why the others may not: one rule for both
representations.

An operator that is not known to be repeatable is kept: that costs memory and is never wrong. So the
list has the operators that may be repeated, by the names that they have in PIR (Paddle 3.3) or in
the old representation (2.6); operators of later Paddle versions are not on it.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

UNKNOWN = "it is not known to be repeatable"

_REPEATABLE = """
abs acos acosh add add_n add_position_encoding addmm affine_channel affine_grid all allclose amax
amin angle any arange arg_max arg_min argmax argmin argsort as_complex as_real asin asinh assign
assign_value atan atan2 atanh baddbmm bce_loss bicubic_interp bicubic_interp_v2 bilinear
bilinear_interp bilinear_interp_v2 bilinear_tensor_product bincount bitwise_and bitwise_left_shift
bitwise_not bitwise_or bitwise_right_shift bitwise_xor bmm brelu broadcast_tensors cast ceil celu
channel_shuffle cholesky cholesky_solve clip clip_by_norm complex concat conj conv2d
conv2d_transpose conv3d conv3d_transpose copysign cos cosh crop crop_tensor cross cross_entropy
cross_entropy2 cross_entropy_with_softmax cummax cummin cumprod cumsum deformable_conv
deformable_conv_v1 depthwise_conv2d depthwise_conv2d_transpose det determinant diag diag_embed
diag_v2 diagonal digamma dist divide dot eig eigh eigvals eigvalsh einsum elementwise_add
elementwise_div elementwise_floordiv elementwise_fmax elementwise_fmin elementwise_heaviside
elementwise_max elementwise_min elementwise_mod elementwise_mul elementwise_pow elementwise_sub elu
embedding equal equal_all erf erfinv exp expand expand_as expand_as_v2 expand_v2 expm1 eye fft_c2c
fft_c2r fft_r2c fill_any_like fill_constant fill_constant_batch_size_like fill_diagonal
fill_diagonal_tensor fill_zeros_like flatten flatten2 flatten_contiguous_range flip floor
floor_divide fmax fmin fold frame frobenius_norm full full_batch_size_like full_int_array full_like
full_with_tensor fused_bias_act fused_elemwise_add_activation fused_gemm_epilogue fused_matmul
fused_rotary_position_embedding fused_softmax_mask fused_softmax_mask_upper_triangle fused_transpose
gammaincc gammaln gather gather_nd gelu greater_equal greater_than grid_sample grid_sampler
group_norm hard_shrink hard_sigmoid hard_swish hardshrink hardsigmoid hardswish hardtanh heaviside
hierarchical_sigmoid hinge_loss histogram hsigmoid_loss huber_loss i0 i0e i1 i1e imag index_add
index_put index_sample index_select instance_norm inverse isclose isfinite isfinite_v2 isinf
isinf_v2 isnan isnan_v2 kldiv_loss kron kthvalue l1_norm label_smooth layer_norm leaky_relu lerp
less_equal less_than lgamma linear_interp linear_interp_v2 linspace log log10 log1p log2 log_loss
log_softmax logcumsumexp logical_and logical_not logical_or logical_xor logit logsigmoid logspace
logsumexp lookup_table lookup_table_v2 lp_pool2d lrn lstsq lu lu_unpack masked_fill masked_select
matmul matmul_v2 matmul_with_flatten matrix_power matrix_rank matrix_rank_tol max
max_pool2d_with_index max_pool3d_with_index maximum maxout mean mean_all median meshgrid min minimum
minus mish mode modified_huber_loss mul multi_dot multiplex multiply mv nanmedian nansum
nearest_interp nearest_interp_v2 nextafter nll_loss nonzero norm not_equal numel one_hot one_hot_v2
ones ones_like overlap_add p_norm pad pad2d pad3d pixel_shuffle pixel_unshuffle polygamma pool2d
pool3d pow prelu prod psroi_pool put_along_axis qr range rank_loss real reciprocal reduce_all
reduce_amax reduce_amin reduce_any reduce_as reduce_max reduce_mean reduce_min reduce_prod
reduce_sum relu relu6 remainder renorm repeat_interleave repeat_interleave_with_tensor_index reshape
reshape2 reverse rint rms_norm roi_align roi_pool roll round row_conv rsqrt scale scatter
scatter_nd_add searchsorted segment_pool selu send_u_recv send_ue_recv send_uv sequence_mask
set_value set_value_with_tensor shape shape64 shuffle_channel sigmoid
sigmoid_cross_entropy_with_logits sign silu sin sinh size slice slogdet slogdeterminant soft_relu
softmax softmax_with_cross_entropy softplus softshrink softsign solve split split_with_num sqrt
square squared_l2_norm squeeze squeeze2 stack stanh stft strided_slice subtract sum svd swiglu swish
take_along_axis tan tanh tanh_shrink temporal_shift thresholded_relu tile top_k top_k_v2 topk trace
transpose transpose2 triangular_solve tril tril_indices tril_triu trilinear_interp
trilinear_interp_v2 triu triu_indices trunc unbind unfold unpool unpool3d unsqueeze unsqueeze2
unstack where where_index zeros zeros_like
builtin.combine builtin.slice builtin.split
"""
"""Return the same for the same operands and change nothing."""

_RANDOM = """
bernoulli bernoulli_p binomial class_center_sample cudnn_lstm dirichlet dropout dropout_nd
exponential flash_attn flash_attn_qkvpacked flash_attn_unpadded flash_attn_varlen_qkvpacked
flashmask_attention fractional_max_pool2d fractional_max_pool3d fused_attention
fused_bias_dropout_residual_layer_norm fused_dot_product_attention fused_dropout_add
fused_feedforward gaussian gaussian_inplace gaussian_random gaussian_random_batch_size_like
graph_khop_sampler graph_sample_neighbors gumbel_softmax memory_efficient_attention multinomial nce
poisson pyramid_hash randint random random_crop random_routing randperm rnn rrelu sampling_id seed
shuffle_batch standard_gamma top_p_sampling truncated_gaussian_random uniform uniform_random
uniform_random_batch_size_like uniform_random_inplace uniform_random_p
variable_length_memory_efficient_attention weighted_sample_neighbors
"""
"""Draw random numbers; a second run would draw others."""

REPEATABLE = frozenset(_REPEATABLE.split())
RANDOM = frozenset(_RANDOM.split())


def why_kept(own: ModuleType, operator: Any) -> str | None:
    """Why the results of `operator` must be kept, in words; None if it may run twice.

    A dropout may: its mask is kept, and its output is computed from the mask. So may a BatchNorm
    that takes the statistics of its batch: it gets copies of the running ones.

    Args:
        own: `_paddle.static.pir` or `old_ir`, which reads an operator.
        operator: One of its operators.
    """
    kind = own.kind(operator).removeprefix("pd_op.")
    if own.has_body(operator):
        return "it is control flow"
    if kind in REPEATABLE or kind == "dropout" or updates_statistics(own, operator):
        return None
    if kind == "rnn" and (
        own.attribute(operator, "is_test") or not own.attribute(operator, "dropout_prob")
    ):
        return None  # it drops nothing out
    if not own.computes(operator):
        return "it computes nothing"
    if kind in RANDOM:
        return "it draws random numbers"
    return "it changes a variable in place" if kind.endswith("_") else UNKNOWN


def is_replayed_from_mask(own: ModuleType, operator: Any) -> bool:
    """Whether it is a dropout with a mask; in evaluation it has none and draws nothing."""
    is_dropout = own.kind(operator).removeprefix("pd_op.") == "dropout"
    return is_dropout and not own.attribute(operator, "is_test")


def updates_statistics(own: ModuleType, operator: Any) -> bool:
    """Whether it is a BatchNorm that takes the statistics of its batch, and only writes to the
    running ones.
    """
    read = own.attribute
    if own.kind(operator) != own.BATCH_NORM or read(operator, "use_global_stats"):
        return False
    return not read(operator, "is_test") or bool(read(operator, "trainable_statistics"))
