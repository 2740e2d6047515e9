"""A chain of shards, of which one is on the device, and those that come next on their way."""

from __future__ import annotations

from collections.abc import Sequence

from paddle_recompute.grad_sync import keep_elsewhere
from paddle_recompute.offload._away import Away
from paddle_recompute.offload._gradients import ChainGradients, ShardGradients
from paddle_recompute.offload._storage import MakeSlot


class Shard:
    """Parameters that come to the device together.

    Attributes:
        gradients: Theirs.
        state: Tensors of the optimizer that come with them when it makes its step.
        has_stepped: Whether it has made one.
        make_slot: Where they are when they are not on the device.
    """

    def __init__(self, name: str, parameters: Sequence[Away], make_slot: MakeSlot) -> None:
        self.name = name
        self.parameters = list(parameters)
        self.state: list[Away] = []
        self.has_stepped = False
        self.make_slot = make_slot
        self.gradients = ShardGradients(name, [p.tensor for p in parameters], make_slot)

    @property
    def num_bytes(self) -> int:
        """Of the parameters."""
        return sum(int(p.tensor.size) * p.tensor.element_size() for p in self.parameters)

    def come(self) -> None:
        for away in self.parameters:
            away.begin()
        for away in self.parameters:
            away.come()

    def begin(self) -> None:
        for away in self.parameters:
            away.begin()

    def write(self) -> None:
        for away in self.parameters:
            away.write()

    def leave(self) -> None:
        for away in self.parameters:
            away.drop()
            away.leave()


class Chain:
    """Shards in the order of the forward.

    Args:
        groups: The parameters of each shard.
        make_slot: Where they are when they are not on the device.
        prefetch: How many shards are on their way while one computes.
    """

    def __init__(
        self,
        groups: Sequence[tuple[str, Sequence[Away]]],
        make_slot: MakeSlot,
        *,
        prefetch: int,
    ) -> None:
        self.prefetch = prefetch
        self.shards = [Shard(name, parameters, make_slot) for name, parameters in groups]
        self.gradients = ChainGradients([shard.gradients for shard in self.shards])
        self._here: int | None = None
        for shard in self.shards:
            for away in shard.parameters:
                keep_elsewhere(away.tensor, self.gradients)
            shard.leave()

    def use(self, index: int, then: Sequence[int] = ()) -> None:
        """Have shard `index` on the device, and begin to bring those of `then`.

        Args:
            index: The shard; all others leave.
            then: Those that will be used next, the next one first.
        """
        then = [other for other in then if 0 <= other < len(self.shards)][: self.prefetch]
        if self._here not in (None, index):
            left = self.shards[self._here or 0]
            self._here = None
            self.gradients.collect(left.gradients)
            left.leave()
        self.shards[index].come()
        self._here = index
        for other, shard in enumerate(self.shards):
            if other != index and other not in then:
                for away in shard.parameters:
                    away.drop()
        for other in then:
            self.shards[other].begin()

    def leave(self) -> None:
        """Have no shard on the device, and none on its way."""
        for shard in self.shards:
            self.gradients.collect(shard.gradients)
            shard.leave()
        self._here = None

    def note_backward(self, index: int) -> None:
        """A backward through shard `index` has ended."""
        self.shards[index].gradients.num_backwards += 1
