"""What the two ways to compute the contrastive loss, whole and in tiles, start from."""

from __future__ import annotations

from dataclasses import dataclass

import paddle

Scale = float | paddle.Tensor


@dataclass(frozen=True)
class ContrastiveBatch:
    """The vectors that are scored with each other, those of this rank's pairs among them.

    Attributes:
        queries: ``[pairs, dim]``; where positives do not search, they are this rank's alone.
        positives: ``[pairs, dim]``, row i belongs to query i.
        own_queries: Where this rank's pairs stand in `queries`; None: they are all there is.
        own_positives: Where they stand in `positives`; None likewise.
        negatives: ``[negatives, dim]``, more candidates for the queries, of no one's own.
        positive_ids: ``[pairs]``, int64: equal numbers are equal texts. None: nothing is masked.
        negative_ids: ``[negatives]``, int64, likewise.
    """

    queries: paddle.Tensor
    positives: paddle.Tensor
    own_queries: slice | None = None
    own_positives: slice | None = None
    negatives: paddle.Tensor | None = None
    positive_ids: paddle.Tensor | None = None
    negative_ids: paddle.Tensor | None = None


@dataclass(frozen=True)
class LossOptions:
    """How scores become a loss.

    Attributes:
        symmetric: Whether positives search for queries too; the loss is the mean of both.
        label_smoothing: Share of the label that goes to all candidates alike.
        weight: Factor of the mean over this rank's pairs, so that the mean over the ranks is the
            mean over the pairs of all of them: pairs of this rank / mean number of pairs.
        normalize: Whether the vectors are still to be scaled to length 1; the loss in tiles does
            it, without a second copy of them.
    """

    symmetric: bool
    label_smoothing: float
    weight: float = 1.0
    normalize: bool = False
