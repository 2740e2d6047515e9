"""The operators of Paddle 3.3 that `program.operators` decides over, by name."""

from __future__ import annotations

from paddle_recompute._paddle.static import pir
from paddle_recompute._paddle.static.pir import Operation
from paddle_recompute.recompute.program.operators import UNKNOWN, Operators

_REPEATABLE_OF_PADDLE = """
abs acos acosh add add_n addmm affine_grid all allclose amax amin angle any arange argmax
argmin argsort as_complex as_real asin asinh assign assign_value atan atan2 atanh baddbmm
bce_loss bicubic_interp bilinear bilinear_interp bincount bitwise_and bitwise_left_shift
bitwise_not bitwise_or bitwise_right_shift bitwise_xor bmm broadcast_tensors cast ceil celu
channel_shuffle cholesky cholesky_solve clip clip_by_norm complex concat conj conv2d
conv2d_transpose conv3d conv3d_transpose copysign cos cosh crop cross
cross_entropy_with_softmax cummax cummin cumprod cumsum deformable_conv depthwise_conv2d
depthwise_conv2d_transpose det diag diag_embed diagonal digamma dist divide dot eig eigh
eigvals eigvalsh einsum elementwise_pow elu embedding equal equal_all erf erfinv exp expand
expand_as expm1 eye fft_c2c fft_c2r fft_r2c fill_diagonal fill_diagonal_tensor flatten flip
floor floor_divide fmax fmin fold frame frobenius_norm full full_batch_size_like
full_int_array full_like full_with_tensor fused_bias_act fused_rotary_position_embedding
fused_softmax_mask fused_softmax_mask_upper_triangle gammaincc gammaln gather gather_nd gelu
greater_equal greater_than grid_sample group_norm hardshrink hardsigmoid hardswish hardtanh
heaviside hinge_loss histogram hsigmoid_loss huber_loss i0 i0e i1 i1e imag index_add
index_put index_sample index_select instance_norm inverse isclose isfinite isinf isnan
kldiv_loss kron kthvalue l1_norm label_smooth layer_norm leaky_relu lerp less_equal less_than
lgamma linear_interp linspace log log10 log1p log2 log_loss log_softmax logcumsumexp
logical_and logical_not logical_or logical_xor logit logsigmoid logspace logsumexp
lookup_table lp_pool2d lstsq lu lu_unpack masked_fill masked_select matmul
matmul_with_flatten matrix_power matrix_rank matrix_rank_tol max max_pool2d_with_index
max_pool3d_with_index maximum maxout mean mean_all median meshgrid min minimum mish mode
multi_dot multiplex multiply mv nanmedian nansum nearest_interp nextafter nll_loss nonzero
norm not_equal numel one_hot ones ones_like overlap_add p_norm pad pad3d pixel_shuffle
pixel_unshuffle polygamma pool2d pool3d pow prelu prod put_along_axis qr real reciprocal
reduce_as relu relu6 remainder renorm repeat_interleave repeat_interleave_with_tensor_index
reshape reverse rint rms_norm roi_align roi_pool roll round rsqrt scale scatter
scatter_nd_add searchsorted segment_pool selu send_u_recv send_ue_recv send_uv sequence_mask
set_value set_value_with_tensor shape shape64 sigmoid sigmoid_cross_entropy_with_logits sign
silu sin sinh slice slogdet softmax softplus softshrink softsign solve split split_with_num
sqrt square squared_l2_norm squeeze stack stanh strided_slice subtract sum svd swiglu swish
take_along_axis tan tanh tanh_shrink temporal_shift thresholded_relu tile topk trace
transpose triangular_solve tril tril_indices trilinear_interp triu triu_indices trunc unbind
unfold unpool unpool3d unsqueeze unstack where zeros zeros_like
"""
REPEATABLE = frozenset(f"pd_op.{name}" for name in _REPEATABLE_OF_PADDLE.split()) | {
    "builtin.combine",
    "builtin.slice",
    "builtin.split",
}
"""Operators of Paddle 3.3 that return the same for the same operands and change nothing."""

_RANDOM_OF_PADDLE = """
bernoulli binomial class_center_sample cudnn_lstm dirichlet dropout flash_attn
flash_attn_qkvpacked flash_attn_unpadded flash_attn_varlen_qkvpacked flashmask_attention
fractional_max_pool2d fractional_max_pool3d fused_attention
fused_bias_dropout_residual_layer_norm fused_dot_product_attention fused_dropout_add
fused_feedforward gaussian graph_khop_sampler graph_sample_neighbors gumbel_softmax
memory_efficient_attention multinomial nce poisson randint random random_routing randperm rnn
rrelu seed shuffle_batch standard_gamma top_p_sampling truncated_gaussian_random uniform
uniform_random_batch_size_like weighted_sample_neighbors
"""
RANDOM = frozenset(f"pd_op.{name}" for name in _RANDOM_OF_PADDLE.split())
"""Operators that draw random numbers; a second run would draw others."""

OPERATORS = Operators(
    pir,
    repeatable=REPEATABLE,
    random=RANDOM,
    dropout="pd_op.dropout",
    rnn="pd_op.rnn",
    batch_norm="pd_op.batch_norm_",
)


def only_shares_memory(operation: Operation) -> bool:
    """Whether the in-place `operation` only gives a second name to memory and changes nothing."""
    return bool(operation.name() == "pd_op.share_data_")


def is_part_of_a_list(operation: Operation) -> bool:
    """Whether the results of `operation` are elements of its operand and share its memory."""
    return operation.name() in ("builtin.split", "builtin.slice")


def may_share_memory(operation: Operation) -> bool:
    """Whether a result of `operation` may share an operand's memory without PIR stating it."""
    return OPERATORS.why_kept(operation) == UNKNOWN
