"""The gradients of a chain: off the device, synchronized and measured a shard at a time."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import paddle

from paddle_recompute._paddle import released_memory
from paddle_recompute._paddle.flat import squares_of
from paddle_recompute._paddle.guarded import gradient_of
from paddle_recompute.errors import OffloadError
from paddle_recompute.grad_sync import PieceSender, SentPiece
from paddle_recompute.offload._ranks import OwnSlot
from paddle_recompute.recompute import MakeSlot, Slot

_HALF = (paddle.float16, paddle.bfloat16)


@dataclass(frozen=True)
class OnComplete:
    """What is done to a gradient when it is complete.

    Attributes:
        loss_scale: What it is divided by; None: nothing.
        upcast: Whether a gradient in half precision becomes float32.
        norm_dtype: In which its squares are summed up; None: they are not needed.
    """

    loss_scale: float | None = None
    upcast: bool = False
    norm_dtype: Any = None


class _StoredGradients:
    """Sums of gradients by the index of their parameter, off the device.

    Attributes:
        present: The indices that have a gradient.
    """

    def __init__(self, parameters: Sequence[paddle.Tensor], make_slot: MakeSlot) -> None:
        self._parameters = parameters
        self._make_slot = make_slot
        self._slots: dict[int, Slot] = {}
        self._zero: set[int] = set()
        self.present: set[int] = set()

    def put(self, index: int, gradient: paddle.Tensor) -> None:
        self.present.add(index)
        self._zero.discard(index)
        slot = self._slots.get(index)
        if slot is None:
            slot = self._slots[index] = self._make_slot()
        slot.write(gradient)

    def put_zero(self, index: int) -> None:
        self.present.add(index)
        self._zero.add(index)

    def with_added(self, index: int, gradient: paddle.Tensor | None) -> paddle.Tensor | None:
        """The sum so far, and `gradient`."""
        if index not in self.present:
            return gradient
        if index in self._zero:
            parameter = self._parameters[index]
            return paddle.zeros(parameter.shape, parameter.dtype) if gradient is None else gradient
        kept = self._slots[index].read()
        return kept if gradient is None else kept.add_(gradient)

    def add(self, index: int, gradient: paddle.Tensor) -> None:
        total = self.with_added(index, gradient)
        assert total is not None
        self.put(index, total)

    def prefetch(self) -> None:
        for index in self.present - self._zero:
            self._slots[index].prefetch()

    def forget(self, index: int) -> None:
        self.present.discard(index)
        self._zero.discard(index)
        if index in self._slots:
            self._slots[index].cancel_prefetch()
            self._free(index)

    def forget_all(self) -> None:
        self.present = set()
        for index in list(self._slots):
            self._free(index)

    def _free(self, index: int) -> None:
        if isinstance(self._slots[index], OwnSlot):  # others have their place for the next step
            del self._slots[index]


class ShardGradients:
    """The gradients of one shard.

    Attributes:
        parameters: Of the shard.
        squares: Sum of the squares of each complete gradient, by the index of its parameter; one
            number on the device.
        is_lent: Whether the gradients are in ``.grad``, where the user has them for a while.
        is_own: Whether this rank keeps them when they are the means over the ranks.
        are_spread: Whether they are those of one rank then; they cannot be read or set.
    """

    def __init__(self, name: str, parameters: Sequence[paddle.Tensor], make_slot: MakeSlot) -> None:
        self.name = name
        self.parameters = list(parameters)
        self.squares: dict[int, paddle.Tensor] = {}
        self.num_backwards = 0
        self.is_sent = False
        self.is_complete = False
        self.present_here: set[int] = set()
        """The indices of the parameters that have a gradient on this rank."""
        self.is_lent = False
        self.is_own, self.are_spread = True, False
        self._means: set[int] = set()
        self._kept = _StoredGradients(self.parameters, make_slot)
        self._late = _StoredGradients(self.parameters, make_slot)

    @property
    def present(self) -> set[int]:
        """The indices of the parameters that have a gradient, on some rank."""
        return self._kept.present

    @property
    def late(self) -> set[int]:
        """The indices of the parameters whose gradient was added to after it was sent."""
        return self._late.present

    def take(self) -> dict[int, paddle.Tensor]:
        """What is in ``.grad``, which is empty then.

        Raises:
            OffloadError: A gradient is sparse.
        """
        taken = {}
        for index, parameter in enumerate(self.parameters):
            gradient = gradient_of(parameter)
            if gradient is not None and gradient.is_selected_rows():
                raise OffloadError(
                    f"the gradient of {parameter.name} is sparse (SelectedRows), which cannot be "
                    "kept off the device; make its Embedding with sparse=False"
                )
            gradient = released_memory.take_gradient(parameter)
            if gradient is not None:
                taken[index] = gradient
        return taken

    def begin_backward(self) -> None:
        """A forward begins whose backward will add to ``.grad``: what is there is added before."""
        if self.are_spread and self._means:
            raise OffloadError(
                f"{self.name} has gradients of the step before, which only its owner has; with "
                "offload='ranks' call clear_grad() of the optimizer before the next forward"
            )
        if self._kept.present and not self.is_sent:
            self.keep(self.take())

    @paddle.no_grad()
    def keep(self, taken: dict[int, paddle.Tensor]) -> None:
        """Add `taken` to what is kept."""
        kept = self._late if self.is_sent else self._kept
        while taken:
            index, gradient = taken.popitem()
            kept.add(index, gradient)

    @paddle.no_grad()
    def totals(self, taken: dict[int, paddle.Tensor]) -> list[paddle.Tensor | None]:
        """What is kept and `taken` together, one for each parameter, to be sent; what comes from
        now on is late.
        """
        kept = self._late if self.is_sent else self._kept
        kept.prefetch()
        totals = [kept.with_added(i, taken.pop(i, None)) for i in range(len(self.parameters))]
        self.present_here |= {i for i, total in enumerate(totals) if total is not None}
        kept.forget_all()
        self.is_sent = True
        return totals

    @paddle.no_grad()
    def complete(self, gradients: list[paddle.Tensor | None], how: OnComplete) -> None:
        """Keep `gradients`, which are the means over the ranks, finished; the list is emptied."""
        for index in range(len(gradients)):
            gradient, gradients[index] = gradients[index], None
            if gradient is None:
                continue
            if how.upcast and gradient.dtype in _HALF:
                gradient = gradient.astype("float32")
            if how.loss_scale is not None:
                gradient.scale_(1.0 / how.loss_scale)
            if self.is_complete:  # what came late
                gradient = self._kept.with_added(index, gradient)
                assert gradient is not None
            if how.norm_dtype is not None:
                same = gradient.dtype == how.norm_dtype
                wide = gradient if same else gradient.astype(how.norm_dtype)
                (self.squares[index],) = squares_of([wide])
            self._means.add(index)
            if self.is_own:
                self._kept.put(index, gradient)
            else:
                self._kept.put_zero(index)  # takes no memory
        self.is_complete = True

    def without(self, indices: set[int]) -> None:
        """The parameters of `indices` have a gradient on no rank."""
        self._kept.present -= indices
        for index in indices:
            self.squares.pop(index, None)

    def prefetch(self) -> None:
        """Begin to bring the gradients back."""
        self._kept.prefetch()

    @paddle.no_grad()
    def give(self, factor: float | None) -> None:
        """Put the gradients, times `factor`, into ``.grad``."""
        for index in self._kept.present:
            gradient = self._kept.with_added(index, None)
            assert gradient is not None
            if factor is not None:
                gradient.scale_(factor)
            released_memory.set_gradient(self.parameters[index], gradient)

    def end_step(self) -> None:
        """The optimizer has used the gradients, which stay until they are cleared."""
        if not self.is_lent:
            for parameter in self.parameters:
                released_memory.set_gradient(parameter, None)
        self._begin_anew()

    def clear(self, indices: Iterable[int], *, set_to_zero: bool) -> None:
        """Forget gradients, or make those zero that there are, as ``clear_gradient`` does."""
        for index in indices:
            parameter = self.parameters[index]
            if self.is_lent:
                parameter.clear_gradient(set_to_zero)
                continue
            had_one = (
                gradient_of(parameter) is not None
                or index in self._kept.present
                or index in self._late.present
            )
            self._kept.forget(index)
            self._late.forget(index)
            self._means.discard(index)
            self.squares.pop(index, None)
            released_memory.set_gradient(parameter, None)
            if had_one and set_to_zero:
                self._kept.put_zero(index)

    def clear_all(self, *, set_to_zero: bool) -> None:
        """`clear` for every parameter that is trained, as in Paddle; the next step begins.

        Where the gradients of the others cannot be read, they are freed too.
        """
        all_or_trained = (
            i for i, p in enumerate(self.parameters) if self.are_spread or not p.stop_gradient
        )
        self.clear(all_or_trained, set_to_zero=set_to_zero)
        self._begin_anew()

    @paddle.no_grad()
    def lend(self) -> None:
        """Put the gradients into ``.grad``, until `take_back`; the parameters are on the device."""
        self.keep(self.take())
        for index in list(self._kept.present):
            released_memory.set_gradient(self.parameters[index], self._kept.with_added(index, None))
            self._kept.forget(index)
        self.is_lent = True

    def take_back(self) -> None:
        """End of `lend`."""
        self.is_lent = False
        for index, gradient in self.take().items():
            self._kept.put(index, gradient)

    def _begin_anew(self) -> None:
        self.squares = {}
        self.present_here = set()
        self.num_backwards = 0
        self.is_sent = self.is_complete = False


class ChainGradients:
    """The gradients of all shards of a chain; `OffloadedGradients`.

    In the last backward of a step a shard's gradient is complete when it has seen as many backwards
    as in the step before; it is sent then, while the next shard computes, always in the order from
    the last shard to the first. What comes later than that is added at the end.

    Args:
        shards: In the order of the forward.
        ranks: Each of `shards` is kept by one of these ranks; empty: all, by each rank.
    """

    def __init__(self, shards: Sequence[ShardGradients], ranks: Sequence[int] = ()) -> None:
        self._ranks = tuple(ranks)
        for shard in shards:
            shard.are_spread = self.is_spread
        self._order = list(reversed(shards))
        self.on_complete = OnComplete()
        self._armed = False
        self._sender: PieceSender | None = None
        self._expected: list[int] | None = None
        self._next = 0
        self._under_way: tuple[ShardGradients, SentPiece] | None = None

    @property
    def is_spread(self) -> bool:
        """Whether each shard is kept by one of several ranks."""
        return len(self._ranks) > 1

    @property
    def parameters(self) -> list[paddle.Tensor]:
        """Of the chain, last shard first."""
        return [parameter for shard in self._order for parameter in shard.parameters]

    @property
    def is_complete(self) -> bool:
        """Whether every shard's gradient is."""
        return all(shard.is_complete or shard.is_lent for shard in self._order)

    @property
    def is_lent(self) -> bool:
        """Whether a shard's gradients are in ``.grad``."""
        return any(shard.is_lent for shard in self._order)

    def begin(self, sender: PieceSender | None) -> None:
        if self.is_lent and sender is not None:
            raise OffloadError(
                "gradients are synchronized inside of resident(), where they are in .grad and not "
                "with their shards; leave resident() before last_backward()"
            )
        self._check_ranks(sender)
        self._sender = sender
        self._armed, self._next = True, 0
        for shard in self._order:
            shard.num_backwards = 0

    def abandon(self) -> None:
        self._armed, self._under_way = False, None

    def collect(self, shard: ShardGradients) -> None:
        """`shard` will leave the device, or the backward has ended."""
        if shard.is_lent:
            return
        taken = shard.take()
        if self._armed and not shard.is_sent and self._is_next(shard):
            self._complete(shard, taken)
            self._next += 1
            while self._next < len(self._order) and self._is_next(self._order[self._next]):
                self._complete(self._order[self._next], {})
                self._next += 1
        else:
            shard.keep(taken)

    def finish(self) -> None:
        self._check_ranks(self._sender)
        kept = [shard for shard in self._order if not shard.is_lent]
        for shard in kept:
            shard.keep(shard.take())
        for shard in kept:
            if not shard.is_sent:
                self._complete(shard, {})
        self._take_sent()
        self._armed = False
        counts = [shard.num_backwards for shard in self._order]
        late = [bool(shard.late) for shard in self._order]
        if self._sender is not None:
            here = [
                index in shard.present_here or index in shard.late
                for shard in self._order
                for index in range(len(shard.parameters))
            ]
            told = self._sender.largest([*counts, *late, *here], "the gradients of the shards")
            size = len(self._order)
            counts, late = [int(n) for n in told[:size]], [n > 0 for n in told[size : 2 * size]]
            first = 2 * size
            for shard in self._order:
                end = first + len(shard.parameters)
                anywhere = {index for index, there in enumerate(told[first:end]) if there}
                shard.without(shard.present - anywhere)
                first = end
        self._expected = None if any(late) or self.is_lent else counts
        for shard, is_late in zip(self._order, late, strict=True):
            if is_late:
                self._complete(shard, {})
                self._take_sent()
                if shard.are_spread:
                    self._share_squares(shard)

    def _check_ranks(self, sender: PieceSender | None) -> None:
        ranks = sender.ranks if sender is not None else ()
        if self.is_spread and ranks != self._ranks:
            raise OffloadError(
                f"the shards are owned by {len(self._ranks)} ranks (offload='ranks'), and their "
                "gradients are not synchronized between all of them. Use TrainStep, or run the "
                "last backward inside of GradientSync(model).last_backward()"
            )

    def _share_squares(self, shard: ShardGradients) -> None:
        """What came late was added by the owner alone, which knows the squares of the sums."""
        assert self._sender is not None
        indices = sorted(shard.squares)
        own = [shard.squares[i].item() if shard.is_own else -math.inf for i in indices]
        own = [math.inf if math.isnan(number) else number for number in own]  # no maximum has a NaN
        told = self._sender.largest(own, f"the norms of {shard.name}")
        for index, value in zip(indices, told, strict=True):
            shard.squares[index] = paddle.full_like(shard.squares[index], value)

    def _is_next(self, shard: ShardGradients) -> bool:
        if self._expected is None or self._order[self._next] is not shard:
            return False
        return shard.num_backwards >= self._expected[self._next]

    def _complete(self, shard: ShardGradients, taken: dict[int, paddle.Tensor]) -> None:
        totals = shard.totals(taken)
        if self._sender is None:
            shard.complete(totals, self.on_complete)
            return
        self._take_sent()  # at most one shard's gradients are in flight
        sent = self._sender.send(shard.parameters, totals, f"gradients of {shard.name}")
        self._under_way = shard, sent

    def _take_sent(self) -> None:
        if self._under_way is not None:
            (shard, sent), self._under_way = self._under_way, None
            shard.complete(sent.wait(keep=shard.is_own), self.on_complete)
