"""The fields of `fleet.DistributedStrategy` that are refused, each with its reason.

Together with `StrategyConfig` this covers every field of Paddle 2.6 and 3.3; a test compares both
with the installed Paddle, so a field that a new release adds is noticed.
"""

from __future__ import annotations

_PARAMETER_SERVER = "parameter-server training is not supported"
_STATIC_ONLY = "settings of Paddle's executor are not supported"
_SPLIT_MODEL = (
    "the model is replicated on every rank; to split a model over ranks, use Paddle's fleet"
)
_LOCAL_STEPS = "every step synchronizes all ranks; local steps are not supported"
_LOSSY = "the only compression of gradients is sync.compression: bf16"
_OPTIMIZER = "the optimizer is AdamW, or Paddle's Lamb (lamb: true) or LarsMomentum (lars: true)"
_QUANTIZED = "quantized and sparse training are not supported"
_AUTO = "Paddle's automatic choice of strategies is not supported; set each one yourself"
_RECOMPUTE = "set the section recompute instead (recompute.enable, recompute.checkpoints)"
_FUSION = "gradient buckets are set by strategy.fuse_grad_size_in_MB and the section sync"
_COLLECTIVES = "Paddle's default communicator is used; its settings are not supported"

_FIELDS_BY_REASON: dict[str, tuple[str, ...]] = {
    _PARAMETER_SERVER: (
        "a_sync",
        "a_sync_configs",
        "downpour_table_param",
        "elastic",
        "fleet_desc_configs",
        "fs_client_param",
        "heter_ccl_mode",
        "is_fl_ps_mode",
        "is_with_coordinator",
        "mode",
        "sparse_table_configs",
        "trainer_desc_configs",
        "with_coordinator",
    ),
    _STATIC_ONLY: (
        "build_strategy",
        "calc_comm_same_stream",
        "conv_workspace_size_limit",
        "cudnn_batchnorm_spatial_persistent",
        "cudnn_exhaustive_search",
        "execution_strategy",
        "split_data",
        "without_graph_optimization",
    ),
    _SPLIT_MODEL: (
        "hybrid_configs",
        "hybrid_parallel_order",
        "pipeline",
        "pipeline_configs",
        "sync_param_name",
        "tensor_parallel",
        "tensor_parallel_configs",
    ),
    _LOCAL_STEPS: (
        "adaptive_localsgd",
        "adaptive_localsgd_configs",
        "localsgd",
        "localsgd_configs",
    ),
    _LOSSY: ("dgc", "dgc_configs", "fp16_allreduce"),
    _OPTIMIZER: ("adam_d2sum",),
    _QUANTIZED: ("asp", "qat", "qat_configs"),
    _AUTO: ("auto", "auto_search", "semi_auto"),
    _RECOMPUTE: ("recompute", "recompute_configs"),
    _FUSION: (
        "fuse_all_reduce_ops",
        "fuse_grad_merge",
        "fuse_grad_size_in_TFLOPS",
        "fuse_grad_size_in_num",
        "last_comm_group_size_MB",
    ),
    _COLLECTIVES: (
        "hierarchical_allreduce_inter_nranks",
        "nccl_comm_num",
        "sync_nccl_allreduce",
        "use_hierarchical_allreduce",
    ),
    "gradients are always the mean over all ranks": ("gradient_scale_configs",),
    "the encoder has no BatchNorm to synchronize": ("sync_batch_norm",),
}

REFUSED_STRATEGY_FIELDS: dict[str, str] = {
    name: f"is a field of DistributedStrategy that paddle_recompute does not honour: {reason}"
    for reason, names in _FIELDS_BY_REASON.items()
    for name in names
}
