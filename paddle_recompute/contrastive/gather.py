"""A differentiable all-gather of rows."""

from __future__ import annotations

import os
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import paddle
import paddle.distributed as dist
from paddle.distributed.communication.group import Group

from paddle_recompute._paddle.version import is_dygraph
from paddle_recompute.contrastive._single_backward import SingleBackwardGuard
from paddle_recompute.distributed import is_distributed, reduce_numbers, run_collective
from paddle_recompute.errors import DataError, StaticGraphError, SyncError


def all_gather_with_grad(tensor: paddle.Tensor, group: Group | None = None) -> paddle.Tensor:
    """Join the rows of all ranks, in rank order; the result is differentiable.

    The gradient of `tensor` is exact: the *sum* over the ranks of the gradients of their losses by
    this rank's rows. After data-parallel averaging a parameter then has the gradient of the mean of
    the ranks' losses.

    Collectives, all in `group` and from the calling thread: a small one to agree on the numbers of
    rows (ranks may hold different numbers), one all-gather, and in the backward one all-reduce of
    the joined gradient, in float32 at least. Every rank must call this equally often, and every
    rank must run the backward if one does.

    Args:
        tensor: ``[rows, ...]``, per rank; any floating dtype. Only the number of rows may differ
            between ranks; it may be 0.
        group: The ranks; None: all ranks.

    Returns:
        ``[rows of all ranks, ...]``, global, of the dtype of `tensor`; in a single process `tensor`
        itself.

    Raises:
        DataError: `tensor` is a scalar or not of a floating dtype.
        SyncError: The ranks' tensors differ in more than the number of rows; or this process is not
            a member of `group`, or was launched as a rank and did not join the others.
        StaticGraphError: A Program is being built.

    Examples:
        >>> import paddle
        >>> vectors = paddle.ones([2, 3])
        >>> all_gather_with_grad(vectors).shape  # a single process
        [2, 3]
    """
    if tensor.ndim == 0 or not tensor.is_floating_point():
        raise DataError(
            f"received a tensor of shape {list(tensor.shape)} and {tensor.dtype}; allowed is "
            "[rows, ...] of a floating dtype"
        )
    if not has_other_ranks(group):
        return tensor
    if not is_dygraph():
        raise StaticGraphError(
            "all_gather_with_grad works in dygraph only, because Paddle's gather has no gradient "
            "in Programs; in a Program use ContrastiveLoss(negatives='global')"
        )
    rows = agree_on_rows([tensor], group)
    return gather_rows([tensor], rows, group)[0]


@dataclass(frozen=True)
class RowsOfRanks:
    """The numbers of rows of the ranks in a joined tensor.

    Attributes:
        counts: Rows of each rank.
        rank: This rank.
    """

    counts: tuple[int, ...]
    rank: int

    @property
    def total(self) -> int:
        """Rows of all ranks."""
        return sum(self.counts)

    @property
    def own(self) -> slice:
        """The rows of this rank."""
        first = sum(self.counts[: self.rank])
        return slice(first, first + self.counts[self.rank])

    def restore(self, padded: paddle.Tensor) -> paddle.Tensor:
        """Remove the padding to equal numbers of rows from a joined tensor."""
        longest = max(self.counts)
        if min(self.counts) == longest:
            return padded
        rows = enumerate(self.counts)
        return paddle.concat([padded[longest * rank :][:count] for rank, count in rows if count])


def has_other_ranks(group: Group | None) -> bool:
    """Whether there are other ranks to gather from.

    Raises:
        SyncError: This process was launched as one of several ranks and did not join them, or it
            is not a member of `group`.
    """
    launched = int(os.environ.get("PADDLE_TRAINERS_NUM") or 1)
    joined = bool(dist.is_initialized())
    if not (is_distributed(group) if joined else launched > 1):
        return False
    if not joined:
        raise SyncError(
            f"this process is one of {launched} ranks (PADDLE_TRAINERS_NUM) and did not join the "
            "others; call paddle.distributed.init_parallel_env() first"
        )
    if dist.get_rank(group) < 0:
        raise SyncError(f"rank {dist.get_rank()} is not a member of the group {group}")
    return True


def agree_on_rows(tensors: Sequence[paddle.Tensor], group: Group | None) -> RowsOfRanks:
    """The number of rows of each rank; the first axis of all `tensors` is the rows.

    Raises:
        SyncError: On every rank, if the ranks' tensors differ in anything else.
    """
    described = "; ".join(
        f"[rows{''.join(f', {size}' for size in tensor.shape[1:])}] {tensor.dtype}"
        # A rank that expects no gradient would not join the all-reduce in the backward.
        f"{'' if tensor.stop_gradient or not paddle.is_grad_enabled() else ' with gradient'}"
        for tensor in tensors
    )
    every = _numbers_of_ranks([tensors[0].shape[0], zlib.crc32(described.encode())], group)
    if len({checksum for _, checksum in every}) > 1:
        raise SyncError(
            f"the ranks cannot gather: rank {dist.get_rank(group)} has {described}, and another "
            "rank has something else; only the number of rows may differ"
        )
    return RowsOfRanks(tuple(count for count, _ in every), int(dist.get_rank(group)))


def _numbers_of_ranks(numbers: list[int], group: Group | None) -> list[list[int]]:
    """Those of every rank, all below 2**53; waits for the hosts, not for a device."""
    ranks, width = dist.get_world_size(group), len(numbers)
    places: list[float] = [0.0] * (ranks * width)
    places[(own := dist.get_rank(group) * width) : own + width] = numbers
    sums = reduce_numbers(places, "sum", "the gather of rows", group)
    return [[int(number) for number in sums[i * width :][:width]] for i in range(ranks)]


def gather_rows(
    tensors: Sequence[paddle.Tensor], rows: RowsOfRanks, group: Group | None
) -> list[paddle.Tensor]:
    """Each of `tensors` with the rows of all ranks; floating dtypes with gradients.

    One node has all their gradients, so all ranks call the collectives in the same order.
    """
    if rows.total == 0:
        return list(tensors)
    floating = [tensor for tensor in tensors if tensor.is_floating_point()]
    results = _Gather.apply(rows, group, *floating) if floating else ()
    SingleBackwardGuard(
        SyncError,
        "the backward of gathered rows can run once only (received retain_graph=True or "
        "create_graph=True)",
    ).guard(*results)
    gathered = iter(results)
    return [
        next(gathered) if tensor.is_floating_point() else _joined(tensor, rows, group)
        for tensor in tensors
    ]


class _Gather(paddle.autograd.PyLayer):  # type: ignore[misc, unused-ignore]
    @staticmethod
    def forward(
        ctx: Any, rows: RowsOfRanks, group: Group | None, *tensors: paddle.Tensor
    ) -> tuple[paddle.Tensor, ...]:
        ctx.rows, ctx.group = rows, group
        ctx.needed = [not tensor.stop_gradient for tensor in tensors]
        return tuple(_joined(tensor, rows, group) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: paddle.Tensor) -> tuple[paddle.Tensor | None, ...]:
        return tuple(
            _summed(gradient, ctx.rows, ctx.group) if needed else None
            for gradient, needed in zip(gradients, ctx.needed, strict=True)
        )


def _joined(tensor: paddle.Tensor, rows: RowsOfRanks, group: Group | None) -> paddle.Tensor:
    missing = max(rows.counts) - tensor.shape[0]
    if missing:
        padding = paddle.zeros([missing, *tensor.shape[1:]], tensor.dtype)
        tensor = paddle.concat([tensor, padding])
    return rows.restore(_all_gather(tensor, group))


def _summed(gradient: paddle.Tensor, rows: RowsOfRanks, group: Group | None) -> paddle.Tensor:
    """This rank's rows of the sum over the ranks of `gradient`.

    A reduce-scatter would send half as much, but gloo has none (2.6, 3.3), and it needs equal
    numbers of rows.
    """
    dtype = gradient.dtype
    half = dtype in (paddle.float16, paddle.bfloat16)  # gloo's sum of float16 is wrong
    # A copy in any case: the engine may pass the same tensor to another node.
    gradient = (gradient.astype("float32") if half else gradient.clone()).contiguous()
    what = "the sum of gradients of gathered rows"
    run_collective(lambda: dist.all_reduce(gradient, group=group), what, group)
    return gradient[rows.own].astype(dtype)


def _all_gather(tensor: paddle.Tensor, group: Group | None) -> paddle.Tensor:
    """The rows of all ranks, joined; all ranks have equal numbers."""
    num_ranks = dist.get_world_size(group)
    joined = paddle.empty([num_ranks * tensor.shape[0], *tensor.shape[1:]], tensor.dtype)
    own = tensor.contiguous()
    what = "the gather of rows"
    run_collective(lambda: dist.stream.all_gather(joined, own, group=group), what, group)
    return joined
