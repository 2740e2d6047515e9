"""The gradients of offloaded parameters in the last backward of a step."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from paddle.distributed.communication.group import Group

from paddle_recompute.distributed import reduce_numbers
from paddle_recompute.errors import ConfigError, DataError
from paddle_recompute.grad_sync._fleet import FleetReduction
from paddle_recompute.grad_sync._offloaded import OffloadedGradients, PieceSender
from paddle_recompute.grad_sync._reduction import BucketedReduction


@dataclass(eq=False)
class OffloadedSync:
    """Gives the owners of offloaded gradients a `PieceSender` for the last backward of each step.

    Attributes:
        owners: `ParameterList.offloaded`, which grows.
        group: The ranks; None is all of them.
        is_wrapped: Whether the model is in ``paddle.DataParallel``.
        compression: As of the `GradientSync`.
    """

    owners: Mapping[int, OffloadedGradients]
    group: Group | None
    is_wrapped: bool
    compression: str
    _senders: dict[int, PieceSender] = field(default_factory=dict)

    @contextlib.contextmanager
    def last_backward(self, reduction: BucketedReduction | FleetReduction | None) -> Iterator[None]:
        """Around the last backward of a step.

        Args:
            reduction: Of the other gradients; None: there is one rank only.

        Raises:
            ConfigError: The gradients of offloaded parameters cannot be synchronized like that.
        """
        owners = list(self.owners.values())
        try:
            for owner in owners:
                owner.begin(self._sender_of(owner, reduction) if reduction is not None else None)
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

    def _sender_of(
        self, owner: OffloadedGradients, reduction: BucketedReduction | FleetReduction
    ) -> PieceSender:
        if self.is_wrapped or not isinstance(reduction, BucketedReduction):
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
        sender.scale = reduction.scale
        return sender
