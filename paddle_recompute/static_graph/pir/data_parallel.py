"""The mean of each gradient over the data-parallel ranks, as operators of the Program."""

from __future__ import annotations

from collections.abc import Iterator

from paddle_recompute._paddle_static import pir
from paddle_recompute._paddle_static.pir import Value
from paddle_recompute.errors import StaticGraphError

ParamsGrads = list[tuple[Value, Value]]


def mean_over_ranks(params_grads: ParamsGrads, *, num_ranks: int, bucket_bytes: int) -> ParamsGrads:
    """Append all-reduces at the insertion point; ``sum / num_ranks`` of each gradient.

    Gradients travel in buffers, in their order, which is the same on every rank because the
    Program is. Each buffer waits for the one before it: the multi-threaded executor could start
    them in another order on another rank, and then they would be summed with each other.

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
    reduced: ParamsGrads = []
    previous: Value | None = None
    for bucket in _buckets(params_grads, bucket_bytes):
        flat = pir.join([gradient for _, gradient in bucket], after=previous)
        previous = pir.mean_over_ranks(flat, num_ranks)
        pieces = pir.part(previous, [gradient for _, gradient in bucket])
        reduced += [
            (parameter, piece) for (parameter, _), piece in zip(bucket, pieces, strict=True)
        ]
    return reduced


def _buckets(params_grads: ParamsGrads, bucket_bytes: int) -> Iterator[ParamsGrads]:
    bucket: ParamsGrads = []
    size = 0
    for parameter, gradient in params_grads:
        own = pir.num_bytes(gradient)
        if bucket and (size + own > bucket_bytes or gradient.dtype != bucket[0][1].dtype):
            yield bucket
            bucket, size = [], 0
        bucket.append((parameter, gradient))
        size += own
    if bucket:
        yield bucket
