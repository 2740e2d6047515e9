"""Data-parallel exchange as operators of a Program: the parameters once, the gradients per run.

Tensors are exchanged in buffers, in an order that is the same on every rank because the Program is.
Each buffer depends on the one before it. Otherwise the multi-threaded executor could start them in
another order on another rank and exchange the wrong buffers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import paddle

from paddle_recompute._paddle.static import pir, pir_exchange
from paddle_recompute._paddle.static.pir import Value

ParamsGrads = list[tuple[Value, Value]]


def mean_over_ranks(params_grads: ParamsGrads, *, num_ranks: int, bucket_bytes: int) -> ParamsGrads:
    """Append all-reduces at the insertion point; ``sum / num_ranks`` of each gradient.

    Args:
        params_grads: Parameter and local gradient, dense.
        num_ranks: How many ranks run this Program; with 1 nothing is appended.
        bucket_bytes: Largest buffer in bytes; a larger gradient has a buffer of its own.

    Returns:
        Parameter and mean gradient. Memory: a copy of one buffer during its exchange.
    """
    if num_ranks == 1:
        return params_grads
    reduced = _exchanged(
        [gradient for _, gradient in params_grads],
        lambda flat: pir_exchange.mean_over_ranks(flat, num_ranks),
        bucket_bytes,
    )
    return [(parameter, mean) for (parameter, _), mean in zip(params_grads, reduced, strict=True)]


def start_as_rank_0(
    program: paddle.static.Program, startup: paddle.static.Program, *, bucket_bytes: int
) -> None:
    """Append to `startup` a broadcast of rank 0's parameters and buffers of `program`.

    Fleet does the same on 2.6: ranks with different seeds draw different weights, and later only
    gradients are exchanged. Every rank must run `startup`.
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
    """The results of `exchange` for `values`, in their shapes."""
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
