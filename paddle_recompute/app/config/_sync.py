"""``sync``: how the gradients of the ranks are synchronized."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar, Literal

from pydantic import Field

from paddle_recompute.app.config._section import Section, Values
from paddle_recompute.app.config._types import Count
from paddle_recompute.options import Fault


class SyncConfig(Section):
    """How the gradients of the ranks are synchronized."""

    @staticmethod
    def _feedback_needs_compression(v: Values) -> Iterator[Fault]:
        if v["compression"] == "none" and not v["error_feedback"]:
            yield Fault("error_feedback", False, "has no effect with compression: none; remove it")

    @staticmethod
    def _peers_before_stalls(v: Values) -> Iterator[Fault]:
        if v["peer_timeout"] > v["stall_timeout"]:
            yield Fault(
                "peer_timeout",
                v["peer_timeout"],
                f"must be at most stall_timeout = {v['stall_timeout']:g}",
            )

    @staticmethod
    def _fleet_does_not_compress(v: Values) -> Iterator[Fault]:
        given = v["compression"]
        if v["mode"] == "fleet" and given != "none":
            yield Fault("compression", given, "is not supported by mode: fleet; use none")

    rules = (_feedback_needs_compression, _peers_before_stalls, _fleet_does_not_compress)
    refused_values: ClassVar[Any] = {
        "compression": {
            "fp16": "float16 overflows beyond 65504, and gloo's sum of float16 is wrong; use bf16, "
            "which has the range of float32"
        }
    }

    mode: Literal["auto", "fused", "overlap", "fleet"] = Field(
        "auto",
        description="overlap: gradients are sent while the backward runs; fused: all after it; "
        "auto: overlap; fleet: Paddle's own fused_allreduce_gradients, as a reference",
    )
    compression: Literal["none", "bf16"] = Field(
        "none",
        description="bf16: gradients are sent in bfloat16, half the bytes; none: as they are",
    )
    error_feedback: bool = Field(
        True,
        description="with bf16: the rounding error is added to the next step's gradient; false: "
        "it is lost",
    )
    check_every: Count | None = Field(
        None,
        description="optimizer steps between comparisons of all ranks' parameters, and of their "
        "buffers, with a warning; none: never",
    )
    peer_timeout: float = Field(
        30.0, gt=0, description="seconds without a sign of life after which a rank counts as dead"
    )
    stall_timeout: float = Field(
        1800.0, gt=0, description="longest wait for a rank that is alive but late, in seconds"
    )
