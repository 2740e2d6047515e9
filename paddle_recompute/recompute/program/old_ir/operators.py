"""The operators of Paddle 2.6 that `program.operators` decides over, by name."""

from __future__ import annotations

from paddle_recompute._paddle.static import old_ir
from paddle_recompute.recompute.program.operators import Operators

_REPEATABLE = """
abs acos acosh add_position_encoding addmm affine_channel affine_grid allclose angle arg_max arg_min
argsort as_complex as_real asin asinh assign assign_value atan atan2 atanh bce_loss bicubic_interp
bicubic_interp_v2 bilinear_interp bilinear_interp_v2 bilinear_tensor_product bincount bitwise_and
bitwise_not bitwise_or bitwise_xor bmm brelu broadcast_tensors cast ceil celu channel_shuffle
cholesky cholesky_solve clip clip_by_norm complex concat conj conv2d conv2d_transpose conv3d
conv3d_transpose cos cosh crop crop_tensor cross cross_entropy cross_entropy2 cummax cummin cumprod
cumsum deformable_conv deformable_conv_v1 depthwise_conv2d depthwise_conv2d_transpose determinant
diag_embed diag_v2 diagonal digamma dist dot eig eigh eigvals eigvalsh einsum elementwise_add
elementwise_div elementwise_floordiv elementwise_fmax elementwise_fmin elementwise_heaviside
elementwise_max elementwise_min elementwise_mod elementwise_mul elementwise_pow elementwise_sub elu
equal equal_all erf erfinv exp expand expand_as_v2 expand_v2 expm1 eye fft_c2c fft_c2r fft_r2c
fill_any_like fill_constant fill_constant_batch_size_like fill_diagonal fill_diagonal_tensor
fill_zeros_like flatten2 flatten_contiguous_range flip floor fold frame frobenius_norm
full_int_array fused_bias_act fused_elemwise_add_activation fused_gemm_epilogue fused_matmul
fused_rotary_position_embedding fused_softmax_mask fused_softmax_mask_upper_triangle
fused_transpose gather gather_nd gelu greater_equal greater_than grid_sampler group_norm hard_shrink
hard_sigmoid hard_swish hierarchical_sigmoid hinge_loss histogram huber_loss i0 i0e i1 i1e imag
index_add index_put index_sample index_select instance_norm inverse isclose isfinite_v2 isinf_v2
isnan_v2 kldiv_loss kron kthvalue l1_norm label_smooth layer_norm leaky_relu lerp less_equal
less_than lgamma linear_interp linear_interp_v2 linspace log log10 log1p log2 log_loss log_softmax
logcumsumexp logical_and logical_not logical_or logical_xor logit logsigmoid logspace logsumexp
lookup_table lookup_table_v2 lrn lstsq lu lu_unpack masked_select matmul matmul_v2 matrix_power
matrix_rank max_pool2d_with_index max_pool3d_with_index maxout mean meshgrid minus mish mode
modified_huber_loss mul multi_dot multiplex mv nanmedian nearest_interp nearest_interp_v2 nextafter
nll_loss norm not_equal one_hot_v2 overlap_add p_norm pad pad2d pad3d pixel_shuffle pixel_unshuffle
polygamma pool2d pool3d pow prelu psroi_pool put_along_axis qr range rank_loss real reciprocal
reduce_all reduce_amax reduce_amin reduce_any reduce_max reduce_mean reduce_min reduce_prod
reduce_sum relu relu6 renorm repeat_interleave reshape reshape2 reverse rms_norm roi_align roi_pool
roll round row_conv rsqrt scale scatter scatter_nd_add searchsorted segment_pool selu set_value
shape shuffle_channel sigmoid sigmoid_cross_entropy_with_logits sign silu sin sinh size slice
slogdeterminant soft_relu softmax softmax_with_cross_entropy softplus softshrink softsign solve
split sqrt square squared_l2_norm squeeze2 stack stanh stft strided_slice sum svd swish
take_along_axis tan tanh tanh_shrink temporal_shift tensor_unfold thresholded_relu tile top_k
top_k_v2 trace transpose transpose2 triangular_solve tril_indices tril_triu trilinear_interp
trilinear_interp_v2 triu_indices trunc unbind unfold unpool unpool3d unsqueeze2 unstack view_dtype
view_shape where where_index
"""
REPEATABLE = frozenset(_REPEATABLE.split())
"""Operators that return the same for the same inputs and change nothing."""

_RANDOM = """
bernoulli bernoulli_p class_center_sample cudnn_lstm dirichlet dropout dropout_nd exponential
flash_attn flash_attn_unpadded fused_attention fused_bias_dropout_residual_layer_norm
fused_dropout_add fused_feedforward gaussian_inplace gaussian_random
gaussian_random_batch_size_like graph_khop_sampler graph_sample_neighbors gumbel_softmax
memory_efficient_attention multinomial nce poisson pyramid_hash randint random_crop random_routing
randperm rnn rrelu sampling_id seed shuffle_batch top_p_sampling truncated_gaussian_random
uniform_random uniform_random_batch_size_like uniform_random_inplace uniform_random_p
variable_length_memory_efficient_attention weighted_sample_neighbors
"""
RANDOM = frozenset(_RANDOM.split())
"""Operators that draw random numbers; a second run would draw others."""

OPERATORS = Operators(
    old_ir,
    repeatable=REPEATABLE,
    random=RANDOM,
    dropout="dropout",
    rnn="rnn",
    batch_norm="batch_norm",
)
