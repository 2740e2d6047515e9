"""The contrastive loss from full matrices of scores, in operators that Paddle differentiates.

It works in dygraph and in a Program, and its backward can run more than once. `_tiled_loss`
computes the same in tiles.
"""

from __future__ import annotations

import math

import paddle

from paddle_recompute.contrastive._batch import ContrastiveBatch, LossOptions, Scale, own_rows
from paddle_recompute.contrastive._false_negatives import (
    equal_ids,
    equal_negatives,
    equal_pairs,
)


def whole_loss(batch: ContrastiveBatch, scale: Scale, options: LossOptions) -> paddle.Tensor:
    """The loss of this rank's pairs, a scalar; inner products are multiplied by `scale`."""
    query, positive = own_rows(batch.queries, batch.own_queries), batch.positives
    own_positive = own_rows(positive, batch.own_positives)
    query = query * scale
    own = (query * own_positive).sum(axis=1)
    if batch.negatives is not None and len(batch.negatives.shape) == 3:
        excluded = equal_negatives(batch)
        excluded = None if excluded is None else excluded.unsqueeze(1)
        given = _competing(query.unsqueeze(1), batch.negatives, excluded).squeeze(1)
        return _mean_info_nce(own, given, options.label_smoothing)
    scores = _competing(query, positive, equal_pairs(batch, batch.own_positives))
    searches = [scores]
    if options.symmetric and batch.own_positives is None:
        searches.append(scores.t())
    elif options.symmetric:
        equal = equal_pairs(batch, batch.own_queries)
        searches.append(_competing(own_positive * scale, batch.queries, equal))
    if batch.negatives is not None:
        more = _competing(query, batch.negatives, equal_negatives(batch))
        searches[0] = paddle.concat([scores, more], axis=1)
    found = [own, own]
    if options.sum_positives:
        same = equal_ids(batch.query_ids, batch.own_positives)
        found[0] = paddle.logsumexp(_competing(query, positive, paddle.logical_not(same)), axis=1)
    losses = [
        _mean_info_nce(own, scores, options.label_smoothing)
        for own, scores in zip(found, searches)  # noqa: B905  to_static knows no strict=
    ]
    return paddle.add_n(losses) * (options.weight / len(losses))


def _competing(
    rows: paddle.Tensor, candidates: paddle.Tensor, excluded: paddle.Tensor | None
) -> paddle.Tensor:
    """The scores [rows, candidates], -inf where `excluded` (bool, of that shape) is true.

    By addition, whose backward saves no operand: `masked_fill` would save the mask.
    """
    if excluded is None:
        return paddle.matmul(rows, candidates, transpose_y=True)
    nothing = paddle.zeros_like(excluded, dtype=rows.dtype)
    added = paddle.masked_fill(nothing, excluded, -math.inf)
    del nothing
    return paddle.matmul(rows, candidates, transpose_y=True) + added


def _mean_info_nce(
    own: paddle.Tensor, others: paddle.Tensor, label_smoothing: float
) -> paddle.Tensor:
    """Mean over the rows of ``log(1 + sum_j exp(others[i, j] - own[i]))``, plus the smoothing.

    The 1 is the row's own score. Inside the sum it would round away small terms. With
    top = max(own[i], max_j others[i, j]) and m = top - own[i] the logarithm is
    ``m + log(exp(-m) + sum_j exp(others[i, j] - top))``, which cannot overflow; log1p and expm1
    keep small values exact. `top` is subtracted as it is, not as own[i] + m: for scores of 1e9 that
    sum is rounded to multiples of 64, and exp(64) or exp(-64) is far from 1.

    Smoothing spreads the share e of the label evenly over all n candidates of the row, which adds
    ``e / n * sum_j (own[i] - others[i, j])``.

    Args:
        own: ``[batch]``, the score of each row with its partner.
        others: ``[batch, candidates]``, -inf for excluded candidates and for the row's partner.
        label_smoothing: The e above.
    """
    # The value does not depend on top, so no gradient flows through it.
    top = paddle.maximum(others.max(axis=1), own).detach()
    m = (top - own).detach()
    # The derivative by own[i] is that of exp(others - own - m): add 0, but with a gradient.
    # A copy: in a Program (3.3) `own.detach()` shares the memory of `own`, which may be
    # overwritten.
    nothing = own - paddle.assign(own).detach()
    rest = paddle.exp(others - (top + nothing).unsqueeze(1)).sum(axis=1)
    of_rows = m + paddle.log1p(paddle.expm1(-m) + rest)
    if label_smoothing:
        none = others == -math.inf
        gaps = paddle.masked_fill(own.unsqueeze(1) - others, none, 0.0).sum(axis=1)
        candidates = 1.0 + paddle.logical_not(none).astype(others.dtype).sum(axis=1)
        of_rows = of_rows + label_smoothing * gaps / candidates
    return of_rows.mean()
