"""A chain of shards: one is resident on the device, the next ones are prefetched."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from paddle_recompute.errors import OffloadError
from paddle_recompute.grad_sync import keep_elsewhere
from paddle_recompute.offload._gradients import ChainGradients, ShardGradients
from paddle_recompute.offload._offloaded_tensor import OffloadedTensor, Uncopied
from paddle_recompute.offload._ranks import Carrier, OwnedShard, OwnSlot
from paddle_recompute.recompute import MakeSlot


class Shard:
    """Parameters that are fetched together.

    Attributes:
        gradients: The gradients of the parameters.
        make_slot: Makes the slots of offloaded gradients and optimizer state.
        owned: The rank that keeps all of these; None: every rank.
    """

    def __init__(
        self,
        name: str,
        parameters: Sequence[OffloadedTensor],
        make_slot: MakeSlot,
        owned: OwnedShard | None = None,
    ) -> None:
        self.name = name
        self.owned = owned
        self.parameters = list(parameters)
        self.make_slot = make_slot
        self.gradients = ShardGradients(name, [p.tensor for p in parameters], make_slot)
        self.gradients.is_own = self.is_own
        for index, offloaded in enumerate(parameters):
            offloaded.gradients, offloaded.index = weakref.ref(self.gradients), index
        self._num_residents = 0

    @property
    def num_bytes(self) -> int:
        """Of the parameters."""
        return sum(int(p.tensor.size) * p.tensor.element_size() for p in self.parameters)

    @property
    def is_own(self) -> bool:
        """Whether this rank updates it."""
        return self.owned is None or self.owned.is_own

    @property
    def _is_on_device(self) -> bool:
        return all(offloaded.is_on_device for offloaded in self.parameters)

    def load(self) -> None:
        if self.owned is not None and not self._is_on_device:
            self.owned.load()
        self._take()

    def load_own(self) -> None:
        """`load` for an update, which its owner makes alone."""
        if self.owned is not None:
            self.owned.load_own()
        self._take()

    def _take(self) -> None:
        for offloaded in self.parameters:
            offloaded.prefetch()
        for offloaded in self.parameters:
            offloaded.load()
            offloaded.unguard()

    @property
    def is_resident(self) -> bool:
        """Whether the user has it on the device, as ordinary parameters."""
        return self._num_residents > 0

    def reside(self) -> None:
        """Come to the device for the user, with the gradients."""
        if not self.is_resident:
            self.load()
            self.gradients.lend()
        self._num_residents += 1

    def end_reside(self) -> None:
        """End of a `reside`."""
        self._num_residents -= 1
        if not self.is_resident:
            self.gradients.take_back()
            for offloaded in self.parameters:
                offloaded.release_to_others()
                offloaded.guard()

    def guard(self) -> None:
        """What it was used for has ended; it is still here."""
        if not self.is_resident:
            for offloaded in self.parameters:
                offloaded.guard()

    def prefetch(self) -> None:
        if self.owned is not None and not self._is_on_device:
            self.owned.prefetch()
        for offloaded in self.parameters:
            offloaded.prefetch()

    def cancel_prefetch(self) -> None:
        if self.owned is not None:
            self.owned.cancel_prefetch()
        for offloaded in self.parameters:
            offloaded.cancel_prefetch()

    def write(self) -> None:
        for offloaded in self.parameters:
            offloaded.write()

    def release(self) -> None:
        if self.is_resident:
            return
        self.cancel_prefetch()
        for offloaded in self.parameters:
            offloaded.guard()
            offloaded.release()


class Chain(Uncopied):
    """Shards in the order of the forward.

    Args:
        groups: The parameters of each shard.
        taken: All that the chain has taken off the device, also what has come back for good.
        make_slot: Where they are when they are not on the device.
        prefetch: How many shards are on their way while one computes.
        carrier: Shards live with the ranks of it; None: all with each rank.
    """

    def __init__(
        self,
        groups: Sequence[tuple[str, Sequence[OffloadedTensor]]],
        taken: Iterable[OffloadedTensor],
        make_slot: MakeSlot,
        *,
        prefetch: int,
        carrier: Carrier | None = None,
    ) -> None:
        self.prefetch = prefetch
        self.is_spread = carrier is not None
        if carrier is None:
            self.shards = [Shard(name, parameters, make_slot) for name, parameters in groups]
        else:
            self.shards = _spread(groups, carrier)
        ranks = carrier.ranks if carrier is not None else ()
        self.gradients = ChainGradients([shard.gradients for shard in self.shards], ranks)
        self._here: int | None = None
        self._using = threading.RLock()
        self._trainer: threading.Thread | None = None
        for offloaded in taken:
            offloaded.owner = weakref.ref(self)
        for shard in self.shards:
            for offloaded in shard.parameters:
                keep_elsewhere(offloaded.tensor, self.gradients)
            shard.release()

    def train_in_this_thread(self) -> None:
        """A call or its backward begins. Until `end_step`, other threads can compute without
        gradients only.

        Raises:
            OffloadError: The chain is in a step of another thread, which lives.
        """
        current = threading.current_thread()
        if all(p.stop_gradient for shard in self.shards for p in shard.gradients.parameters):
            return  # no step has gradients of it
        with self._using:
            other = self._trainer
            if other is not None and other is not current and other.is_alive():
                raise OffloadError(
                    f"{self.shards[0].name} is in a step of the thread {other.name}, and is used "
                    f"in {current.name}; call it inside paddle.no_grad() there, or train in turns: "
                    "a step ends with step() or clear_grad() of model.optimizer(...), also one "
                    "that has failed"
                )
            self._trainer = current

    def end_step(self) -> None:
        """Its parameters are updated, or its gradients cleared; the next step may be one of another
        thread.
        """
        self._trainer = None

    @contextlib.contextmanager
    def use(self, index: int, then: Sequence[int] = ()) -> Iterator[None]:
        """Have shard `index` on the device, and begin to bring those of `then`.

        When the body has ended, it may stay on the device, but not in anybody's hands. Another
        thread that wants a shard waits until then.

        Args:
            index: The shard; all others leave.
            then: Those that will be used next, the next one first.
        """
        with self._using:
            self._make_room_for(index, then)
            try:
                yield
            finally:
                self.shards[index].guard()

    def _make_room_for(self, index: int, then: Sequence[int]) -> None:
        then = [other for other in then if 0 <= other < len(self.shards)][: self.prefetch]
        if self._here not in (None, index):
            left = self.shards[self._here or 0]
            self._here = None
            left.release()  # before its gradients are joined, which takes memory
            if self._trainer in (None, threading.current_thread()):
                self.gradients.collect(left.gradients)
        self.shards[index].load()
        self._here = index
        for other, shard in enumerate(self.shards):
            if other != index and other not in then:
                shard.cancel_prefetch()
        for other in then:
            self.shards[other].prefetch()

    @contextlib.contextmanager
    def resident(self, indices: Iterable[int]) -> Iterator[None]:
        """Have the shards of `indices` on the device as if they were not offloaded."""
        if self.is_spread:
            raise OffloadError(
                "resident() is not supported with offload='ranks'; use offload='host'"
            )
        come: list[Shard] = []
        try:
            with self._using:
                for index in indices:
                    self._here = None if self._here == index else self._here
                    self.shards[index].reside()
                    come.append(self.shards[index])
            yield
        finally:
            with self._using:
                for shard in come:
                    shard.end_reside()

    def release(self) -> None:
        """Have no shard on the device, and none on its way."""
        with self._using:
            for shard in self.shards:
                self.gradients.collect(shard.gradients)
                shard.release()
            self._here = None

    def note_backward(self, index: int) -> None:
        """A backward through shard `index` has ended."""
        shard = self.shards[index]
        shard.gradients.num_backwards += 1
        if self.is_spread and index == 0:  # its gradients are collected when another one comes
            shard.release()


def _spread(
    groups: Sequence[tuple[str, Sequence[OffloadedTensor]]], carrier: Carrier
) -> list[Shard]:
    """Shards that live with one rank each."""
    sizes = [
        sum(int(parameter.tensor.size) for parameter in parameters) for _, parameters in groups
    ]
    owners = carrier.owners(sizes)
    shards = []
    for (name, parameters), owner in zip(groups, owners, strict=True):
        members: list[Any] = [
            (parameter.slot, list(parameter.tensor.shape), parameter.tensor.dtype)
            for parameter in parameters
        ]
        shards.append(Shard(name, parameters, OwnSlot, OwnedShard(carrier, name, owner, members)))
    return shards
