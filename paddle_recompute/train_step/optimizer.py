"""The optimizer of a step."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

import paddle
from paddle.incubate.optimizer import LarsMomentumOptimizer
from paddle.optimizer import AdamW, Lamb, lr

from paddle_recompute.offload import OffloadOptimizer, offloaded_optimizer
from paddle_recompute.options import Options
from paddle_recompute.train_step.step import LOSS_PREFIX

LARS_MOMENTUM = 0.9
"""``lars_configs`` has none: fleet takes it from the Momentum that it replaces."""


@dataclass(frozen=True)
class OptimizerConfig(Options):
    """AdamW, or what fleet makes of it: Paddle's Lamb or LarsMomentum.

    Attributes:
        name: Which one.
        weight_decay: Its weight decay; AdamW decays no bias, LayerNorm, loss or temperature.
        exclude_from_weight_decay: Parameters without weight decay, by Paddle's names: ends of them
            (``.b_0``) for Lamb, parts of them (``layer_norm``) for LARS.
        lars_coeff: The trust coefficient of LARS.
        lars_epsilon: Added to the denominator of its trust ratio.

    Raises:
        ConfigError: A value is not allowed.
    """

    name: Literal["adamw", "lamb", "lars"] = "adamw"
    weight_decay: float = field(default=0.01, metadata={"at_least": 0})
    exclude_from_weight_decay: list[str] = field(default_factory=list)
    lars_coeff: float = field(default=0.001, metadata={"above": 0})
    lars_epsilon: float = field(default=0.0, metadata={"at_least": 0})


def build_optimizer(
    options: OptimizerConfig,
    model: paddle.nn.Layer,
    schedule: lr.LRScheduler | float,
    besides: Iterable[paddle.Tensor] = (),
) -> paddle.optimizer.Optimizer | OffloadOptimizer:
    """The optimizer of all trainable parameters; one for each shard of what is offloaded.

    Clipping is the train step's: it must see the gradients of all ranks together.

    Args:
        options: Which optimizer.
        model: Its parameters are trained.
        schedule: The learning rate.
        besides: More parameters to train, which AdamW does not decay: those of the loss.
    """
    decayed = decayed_parameters(model)

    def make(parameters: list[paddle.Tensor]) -> paddle.optimizer.Optimizer:
        return make_optimizer(options, schedule, parameters, decayed)

    parameters = [p for p in [*model.parameters(), *besides] if not p.stop_gradient]
    return offloaded_optimizer(model, parameters, make) or make(parameters)


def make_optimizer(
    options: OptimizerConfig,
    schedule: lr.LRScheduler | float,
    parameters: list[paddle.Tensor],
    decayed: frozenset[str],
    grad_clip: Any = None,
) -> paddle.optimizer.Optimizer:
    """The optimizer that `options` describe.

    Args:
        options: Which optimizer.
        schedule: The learning rate.
        parameters: What it updates, in dygraph or of a Program.
        decayed: Paddle's names of the parameters that AdamW decays.
        grad_clip: For a Program; `TrainStep` clips itself.

    References:
        You et al. 2017, "Large Batch Training of Convolutional Networks", arXiv:1708.03888 (LARS);
        You et al. 2019, "Large Batch Optimization for Deep Learning", arXiv:1904.00962 (LAMB).
    """
    if options.name == "lamb":
        ends = tuple(options.exclude_from_weight_decay)
        return Lamb(
            learning_rate=schedule,
            lamb_weight_decay=options.weight_decay,
            parameters=parameters,
            grad_clip=grad_clip,
            exclude_from_weight_decay_fn=(lambda one: one.name.endswith(ends)) if ends else None,
        )
    if options.name == "lars":
        return LarsMomentumOptimizer(
            learning_rate=schedule,
            momentum=LARS_MOMENTUM,
            parameter_list=parameters,
            grad_clip=grad_clip,
            lars_coeff=options.lars_coeff,
            lars_weight_decay=options.weight_decay,
            epsilon=options.lars_epsilon,
            exclude_from_weight_decay=options.exclude_from_weight_decay,
        )
    return AdamW(
        learning_rate=schedule,
        parameters=parameters,
        weight_decay=options.weight_decay,
        apply_decay_param_fun=decayed.__contains__,
        grad_clip=grad_clip,
    )


def decayed_parameters(model: paddle.nn.Layer) -> frozenset[str]:
    """Paddle's names (``linear_0.w_0``) of the parameters that weight decay applies to: all but
    biases, those of LayerNorms and of the loss, and a learned temperature (``logit_scale``, as CLIP
    calls it).
    """
    norms = {
        id(parameter)
        for layer in model.sublayers(include_self=True)
        if isinstance(layer, paddle.nn.LayerNorm)
        for parameter in layer.parameters()
    }
    return frozenset(
        parameter.name
        for name, parameter in model.named_parameters()
        if id(parameter) not in norms
        and not name.startswith(LOSS_PREFIX)
        and not name.endswith(("bias", "logit_scale"))
    )
