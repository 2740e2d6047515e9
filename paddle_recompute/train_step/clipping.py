"""Clipping by the global norm, on the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import paddle

_HALF = (paddle.float16, paddle.bfloat16)


@paddle.no_grad()
def scale_to_norm(gradients: Sequence[paddle.Tensor], norm: paddle.Tensor, limit: float) -> None:
    """Scale `gradients` in place as ``paddle.nn.ClipGradByGlobalNorm`` does, reading nothing.

    Bit by bit what ``gradient.scale_(limit / norm)`` makes of them, with the quotient in float64,
    where `norm` is above `limit`; unchanged bits where it is not.

    Args:
        gradients: Of floating dtypes.
        norm: Their norm, one number; where it is not finite the gradients must be 0.
        limit: The largest norm, positive.
    """
    norm = norm.astype("float64").reshape([])
    quotient = paddle.full_like(norm, limit) / norm
    factor = paddle.where(norm > limit, quotient, paddle.ones_like(norm))
    factors: dict[Any, paddle.Tensor] = {paddle.float64: factor}
    for gradient in gradients:
        exact = paddle.float32 if gradient.dtype in _HALF else gradient.dtype
        if exact not in factors:
            factors[exact] = factor.astype(exact)
        if gradient.dtype == exact:
            gradient.multiply_(factors[exact])
        else:  # as the kernel of scale_ does it
            scaled = gradient.astype(exact) * factors[exact]
            paddle.assign(scaled.astype(gradient.dtype), gradient)
