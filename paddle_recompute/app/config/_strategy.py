"""The section ``strategy``: the supported fields of ``fleet.DistributedStrategy``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from paddle_recompute.app.config._section import Holds, Section, section_of
from paddle_recompute.app.config._types import Count
from paddle_recompute.options import PURE, AmpConfigs, apart, needs

_SPLIT_MODEL = (
    "the model is replicated on every rank; to split a model over ranks, use Paddle's fleet"
)
_RECOMPUTE = "set the section recompute instead (recompute.enable, recompute.checkpoints)"
_FUSION = "gradient buckets are set by strategy.fuse_grad_size_in_MB and the section sync"
_LOSSY = "the only compression of gradients is sync.compression: bf16"
_NOT_HONOURED = "is no field of DistributedStrategy that paddle_recompute honours"
_REFUSED = {
    "adam_d2sum": "the optimizer is AdamW, or Paddle's Lamb (lamb: true) or LarsMomentum (lars: "
    "true)",
    "dgc": _LOSSY,
    "fp16_allreduce": _LOSSY,
    "fuse_all_reduce_ops": _FUSION,
    "fuse_grad_size_in_num": _FUSION,
    "gradient_scale_configs": "gradients are always the mean over all ranks",
    "hybrid_configs": _SPLIT_MODEL,
    "localsgd": "every step synchronizes all ranks; local steps are not supported",
    "pipeline": _SPLIT_MODEL,
    "recompute": _RECOMPUTE,
    "recompute_configs": _RECOMPUTE,
    "sync_batch_norm": "the encoder has no BatchNorm to synchronize",
    "tensor_parallel": _SPLIT_MODEL,
}


def _with_dtype_and_level(given: dict[str, Any]) -> dict[str, Any]:
    """``use_pure_fp16`` and ``use_pure_bf16`` stand for a dtype and level O2."""
    for name, dtype in PURE.items():
        if given.get(name) is True:
            given = {"dtype": dtype, "level": "O2", **given}
    return given


AmpSection = section_of(AmpConfigs, _with_dtype_and_level)


class GradientMergeConfigs(Section):
    """`DistributedStrategy.gradient_merge_configs`, with Paddle's defaults.

    Attributes:
        k_steps: Micro-batches per optimizer step; 1: no accumulation.
        avg: Gradients are averaged over the micro-batches.
    """

    refused_values: ClassVar[Any] = {
        "avg": {False: "summing the micro-batches' gradients is not supported; set avg: true"}
    }

    k_steps: Count = 1
    avg: Literal[True] = True


class LambConfigs(Section):
    """`DistributedStrategy.lamb_configs`, with Paddle's defaults.

    Attributes:
        lamb_weight_decay: Weight decay of Lamb.
        exclude_from_weight_decay: Parameters without weight decay: ends of Paddle's names, as in
            .b_0.
    """

    lamb_weight_decay: float = Field(0.01, ge=0)
    exclude_from_weight_decay: list[str] = Field(default_factory=list)


class LarsConfigs(Section):
    """`DistributedStrategy.lars_configs`, with Paddle's defaults.

    Attributes:
        lars_coeff: Trust coefficient of LARS.
        lars_weight_decay: Weight decay of LARS.
        epsilon: Added to the denominator of the trust ratio.
        exclude_from_weight_decay: Parameters without weight decay: parts of Paddle's names, as in
            layer_norm.
    """

    lars_coeff: float = Field(0.001, gt=0)
    lars_weight_decay: float = Field(0.0005, ge=0)
    epsilon: float = Field(0.0, ge=0)
    exclude_from_weight_decay: list[str] = Field(default_factory=list)


class ShardingConfigs(Section):
    """`DistributedStrategy.sharding_configs`, with Paddle's default.

    Attributes:
        stage: 1: the optimizer state is spread over the ranks.
    """

    refused_values: ClassVar[Any] = {
        "stage": {
            2: "gradients are not sharded, every rank has all of them; set stage: 1. For less "
            "memory, set recompute.enable, or a smaller contrastive.chunk_tokens",
            3: "parameters are not sharded; set stage: 1, or recompute.offload_parameters: ranks "
            "without sharding, which keeps parameters, gradients and optimizer state of a shard on "
            "one rank",
        }
    }
    refused_keys: ClassVar[Mapping[str, str]] = {
        "sharding_degree": "the optimizer state is spread over all ranks; remove it"
    }

    stage: Literal[1] = 1


class StrategyConfig(Section):
    """The supported fields of `fleet.DistributedStrategy`; all others are refused.

    Attributes:
        amp: True: mixed precision (in dygraph on a GPU only: on a CPU Paddle has none there).
        amp_configs: Settings of `amp`.
        gradient_merge: True: one optimizer step per k_steps micro-batches.
        gradient_merge_configs: Settings of `gradient_merge`.
        lamb: True: the optimizer is Paddle's Lamb.
        lamb_configs: Settings of `lamb`.
        lars: True: the optimizer is Paddle's LarsMomentum, with momentum 0.9.
        lars_configs: Settings of `lars`.
        sharding: True: each rank has the optimizer state of its share of the parameters; False: of
            all. The bits are the same.
        sharding_configs: Settings of `sharding`.
        fuse_grad_size_in_MB: Size of the gradient buckets, in MiB.
        find_unused_parameters: True: some parameters have no gradient in some steps; False: a
            warning reports the first such step. The gradients are exact in both cases.
    """

    rules = (
        *needs("amp=true", "amp_configs"),
        *needs("lamb=true", "lamb_configs"),
        *needs("lars=true", "lars_configs"),
        *needs("gradient_merge=true", "gradient_merge_configs.k_steps"),
        *needs("gradient_merge_configs.k_steps", "gradient_merge"),
        *apart("lamb", "lars", because="there is one optimizer"),
        *apart(
            "amp_configs.level=O2 & amp=true",
            *("lamb", "lars"),
            because="Adam and AdamW keep float32 master weights here; use level O1",
        ),
    )
    unknown_key = _NOT_HONOURED
    refused_keys: ClassVar[Mapping[str, str]] = {
        name: f"{_NOT_HONOURED}: {words}" for name, words in _REFUSED.items()
    }

    amp: bool = False
    amp_configs: Annotated[AmpConfigs, Holds(AmpSection)] = Field(default_factory=AmpConfigs)
    gradient_merge: bool = False
    gradient_merge_configs: GradientMergeConfigs = Field(default_factory=GradientMergeConfigs)
    lamb: bool = False
    lamb_configs: LambConfigs = Field(default_factory=LambConfigs)
    lars: bool = False
    lars_configs: LarsConfigs = Field(default_factory=LarsConfigs)
    sharding: bool = False
    sharding_configs: ShardingConfigs = Field(default_factory=ShardingConfigs)
    fuse_grad_size_in_MB: Count = 32
    find_unused_parameters: bool = False
