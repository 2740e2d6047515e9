"""Gradients joined into few large buffers, in the order in which they become ready."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import paddle


@dataclass(frozen=True)
class Bucket:
    """Parameters (by index) whose gradients are sent together, and the offset of each in the
    buffer.
    """

    members: tuple[int, ...]
    sizes: tuple[int, ...]

    def join(
        self, gradients: Sequence[paddle.Tensor | None], dtype: Any, scale: float
    ) -> paddle.Tensor:
        """The members' `gradients` times `scale` in one flat tensor; zeros where one is None.

        Args:
            gradients: One for each member.
            dtype: That of the members.
            scale: A factor.
        """
        parts = [
            paddle.zeros([size], dtype) if gradient is None else gradient.reshape([-1])
            for gradient, size in zip(gradients, self.sizes, strict=True)
        ]
        return (paddle.concat(parts) if len(parts) > 1 else parts[0].clone()).scale_(scale)

    def split(self, flat: paddle.Tensor) -> list[paddle.Tensor]:
        """The members' pieces of `flat`."""
        return paddle.split(flat, list(self.sizes)) if len(self.sizes) > 1 else [flat]

    def split_into(
        self, parameters: Sequence[paddle.Tensor], flat: paddle.Tensor, skip: frozenset[int]
    ) -> None:
        """Write the pieces of `flat` into the members' ``.grad``, except for those in `skip`."""
        offset = 0
        for index, size in zip(self.members, self.sizes, strict=True):
            parameter = parameters[index]
            if index not in skip:
                piece = flat[offset : offset + size].reshape(parameter.shape)
                if parameter.grad is None:
                    parameter.grad = piece
                else:
                    paddle.assign(piece, parameter.grad)
            offset += size


def plan_buckets(
    parameters: Sequence[paddle.Tensor],
    order: Sequence[int],
    *,
    bucket_bytes: int,
    first_bucket_bytes: int,
) -> list[Bucket]:
    """Cut `order` (parameter indices, first ready first) into buckets of one dtype each.

    The first bucket is small, so that the communication starts early (Li et al. 2020, PyTorch
    Distributed, arXiv:2006.15704, section 3.2). A bucket is closed when it has reached its size.
    Parameters without elements are in none.
    """
    buckets: list[Bucket] = []
    members: list[int] = []
    filled = 0

    def close() -> None:
        nonlocal filled
        if members:
            sizes = tuple(_numel(parameters[index]) for index in members)
            buckets.append(Bucket(tuple(members), sizes))
            members.clear()
            filled = 0

    for index in order:
        if not _numel(parameters[index]):
            continue
        if members and parameters[index].dtype != parameters[members[0]].dtype:
            close()
        members.append(index)
        filled += _numel(parameters[index]) * parameters[index].element_size()
        if filled >= (bucket_bytes if buckets else first_bucket_bytes):
            close()
    close()
    return buckets


def _numel(parameter: paddle.Tensor) -> int:
    return int(np.prod(parameter.shape, dtype=np.int64))
