"""Whether a gradient was changed by hand after it was sent.

In ``overlap`` a bucket leaves while the backward runs, and its sum replaces ``.grad`` at the end. A
change of ``.grad`` in between, such as unscaling or clipping inside of ``last_backward``, would be
lost. It is noticed in two ways, neither of which reads a tensor in a usual step:

- by memory and ``inplace_version`` of each gradient that was sent: operators raise it, and
  `paddle.amp.GradScaler` is made to;
- ``gradient.set_value``, ``parameter.grad = x`` and 2.6's ``clip_grad_norm_`` do not raise it
  (2.6.2, 3.3.1). So in a step in which the order is learnt, and nothing is sent early, the extremes
  of the gradients at the end of the backward are compared with those at the end of
  ``last_backward``.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import paddle

from paddle_recompute._paddle.backward import at_end_of_backward
from paddle_recompute._paddle.flat import versions_of


class SentGradients:
    """The gradients that one step has sent, or has ready."""

    def __init__(self) -> None:
        # Indices and gradients; while these live, no other tensor can have their address.
        self._members: list[int] = []
        self._gradients: list[paddle.Tensor] = []
        self._versions: list[tuple[int, int]] = []
        self._absent: set[int] = set()
        self._extremes: dict[int, paddle.Tensor | None] = {}
        self._unread: set[int] = set()

    def add(self, members: Sequence[int], gradients: Sequence[paddle.Tensor | None]) -> None:
        """`gradients` of the parameters `members` were sent as they are now."""
        absent = {i for i, one in zip(members, gradients, strict=True) if one is None}
        present = [one for one in gradients if one is not None]
        self._absent |= absent
        self._members += [index for index in members if index not in absent]
        self._gradients += present
        self._versions += versions_of(present)

    def forget(self, index: int) -> None:
        """A backward has added to the gradient of parameter `index` since."""
        self._absent.discard(index)
        if index in self._members:
            at = self._members.index(index)
            del self._members[at], self._gradients[at], self._versions[at]

    def expect_end(self, index: int, parameters: Sequence[paddle.Tensor]) -> None:
        """A backward that runs has added to `index`: read its gradient when the backward ends."""
        self._unread.add(index)
        at_end_of_backward(self, lambda: self._read(parameters))

    def is_changed(self, gradients: Sequence[paddle.Tensor | None]) -> bool:
        """Whether one of `gradients`, those of all parameters, is not what it was."""
        if any(gradients[index] is not None for index in self._absent):
            return True
        present = [one for i in self._members if (one := gradients[i]) is not None]
        if len(present) != len(self._members) or versions_of(present) != self._versions:
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
    def _read(self, parameters: Sequence[paddle.Tensor]) -> None:
        for index in self._unread:
            gradient = parameters[index].grad
            if gradient is None:
                self._extremes[index] = None
            elif gradient.is_dense() and gradient.size:  # a sparse one is refused later
                self._extremes[index] = _extremes(gradient)
        self._unread.clear()


@paddle.no_grad()
def _extremes(gradient: paddle.Tensor) -> paddle.Tensor:
    """The largest and the smallest element, which no order of summation can change."""
    flat = gradient.astype("float64").flatten()
    return paddle.stack([flat.max(), flat.min()])
