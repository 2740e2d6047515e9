"""The options of a `GradientSync`: which are allowed, and the mode in force."""

from __future__ import annotations

from typing import Literal

import paddle.distributed as dist
from paddle.distributed.communication.group import Group

from paddle_recompute.distributed import is_distributed
from paddle_recompute.errors import ConfigError

SyncMode = Literal["auto", "fused", "overlap", "fleet"]
SYNC_MODES = ("auto", "fused", "overlap", "fleet")
MIB = 2**20
BUCKET_BYTES, FIRST_BUCKET_BYTES = 25 * MIB, 1 * MIB


def choose_mode(mode: str, group: Group | None) -> tuple[str, str]:
    """The mode in force, and why."""
    if not is_distributed():
        return "none", "there is one process only"
    if not is_distributed(group):
        assert group is not None
        ranks = ", ".join(map(str, group.ranks))
        if dist.get_rank() not in group.ranks:
            return "none", f"this rank, {dist.get_rank()}, is not in the group of the ranks {ranks}"
        return "none", f"there is one rank only in the group, {ranks}"
    if mode == "auto":
        return "overlap", "buckets are sent during the backward"
    return mode, "as configured"


def check_options(
    mode: str,
    compression: str,
    sizes: tuple[int, int],
    limits: tuple[float, float],
    check_every: int | None,
) -> None:
    """Raise ConfigError if an option has no such value, or contradicts another one.

    Args:
        mode: See `GradientSync`, as the others.
        compression: Likewise.
        sizes: `bucket_bytes`, `first_bucket_bytes`.
        limits: `peer_timeout`, `stall_timeout`.
        check_every: Likewise.
    """
    if mode not in SYNC_MODES:
        raise ConfigError(
            f"sync mode {mode!r} does not exist; it is one of {', '.join(map(repr, SYNC_MODES))}"
        )
    if compression == "fp16":
        raise ConfigError(
            "compression 'fp16' is not offered: gradients beyond 65504 overflow, and gloo's sum of "
            "float16 is wrong (Paddle 3.3: inf everywhere; 2.6: inexact). Use 'bf16'."
        )
    if compression not in ("none", "bf16"):
        raise ConfigError(
            f"compression {compression!r} does not exist; it is one of 'none', 'bf16'"
        )
    if mode == "fleet" and compression != "none":
        raise ConfigError(
            f"compression {compression!r} is not supported by sync mode 'fleet', which sends "
            "gradients as they are; use 'none', or mode 'overlap'"
        )
    told = f"bucket_bytes is {sizes[0]}, first_bucket_bytes {sizes[1]}"
    if min(sizes) < 1:
        raise ConfigError(f"{told}; both must be positive")
    if mode == "fleet" and sizes != (BUCKET_BYTES, FIRST_BUCKET_BYTES):
        raise ConfigError(
            f"{told}; sync mode 'fleet' has buffers of Paddle's own size, 128 MiB. Remove both, or "
            "use mode 'fused'"
        )
    if not 0 < limits[0] <= limits[1]:
        raise ConfigError(
            f"peer_timeout is {limits[0]}, stall_timeout {limits[1]} seconds; both must be "
            "positive, and the first at most the second"
        )
    if check_every is not None and check_every < 1:
        raise ConfigError(f"check_every is {check_every}; it must be at least 1, or None for never")
