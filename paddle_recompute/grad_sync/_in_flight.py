"""Whether a gradient was changed by hand after it was sent.

In ``overlap`` a bucket leaves while the backward runs, and its sum replaces ``.grad`` at the end. A
change of ``.grad`` in between, such as unscaling or clipping inside of ``last_backward``, would be
lost. It is noticed in two ways, neither of which reads a tensor in a usual step:

- by memory and ``inplace_version`` of each gradient that was sent: operators increment it, and
  `paddle.amp.GradScaler` is made to;
- ``gradient.set_value``, ``parameter.grad = x`` and 2.6's ``clip_grad_norm_`` do not
  (2.6.2, 3.3.1). So in a step in which the order is learnt, and nothing is sent early, the extremes
  of the gradients at the end of the backward are compared with those at the end of
  ``last_backward``.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import compress, repeat
from operator import is_, not_

import numpy as np
import paddle

from paddle_recompute._paddle.flat import versions_of


class InFlightGradients:
    """The gradients that one step has sent, or has ready."""

    def __init__(self) -> None:
        # Indices and gradients; while these live, no other tensor can have their address.
        self._members: list[int] = []
        self._gradients: list[paddle.Tensor] = []
        self._addresses: list[int] = []
        self._versions: list[int] = []
        self._absent: set[int] = set()
        self._extremes: dict[int, paddle.Tensor | None] = {}
        self._sent: list[tuple[Sequence[int], int]] = []

    def add(
        self, members: Sequence[int], gradients: Sequence[paddle.Tensor | None], arrived: int
    ) -> None:
        """`gradients` of the parameters `members` were sent as they are now, after `arrived`
        additions to gradients.
        """
        self._sent.append((members, arrived))
        absent = [*map(is_, gradients, repeat(None))]
        if any(absent):
            self._absent.update(compress(members, absent))
            present = [*map(not_, absent)]
            members = [*compress(members, present)]
            gradients = [*compress(gradients, present)]
        self._members += members
        self._gradients += gradients
        addresses, versions = versions_of(gradients)
        self._addresses += addresses
        self._versions += versions

    def late(self, order: Sequence[int]) -> int | None:
        """A parameter that was added to after its gradient was sent, where there is one.

        Args:
            order: The parameters, as a backward has added to their gradients.
        """
        late: set[int] = set()
        for members, arrived in self._sent:
            late.update({*members}.intersection(order[arrived:]))
        return next((index for index in reversed(order) if index in late), None)

    def is_changed(self, gradients: Sequence[paddle.Tensor | None]) -> bool:
        """Whether one of `gradients`, those of all parameters, is not what it was, where none is
        `late`.
        """
        if any(gradients[index] is not None for index in self._absent):
            return True
        present = [*map(gradients.__getitem__, self._members)]
        if any(map(is_, present, repeat(None))):
            return True
        if versions_of(present) != (self._addresses, self._versions):
            return True
        before, now = [], []
        for index, extremes in self._extremes.items():
            gradient = gradients[index]
            if (gradient is None) != (extremes is None):
                return True
            if gradient is not None and extremes is not None:
                before.append(extremes)
                now.append(_extremes(gradient))
        if not before:
            return False
        return not np.array_equal(
            paddle.stack(before).numpy(), paddle.stack(now).numpy(), equal_nan=True
        )

    @paddle.no_grad()
    def read(self, indices: Collection[int], parameters: Sequence[paddle.Tensor]) -> None:
        """A backward that has added to the gradients of `indices` has ended: read them."""
        for index in indices:
            gradient = parameters[index].grad
            if gradient is None:
                self._extremes[index] = None
            elif gradient.is_dense() and gradient.size:  # a sparse one is refused later
                self._extremes[index] = _extremes(gradient)


@paddle.no_grad()
def _extremes(gradient: paddle.Tensor) -> paddle.Tensor:
    """The largest and the smallest element, which no order of summation can change."""
    flat = gradient.astype("float64").flatten()
    return paddle.stack([flat.max(), flat.min()])
