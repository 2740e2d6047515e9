"""Gradients that do not stay in ``.grad``, because their parameters are on the device by turns.

Their keeper collects them, has them summed a piece at a time, in an order of its own that is the
same on all ranks, and gives them to the optimizer. `GradientSync` tells it which backward is the
last one of a step, and leaves its parameters out of its own buckets.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Sequence
from typing import Any, Protocol

import paddle
import paddle.distributed as dist
from paddle.distributed.communication.group import Group

from paddle_recompute.distributed import Scope, agree_on_parameters, device_group
from paddle_recompute.grad_sync._all_reduce import (
    AllReducer,
    AllReduceTask,
    StreamAllReducer,
    ThreadAllReducer,
)

_KEEPER = "_paddle_recompute_gradient_keeper"


class GradientKeeper(Protocol):
    """Keeps the gradients of some parameters somewhere else than in their ``.grad``."""

    @property
    def parameters(self) -> Sequence[paddle.Tensor]:
        """Those parameters, in the same order on every rank."""

    def begin(self, sender: PieceSender | None) -> None:
        """The backward that follows is the last one of a step; None: there is one rank only."""

    def finish(self) -> None:
        """That backward has ended: the gradients become the mean over the ranks."""

    def abandon(self) -> None:
        """That backward has failed."""


def keep_elsewhere(parameter: paddle.Tensor, keeper: GradientKeeper) -> None:
    """From now on, `keeper` has the gradient of `parameter`, as long as somebody keeps `keeper`."""
    setattr(parameter, _KEEPER, weakref.ref(keeper))


def keeper_of(parameter: paddle.Tensor) -> GradientKeeper | None:
    """Who has the gradient of `parameter`; None: it is in ``.grad``."""
    keeper: weakref.ref[GradientKeeper] | None = getattr(parameter, _KEEPER, None)
    return keeper() if keeper is not None else None


class PieceSender:
    """Averages gradients over the ranks, a piece at a time, while the host goes on.

    It has a courier of its own, so that pieces and the buckets of other gradients may be sent in
    any order beside each other.
    """

    def __init__(
        self, parameters: Sequence[paddle.Tensor], group: Group | None, scope: Scope
    ) -> None:
        """Every rank of `scope` must call this.

        Raises:
            SyncError: The ranks' parameters differ.
        """
        agree_on_parameters([p.name for p in parameters], parameters, structured=False, scope=scope)
        self._scope = scope
        self._is_gloo = dist.get_backend(group).lower() == "gloo"
        # No other sender has it, so that two chains need not send in the same order.
        _num_senders[scope.ranks] += 1
        name = f"offloaded parameters {_num_senders[scope.ranks]}"
        self._reducer: AllReducer = (
            ThreadAllReducer(name)
            if self._is_gloo
            else StreamAllReducer(device_group(scope.ranks, name))
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
            gradients: One for each, freed when this returns if nobody else has them.
            label: What they are, for messages; the same on every rank.
        """
        by_dtype: dict[Any, list[int]] = {}
        for index, parameter in enumerate(parameters):
            if parameter.size:
                by_dtype.setdefault(parameter.dtype, []).append(index)
        piece = SentPiece(len(parameters))
        for dtype, members in by_dtype.items():
            flats = [_flat(parameters[i], gradients[i]) for i in members]
            flat = (paddle.concat(flats) if len(flats) > 1 else flats[0].clone()).scale_(
                1.0 / len(self._scope.ranks)
            )
            if self._is_gloo and dtype == paddle.float16:
                flat = flat.astype("float32")  # gloo's sums of float16 are wrong (2.6, 3.3)
            task = self._reducer.send(
                flat, f"{label} ({dtype})", self._scope, "gradient sync of offloaded parameters"
            )
            piece.parts.append((members, [parameters[i] for i in members], flat, task))
        return piece

    def largest(self, numbers: Sequence[float], label: str) -> list[float]:
        """The largest over the ranks of each of `numbers`, as many on every rank."""
        return self._reducer.largest(numbers, label, self._scope)


_num_senders: Counter[tuple[int, ...]] = Counter()


class SentPiece:
    """Gradients under way."""

    def __init__(self, num_parameters: int) -> None:
        self._num_parameters = num_parameters
        self.parts: list[tuple[list[int], list[paddle.Tensor], paddle.Tensor, AllReduceTask]] = []

    @paddle.no_grad()
    def wait(self) -> list[paddle.Tensor | None]:
        """The means, of the dtypes of the parameters; None for parameters without elements."""
        gradients: list[paddle.Tensor | None] = [None] * self._num_parameters
        for members, parameters, flat, task in self.parts:
            task.wait()
            if flat.dtype != parameters[0].dtype:
                flat = flat.astype(parameters[0].dtype)
            sizes = [int(parameter.size) for parameter in parameters]
            pieces = paddle.split(flat, sizes) if len(sizes) > 1 else [flat]
            for index, parameter, piece in zip(members, parameters, pieces, strict=True):
                gradients[index] = piece.reshape(parameter.shape)
        self.parts = []
        return gradients


def _flat(parameter: paddle.Tensor, gradient: paddle.Tensor | None) -> paddle.Tensor:
    if gradient is None:
        return paddle.zeros([parameter.size], parameter.dtype)
    return gradient.reshape([-1])
