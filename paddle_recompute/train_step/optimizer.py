"""AdamW and its learning rate, as the configuration asks for them."""

from __future__ import annotations

from collections.abc import Iterable

import paddle
from paddle.optimizer import AdamW, lr

from paddle_recompute.config import Config


def build_schedule(config: Config, total_steps: int) -> lr.LRScheduler:
    """The learning rate of every step: a linear warm-up, then the decay of the configuration.

    The first step has ``peak / warmup_steps``, not 0, which would waste it; step
    ``warmup_steps`` has the peak; a decay reaches 0 one step after the last.

    Args:
        config: ``config.learning_rate`` is the peak, ``config.train`` has the rest.
        total_steps: Optimizer steps of the whole run.

    Returns:
        A scheduler at step 0; ``step()`` is to be called after each optimizer step.
    """
    peak, warmup = config.learning_rate, config.train.warmup_steps
    decay_steps = max(1, total_steps - warmup)
    schedule: lr.LRScheduler
    if config.train.decay == "linear":
        schedule = lr.PolynomialDecay(peak, decay_steps=decay_steps, end_lr=0.0, power=1.0)
    elif config.train.decay == "cosine":
        schedule = lr.CosineAnnealingDecay(peak, T_max=decay_steps)
    else:
        schedule = lr.LambdaDecay(peak, lr_lambda=lambda step: 1.0)
    if warmup <= 1:  # the first step has the peak either way
        return schedule
    return lr.LinearWarmup(schedule, warmup_steps=warmup, start_lr=peak / warmup, end_lr=peak)


def build_optimizer(
    config: Config,
    model: paddle.nn.Layer,
    schedule: lr.LRScheduler | float,
    besides: Iterable[paddle.Tensor] = (),
) -> AdamW:
    """AdamW over all trainable parameters; biases and LayerNorms are not decayed.

    Clipping is the train step's: it must see the gradients of all ranks together.

    Args:
        config: ``config.train`` has the weight decay.
        model: Its parameters are trained.
        schedule: The learning rate.
        besides: More parameters to train, which are not decayed: those of the loss.
    """
    decayed = decayed_parameters(model)
    return AdamW(
        learning_rate=schedule,
        parameters=[p for p in [*model.parameters(), *besides] if not p.stop_gradient],
        weight_decay=config.train.weight_decay,
        apply_decay_param_fun=decayed.__contains__,
    )


def decayed_parameters(model: paddle.nn.Layer) -> frozenset[str]:
    """Paddle's names (``linear_0.w_0``) of the parameters that weight decay applies to."""
    norms = {
        id(parameter)
        for layer in model.sublayers(include_self=True)
        if isinstance(layer, paddle.nn.LayerNorm)
        for parameter in layer.parameters()
    }
    return frozenset(
        parameter.name
        for name, parameter in model.named_parameters()
        if id(parameter) not in norms and not name.endswith("bias")
    )
