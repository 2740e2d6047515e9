"""Gradients of offloaded parameters, which do not stay in ``.grad``.

`OffloadedGradients` collects them, averages them over the ranks piece by piece, in an order that is
the same on all ranks, and passes them to the optimizer. `GradientSync` announces the last backward
of a step, and leaves these parameters out of its own buckets.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
import weakref
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import paddle
from paddle.distributed.communication.group import Group

from paddle_recompute._paddle.released_memory import piece_of
from paddle_recompute.distributed import (
    agree_on_parameters,
    device_group,
    is_gloo,
    reduce_numbers,
    scope_of,
)
from paddle_recompute.errors import ConfigError, DataError
from paddle_recompute.grad_sync._all_reduce import AllReducer, AllReduceTask
from paddle_recompute.grad_sync._buckets import Bucket, plan_buckets
from paddle_recompute.grad_sync._compression import GradientCompression

_OWNER = "_paddle_recompute_gradient_owner"
_num_kept = 0


class OffloadedGradients(Protocol):
    """Has the gradients of some parameters somewhere else than in their ``.grad``."""

    @property
    def parameters(self) -> Sequence[paddle.Tensor]:
        """Those parameters, in the same order on every rank."""

    @property
    def is_spread(self) -> bool:
        """Whether its parameters are with several ranks, which then run the forward together."""

    def begin(self, sender: PieceSender | None) -> None:
        """The backward that follows is the last one of a step; None: there is one rank only."""

    def finish(self) -> None:
        """That backward has ended: the gradients become the mean over the ranks."""

    def abandon(self) -> None:
        """That backward has failed."""


def keep_elsewhere(parameter: paddle.Tensor, owner: OffloadedGradients) -> None:
    """From now on, `owner` has the gradient of `parameter`, as long as `owner` lives."""
    setattr(parameter, _OWNER, weakref.ref(owner))
    global _num_kept
    _num_kept += 1


def num_kept() -> int:
    """How often `keep_elsewhere` was called; as long as it is the same, no owner is new."""
    return _num_kept


def offloaded_gradients_of(parameter: paddle.Tensor) -> OffloadedGradients | None:
    """Who has the gradient of `parameter`; None: it is in ``.grad``."""
    owner: weakref.ref[OffloadedGradients] | None = getattr(parameter, _OWNER, None)
    return owner() if owner is not None else None


class PieceSender:
    """Averages gradients over the ranks, a piece at a time, while the host goes on.

    It has a lane, or a group of the device's backend, so that its pieces and the buckets of other
    gradients may be sent in any order beside each other.
    """

    def __init__(self, parameters: Sequence[paddle.Tensor], group: Group | None) -> None:
        """Every rank of `group` must call this.

        Raises:
            SyncError: The ranks' parameters differ.
        """
        scope = scope_of(group)
        agree_on_parameters([p.name for p in parameters], parameters, structured=False, scope=scope)
        self._group = group
        self.ranks = scope.ranks
        self.scale = 1.0 / len(scope.ranks)
        """What the gradients of this rank are multiplied by before they are summed up."""
        # Of the last few senders each has its own: two chains need not send in the same order.
        number = _num_senders[scope.ranks] = (_num_senders[scope.ranks] + 1) % _NUM_LANES
        self._name = f"offloaded parameters {number}"
        own = group if is_gloo(group) else device_group(scope.ranks, self._name)
        self._reducer = AllReducer(own, self._name)
        self._compression = GradientCompression(
            "none", error_feedback=False, is_gloo=is_gloo(group)
        )

    @paddle.no_grad()
    def send(
        self,
        parameters: Sequence[paddle.Tensor],
        gradients: Sequence[paddle.Tensor | None],
        label: str,
    ) -> SentPiece:
        """Begin to average `gradients`; None counts as zero.

        Args:
            parameters: Those whose gradients they are; the same on every rank.
            gradients: One for each, freed when this returns unless referenced elsewhere.
            label: What they are, for messages; the same on every rank.
        """
        piece = SentPiece(parameters)
        by_dtype = sorted(range(len(parameters)), key=lambda index: str(parameters[index].dtype))
        for bucket in plan_buckets(
            parameters, by_dtype, bucket_bytes=sys.maxsize, first_bucket_bytes=sys.maxsize
        ):
            dtype = parameters[bucket.members[0]].dtype
            flat = bucket.join([gradients[i] for i in bucket.members], dtype, self.scale)
            flat = self._compression.encode(flat, bucket)
            label_of_dtype = f"gradient sync of offloaded parameters: {label} ({dtype})"
            task = self._reducer.send(flat, label_of_dtype)
            piece.parts.append((bucket, flat, task))
        return piece

    def largest(self, numbers: Sequence[float], label: str) -> list[float]:
        """The largest over the ranks of each of `numbers`, as many on every rank."""
        return reduce_numbers(numbers, "max", label, self._group, lane=self._name)


_NUM_LANES = 4
"""Of all senders together: a lane has a thread and a group, which stay until the process ends."""
_num_senders: Counter[tuple[int, ...]] = Counter()


class SentPiece:
    """Gradients under way."""

    def __init__(self, parameters: Sequence[paddle.Tensor]) -> None:
        self._parameters = parameters
        self.parts: list[tuple[Bucket, paddle.Tensor, AllReduceTask]] = []

    @paddle.no_grad()
    def wait(self, *, keep: bool = True) -> list[paddle.Tensor | None]:
        """The means, of the dtypes of the parameters; None for parameters without elements.

        Args:
            keep: Whether to copy the means; else they are views of the buckets.
        """
        gradients: list[paddle.Tensor | None] = [None] * len(self._parameters)
        for bucket, flat, task in self.parts:
            task.wait()
            flat = GradientCompression.decode(flat, self._parameters[bucket.members[0]].dtype)
            if not keep:
                begins = itertools.accumulate(bucket.sizes, initial=0)
                for index, begin in zip(bucket.members, begins, strict=False):
                    gradients[index] = piece_of(flat, begin, self._parameters[index].shape)
                continue
            for index, piece in zip(bucket.members, bucket.split(flat), strict=True):
                gradients[index] = piece.reshape(self._parameters[index].shape)
        self.parts = []
        return gradients


@dataclass(eq=False)
class OffloadedSync:
    """Gives the owners of offloaded gradients a `PieceSender` for the last backward of each step.

    Attributes:
        owners: `ParameterList.offloaded`, which grows.
        group: The ranks; None is all of them.
        has_own_buckets: Whether `GradientSync` has buckets of its own, over the bare Layer.
        compression: As of the `GradientSync`.
    """

    owners: Mapping[int, OffloadedGradients]
    group: Group | None
    has_own_buckets: bool
    compression: str
    _senders: dict[int, PieceSender] = field(default_factory=dict)

    @contextlib.contextmanager
    def last_backward(self, scale: float | None) -> Iterator[None]:
        """Around the last backward of a step.

        Args:
            scale: What the gradients of this rank are multiplied by; None: there is one rank only.

        Raises:
            ConfigError: The gradients of offloaded parameters cannot be synchronized like that.
        """
        owners = list(self.owners.values())
        try:
            for owner in owners:
                owner.begin(None if scale is None else self._sender_of(owner, scale))
            yield
            for owner in owners:
                owner.finish()
        except BaseException:
            for owner in owners:
                owner.abandon()
            raise

    def agree_on_chunks(self, num_chunks: int) -> None:
        """See `GradientSync.agree_on_chunks`."""
        if not any(owner.is_spread for owner in self.owners.values()):
            return
        most, least = reduce_numbers(
            [num_chunks, -num_chunks], "max", "the number of chunks", self.group
        )
        if most != -least:
            raise DataError(
                f"this rank has {num_chunks} chunks, and the ranks have from {-least:.0f} to "
                f"{most:.0f}; with offload='ranks' all ranks run the encoder together, so give all "
                "of them as many rows, and chunk_size instead of chunk_tokens"
            )

    def _sender_of(self, owner: OffloadedGradients, scale: float) -> PieceSender:
        if not self.has_own_buckets:
            raise ConfigError(
                "parameters that are offloaded are synchronized by GradientSync itself, a shard at "
                "a time: give it the bare Layer instead of paddle.DataParallel, and another mode "
                "than 'fleet'"
            )
        if self.compression != "none":
            raise ConfigError(
                f"compression {self.compression!r} is not supported for the gradients of "
                "offloaded parameters; use 'none'"
            )
        if id(owner) not in self._senders:
            self._senders[id(owner)] = PieceSender(owner.parameters, self.group)
        sender = self._senders[id(owner)]
        sender.scale = scale
        return sender
