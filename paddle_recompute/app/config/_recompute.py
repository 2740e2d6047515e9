"""``recompute``: what YAML may hold for the library's `RecomputeConfig`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from paddle_recompute.app.config._section import Section
from paddle_recompute.app.config._types import ByteCount, Count
from paddle_recompute.options import AUTO, RecomputeConfig


def _auto_is_a_list(given: Any) -> Any:
    return [AUTO] if given == AUTO else given


class RecomputeSection(Section):
    """Which sublayers drop their activations and compute them again in the backward."""

    rules = RecomputeConfig.rules

    enable: bool = Field(True, description="false: the model is left as it is")
    engine: Literal["paddle_recompute", "fleet"] = Field(
        "paddle_recompute",
        description="paddle_recompute: the recompute of this library; fleet: Paddle's own "
        "recompute around each sublayer, as a reference. Cases that fleet computes wrong "
        "without an error are refused",
    )
    checkpoints: Annotated[list[str], BeforeValidator(_auto_is_a_list)] = Field(
        default_factory=lambda: [AUTO],
        min_length=1,
        description="glob patterns over sublayer names; * stays within one name, ** crosses dots; "
        "auto: the repeated blocks of the model, found by its structure",
    )
    policy: Literal["all", "every_n", "segments", "budget"] = Field(
        "all",
        description="all: each selected sublayer on its own; every_n: the 1st, (n+1)th, ... of "
        "them; segments: consecutive ones are joined and recomputed together; budget: what is "
        "fastest within memory_budget, by measurement",
    )
    memory_budget: ByteCount | None = Field(
        None,
        description="with policy: budget, the most bytes that a rank may hold on its device, all "
        "in all, as in 8GiB",
    )
    every_n: Count = Field(2, description="the n of policy every_n, in selected sublayers")
    segments: Count | Literal["auto"] = Field(
        "auto",
        description="number of segments; auto: square root of the number of selected sublayers",
    )
    offload: Literal["none", "host", "disk"] = Field(
        "none",
        description="where the inputs of recomputed parts are kept until the backward; none: on "
        "the device; host: pinned memory; disk: a temporary file; not with policy: budget",
    )
    offload_parameters: Literal["none", "host", "disk", "ranks"] = Field(
        "none",
        description="where parameters, gradients and optimizer state of the selected sublayers are "
        "while others compute; none: on the device; host: pinned memory; disk: a temporary file; "
        "ranks: each of num_shards parts on the device of one rank",
    )
    num_shards: Count = Field(
        1, description="with offload_parameters: one of so many parts is on the device at a time"
    )
    preserve_rng_state: bool = Field(
        True,
        description="true: the second forward draws the random numbers of the first; false: "
        "only correct if the recomputed parts draw none",
    )
