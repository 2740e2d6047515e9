"""Matryoshka: the loss of the first numbers of each vector, for several lengths."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import paddle
import paddle.nn.functional as F

from paddle_recompute.contrastive._batch import ContrastiveBatch
from paddle_recompute.errors import ConfigError, DataError

_VECTORS = ("queries", "positives", "negatives")


def checked_dims(dims: Sequence[int], *, normalize: bool) -> tuple[int, ...]:
    """`dims` in ascending order.

    Raises:
        ConfigError: They are not different whole numbers above 0, or the vectors are not scaled.
    """
    found = tuple(dims)
    if any(type(dim) is not int or dim < 1 for dim in found) or len({*found}) < max(1, len(found)):
        raise ConfigError(
            f"matryoshka_dims: received {dims!r}; allowed are different whole numbers of at least 1"
        )
    if not normalize:
        raise ConfigError(
            "matryoshka_dims needs normalize=True: the start of a vector of length 1 is shorter, "
            "and the loss must scale each one"
        )
    return tuple(sorted(found))


def prefixes(
    batch: ContrastiveBatch, dims: tuple[int, ...], *, normalize: bool
) -> Iterator[ContrastiveBatch]:
    """`batch` with the first ``dims[0]``, ``dims[1]``, ... numbers of its vectors.

    Args:
        batch: The vectors of all ranks, as the encoder returned them.
        dims: From `checked_dims`.
        normalize: Whether to scale them to length 1 here.

    Raises:
        DataError: The largest of `dims` is not the length of the vectors.
    """
    width = batch.queries.shape[1]
    if dims[-1] != width:
        raise DataError(
            f"received vectors of {width} numbers; the largest of matryoshka_dims = {list(dims)} "
            "must be that: behind it nothing is trained"
        )
    for dim in dims:
        cut: dict[str, paddle.Tensor] = {}
        for name in _VECTORS:
            if (vectors := getattr(batch, name)) is not None:
                start = vectors if dim == width else vectors[..., :dim]
                cut[name] = F.normalize(start, axis=-1) if normalize else start
        yield dataclasses.replace(batch, **cut)
