"""Tensors that one rank each has, gathered one by one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist
from paddle.distributed.communication.group import Group

from paddle_recompute._nested import dtype_name
from paddle_recompute._paddle import device
from paddle_recompute.distributed.connection import scope_of
from paddle_recompute.distributed.ranks import run_collective, values_of_ranks
from paddle_recompute.errors import SyncError


def gathered(own: Mapping[str, Any], group: Group | None, keep: bool) -> dict[str, Any]:
    """The entries of all ranks of `group`. All of them call this.

    Besides the result, it takes the memory of one tensor.

    Args:
        own: Tensors and arrays of this rank, under names that no other rank has.
        group: The ranks; None is all of them.
        keep: Whether this rank wants those of the others.

    Returns:
        `own`, and what the other ranks have as arrays in host memory, in the order of the ranks;
        without `keep`, `own` alone.

    Raises:
        SyncError: Two ranks have the same name.
        PeerError: A rank has died, stopped or failed; no rank has a state then.
    """
    ranks = scope_of(group).ranks
    described = [[name, list(array.shape), dtype_name(array.dtype)] for name, array in own.items()]
    everywhere = values_of_ranks(described, "what the optimizers have", group)
    names = [name for entries in everywhere for name, _, _ in entries]
    if len({*names}) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise SyncError(f"two ranks have the optimizer state {twice}; each parameter has one owner")
    found: dict[str, Any] = {}

    @paddle.no_grad()
    def gather() -> None:
        for rank, entries in zip(ranks, everywhere, strict=True):
            for name, shape, dtype in entries:
                is_own = rank == dist.get_rank()
                tensor = _on_device(own[name]) if is_own else paddle.empty(shape, dtype)
                if tensor.size:
                    dist.broadcast(tensor, src=rank, group=group)
                if is_own:
                    found[name] = own[name]
                elif keep:
                    found[name] = tensor.numpy()

    run_collective(gather, "the gathering of the optimizer's state", group)
    return found


def _on_device(value: Any) -> paddle.Tensor:
    """Where collectives are; Adam keeps the powers of its betas on the host."""
    if isinstance(value, paddle.Tensor) and (
        str(paddle.get_device()) == "cpu" or not device.is_on_host(value)
    ):
        return value
    return paddle.to_tensor(np.asarray(value))
