"""Which parameters a step trains, updates and synchronizes: looked up anew in each step."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import paddle

from paddle_recompute._paddle.flat import are_sparse
from paddle_recompute._paddle.gradients import keeps_main_grad
from paddle_recompute._paddle.guarded import gradient_of
from paddle_recompute._paddle.layers import parameters_of_optimizer
from paddle_recompute.contrastive import GradCache
from paddle_recompute.errors import ConfigError
from paddle_recompute.grad_sync import GradientSync, SyncMode, owner_of
from paddle_recompute.offload import OffloadOptimizer
from paddle_recompute.sharding import ShardedOptimizer

_SHOWN = 5
_logger = logging.getLogger("paddle_recompute")


def all_parameters(
    own: Sequence[paddle.Tensor], optimizer: paddle.optimizer.Optimizer
) -> list[paddle.Tensor]:
    """Those of a model, its `own`, and what `optimizer` updates besides, each once; frozen ones
    too.
    """
    return list({id(p): p for p in [*own, *parameters_of_optimizer(optimizer)]}.values())


def trained(
    own: Sequence[paddle.Tensor], optimizer: paddle.optimizer.Optimizer
) -> list[paddle.Tensor]:
    """What a model trains of its `own`, and what `optimizer` updates besides, each once."""
    return [p for p in all_parameters(own, optimizer) if not p.stop_gradient]


def updated(
    trained: list[paddle.Tensor], optimizer: paddle.optimizer.Optimizer
) -> list[paddle.Tensor]:
    """Those of `trained` that `optimizer` has; all, where it cannot be told."""
    of_optimizer = {id(p) for p in parameters_of_optimizer(optimizer)}
    return [p for p in trained if id(p) in of_optimizer] if of_optimizer else trained


def warn_of_not_updated(
    trained: list[paddle.Tensor], optimizer: paddle.optimizer.Optimizer
) -> None:
    """Warn of those of `trained` that `optimizer` does not have."""
    of_optimizer = {id(parameter) for parameter in updated(trained, optimizer)}
    names = [parameter.name for parameter in trained if id(parameter) not in of_optimizer]
    if names:
        _logger.warning(
            "the optimizer does not have %s%s of the model, so they do not change, and their "
            "gradients are cleared without being counted. If that is wanted, freeze them "
            "(stop_gradient = True): the backward takes less time then",
            ", ".join(names[:_SHOWN]),
            f" and {len(names) - _SHOWN} more parameters" if len(names) > _SHOWN else "",
        )


def offload_optimizer(
    model: paddle.nn.Layer, optimizer: paddle.optimizer.Optimizer | OffloadOptimizer
) -> OffloadOptimizer | None:
    """`optimizer`, if it is that of an offloaded model.

    Raises:
        ConfigError: `model` is offloaded, and `optimizer` is a plain one.
    """
    if isinstance(optimizer, OffloadOptimizer):
        return optimizer
    names = [p.name for p in model.parameters() if owner_of(p) is not None]
    if names:
        raise ConfigError(
            f"{names[0]} is offloaded, and {type(optimizer).__name__} has its state on the device; "
            "make the optimizer with model.optimizer(lambda parameters: ...)"
        )
    return None


def refuse_main_grad(parameters: list[paddle.Tensor]) -> None:
    """Raise ConfigError if one of `parameters` keeps its gradient in ``main_grad``."""
    names = [p.name for p in parameters if keeps_main_grad(p)]
    if names:
        raise ConfigError(
            f"{names[0]} keeps its gradient in main_grad (fleet's MixPrecisionLayer), which "
            "TrainStep does not look at. Give it the Layer without MixPrecisionLayer, and "
            "amp=AmpConfigs(level='O2') for the same"
        )


def refuse_sparse(parameters: list[paddle.Tensor], gradients: list[paddle.Tensor]) -> None:
    """Raise ConfigError if one of `gradients`, of `parameters`, is sparse; it has no norm."""
    if are_sparse(gradients):
        number = [gradient.is_selected_rows() for gradient in gradients].index(True)
        with_gradient = [one for one in parameters if gradient_of(one) is not None]
        raise ConfigError(
            f"the gradient of {with_gradient[number].name} is sparse (SelectedRows), of which "
            "Paddle computes no norm; make its Embedding with sparse=False"
        )


def check_sharded(
    model: paddle.nn.Layer, optimizer: paddle.optimizer.Optimizer, sync: GradientSync
) -> None:
    """Raise ConfigError if `optimizer` is sharded, and `model` or `sync` does not go with that."""
    if not isinstance(optimizer, ShardedOptimizer):
        return
    if isinstance(model, paddle.DataParallel):
        raise ConfigError(
            "a ShardedOptimizer does not go with paddle.DataParallel; give TrainStep the bare "
            "Layer, whose gradients it synchronizes itself"
        )
    if sync.mode == "fleet":
        raise ConfigError(
            "a ShardedOptimizer does not go with sync mode 'fleet', the reference for a replicated "
            "run; use 'overlap' or 'fused'"
        )


def synchronization_of(
    given: SyncMode | GradientSync,
    model: paddle.nn.Layer,
    optimizer: paddle.optimizer.Optimizer,
    parameters: list[paddle.Tensor],
    cache: GradCache | None,
) -> GradientSync:
    """The `GradientSync` of a step: over all of `parameters`; that of `cache`, if it has one.

    Raises:
        ConfigError: It is not over all of them, or there are two.
    """
    in_model = {id(parameter) for parameter in model.parameters()}
    besides = [parameter for parameter in parameters if id(parameter) not in in_model]
    if isinstance(given, GradientSync):
        sync = given
    elif cache is not None and cache.sync is not None:
        sync = cache.sync
    elif not besides:
        sync = GradientSync(model, mode=given)
    elif isinstance(model, paddle.DataParallel) and cache is None:
        raise ConfigError(
            f"the optimizer updates {', '.join(p.name for p in besides)}, and the model in "
            "paddle.DataParallel does not have it; pass the bare Layer, which is synchronized here"
        )
    else:
        sync = GradientSync(lambda: all_parameters(model.parameters(), optimizer), mode=given)
    if cache is not None and cache.sync is not None and cache.sync is not sync:
        raise ConfigError(
            "grad_cache has a GradientSync, and sync is another one; leave one of them out"
        )
    check_all_synchronized(sync, parameters)
    return sync


def check_all_synchronized(sync: GradientSync, parameters: list[paddle.Tensor]) -> None:
    """Raise ConfigError if `sync` leaves out one of `parameters`."""
    synchronized = {id(parameter) for parameter in sync.parameters}
    missing = [p.name for p in parameters if id(p) not in synchronized]
    if missing:
        raise ConfigError(
            f"sync does not synchronize {', '.join(missing)}, which the optimizer updates or the "
            "model trains, so the ranks would drift apart; make it over all of them: "
            "GradientSync([*model.parameters(), *loss.parameters()])"
        )
