"""Small agreements between ranks: waiting for each other, equal parameters, mean of a number.

None of them hangs on a peer that has died, stopped or failed: each ends with a `PeerError` that
names it. The limits are those of the newest `GradientSync` of the process.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import paddle
import paddle.distributed as dist
from numpy.typing import NDArray
from paddle.distributed.communication.group import Group

from paddle_recompute._paddle.layers import saved_buffers
from paddle_recompute.distributed.agreement import agree_on_parameters, first_that_differs
from paddle_recompute.distributed.connection import is_distributed, is_gloo, peers, scope_of
from paddle_recompute.distributed.gloo_lane import MAIN_LANE, lane_of
from paddle_recompute.distributed.numbers import reduce_numbers
from paddle_recompute.distributed.stop_request import asked, hear_asked
from paddle_recompute.distributed.waiting_collectives import watched_on_device
from paddle_recompute.errors import DivergenceError, SyncError

Result = TypeVar("Result")


def barrier() -> None:
    """Wait until every rank is here; returns at once in a single process.

    The ranks wait in no collective: gloo gives up a collective after 30 s, which is less than a
    rank-0-only evaluation or checkpoint may take.

    Raises:
        PeerError: Some rank did not come within ``stall_timeout``, or has died, stopped or failed.
        SyncError: Another rank is not at a barrier.
    """
    if is_distributed():
        peers().exchange("barrier()", scope_of(None))


@contextlib.contextmanager
def ends_all_ranks() -> Iterator[None]:
    """Inside, an error ends the run on all ranks, with that error as the cause.

    Not a `DivergenceError`, which all ranks raise alike, with equal parameters.
    """
    try:
        yield
    except DivergenceError:
        raise
    except BaseException as error:
        if is_distributed():
            peers().fail(error)
        raise


def run_collective(function: Callable[[], Result], what: str, group: Group | None = None) -> Result:
    """The result of ``function()``, which calls collectives between the ranks of `group`.

    With gloo it begins when all ranks are here, so that none waits for a late one longer than gloo
    does, and a peer that dies or stops meanwhile ends it with an error that names the peer
    (`gloo_lane`). With the backends of devices it is begun only, and the host goes on; where it
    waits for a peer that has died or stopped, another thread ends the process with that error. In
    a single process the function is just called.

    Args:
        function: The collectives; the same on every rank. With gloo it runs in another thread,
            while this one waits, so it must not depend on the thread's grad mode or AMP state.
        what: Names them, for messages; the same on every rank.
        group: The ranks; None is all of them.

    Raises:
        PeerError: A rank has died, stopped or failed, or a collective failed.
        SyncError: Another rank does something else.
    """
    if not is_distributed(group):
        return function()
    if is_gloo(group):
        return lane_of(scope_of(group), MAIN_LANE).begin(lambda _: function(), what).wait()
    with watched_on_device(what, scope_of(group)):
        return function()


def broadcast_from_rank0(model: paddle.nn.Layer, group: Group | None = None) -> None:
    """Make parameters and buffers of `model` on all ranks those of rank 0, and check that they are.

    Args:
        model: The same Layer on every rank (same names, shapes and dtypes, in the same order).
        group: The ranks; None is all of them.

    Raises:
        SyncError: A tensor still differs afterwards; the message names the first one.
        PeerError: A rank has died, stopped or failed.
    """
    if not is_distributed(group):
        return
    tensors = dict(_tensors_of(model))
    broadcast_tensors(tensors, group)
    difference = first_that_differs(list(tensors.values()), scope_of(group))
    if difference is not None:
        index, ranks = difference
        raise SyncError(
            f"after the broadcast from rank 0, '{list(tensors)[index]}' on rank "
            f"{', '.join(map(str, ranks))} is not what the others have; is the model built in the "
            "same way everywhere?"
        )


def equal_buffers(model: paddle.nn.Layer, group: Group | None = None) -> list[str]:
    """Make the buffers of `model` on all ranks those of rank 0, and return their names.

    Each rank's BatchNorms count the statistics of its own rows, so models of equal parameters
    evaluate differently. Rank 0's, and not the mean of all: they do not depend on when this is
    called, so saving once more leaves the run bitwise identical.

    Args:
        model: The same Layer on every rank. Buffers that are not saved stay as they are.
        group: The ranks; None is all of them.

    Raises:
        PeerError: A rank has died, stopped or failed.
    """
    buffers = buffers_of(model)
    if (
        buffers
        and is_distributed(group)
        and first_that_differs([*buffers.values()], scope_of(group)) is not None
    ):
        broadcast_tensors(buffers, group)
    return list(buffers)


def buffers_of(model: paddle.nn.Layer) -> dict[str, paddle.Tensor]:
    """What the forward of `model` may write and a checkpoint saves, by structured name."""
    return {
        f"{prefix}.{name}" if prefix else name: tensor
        for prefix, layer in model.named_sublayers(include_self=True)
        for name, tensor in saved_buffers(layer).items()
    }


def broadcast_tensors(tensors: Mapping[str, paddle.Tensor], group: Group | None = None) -> None:
    """Give all ranks of `group` the values that its first rank has.

    Args:
        tensors: By name; of the same shapes and dtypes in the same order on every rank.
        group: The ranks; None is all of them.

    Raises:
        SyncError: The ranks' shapes or dtypes differ.
        PeerError: A rank has died, stopped or failed.
    """
    scope = scope_of(group)
    agree_on_parameters([*tensors], [*tensors.values()], structured=False, scope=scope)

    @paddle.no_grad()
    def broadcast_all() -> None:
        for tensor in tensors.values():
            carrier = tensor
            if tensor.dtype in _CARRIERS:
                carrier = tensor.astype(_CARRIERS[tensor.dtype])
            if tensor.size:
                dist.broadcast(carrier, src=scope.ranks[0], group=group)
            if carrier is not tensor:
                paddle.assign(carrier.astype(tensor.dtype), tensor)

    run_collective(broadcast_all, f"the broadcast of {len(tensors)} tensors from rank 0", group)


_CARRIERS = {paddle.bool: "uint8", paddle.int16: "int32"}
"""Broadcast as other dtypes: gloo ends the process with "Unknown DataType" (2.6, 3.x)."""


def mean_over_ranks(value: float, group: Group | None = None) -> float:
    """The mean of a number over the ranks of `group`, bitwise identical on all.

    Raises:
        PeerError: A rank has died, stopped or failed.
        SyncError: Another rank does something else.
    """
    if not is_distributed(group):
        return value
    (total,) = sum_over_ranks([value], "mean_over_ranks()", group)
    return total / len(scope_of(group).ranks)


def mean_of_array(array: NDArray[Any], what: str) -> NDArray[Any]:
    """The mean of an array of the hosts over all ranks, which have the same shape; errors as in
    `mean_over_ranks`.
    """
    if not is_distributed():
        return array
    total = paddle.to_tensor(array)
    run_collective(lambda: dist.all_reduce(total), what)
    return np.array((total / dist.get_world_size()).numpy())


def sum_over_ranks(values: Sequence[float], what: str, group: Group | None = None) -> list[float]:
    """The sums of numbers over the ranks of `group`; see `reduce_numbers`."""
    if not is_distributed(group):
        return list(values)
    if group is not None:
        return reduce_numbers(values, "sum", what, group)
    *sums, total = reduce_numbers([*values, asked()], "sum", what)
    hear_asked(total)
    return sums


def values_of_ranks(value: Any, what: str, group: Group | None = None) -> list[Any]:
    """The `value` (for JSON) of every rank of `group`, in rank order.

    Through rank 0, and not for every step: where all values differ, each rank gets all of them.

    Args:
        value: Of this rank; it may differ.
        what: Names the exchange, for messages; the same on every rank.
        group: The ranks; None is all of them.

    Raises:
        PeerError: A rank has died, stopped or failed.
        SyncError: Another rank does something else.
    """
    if not is_distributed(group):
        return [value]
    scope = scope_of(group)
    said = peers().exchange(what, scope, value)
    by_rank = {rank: rank_value.content for rank_value in said for rank in rank_value.ranks}
    return [by_rank[rank] for rank in scope.ranks]


def _tensors_of(model: paddle.nn.Layer) -> Iterator[tuple[str, paddle.Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()
