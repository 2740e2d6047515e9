"""`ShardedOptimizer`: each rank updates a part of the parameters and has only their state."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import paddle
import paddle.distributed as dist
from paddle.distributed.communication.group import Group

from paddle_recompute._paddle.updates import MASTERS, SCHEDULE, parameter_of_state, part_of_state
from paddle_recompute._paddle.walk import ParameterWalk
from paddle_recompute.captured_state import note_write
from paddle_recompute.distributed import (
    agree_on_parameters,
    first_that_differs,
    gathered,
    is_distributed,
    parts_of_owners,
    scope_of,
)
from paddle_recompute.errors import CheckpointError, ConfigError, SyncError
from paddle_recompute.sharding._all_gather import ParameterAllGather
from paddle_recompute.sharding._supported import check_model, check_optimizer


class ShardedOptimizer:
    """An optimizer whose state is spread over the ranks; parameters and gradients are not.

    Each parameter is owned by one rank as a whole, not cut into flat shards, so a step is bitwise
    that of the plain optimizer, also if the update uses a norm of the parameter (Lamb). With P
    float32 parameters on n ranks, AdamW takes 8 P / n bytes for its moments instead of 8 P;
    parameters and gradients take 8 P as before. After the update an all-gather sends the new values
    from their owners to all ranks: each receives (n - 1) / n of the bytes of the model.

    It has what `TrainStep` and a loop of your own need of a Paddle optimizer: `step`, `clear_grad`,
    `get_lr`, `set_lr`, `state_dict`, `set_state_dict`. In a loop of your own, synchronize the
    gradients before `step`, as with a plain optimizer (`GradientSync`): a rank updates its
    parameters from its own ``.grad``.

    References:
        Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter
        Models", arXiv:1910.02054, section 5.1: stage 1.

    Examples:
        >>> import paddle
        >>> from paddle_recompute import ShardedOptimizer, TrainStep
        >>> model = paddle.nn.Linear(4, 1)
        >>> def make(parameters):
        ...     return paddle.optimizer.AdamW(1e-3, parameters=parameters)
        >>> optimizer = ShardedOptimizer(make, model)
        >>> step = TrainStep(model, optimizer, loss_fn=lambda model, x: model(x).square().mean())
        >>> step([paddle.ones([8, 4])]).grad_norm > 0
        True
    """

    def __init__(
        self,
        make_optimizer: Callable[[list[paddle.Tensor]], paddle.optimizer.Optimizer],
        model: paddle.nn.Layer,
        group: Group | None = None,
        *,
        debug: bool = False,
    ) -> None:
        """Make the optimizer of what this rank owns. Every rank of `group` calls this.

        Args:
            make_optimizer: Makes a Paddle optimizer over the parameters that it is given.
            model: Its trained parameters are updated; a replica on every rank. Where a loss has
                parameters too: ``paddle.nn.LayerDict({"model": model, "loss": loss})``.
            group: The data-parallel ranks; None is all of them.
            debug: Compare the parameters of all ranks after each update, bit by bit; takes about
                1 s per GB.

        Raises:
            ConfigError: `model` or the optimizer cannot be sharded; the message says what to use.
            SyncError: The ranks have different parameters.
        """
        self._model, self._group = model, group
        self._debug = debug
        ranks = scope_of(group).ranks if is_distributed(group) else (0,)
        self._parameter_list = check_model(model, len(ranks))
        self._known = {id(parameter) for parameter in self._parameter_list}
        self._walk = ParameterWalk(model)
        self._all_gather: ParameterAllGather | None = None
        parts = parts_of_owners(self._parameter_list, len(ranks))
        own = parts[0]
        if len(ranks) > 1:
            agree_on_parameters(
                self._names(), self._parameter_list, structured=True, scope=scope_of(group)
            )
            own = parts[ranks.index(dist.get_rank())]
            self._all_gather = ParameterAllGather(parts, self._parameter_list, group)
        self._num_updates = 0
        self.owned = frozenset(parameter.name for parameter in own)
        """Paddle's names of the parameters that this rank owns."""
        self.inner = make_optimizer(own)
        """Paddle's optimizer of what this rank owns."""
        self._is_updating = False
        check_optimizer(self.inner, own)

    @property
    def is_updating(self) -> bool:
        """Whether an update has begun and not reached all ranks; stays true after a failed one."""
        return self._is_updating

    def step(self) -> None:
        """Update what this rank owns, then gather the new values of all parameters.

        Raises:
            ConfigError: A parameter was added or unfrozen.
            PeerError: A rank has died, stopped or failed.
            SyncError: An earlier update did not reach all ranks; or, with ``debug``, a parameter
                differs between them.
        """
        self._check_last_update()
        new = [
            p.name
            for p in self._walk.parameters()
            if id(p) not in self._known and not p.stop_gradient
        ]
        if new:
            raise ConfigError(
                f"{new[0]} was added or unfrozen after the ShardedOptimizer was made, and has no "
                "owner; make a new ShardedOptimizer, or freeze it (stop_gradient)"
            )
        self._is_updating = True
        self.inner.step()
        self._num_updates += 1
        if self._all_gather is not None:
            for parameter in self._parameter_list:
                if parameter.grad is not None:
                    note_write(parameter)
            self._all_gather.send(self._num_updates)
            if self._debug:
                self._check_replicas()
        self._is_updating = False

    def clear_grad(self, set_to_zero: bool = True) -> None:
        """Clear the gradients of all parameters, owned or not."""
        for parameter in self._parameter_list:
            parameter.clear_gradient(set_to_zero)

    clear_gradients = clear_grad

    def get_lr(self) -> float:
        """The learning rate."""
        return float(self.inner.get_lr())

    def set_lr(self, value: float) -> None:
        """Set the learning rate; the same on all ranks."""
        self.inner.set_lr(value)

    def state_dict(self) -> dict[str, Any]:
        """The whole state, as the plain optimizer's. All ranks call this.

        What other ranks own comes as arrays in host memory.

        Raises:
            PeerError: A rank has died, stopped or failed.
            SyncError: An update did not reach all ranks.
        """
        self._check_last_update()
        state = dict(self.inner.state_dict())
        schedule = state.pop(SCHEDULE, None)
        # Paddle's names count the Layers of a process, so ranks may differ in them.
        masters = state.pop(MASTERS, {})
        own = {f"{self._index(name)}:{MASTERS}": master for name, master in masters.items()}
        for key, value in state.items():
            owner = parameter_of_state(key, self.owned)
            own[f"{self._index(owner)}:{key[len(owner) :]}"] = value
        whole: dict[str, Any] = {}
        for key, value in self.gathered(own).items():
            index, _, rest = key.partition(":")
            name = self._parameter_list[int(index)].name
            if rest == MASTERS:
                whole.setdefault(MASTERS, {})[name] = value
            else:
                whole[f"{name}{rest}"] = value
        return whole if schedule is None else {**whole, SCHEDULE: schedule}

    def set_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the `state_dict` of a ShardedOptimizer, saved on any number of ranks, or of the
        plain optimizer; each rank takes what it owns.

        Raises:
            CheckpointError: An entry belongs to no parameter of the model.
        """
        known = {p.name for p in (*self._parameter_list, *self._model.parameters())}
        owners = {k: parameter_of_state(k, known) for k in state if k not in (MASTERS, SCHEDULE)}
        foreign = [key for key, owner in owners.items() if not owner]
        foreign += [name for name in state.get(MASTERS, {}) if name not in known]
        if foreign:
            raise CheckpointError(
                f"the optimizer state has '{foreign[0]}', which is of no parameter of the model; "
                f"these are named as '{self._parameter_list[0].name}'. Paddle numbers the Layers "
                "of a process: the model must be made in the same order as that of the state. "
                "TrainStep.state_dict() does not depend on it"
            )
        self.inner.set_state_dict(part_of_state(state, owners, self.owned))

    def gathered(self, own: Mapping[str, Any], *, keep: bool = True) -> dict[str, Any]:
        """The entries of all ranks, gathered tensor by tensor. All ranks call this.

        Args:
            own: Entries of this rank, under names that no other rank has.
            keep: Whether the result has the entries of the other ranks too.

        Raises:
            PeerError: A rank has died, stopped or failed.
            SyncError: An update did not reach all ranks.
        """
        self._check_last_update()
        return dict(own) if self._all_gather is None else gathered(own, self._group, keep)

    def _check_last_update(self) -> None:
        if self._is_updating:
            raise SyncError(
                f"update {self._num_updates} of the ShardedOptimizer did not reach all ranks, so "
                "their parameters differ; resume from the last checkpoint"
            )

    def _check_replicas(self) -> None:
        difference = first_that_differs(self._parameter_list, scope_of(self._group))
        if difference is not None:
            index, ranks = difference
            raise SyncError(
                f"'{self._names()[index]}' differs on rank {', '.join(map(str, ranks))} after "
                f"update {self._num_updates} of the ShardedOptimizer. Something changes it on some "
                "ranks only, outside of the optimizer"
            )

    def _names(self) -> list[str]:
        """Structured names of the parameters; of one that has left the model, Paddle's name."""
        names = {id(parameter): name for name, parameter in self._model.named_parameters()}
        return [names.get(id(p), p.name) for p in self._parameter_list]

    def _index(self, name: str) -> int:
        return [parameter.name for parameter in self._parameter_list].index(name)


def inner_of(optimizer: Any) -> Any:
    """Paddle's optimizer inside a `ShardedOptimizer`; any other as it is."""
    return optimizer.inner if isinstance(optimizer, ShardedOptimizer) else optimizer
