"""Gather the rows of all ranks in a Program, where no gathering operator has a gradient."""

from __future__ import annotations

import math
from typing import Any

import paddle

from paddle_recompute._paddle.static import ranks

Variable = Any
_PART = 2**22
"""An int64 is sent as three floats of 20, 22 and 22 bits; float32 has 24 bits."""


def gather_in_program(tensors: dict[str, Variable]) -> dict[str, Variable]:
    """The rows of all ranks, for a loss that every rank computes over all of them.

    Every rank computes the loss over all rows, so the gradient by a rank's own rows is complete on
    that rank alone. Data-parallel averaging would divide it by the number of ranks R. So a rank's
    own rows propagate R times their gradient, and the rows of other ranks propagate none. Other
    inputs of the loss, such as a learned temperature, are not changed: every rank has their full
    gradient.

    One all-reduce of ``[R * rows, columns]`` gathers all tensors. With two, the executor could
    start them in different orders on different ranks.

    Args:
        tensors: ``[rows, ...]`` each, floating point or int64 (sent without loss). The number of
            rows may be unknown, but must be the same on all ranks.

    Returns:
        ``[R * rows, ...]`` each, in rank order.
    """
    rank, num_ranks = paddle.distributed.get_rank(), paddle.distributed.get_world_size()
    wide = any(tensor.dtype == paddle.float64 for tensor in tensors.values())
    parts = {name: _as_columns(tensor) for name, tensor in tensors.items()}
    mine = paddle.concat(
        [part.astype("float64" if wide else "float32") for part in parts.values()], axis=1
    )

    def placed(rows: Variable) -> Variable:
        nothing = paddle.zeros_like(rows)
        return paddle.concat([rows if other == rank else nothing for other in range(num_ranks)])

    own = placed(mine.detach())
    others = (ranks.sum_over_ranks(own) - own).detach()
    # The value is that of `mine`, bit by bit.
    boosted = mine + (mine - mine.detach()) * (num_ranks - 1)
    columns = paddle.split(
        placed(boosted) + others, [part.shape[1] for part in parts.values()], axis=1
    )
    return {
        name: _from_columns(width, tensor)
        for (name, tensor), width in zip(tensors.items(), columns, strict=True)
    }


def _as_columns(tensor: Variable) -> Variable:
    """[rows, columns], floating point."""
    flat = tensor.unsqueeze(1) if len(tensor.shape) == 1 else tensor.flatten(1)
    if flat.dtype != paddle.int64:
        return flat
    part = paddle.full([1], _PART, "int64")
    high = paddle.floor_divide(flat, part)
    highest = paddle.floor_divide(high, part)
    parts = [highest, high - highest * part, flat - high * part]
    return paddle.concat([column.astype("float64") for column in parts], axis=1)


def _from_columns(columns: Variable, like: Variable) -> Variable:
    """The inverse of `_as_columns`, with the rows of all ranks and the dtype of `like`."""
    shape = [-1, *like.shape[1:]]
    if like.dtype != paddle.int64:
        return columns.astype(like.dtype).reshape(shape)
    highest, high, low = (
        column.astype("int64")
        for column in paddle.split(columns, [math.prod(shape[1:])] * 3, axis=1)
    )
    part = paddle.full([1], _PART, "int64")
    return ((highest * part + high) * part + low).reshape(shape)
