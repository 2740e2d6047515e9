"""What cannot be sharded: models and optimizers that `ShardedOptimizer` refuses."""

from __future__ import annotations

from collections.abc import Sequence

import paddle

from paddle_recompute._paddle.layers import parameters_of_optimizer
from paddle_recompute._paddle.updates import check_treats_each_alone
from paddle_recompute.errors import ConfigError
from paddle_recompute.grad_sync import offloaded_gradients_of


def check_model(model: paddle.nn.Layer, num_ranks: int) -> list[paddle.Tensor]:
    """The trained parameters of `model`, each once.

    Raises:
        ConfigError: `model` cannot be sharded.
    """
    if not paddle.in_dynamic_mode():
        raise ConfigError("ShardedOptimizer is for dygraph; use a plain optimizer here")
    if isinstance(model, paddle.DataParallel):
        raise ConfigError(
            "the model is in paddle.DataParallel; give ShardedOptimizer the bare Layer, whose "
            "gradients TrainStep or GradientSync synchronizes"
        )
    for layer in model.sublayers(include_self=True):
        if type(layer).__name__ in ("GroupShardedStage2", "GroupShardedStage3"):
            raise ConfigError(
                f"the model has a {type(layer).__name__}, which is Paddle's own sharding; give "
                "ShardedOptimizer the bare Layer. It has stage 1 alone: all ranks have all "
                "gradients and parameters. To keep parameters and gradients off the device, use "
                "OffloadSequential instead"
            )
    parameters = trained_of(model)
    away = [p.name for p in parameters if offloaded_gradients_of(p) is not None]
    if away:
        raise ConfigError(
            f"{away[0]} is offloaded to host or disk, and its optimizer state with it; use "
            "model.optimizer(...) instead of ShardedOptimizer"
        )
    if len(parameters) < num_ranks:
        raise ConfigError(
            f"the model trains {len(parameters)} parameters, and there are {num_ranks} ranks, each "
            "of which must own at least one; use the plain optimizer"
        )
    return parameters


def trained_of(model: paddle.nn.Layer) -> list[paddle.Tensor]:
    """The parameters of `model` that need a gradient, each once."""
    return list({id(p): p for p in model.parameters() if not p.stop_gradient}.values())


def check_optimizer(optimizer: object, own: Sequence[paddle.Tensor]) -> None:
    """Check that `optimizer` updates each of `own` by itself, and nothing else.

    Raises:
        ConfigError: It does not.
    """
    if not isinstance(optimizer, paddle.optimizer.Optimizer):
        raise ConfigError(
            f"make_optimizer returned {type(optimizer).__name__}; it must return an optimizer of "
            "paddle.optimizer over the parameters that it is given. Optimizers of fleet and of "
            "group_sharded_parallel, which shard by themselves, are not supported"
        )
    check_treats_each_alone(optimizer, "those of one rank only")
    updated = parameters_of_optimizer(optimizer)
    if {id(p) for p in updated} != {id(p) for p in own}:
        raise ConfigError(
            f"the optimizer of make_optimizer has {len(updated)} parameters, and this rank owns "
            f"{len(own)}; make it over the list that make_optimizer is given: "
            "lambda parameters: AdamW(parameters=parameters)"
        )
