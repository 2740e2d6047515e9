"""The input of both forms of the contrastive loss, dense and tiled."""

from __future__ import annotations

from dataclasses import dataclass

import paddle

Scale = float | paddle.Tensor


@dataclass(frozen=True)
class ContrastiveBatch:
    """The vectors that are scored with each other, this rank's pairs among them.

    Attributes:
        queries: ``[pairs, dim]``; this rank's pairs only, unless positives search too.
        positives: ``[pairs, dim]``, row i belongs to query i.
        own_queries: This rank's rows in `queries`; None: all rows.
        own_positives: This rank's rows in `positives`; None: all rows.
        negatives: ``[negatives, dim]``, more candidates, for all queries; or ``[pairs, n, dim]``,
            the only candidates, each for its own query.
        positive_ids: ``[pairs]``, int64: equal ids mean equal texts. None: nothing is masked.
        negative_ids: ``[negatives]``, int64, in the same numbering.
        query_ids: ``[pairs]``, int64: equal ids mean equal queries. None: nothing is masked.
    """

    queries: paddle.Tensor
    positives: paddle.Tensor
    own_queries: slice | None = None
    own_positives: slice | None = None
    negatives: paddle.Tensor | None = None
    positive_ids: paddle.Tensor | None = None
    negative_ids: paddle.Tensor | None = None
    query_ids: paddle.Tensor | None = None


@dataclass(frozen=True)
class LossOptions:
    """How scores become a loss.

    Attributes:
        symmetric: Whether positives search for queries too; the loss is the mean of both.
        label_smoothing: Share of the label that is spread evenly over all candidates.
        weight: Factor of the mean over this rank's pairs, so that the mean over the ranks is the
            mean over all their pairs: pairs of this rank / mean number of pairs.
        normalize: Whether the vectors must still be scaled to length 1; the tiled loss does this
            per tile, without a second copy of all vectors.
        sum_positives: Whether a query finds any of the positives with its id.
    """

    symmetric: bool
    label_smoothing: float
    weight: float = 1.0
    normalize: bool = False
    sum_positives: bool = False


def own_rows(tensor: paddle.Tensor, own: slice | None) -> paddle.Tensor:
    """The rows of this rank; all of them where `own` is None."""
    return tensor if own is None else tensor[own]
