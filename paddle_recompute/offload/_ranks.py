"""Shards that live with one of the ranks each, and visit the others while they compute."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist

from paddle_recompute._paddle.released_memory import over_same_memory, piece_of
from paddle_recompute.distributed import (
    device_group,
    is_distributed,
    is_gloo,
    lane_of,
    owner_ranks,
    scope_of,
    watched_on_device,
)
from paddle_recompute.errors import ConfigError, OffloadError
from paddle_recompute.recompute import slots

_ALIGNMENT = 256
"""Bytes; kernels may sum up in another order where memory is aligned in another way."""
_num_chains: Counter[tuple[int, ...]] = Counter()
_NUM_LANES = 4
"""Of all chains together: a lane has a thread and a group, which stay until the process ends."""


class OwnSlot:
    """A slot that keeps a tensor where it is."""

    _kept: paddle.Tensor

    def write(self, tensor: paddle.Tensor) -> None:
        self._kept = over_same_memory(tensor)

    def prefetch(self) -> None: ...

    def cancel_prefetch(self) -> None: ...

    def read(self) -> paddle.Tensor:
        return over_same_memory(self._kept)

    def numpy(self) -> np.ndarray[Any, Any]:
        return np.array(self._kept.numpy())


class RankSlot:
    """A slot of a parameter: in host memory until the chain is made, then with the shard's owner.

    Attributes:
        shard: Has it, at place `index`; None: the chain is not made yet.
        arrived: What the next `read` returns; None: the owner sends this parameter alone.
    """

    def __init__(self) -> None:
        self.shard: OwnedShard | None = None
        self.index = 0
        self.arrived: paddle.Tensor | None = None
        self._first = slots("host", None)()

    def write(self, tensor: paddle.Tensor) -> None:
        if self.shard is None:
            self._first.write(tensor)
        else:
            self.shard.write(self.index, tensor)

    def prefetch(self) -> None:
        """Shards are read ahead as a whole."""

    def cancel_prefetch(self) -> None:
        """As `prefetch`."""

    def read(self) -> paddle.Tensor:
        if self.shard is None:
            return self._first.read()
        arrived, self.arrived = self.arrived, None
        return self.shard.fetch(self.index) if arrived is None else arrived

    def numpy(self) -> np.ndarray[Any, Any]:
        if self.shard is None:
            return self._first.numpy()
        return np.array(self.shard.fetch(self.index).numpy())


class Carrier:
    """Broadcasts the parameters of one chain, in the order in which that is begun.

    Every rank makes it, and begins the same broadcasts.
    """

    def __init__(self) -> None:
        self.ranks: tuple[int, ...] = scope_of(None).ranks if is_distributed() else (0,)
        self.rank = dist.get_rank()
        if len(self.ranks) == 1:
            return
        number = _num_chains[self.ranks] = _num_chains[self.ranks] + 1
        self._name = f"chain {number}"
        self._lane = f"shards of chains, {number % _NUM_LANES}"
        self._num_begun = 0
        self._is_gloo = is_gloo()
        if self._is_gloo:
            lane_of(scope_of(None), self._lane)  # made now, and not in the first step
        else:
            self._group = device_group(self.ranks, self._lane)

    def begin(self, tensors: Sequence[paddle.Tensor], owner: int, what: str) -> Callable[[], Any]:
        """Begin to bring `tensors` from `owner`; returns what waits until they are there.

        Args:
            tensors: Of the same sizes on all ranks; those of `owner` are not to change meanwhile.
            owner: Number of a rank.
            what: For messages; the same on all ranks.
        """
        if len(self.ranks) == 1:
            return lambda: None
        self._num_begun += 1
        label = f"the parameters of {what} from rank {owner} ({self._name}: {self._num_begun})"
        scope = scope_of(None)
        if self._is_gloo:

            def carry(group: Any) -> None:
                for tensor in tensors:
                    dist.broadcast(tensor, src=owner, group=group)

            code = ", ".join(f"{tensor.size} x {tensor.dtype}" for tensor in tensors)
            return lane_of(scope, self._lane).begin(carry, label, code=code).wait
        with watched_on_device(label, scope):
            tasks = [
                dist.broadcast(tensor, src=owner, group=self._group, sync_op=False)
                for tensor in tensors
            ]
        return lambda: [task.wait() for task in tasks]

    def owners(self, sizes: Sequence[int]) -> list[int]:
        """The owner of each shard of `sizes`: the largest first, to the rank that has least.

        Raises:
            ConfigError: There are fewer shards than ranks.
        """
        if len(sizes) < len(self.ranks):
            raise ConfigError(
                f"num_shards is {len(sizes)}, and there are {len(self.ranks)} ranks, each of which "
                "must own a shard with offload='ranks'; best is a multiple of that number"
            )
        return [self.ranks[place] for place in owner_ranks(sizes, len(self.ranks))]


class OwnedShard:
    """The parameters of one shard, joined in the memory of its owner.

    The parameters of the owner are views of that memory. A rank that computes with the shard gets a
    copy of it, as one piece for each dtype.

    Args:
        carrier: Of the chain.
        name: For messages.
        owner: Number of the rank that keeps it.
        members: The slot of each parameter, and its shape and dtype.
    """

    def __init__(
        self,
        carrier: Carrier,
        name: str,
        owner: int,
        members: Sequence[tuple[RankSlot, list[int], Any]],
    ) -> None:
        self._carrier, self._name, self._owner = carrier, name, owner
        self.is_own = owner == carrier.rank
        self._slots = [slot for slot, _, _ in members]
        self._forms = [(shape, dtype) for _, shape, dtype in members]
        self._begins: list[int] = []
        self._sizes: dict[Any, int] = {}
        for shape, dtype in self._forms:
            begin = self._sizes.get(dtype, 0)
            step = _ALIGNMENT // paddle.empty([0], dtype).element_size()
            self._begins.append(begin)
            self._sizes[dtype] = begin + -(-int(np.prod(shape)) // step) * step
        self._coming: tuple[dict[Any, paddle.Tensor], Callable[[], Any]] | None = None
        self._own: dict[Any, paddle.Tensor] = {}
        if self.is_own:
            self._own = {dtype: paddle.zeros([n], dtype) for dtype, n in self._sizes.items()}
        for index, slot in enumerate(self._slots):
            first = slot.read() if self.is_own else None
            slot.shard, slot.index = self, index
            if first is not None:
                self.write(index, first)
            slot._first.cancel_prefetch()
            del slot._first

    def prefetch(self) -> None:
        """Begin to bring it. All ranks call this."""
        if self._coming is None and self._slots:
            memory = self._own or {d: paddle.empty([n], d) for d, n in self._sizes.items()}
            wait = self._carrier.begin([*memory.values()], self._owner, self._name)
            self._coming = memory, wait

    def load(self) -> None:
        """Let every slot have its parameter. All ranks call this.

        Raises:
            PeerError: A rank has died, stopped or failed.
            SyncError: Another rank does something else.
        """
        self.prefetch()
        if self._coming is not None:
            memory, wait = self._coming
            self._coming = None
            wait()
            self._deal(memory)

    def load_own(self) -> None:
        """`load` on the owner alone, for its update."""
        self._deal(self._own)

    def cancel_prefetch(self) -> None:
        """Forget what `prefetch` has begun. All ranks call this."""
        if self._coming is not None:
            coming, self._coming = self._coming, None
            coming[1]()

    def write(self, index: int, tensor: paddle.Tensor) -> None:
        """Keep `tensor`, if this rank is the owner. All ranks call this."""
        if (list(tensor.shape), tensor.dtype) != self._forms[index]:
            shape, dtype = self._forms[index]
            raise OffloadError(
                f"a parameter of {self._name} became {list(tensor.shape)} of {tensor.dtype}; with "
                f"offload='ranks' its shape {shape} and dtype {dtype} stay"
            )
        self.cancel_prefetch()
        self._slots[index].arrived = None
        if self.is_own:
            piece = self._piece(self._own, index)
            if piece.data_ptr() != tensor.data_ptr():
                piece.copy_(tensor, False)

    def fetch(self, index: int) -> paddle.Tensor:
        """The parameter `index` alone. All ranks call this."""
        shape, dtype = self._forms[index]
        tensor = self._piece(self._own, index) if self.is_own else paddle.empty(shape, dtype)
        self._carrier.begin([tensor], self._owner, self._name)()
        return tensor

    def _deal(self, memory: dict[Any, paddle.Tensor]) -> None:
        for index, slot in enumerate(self._slots):
            slot.arrived = self._piece(memory, index)

    def _piece(self, memory: dict[Any, paddle.Tensor], index: int) -> paddle.Tensor:
        shape, dtype = self._forms[index]
        return piece_of(memory[dtype], self._begins[index], shape)
