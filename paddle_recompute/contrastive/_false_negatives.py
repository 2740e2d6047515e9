"""The mask of false negatives: candidates that equal a query's positive do not count as negatives.

Texts are compared by ids (`text_ids`), which the batch carries.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import numpy as np
import paddle

from paddle_recompute._paddle import device
from paddle_recompute.contrastive._batch import ContrastiveBatch, own_rows
from paddle_recompute.contrastive._vector_blocks import Block
from paddle_recompute.errors import DataError

QUERIES, POSITIVES, NEGATIVES = 0, 1, 2
"""The sides of a tile of scores."""


def text_ids(texts: Iterable[str]) -> paddle.Tensor:
    """Ids for `ContrastiveLoss`: equal texts have equal ids, on every rank.

    The ids are 64-bit hashes: the probability that any two of a million texts collide is 1 in 37
    million.

    Args:
        texts: Compared letter by letter; normalise them first if necessary.

    Returns:
        ``[len(texts)]``, int64.
    """
    digests = b"".join(hashlib.blake2b(text.encode(), digest_size=8).digest() for text in texts)
    return device.put(np.frombuffer(digests, "<i8").astype(np.int64))


def check_ids(name: str, vectors: paddle.Tensor | None, ids: paddle.Tensor | None) -> None:
    """Check that there is an int64 id for each of `vectors`.

    Args:
        name: ``query``, ``positive`` or ``negative``.
        vectors: None: there are none, and no ids may be given.
        ids: What was given.

    Raises:
        DataError: Shape or dtype do not fit.
    """
    wanted = None if vectors is None else list(vectors.shape[:-1])
    found = None if ids is None else list(ids.shape)
    if found != wanted or (ids is not None and ids.dtype != paddle.int64):
        received = "none" if ids is None else f"{ids.dtype} of shape {found}"
        allowed = "none" if wanted is None else f"int64 of shape {wanted}"
        raise DataError(
            f"{name}_ids: received {received}; with mask_false_negatives, or positives for "
            f"query_ids, and these vectors allowed is {allowed}"
        )


def equal_pairs(batch: ContrastiveBatch, own: slice | None) -> paddle.Tensor:
    """[own pairs, pairs], bool: true for a pair's own positive and for equal texts."""
    ids, of_queries = batch.positive_ids, batch.query_ids
    if ids is not None and of_queries is not None:
        return paddle.logical_or(equal_ids(ids, own), equal_ids(of_queries, own))
    if of_queries is not None:
        return equal_ids(of_queries, own)
    if ids is None:
        # Counted, because a Program may not know the shape.
        ids = paddle.cumsum(paddle.ones_like(batch.positives[:, 0], dtype="int64")) - 1
    return equal_ids(ids, own)


def equal_ids(ids: paddle.Tensor, own: slice | None) -> paddle.Tensor:
    """[own pairs, pairs], bool: true where two pairs have the same id."""
    return paddle.equal(own_rows(ids, own).unsqueeze(1), ids.unsqueeze(0))


def equal_negatives(batch: ContrastiveBatch) -> paddle.Tensor | None:
    """[own pairs, negatives], bool: true where a negative equals the positive; None without ids."""
    ids = batch.negative_ids
    if batch.positive_ids is None or ids is None:
        return None
    own = own_rows(batch.positive_ids, batch.own_positives)
    return paddle.equal(own.unsqueeze(1), ids if len(ids.shape) == 2 else ids.unsqueeze(0))


class TileMask:
    """The mask of each tile of scores.

    Args:
        batch: Its ids; the vectors are not kept.
        shift: From the number of a query to that of its positive.
    """

    def __init__(self, batch: ContrastiveBatch, shift: int) -> None:
        self._ids = [(batch.positive_ids, batch.negative_ids), (batch.query_ids, None)]
        self._shift = shift

    def of(self, sides: tuple[int, int], blocks: tuple[Block, Block]) -> paddle.Tensor | None:
        """[rows, columns], bool: true for equal texts; None: the batch has no ids for them."""
        excluded = None
        for ids in self._ids:
            rows, columns = (
                self._ids_of(*ids, side, block) for side, block in zip(sides, blocks, strict=True)
            )
            if rows is not None and columns is not None:
                equal = paddle.equal(rows.unsqueeze(1), columns.unsqueeze(0))
                excluded = equal if excluded is None else paddle.logical_or(excluded, equal)
        return excluded

    def _ids_of(
        self,
        pair_ids: paddle.Tensor | None,
        negative_ids: paddle.Tensor | None,
        side: int,
        block: Block,
    ) -> paddle.Tensor | None:
        if side == NEGATIVES:
            return None if negative_ids is None else negative_ids[slice(*block)]
        if pair_ids is None:
            return None
        shift = self._shift if side == QUERIES else 0
        return pair_ids[block[0] + shift : block[1] + shift]
