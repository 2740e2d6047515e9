"""Which parameters a step trains, updates and synchronizes: looked up anew in each step."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from operator import is_

import paddle

from paddle_recompute._paddle.flat import is_frozen
from paddle_recompute._paddle.gradients import keeps_main_grad
from paddle_recompute._paddle.guarded import gradient_of
from paddle_recompute._paddle.layers import parameters_of_optimizer
from paddle_recompute._paddle.walk import ParameterWalk
from paddle_recompute.contrastive import GradCache
from paddle_recompute.errors import ConfigError
from paddle_recompute.grad_sync import GradientSync, SyncMode, offloaded_gradients_of
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


class TrainedParameters:
    """What a step trains, updates and clears; looked up anew in each step.

    Attributes:
        trained: What the model trains, and what the optimizer updates besides, each once.
        updated: Those that the optimizer has; all, where it cannot be told.
        stepped: Paddle's names of the parameters that it has updated, which have moments.

    Args:
        model: The Layer.
        optimizer: Its optimizer.

    Raises:
        ConfigError: A parameter keeps its gradient in ``main_grad``.
    """

    def __init__(self, model: paddle.nn.Layer, optimizer: paddle.optimizer.Optimizer) -> None:
        self._optimizer = optimizer
        self._walk = ParameterWalk(model)
        self._looked_at: list[paddle.Tensor] = []  # the lists follow from them
        self._state: tuple[int, list[bool]] = 0, []  # and from which of these are frozen
        self.trained: list[paddle.Tensor] = []
        self.updated: list[paddle.Tensor] = []
        self._cleared_here: Sequence[paddle.Tensor] = ()  # not by the optimizer
        self.stepped: set[str] = set()
        self._without_moments: list[paddle.Tensor] = []
        self._find(self._walk.parameters())
        self._warn_of_not_updated()

    def note_trained(self, sync: GradientSync) -> None:
        """Find out what is trained now; it may have changed since the last step.

        Raises:
            ConfigError: A new one keeps its gradient in ``main_grad``, or `sync` leaves it out.
        """
        own, listed = self._walk.parameters(), parameters_of_optimizer(self._optimizer)
        everything = [*own, *listed]
        state = len(own), [*map(is_frozen, everything)]
        if state != self._state or not all(map(is_, everything, self._looked_at)):
            self._find(own, sync)
            self._state, self._looked_at = state, everything

    def _find(self, own: Sequence[paddle.Tensor], sync: GradientSync | None = None) -> None:
        """Fill the lists, if all that is new may be trained; whoever catches the error gets it
        again in the next step.
        """
        before = {*map(id, self.trained)}
        trained = [p for p in all_parameters(own, self._optimizer) if not p.stop_gradient]
        new = [parameter for parameter in trained if id(parameter) not in before]
        refuse_main_grad(new)
        if sync is not None:
            # A parameter that was replaced in the model stays in the optimizer, without a gradient.
            has_gradient = [p for p in trained if gradient_of(p) is not None]
            check_all_synchronized(sync, [*new, *has_gradient])
        self.trained = trained
        of_optimizer = {*map(id, parameters_of_optimizer(self._optimizer))}
        self.updated = [p for p in trained if id(p) in of_optimizer or not of_optimizer]
        self._cleared_here = [p for p in own if p.stop_gradient or id(p) not in of_optimizer]
        self._without_moments = [p for p in self.updated if p.name not in self.stepped]

    def _warn_of_not_updated(self) -> None:
        of_optimizer = {*map(id, self.updated)}
        names = [parameter.name for parameter in self.trained if id(parameter) not in of_optimizer]
        if names:
            _logger.warning(
                "the optimizer does not have %s%s of the model, so they do not change, and their "
                "gradients are cleared without being counted. If that is wanted, freeze them "
                "(stop_gradient = True): the backward takes less time then",
                ", ".join(names[:_SHOWN]),
                f" and {len(names) - _SHOWN} more parameters" if len(names) > _SHOWN else "",
            )

    def note_stepped(self) -> None:
        """Record what the optimizer updates in this step; costs nothing once all have moments."""
        if self._without_moments:
            self.stepped.update(p.name for p in self._without_moments if p.grad is not None)
            self._without_moments = [p for p in self._without_moments if p.grad is None]

    def clear_gradients(self, *, after_error: bool = False) -> None:
        """Clear the gradients of all of them, and of what was frozen with one.

        Args:
            after_error: Whether the step has failed, maybe before `note_trained`.
        """
        # Not set_to_zero: a parameter that has no gradient in the next step must not be decayed.
        self._optimizer.clear_grad(set_to_zero=False)
        for parameter in self._walk.parameters() if after_error else self._cleared_here:
            if parameter.stop_gradient or gradient_of(parameter) is not None:
                parameter.clear_gradient(False)


def offload_optimizer(
    model: paddle.nn.Layer, optimizer: paddle.optimizer.Optimizer | OffloadOptimizer
) -> OffloadOptimizer | None:
    """`optimizer`, if it is that of an offloaded model.

    Raises:
        ConfigError: `model` is offloaded, and `optimizer` is a plain one.
    """
    if isinstance(optimizer, OffloadOptimizer):
        return optimizer
    names = [p.name for p in model.parameters() if offloaded_gradients_of(p) is not None]
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
    *,
    broadcast_parameters: bool,
) -> GradientSync:
    """The `GradientSync` of a step: over all of `parameters`; that of `cache`, if it has one.

    Raises:
        ConfigError: It is not over all of them, or there are two.
    """
    in_model = {id(parameter) for parameter in model.parameters()}
    besides = [parameter for parameter in parameters if id(parameter) not in in_model]
    has_own = isinstance(given, GradientSync) or (cache is not None and cache.sync is not None)
    if broadcast_parameters and has_own:
        raise ConfigError(
            "broadcast_parameters=True was given to TrainStep with a GradientSync; give it to that "
            "GradientSync"
        )
    if isinstance(given, GradientSync):
        sync = given
    elif cache is not None and cache.sync is not None:
        sync = cache.sync
    elif not besides:
        sync = GradientSync(model, mode=given, broadcast_parameters=broadcast_parameters)
    elif isinstance(model, paddle.DataParallel) and cache is None:
        raise ConfigError(
            f"the optimizer updates {', '.join(p.name for p in besides)}, and the model in "
            "paddle.DataParallel does not have it; pass the bare Layer, which is synchronized here"
        )
    else:
        sync = GradientSync(
            lambda: all_parameters(model.parameters(), optimizer),
            mode=given,
            broadcast_parameters=broadcast_parameters,
        )
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
