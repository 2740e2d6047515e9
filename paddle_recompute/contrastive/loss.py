"""InfoNCE: every query must find its own positive among the positives of its batch."""

from __future__ import annotations

import contextlib
import math
from typing import Literal

import paddle

from paddle_recompute.errors import ConfigError, DataError


class ContrastiveLoss(paddle.nn.Layer):
    r"""InfoNCE with the other pairs of the batch as negatives.

    With the scores :math:`s_{ij} = \langle q_i, p_j \rangle / \tau` of query i and positive j, and
    b pairs,

    .. math:: L = \frac{1}{b} \sum_i -\log \frac{e^{s_{ii}}}{\sum_j e^{s_{ij}}}

    Reduction: the mean over the b queries. ``symmetric`` takes the mean of this and of the same
    with the roles exchanged (every positive must find its query); it does not double the scale.

    Gradients: negatives are local, which means that a query competes with the b positives of its
    own call, whatever other ranks and micro-batches do. Gradients averaged over R ranks and K
    micro-batches are those of the mean of R*K such losses, each a choice among b: of the same
    scale as one of them, with nothing to multiply by R or K, but *not* those of one loss over all
    R*K*b pairs, whose queries have R*K*b - 1 negatives.

    Precision: the gradient of a query that has found its positive shrinks with its loss, and both
    keep their relative precision as far down as float32 goes, where softmax cross-entropy in
    float32 rounds them to 0 at 6e-8. Finite scores do not overflow. It is computed in float32 at
    least, in dygraph under ``paddle.amp.auto_cast`` too.

    Memory: one matrix [b, b] until the backward pass, three at the peak of the forward; two and
    four with ``symmetric``.

    Args:
        temperature: :math:`\tau > 0`; with normalised vectors the scores are within 1/temperature.
        symmetric: Whether positives search for queries too.
        negatives: ``"local"``, the pairs of the call; the only value so far.

    Raises:
        ConfigError: `temperature` is no positive number, or `negatives` is not known.

    References:
        van den Oord et al., "Representation Learning with Contrastive Predictive Coding",
        arXiv:1807.03748, equation 4; Radford et al., "CLIP", arXiv:2103.00020, figure 3, for the
        symmetric form.

    Examples:
        >>> import paddle
        >>> loss = ContrastiveLoss(temperature=0.05)
        >>> vectors = paddle.eye(4)  # every query equals its positive and no other
        >>> f"{float(loss(vectors, vectors)):.3g}"  # log(1 + 3 * exp(-1 / 0.05))
        '6.18e-09'
    """

    def __init__(
        self,
        temperature: float = 0.05,
        symmetric: bool = True,
        negatives: Literal["local"] = "local",
    ) -> None:
        super().__init__()
        if not (math.isfinite(temperature) and temperature > 0):
            raise ConfigError(
                f"temperature: received {temperature!r}; allowed is a number greater than 0"
            )
        if negatives != "local":
            raise ConfigError(f"negatives: received {negatives!r}; allowed is 'local'")
        self.temperature = temperature
        self.symmetric = symmetric

    def forward(self, query: paddle.Tensor, positive: paddle.Tensor) -> paddle.Tensor:
        """The loss of one batch of pairs.

        Args:
            query: ``[local_batch, dim]``, floating point, per rank; normalised by the caller if
                the scores are to be cosines. Row i of `positive` belongs to row i.
            positive: ``[local_batch, dim]``, like `query`.

        Returns:
            A scalar, float32 (float64 from float64 input), at least 0.

        Raises:
            DataError: The shapes differ or are not ``[batch, dim]``, or there is one pair only:
                it has no negatives, its loss would be 0 whatever the model does.
        """
        _check(query, positive)
        with _amp_off():
            query, positive = (
                vectors if vectors.dtype == paddle.float64 else vectors.astype("float32")
                for vectors in (query, positive)
            )
            query = query / self.temperature
            own = (query * positive).sum(axis=1)
            others = paddle.matmul(query, positive, transpose_y=True)
            others = others + paddle.diag(paddle.full_like(own, -math.inf))
            loss = _mean_surprise(own, others)
            if self.symmetric:
                loss = (loss + _mean_surprise(own, others.t())) / 2
        return loss


def _amp_off() -> contextlib.AbstractContextManager[None]:
    """Inside, `paddle.amp.auto_cast` does nothing; in a Program, AMP is not ours to switch."""
    if not paddle.in_dynamic_mode():
        return contextlib.nullcontext()
    amp_off: contextlib.AbstractContextManager[None] = paddle.amp.auto_cast(enable=False)
    return amp_off


def _mean_surprise(own: paddle.Tensor, others: paddle.Tensor) -> paddle.Tensor:
    """Mean over the rows of ``log(1 + sum_j exp(others[i, j] - own[i]))``.

    The 1 is the row's own score: kept out of the sum, it cannot swallow a small rest. With
    m = max(0, max_j others[i, j] - own[i]) the logarithm is
    ``m + log(exp(-m) + sum_j exp(others[i, j] - own[i] - m))``, in which nothing overflows; log1p
    and expm1 keep what is small.

    Args:
        own: ``[batch]``, the score of each row with its partner.
        others: ``[batch, batch]``, the scores with everybody, -inf on the diagonal.
    """
    # The value does not depend on m, so no gradient has to go through it.
    m = (others.max(axis=1) - own).clip(min=0.0).detach()
    rest = paddle.exp(others - (own + m).unsqueeze(1)).sum(axis=1)
    return (m + paddle.log1p(paddle.expm1(-m) + rest)).mean()


def _check(query: paddle.Tensor, positive: paddle.Tensor) -> None:
    shapes = list(query.shape), list(positive.shape)
    if shapes[0] != shapes[1] or len(shapes[0]) != 2:
        raise DataError(
            f"received queries of shape {shapes[0]} and positives of shape {shapes[1]}; "
            "allowed is the same [batch, dim] for both"
        )
    if shapes[0][0] < 2 and shapes[0][0] != -1:  # -1: a static Program does not know it yet
        raise DataError(
            f"received a batch of {shapes[0][0]}; a pair needs at least one other pair for its "
            "negative; give every rank and micro-batch at least 2 pairs"
        )
