"""``sync``: how the gradients of the ranks are synchronized."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field

from paddle_recompute.app.config._section import Broken, Section, Values
from paddle_recompute.app.config._types import Count
from paddle_recompute.options import apart, needs


def _peers_before_stalls(v: Values) -> Broken:
    if v["peer_timeout"] > v["stall_timeout"]:
        yield "peer_timeout", f"must be at most stall_timeout = {v['stall_timeout']:g}"


class SyncConfig(Section):
    """How the gradients of the ranks are synchronized.

    Attributes:
        mode: Overlap: gradients are sent while the backward runs; fused: all after it; auto:
            overlap; fleet: Paddle's own fused_allreduce_gradients, as a reference.
        compression: bf16: gradients are sent in bfloat16, half the bytes.
        error_feedback: With bf16: the rounding error is added to the next step's gradient; False:
            it is lost.
        check_every: Optimizer steps between comparisons of all ranks' parameters, and of their
            buffers, with a warning; None: never.
        peer_timeout: Seconds without a sign of life after which a rank counts as dead.
        stall_timeout: Longest wait for a rank that is alive but late, in seconds.
    """

    rules = (
        _peers_before_stalls,
        *needs("compression", "error_feedback"),
        *apart("mode=fleet", "compression"),
    )
    refused_values: ClassVar[Any] = {
        "compression": {
            "fp16": "float16 overflows beyond 65504, and gloo's sum of float16 is wrong; use bf16, "
            "which has the range of float32"
        }
    }

    mode: Literal["auto", "fused", "overlap", "fleet"] = "auto"
    compression: Literal["none", "bf16"] = "none"
    error_feedback: bool = True
    check_every: Count | None = None
    peer_timeout: float = Field(30.0, gt=0)
    stall_timeout: float = Field(1800.0, gt=0)
