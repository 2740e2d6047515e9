"""Gradients joined into few large buffers, in the order in which they become ready."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import compress, repeat
from operator import is_, not_
from typing import Any

import numpy as np
import paddle

from paddle_recompute._paddle.amp import amp_off
from paddle_recompute._paddle.flat import joined, parted, replace_memory
from paddle_recompute.errors import SyncError


@dataclass(frozen=True)
class Bucket:
    """Parameters (by index) whose gradients are sent together, and the offset of each in the
    buffer.
    """

    members: tuple[int, ...]
    sizes: tuple[int, ...]
    _shells: list[paddle.Tensor] = field(default_factory=list, compare=False, repr=False)

    def join(
        self, gradients: Sequence[paddle.Tensor | None], dtype: Any, scale: float
    ) -> paddle.Tensor:
        """The members' `gradients` times `scale` in one flat tensor; zeros where one is None.

        Args:
            gradients: One for each member.
            dtype: That of the members.
            scale: A factor.

        Raises:
            SyncError: The gradients have another dtype.
        """
        if any(map(is_, gradients, repeat(None))):
            gradients = [
                paddle.zeros([size], dtype) if gradient is None else gradient
                for gradient, size in zip(gradients, self.sizes, strict=True)
            ]
        with amp_off():  # of level O2, which would cast them
            flat = joined(gradients, self._shells)
        if flat.dtype != dtype:
            raise SyncError(
                f"a gradient is {flat.dtype}, and its parameter {dtype}; the ranks sum gradients "
                "of one dtype. Change the dtype of gradients after last_backward()"
            )
        return flat.scale_(scale)

    def split(self, flat: paddle.Tensor) -> list[paddle.Tensor]:
        """The members' pieces of `flat`."""
        with amp_off():
            return parted(flat, self.sizes) if len(self.sizes) > 1 else [flat]

    def split_into(
        self,
        parameters: Sequence[paddle.Tensor],
        gradients: Sequence[paddle.Tensor | None],
        flat: paddle.Tensor,
        skip: frozenset[int],
    ) -> None:
        """Let the members' ``.grad`` have the pieces of `flat`, but for those in `skip`.

        Args:
            parameters: All parameters.
            gradients: What each of them has in ``.grad`` now.
            flat: The content of this bucket, not used afterwards.
            skip: Indices of parameters without a gradient.
        """
        pieces = self.split(flat)
        taken = [*map(gradients.__getitem__, self.members)]
        absent = [*map(is_, taken, repeat(None))]
        if any(absent):
            for at, index in compress(enumerate(self.members), absent):
                if index not in skip:
                    parameters[index].grad = pieces[at].reshape(parameters[index].shape)
            present = [*map(not_, absent)]
            taken, pieces = [*compress(taken, present)], [*compress(pieces, present)]
        replace_memory(taken, pieces)


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
