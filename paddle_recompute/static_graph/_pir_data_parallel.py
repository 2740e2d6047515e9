"""What data-parallel ranks exchange, as operators of their Programs: parameters, and gradients.

Tensors travel in buffers, in their order, which is the same on every rank because the Program is.
Each buffer waits for the one before it: the multi-threaded executor could start them in another
order on another rank, and then they would be mixed with each other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import paddle

from paddle_recompute._paddle.static import pir, pir_exchange
from paddle_recompute._paddle.static.pir import Value
from paddle_recompute.errors import StaticGraphError

ParamsGrads = list[tuple[Value, Value]]


def mean_over_ranks(params_grads: ParamsGrads, *, num_ranks: int, bucket_bytes: int) -> ParamsGrads:
    """Append all-reduces at the insertion point; ``sum / num_ranks`` of each gradient.

    Args:
        params_grads: Parameter and local gradient, dense.
        num_ranks: How many ranks run this Program; with 1 nothing is appended.
        bucket_bytes: Largest buffer in bytes; a gradient that is larger travels alone.

    Returns:
        Parameter and mean gradient. Costs a copy of a buffer while it travels.

    Raises:
        StaticGraphError: A gradient is sparse.
    """
    if num_ranks == 1:
        return params_grads
    for parameter, gradient in params_grads:
        if not pir.is_dense(gradient):
            raise StaticGraphError(
                f"the gradient of '{parameter.name}' is sparse, and ranks exchange dense "
                "gradients only; create its embedding with sparse=False"
            )
    reduced = _exchanged(
        [gradient for _, gradient in params_grads],
        lambda flat: pir_exchange.mean_over_ranks(flat, num_ranks),
        bucket_bytes,
    )
    return [(parameter, mean) for (parameter, _), mean in zip(params_grads, reduced, strict=True)]


def start_as_rank_0(
    program: paddle.static.Program, startup: paddle.static.Program, *, bucket_bytes: int
) -> None:
    """Append to `startup` what gives parameters and buffers of `program` the values of rank 0.

    As fleet does it on 2.6: ranks with seeds of their own draw other weights, and only gradients
    are exchanged afterwards. Every rank must run `startup`.
    """
    found = pir_exchange.initial_values(startup, program)
    with pir.editing(startup):
        values = _exchanged(
            [value for _, value in found], pir_exchange.value_of_rank_0, bucket_bytes
        )
        for (operation, _), value in zip(found, values, strict=True):
            pir_exchange.set_instead(operation, value)


def _exchanged(
    values: list[Value], exchange: Callable[[Value], Value], bucket_bytes: int
) -> list[Value]:
    """What `exchange` makes of `values`, in their shapes."""
    results: list[Value] = []
    previous: Value | None = None
    for bucket in _buckets(values, bucket_bytes):
        previous = exchange(pir_exchange.join(bucket, after=previous))
        results += pir_exchange.part(previous, bucket)
    return results


def _buckets(values: list[Value], bucket_bytes: int) -> Iterator[list[Value]]:
    bucket: list[Value] = []
    size = 0
    for value in values:
        own = pir.num_bytes(value)
        if bucket and (size + own > bucket_bytes or value.dtype != bucket[0].dtype):
            yield bucket
            bucket, size = [], 0
        bucket.append(value)
        size += own
    if bucket:
        yield bucket
