"""Clipping by the global norm, on the device."""

from __future__ import annotations

import paddle

from paddle_recompute._paddle.flat import Gradients, multiply_all

_HALF = (paddle.float16, paddle.bfloat16)


@paddle.no_grad()
def scale_to_norm(gradients: Gradients, norm: paddle.Tensor, limit: float) -> None:
    """Scale `gradients` in place as ``paddle.nn.ClipGradByGlobalNorm`` does, reading nothing.

    Bit by bit what ``gradient.scale_(limit / norm)`` makes of them, with the quotient in float64,
    where `norm` is above `limit`; unchanged bits where it is not.

    Args:
        gradients: By their floating dtypes.
        norm: Their norm, one number; where it is not finite the gradients must be 0.
        limit: The largest norm, positive.
    """
    norm = norm.astype("float64").reshape([])
    quotient = paddle.full_like(norm, limit) / norm
    factor = paddle.where(norm > limit, quotient, paddle.ones_like(norm))
    for dtype, alike in gradients.items():
        if dtype not in _HALF:
            multiply_all(alike, factor.astype(dtype))
            continue
        for gradient in alike:  # as the kernel of scale_ does it
            scaled = gradient.astype("float32") * factor.astype("float32")
            paddle.assign(scaled.astype(dtype), gradient)
