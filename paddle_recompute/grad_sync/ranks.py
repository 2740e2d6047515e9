"""Small agreements between ranks: waiting for each other, equal parameters, mean of a number."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Iterator

import paddle
import paddle.distributed as dist
from paddle.distributed.communication.group import Group

from paddle_recompute import _paddle
from paddle_recompute.errors import SyncError

_barrier_numbers = itertools.count()


def is_distributed(group: Group | None = None) -> bool:
    """Whether there is somebody to talk to: a group is set up and has more than one rank."""
    return bool(dist.is_initialized()) and int(dist.get_world_size(group)) > 1


def barrier(timeout: float = 3600.0) -> None:
    """Wait until every rank is here; returns at once in a single process.

    The ranks wait on the TCP store of the launch, not in a collective: gloo gives up a collective
    after 30 s, which is less than a rank-0-only evaluation or checkpoint may take.

    Args:
        timeout: Seconds to wait for the slowest rank.

    Raises:
        SyncError: Some rank did not come in time.
    """
    if is_distributed():
        _paddle.store_barrier(
            f"paddle_recompute/barrier/{next(_barrier_numbers)}",
            rank=dist.get_rank(),
            num_ranks=dist.get_world_size(),
            timeout=timeout,
        )


def broadcast_from_rank0(model: paddle.nn.Layer, group: Group | None = None) -> None:
    """Make parameters and buffers of `model` on all ranks those of rank 0, and check that they are.

    Args:
        model: The same Layer on every rank (same names, shapes and dtypes, in the same order).
        group: The ranks; None is all of them.

    Raises:
        SyncError: A tensor still differs afterwards; the message names the first one.
    """
    if not is_distributed(group):
        return
    tensors = dict(_tensors_of(model))
    source = 0 if group is None else group.ranks[0]
    for tensor in tensors.values():
        with paddle.no_grad():
            dist.broadcast(tensor, src=source, group=group)
    first_difference = _first_that_differs(list(tensors.values()), group)
    if first_difference is not None:
        raise SyncError(
            f"after the broadcast from rank 0, '{list(tensors)[first_difference]}' is not equal "
            "on all ranks; is the model built in the same way everywhere?"
        )


def mean_over_ranks(value: float, group: Group | None = None) -> float:
    """The mean of a number over the ranks of `group`; costs one small collective."""
    if not is_distributed(group):
        return value
    total = paddle.to_tensor([value], dtype="float64")
    dist.all_reduce(total, group=group)
    return float(total.item()) / int(dist.get_world_size(group))


def _tensors_of(model: paddle.nn.Layer) -> Iterator[tuple[str, paddle.Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def _first_that_differs(tensors: list[paddle.Tensor], group: Group | None) -> int | None:
    checksums = paddle.to_tensor(
        [zlib.crc32(tensor.numpy().tobytes()) for tensor in tensors], dtype="int64"
    )
    smallest, largest = checksums.clone(), checksums.clone()
    dist.all_reduce(smallest, op=dist.ReduceOp.MIN, group=group)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    differing = (smallest != largest).nonzero().flatten().tolist()
    return int(differing[0]) if differing else None
