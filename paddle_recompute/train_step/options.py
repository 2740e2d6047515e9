"""Options of `TrainStep` that contradict each other, or cannot be honoured."""

from __future__ import annotations

import paddle

from paddle_recompute.contrastive import GradCache
from paddle_recompute.errors import ConfigError
from paddle_recompute.train_step.backward import LossFn


def check_options(
    accumulate_steps: int,
    clip_grad_norm: float | None,
    loss_fn: LossFn | None,
    grad_cache: GradCache | None,
    optimizer: object,
) -> None:
    """Refuse what `TrainStep` was given, before anything is set up.

    Raises:
        ConfigError: See `TrainStep`.
    """
    if accumulate_steps < 1:
        raise ConfigError(f"accumulate_steps is {accumulate_steps}; it must be at least 1")
    if clip_grad_norm is not None and not clip_grad_norm > 0:
        raise ConfigError(
            f"clip_grad_norm is {clip_grad_norm}; it must be positive, or None for no clipping"
        )
    check_one_loss(loss_fn, grad_cache)
    if isinstance(optimizer, paddle.optimizer.LBFGS):
        raise ConfigError(
            "the optimizer is LBFGS, whose step() runs forward and backward itself, several "
            "times; TrainStep makes one of each. Use another optimizer, or call LBFGS yourself"
        )


def check_one_loss(loss_fn: object, grad_cache: object) -> None:
    """Check that there is one way to compute the gradient.

    Raises:
        ConfigError: There is none, or two.
    """
    if (loss_fn is None) == (grad_cache is None):
        raise ConfigError(
            f"received {'neither' if loss_fn is None else 'both'} of loss_fn and grad_cache; "
            "give one of them: a gradient cache has a loss of its own"
        )
