"""The section ``strategy``: the supported fields of ``fleet.DistributedStrategy``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from paddle_recompute.app.config._refused import REFUSED_STRATEGY_FIELDS
from paddle_recompute.app.config._section import Holds, Section, Values
from paddle_recompute.app.config._types import Count
from paddle_recompute.options import PURE, AmpConfigs, Fault

STATIC_AMP = ("custom_black_varnames", "use_fp16_guard", "use_optimizer_fp16")
"""Fields of AmpConfigs that only the static graph has."""


class AmpSection(Section):
    """`DistributedStrategy.amp_configs`, with `dtype` and `level`: what YAML may hold for it."""

    rules = AmpConfigs.rules

    dtype: Literal["float16", "bfloat16"] = Field(
        "float16",
        description="bfloat16 has the range of float32 and needs no loss scale; float16 uses a "
        "loss scale",
    )
    level: Literal["O1", "O2"] = Field(
        "O1",
        description="O1: operators on Paddle's white list compute in half precision; O2: the "
        "parameters are in half precision too, with float32 master weights in the optimizer",
    )
    init_loss_scaling: float = Field(32768.0, gt=0, description="initial loss scale, a factor")
    incr_every_n_steps: Count = Field(
        1000, description="steps without overflow before the loss scale grows"
    )
    decr_every_n_nan_or_inf: Count = Field(
        2, description="steps with overflow before the loss scale shrinks"
    )
    incr_ratio: float = Field(2.0, gt=1, description="factor by which the loss scale grows")
    decr_ratio: float = Field(0.8, gt=0, lt=1, description="factor by which the loss scale shrinks")
    use_dynamic_loss_scaling: bool = Field(True, description="false: the loss scale is constant")
    custom_white_list: list[str] = Field(
        default_factory=list, description="more operators in half precision"
    )
    custom_black_list: list[str] = Field(
        default_factory=list, description="more operators in float32"
    )
    custom_black_varnames: list[str] = Field(
        default_factory=list, description="static graph: variables kept in float32"
    )
    use_pure_fp16: bool = Field(False, description="true: level O2 in float16")
    use_fp16_guard: bool = Field(True, description="static graph: only guarded ops in float16")
    use_optimizer_fp16: bool = Field(
        False, description="static graph: true: optimizer state in float16"
    )
    use_pure_bf16: bool = Field(False, description="true: level O2 in bfloat16")

    @classmethod
    def complete(cls, given: dict[str, Any]) -> dict[str, Any]:
        """``use_pure_fp16`` and ``use_pure_bf16`` stand for a dtype and level O2."""
        for name, dtype in PURE.items():
            if given.get(name) is True:
                given = {"dtype": dtype, "level": "O2", **given}
        return given


class GradientMergeConfigs(Section):
    """`DistributedStrategy.gradient_merge_configs`, with Paddle's defaults."""

    refused_values: ClassVar[Any] = {
        "avg": {False: "summing the micro-batches' gradients is not supported; set avg: true"}
    }

    k_steps: Count = Field(1, description="micro-batches per optimizer step; 1: no accumulation")
    avg: Literal[True] = Field(True, description="gradients are averaged over the micro-batches")


class LambConfigs(Section):
    """`DistributedStrategy.lamb_configs`, with Paddle's defaults."""

    lamb_weight_decay: float = Field(0.01, ge=0, description="weight decay of Lamb")
    exclude_from_weight_decay: list[str] = Field(
        default_factory=list,
        description="parameters without weight decay: ends of Paddle's names, as in .b_0",
    )


class LarsConfigs(Section):
    """`DistributedStrategy.lars_configs`, with Paddle's defaults."""

    lars_coeff: float = Field(0.001, gt=0, description="trust coefficient of LARS")
    lars_weight_decay: float = Field(0.0005, ge=0, description="weight decay of LARS")
    epsilon: float = Field(0.0, ge=0, description="added to the denominator of the trust ratio")
    exclude_from_weight_decay: list[str] = Field(
        default_factory=list,
        description="parameters without weight decay: parts of Paddle's names, as in layer_norm",
    )


class ShardingConfigs(Section):
    """`DistributedStrategy.sharding_configs`, with Paddle's default."""

    refused_values: ClassVar[Any] = {
        "stage": {
            2: "gradients are not sharded, every rank has all of them; set stage: 1. For less "
            "memory, set recompute.enable, or a smaller contrastive.chunk_tokens",
            3: "parameters are not sharded; set stage: 1, or recompute.offload_parameters: ranks "
            "without sharding, which keeps parameters, gradients and optimizer state of a shard on "
            "one rank",
        }
    }

    refused_keys: ClassVar[Any] = {
        "sharding_degree": "the optimizer state is spread over all ranks; remove it"
    }

    stage: Literal[1] = Field(1, description="1: the optimizer state is spread over the ranks")


class StrategyConfig(Section):
    """The supported fields of `fleet.DistributedStrategy`; all others are refused."""

    @staticmethod
    def _configs_need_their_switch(v: Values) -> Iterator[Fault]:
        if not v["gradient_merge"] and v["gradient_merge_configs.k_steps"] != 1:
            yield Fault(
                "gradient_merge_configs.k_steps",
                v["gradient_merge_configs.k_steps"],
                "has no effect while gradient_merge is false; set gradient_merge: true",
            )
        if v["gradient_merge"] and v["gradient_merge_configs.k_steps"] == 1:
            yield Fault(
                "gradient_merge",
                True,
                "has no effect while gradient_merge_configs.k_steps is 1; set the number of "
                "micro-batches there, or gradient_merge: false",
            )
        if not v["amp"] and v["amp_configs"] != asdict(AmpConfigs()):
            yield Fault(
                "amp_configs", v["amp_configs"], "has no effect while amp is false; remove it"
            )

    @staticmethod
    def _one_optimizer(v: Values) -> Iterator[Fault]:
        for name, defaults in (("lamb", LambConfigs()), ("lars", LarsConfigs())):
            if not v[name] and v[f"{name}_configs"] != defaults.model_dump():
                yield Fault(
                    f"{name}_configs",
                    v[f"{name}_configs"],
                    f"has no effect while {name} is false; remove it",
                )
            if v[name] and v["amp"] and v["amp_configs.level"] == "O2":
                yield Fault(
                    name,
                    True,
                    "is not supported with amp level O2, whose float32 master weights Adam and "
                    "AdamW keep here; use level O1",
                )
        if v["lamb"] and v["lars"]:
            yield Fault("lars", True, "contradicts lamb: true; there is one optimizer")

    rules = (_configs_need_their_switch, _one_optimizer)
    refused_keys: ClassVar[Any] = REFUSED_STRATEGY_FIELDS

    amp: bool = Field(
        False,
        description="true: mixed precision (in dygraph on a GPU only: on a CPU Paddle has none "
        "there); false: float32 everywhere",
    )
    amp_configs: Annotated[AmpConfigs, Holds(AmpSection)] = Field(
        default_factory=AmpConfigs, description="settings of amp"
    )
    gradient_merge: bool = Field(
        False, description="true: one optimizer step per k_steps micro-batches"
    )
    gradient_merge_configs: GradientMergeConfigs = Field(
        default_factory=GradientMergeConfigs, description="settings of gradient_merge"
    )
    lamb: bool = Field(
        False, description="true: the optimizer is Paddle's Lamb; false: AdamW, or Lars"
    )
    lamb_configs: LambConfigs = Field(default_factory=LambConfigs, description="settings of lamb")
    lars: bool = Field(
        False, description="true: the optimizer is Paddle's LarsMomentum, with momentum 0.9"
    )
    lars_configs: LarsConfigs = Field(default_factory=LarsConfigs, description="settings of lars")
    sharding: bool = Field(
        False,
        description="true: each rank has the optimizer state of its share of the parameters; "
        "false: of all. The bits are the same",
    )
    sharding_configs: ShardingConfigs = Field(
        default_factory=ShardingConfigs, description="settings of sharding"
    )
    fuse_grad_size_in_MB: Count = Field(32, description="size of the gradient buckets, in MiB")
    find_unused_parameters: bool = Field(
        False,
        description="true: some parameters have no gradient in some steps; false: a warning "
        "reports the first such step. The gradients are exact in both cases",
    )
