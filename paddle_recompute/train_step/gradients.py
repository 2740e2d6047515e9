"""The gradients of one step: divided by the loss scale, their norm, clipped by it."""

from __future__ import annotations

from collections.abc import Sequence

import paddle

from paddle_recompute._paddle.flat import (
    Gradients,
    are_sparse,
    by_dtype,
    multiply_all,
    scale_all,
    squares_of,
)
from paddle_recompute._paddle.guarded import gradient_of
from paddle_recompute.errors import ConfigError
from paddle_recompute.offload import OffloadOptimizer

HALF = (paddle.float16, paddle.bfloat16)


@paddle.no_grad()
def unscale(
    parameters: Sequence[paddle.Tensor],
    loss_scale: float | None,
    *,
    upcast: bool,
    offloaded: OffloadOptimizer | None,
) -> tuple[Gradients, paddle.Tensor]:
    """Divide the gradients of `parameters` by `loss_scale`; returns them by dtype, and their norm,
    one number.

    The norm is the test for overflow too: it is finite only if every element is.

    Args:
        parameters: What is updated.
        loss_scale: None: the loss was not scaled.
        upcast: Whether gradients in half precision become float32 before.
        offloaded: Has the gradients that are not in ``.grad``, and divides them itself.

    Raises:
        ConfigError: A gradient is sparse.
    """
    gradients = _gradients_of(parameters)
    if are_sparse(gradients):
        number = [gradient.is_selected_rows() for gradient in gradients].index(True)
        with_gradient = [
            parameter for parameter in parameters if gradient_of(parameter) is not None
        ]
        raise ConfigError(
            f"the gradient of {with_gradient[number].name} is sparse (SelectedRows), of which "
            "Paddle computes no norm; make its Embedding with sparse=False"
        )
    alike = by_dtype(gradients)
    if upcast and not alike.keys().isdisjoint(HALF):
        _to_float32(parameters)
        gradients = _gradients_of(parameters)
        alike = by_dtype(gradients)
    if loss_scale is not None:
        for each in alike.values():
            scale_all(each, 1.0 / loss_scale)
    dtype = paddle.float64 if paddle.float64 in alike else paddle.float32
    squares = squares_of(
        [g.astype(dtype) for g in gradients] if alike.keys() - {dtype} else gradients
    )
    if offloaded is not None:
        # In the order of the parameters, offloaded or not: so that the sum is bitwise identical.
        own, others = iter(squares), offloaded.squares()
        squares = [
            next(own) if gradient_of(p) is not None else others[id(p)]
            for p in parameters
            if gradient_of(p) is not None or id(p) in others
        ]
    return alike, paddle.add_n(squares).sqrt() if squares else paddle.zeros([1])


def _gradients_of(parameters: Sequence[paddle.Tensor]) -> list[paddle.Tensor]:
    """Those that are not kept off the device."""
    return [gradient for gradient in map(gradient_of, parameters) if gradient is not None]


def _to_float32(parameters: Sequence[paddle.Tensor]) -> None:
    """Turn half-precision gradients into float32, one after the other.

    Only after the backward: Paddle cannot add a float16 gradient to a float32 one.
    """
    for parameter in parameters:
        gradient = gradient_of(parameter)
        if gradient is not None and gradient.dtype in HALF:
            wide = gradient.astype("float32")
            # A gradient cannot be replaced by one of another dtype, only be put where none is.
            parameter.clear_gradient(False)
            parameter.grad = wide


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
        if dtype not in HALF:
            multiply_all(alike, factor.astype(dtype))
            continue
        for gradient in alike:  # as the kernel of scale_ does it
            scaled = gradient.astype("float32") * factor.astype("float32")
            paddle.assign(scaled.astype(dtype), gradient)
