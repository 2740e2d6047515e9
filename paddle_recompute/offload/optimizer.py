"""`OffloadOptimizer`: one Paddle optimizer per shard; the device holds one shard at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import paddle

from paddle_recompute._paddle import device
from paddle_recompute._paddle.layers import parameters_of_optimizer
from paddle_recompute._paddle.released_memory import has_memory
from paddle_recompute._paddle.updates import (
    MASTERS,
    SCHEDULE,
    check_treats_each_alone,
    parameter_of_state,
    part_of_state,
)
from paddle_recompute.errors import OffloadError
from paddle_recompute.grad_sync import offloaded_gradients_of
from paddle_recompute.offload._chain import Chain, Shard
from paddle_recompute.offload._gradients import OnComplete
from paddle_recompute.offload._offloaded_tensor import OffloadedTensor
from paddle_recompute.offload._state import on_host

MakeOptimizer = Callable[[list[paddle.Tensor]], paddle.optimizer.Optimizer]


class OffloadOptimizer:
    """Updates shard by shard: parameters, gradients and optimizer state of one shard are on the
    device, and those of the next one on their way.

    It has what `TrainStep` and a loop of your own need of a Paddle optimizer: `step`, `clear_grad`,
    `get_lr`, `set_lr`, `state_dict`, `set_state_dict`. Made by `OffloadSequential.optimizer`.
    """

    def __init__(
        self, chains: Iterable[Chain], parameters: Iterable[paddle.Tensor], make: MakeOptimizer
    ) -> None:
        """Make the optimizers.

        Args:
            chains: The offloaded shards.
            parameters: All trained parameters; those that are not offloaded get one optimizer.
            make: ``make(parameters)`` returns the optimizer of a shard, or of the other parameters.

        Raises:
            ConfigError: The optimizer does not treat each parameter by itself (LBFGS, clipping by a
                norm over all parameters).
        """
        self._chains = list(chains)
        self._parameter_list = list({id(p): p for p in parameters}.values())
        rest = [p for p in self._parameter_list if offloaded_gradients_of(p) is None]
        self._rest = make(rest) if rest else None
        self._optimizer_of = {
            id(shard): make(shard.gradients.parameters)
            for chain in self._chains
            for shard in chain.shards
            if shard.parameters
        }
        self._state: dict[int, list[OffloadedTensor]] = {key: [] for key in self._optimizer_of}
        """By the id of a shard: the optimizer state that comes to the device for its update."""
        self._stepped: set[int] = set()
        """The ids of the shards whose optimizers have made a step, and so their accumulators."""
        self._gradient_factor: float | None = None
        for optimizer in self.optimizers:
            check_treats_each_alone(optimizer, "those of one shard only")

    @property
    def optimizers(self) -> list[paddle.optimizer.Optimizer]:
        """One of each shard; before them that of the parameters that are not offloaded."""
        first = [self._rest] if self._rest is not None else []
        return [*first, *self._optimizer_of.values()]

    @property
    def is_spread(self) -> bool:
        """Whether other ranks have the optimizer state of some shards (``offload="ranks"``)."""
        return any(not shard.is_own for chain in self._chains for shard in chain.shards)

    @property
    def shared(self) -> frozenset[str]:
        """Paddle's names of the parameters that every rank updates."""
        return frozenset(p.name for p in self._parameter_list if offloaded_gradients_of(p) is None)

    @property
    def owned(self) -> frozenset[str]:
        """Paddle's names of the parameters that this rank updates."""
        own = [p.name for shard, _ in self._own_shards() for p in shard.gradients.parameters]
        return self.shared.union(own)

    # ------------------------------------------------------------------------- for TrainStep

    def set_on_complete(self, on_complete: OnComplete) -> None:
        """Set what is done to each gradient of the step when it is complete.

        Raises:
            OffloadError: A shard is resident.
        """
        for chain in self._chains:
            if chain.gradients.is_lent:
                raise OffloadError(
                    "TrainStep was called inside of resident(), where the gradients are in .grad "
                    "and their norm is not computed shard by shard; call it outside"
                )
            chain.gradients.on_complete = on_complete

    def squares(self) -> dict[int, paddle.Tensor]:
        """The sum of squares of each offloaded gradient, ``[1]``, by the id of its parameter."""
        return {
            id(shard.gradients.parameters[index]): square
            for chain in self._chains
            for shard in chain.shards
            for index, square in shard.gradients.squares.items()
        }

    def scale_gradients(self, factor: float) -> None:
        """Multiply the offloaded gradients by `factor`, in the step that follows."""
        self._gradient_factor = factor

    # ---------------------------------------------------------------- as a Paddle optimizer

    def step(self) -> None:
        """Update all parameters. The gradients stay until they are cleared, as in Paddle."""
        if self._rest is not None:
            self._rest.step()
        for chain in self._chains:
            if not chain.gradients.is_complete:  # there was no last_backward() of a GradientSync
                chain.gradients.finish()
            if chain.is_spread:
                self._step_own_shards(chain)
            else:
                for index in reversed(range(len(chain.shards))):
                    with chain.use(index, [index - 1]):
                        self._step_shard(chain, index)
            chain.end_step()
        self._gradient_factor = None

    def clear_grad(self, set_to_zero: bool = True) -> None:
        """Clear the gradients.

        Args:
            set_to_zero: As in Paddle: existing gradients become zero, so that a parameter without a
                new one in the next step is still decayed, and moved by its momentum. The zeros take
                no memory. False: the gradients are removed.
        """
        if self._rest is not None:
            self._rest.clear_grad(set_to_zero=set_to_zero)
        for chain in self._chains:
            for shard in chain.shards:
                shard.gradients.clear_all(set_to_zero=set_to_zero)
            chain.end_step()
        self._gradient_factor = None

    clear_gradients = clear_grad

    def get_lr(self) -> float:
        """The learning rate."""
        return float(self.optimizers[0].get_lr())

    def set_lr(self, value: float) -> None:
        """Set the learning rate, of every optimizer."""
        for optimizer in self.optimizers:
            optimizer.set_lr(value)

    def state_dict(self) -> dict[str, Any]:
        """As the plain optimizer's; offloaded state is copied to host memory.

        Raises:
            OffloadError: Other ranks have a part of the state.
        """
        if self.is_spread:
            raise OffloadError(
                "with offload='ranks' the optimizer of a rank has the state of its own shards; "
                "TrainStep.state_dict() gathers that of all ranks"
            )
        return self.own_state_dict()

    def own_state_dict(self) -> dict[str, Any]:
        """`state_dict` of the parameters that this rank updates."""
        state: dict[str, Any] = dict(self._rest.state_dict()) if self._rest is not None else {}
        masters = dict(state.pop(MASTERS, {}))
        for shard, optimizer in self._own_shards():
            state_of_shard = optimizer.state_dict()
            masters.update(
                {
                    name: self._host_value(shard, m)
                    for name, m in state_of_shard.pop(MASTERS, {}).items()
                }
            )
            schedule = state_of_shard.pop(SCHEDULE, None)
            if schedule is not None:
                state[SCHEDULE] = schedule
            state.update(
                {key: self._host_value(shard, tensor) for key, tensor in state_of_shard.items()}
            )
        if masters:
            state[MASTERS] = masters
        return state

    def set_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from the `state_dict` of this or of the plain optimizer."""
        names = [parameter.name for parameter in self._parameter_list]
        owners = {k: parameter_of_state(k, names) for k in state if k not in (MASTERS, SCHEDULE)}
        if self._rest is not None:
            rest = {p.name for p in parameters_of_optimizer(self._rest)}
            self._rest.set_state_dict(part_of_state(state, owners, rest))
        for shard, optimizer in self._own_shards():
            own = {parameter.name for parameter in shard.gradients.parameters}
            for offloaded in self._state[id(shard)]:
                offloaded.load()
            optimizer.set_state_dict(part_of_state(state, owners, own))
            # Before its first step an optimizer has only its master weights. It holds the rest of
            # the given state, where that is, until the step makes the accumulators.
            self._release_state(shard, optimizer, only_masters=id(shard) not in self._stepped)

    def _own_shards(self) -> list[tuple[Shard, paddle.optimizer.Optimizer]]:
        """The shards that this rank updates, each with its optimizer."""
        return [
            (shard, self._optimizer_of[id(shard)])
            for chain in self._chains
            for shard in chain.shards
            if shard.parameters and shard.is_own
        ]

    def _step_own_shards(self, chain: Chain) -> None:
        """Update the shards of this rank; the other ranks load the new values at their next use."""
        chain.release()
        for index in reversed(range(len(chain.shards))):
            shard = chain.shards[index]
            if shard.is_own:
                shard.load_own()
                self._step_shard(chain, index)
                shard.release()
                continue
            shard.gradients.end_step()
            for offloaded in shard.parameters:
                offloaded.mark_written_by_owner()

    def _step_shard(self, chain: Chain, index: int) -> None:
        shard = chain.shards[index]
        if not shard.parameters:
            return
        optimizer = self._optimizer_of[id(shard)]
        shard.gradients.prefetch()
        for offloaded in self._state[id(shard)]:
            offloaded.prefetch()
        for offloaded in self._state[id(shard)]:
            offloaded.load()
        following = chain.shards[index - 1] if index > 0 and chain.prefetch else None
        if following is not None:
            for offloaded in self._state.get(id(following), ()):
                offloaded.prefetch()
        shard.gradients.give(self._gradient_factor)
        optimizer.step()
        shard.gradients.end_step()
        if following is not None:  # only now: gradients of two shards would raise the peak
            following.gradients.prefetch()
        self._stepped.add(id(shard))
        self._release_state(shard, optimizer)
        shard.write()

    def _release_state(
        self, shard: Shard, optimizer: paddle.optimizer.Optimizer, *, only_masters: bool = False
    ) -> None:
        """Write the optimizer's state to where the shard is kept, and free it on the device."""
        known = {offloaded.key: offloaded for offloaded in self._state[id(shard)]}
        self._state[id(shard)] = state = [
            known.get(id(tensor)) or OffloadedTensor(tensor, shard.make_slot())
            for tensor in _state_to_offload(optimizer, only_masters)
        ]
        for offloaded in state:
            offloaded.mark_written()
            offloaded.release()

    def _host_value(self, shard: Shard, tensor: Any) -> Any:
        """`tensor` of the optimizer's state; if it is offloaded, a copy in host memory."""
        offloaded = next(
            (candidate for candidate in self._state[id(shard)] if candidate.key == id(tensor)), None
        )
        if offloaded is None:
            return tensor
        return on_host(offloaded.numpy(), tensor.name, tensor.dtype)


def _state_to_offload(
    optimizer: paddle.optimizer.Optimizer, only_masters: bool
) -> list[paddle.Tensor]:
    """The optimizer's state without single numbers and without what Paddle keeps on the host."""
    state = optimizer.state_dict()
    state.pop(SCHEDULE, None)
    found = list(state.pop(MASTERS, {}).values())
    if not only_masters:
        found += state.values()
    on_cpu = str(paddle.get_device()) == "cpu"
    return [
        tensor
        for tensor in found
        if isinstance(tensor, paddle.Tensor)
        and tensor.size > 1
        and (on_cpu or not has_memory(tensor) or not device.is_on_host(tensor))
    ]
