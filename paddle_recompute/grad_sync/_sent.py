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


class SentGradients:
    """The gradients that one step has sent, or has ready."""

    def __init__(self) -> None:
        # The tensor too: while it lives, no other one can have its address.
        self._sent: dict[int, tuple[paddle.Tensor | None, tuple[int, int] | None]] = {}
        self._extremes: dict[int, paddle.Tensor | None] = {}
        self._unread: set[int] = set()

    def add(self, index: int, gradient: paddle.Tensor | None) -> None:
        """`gradient` of parameter `index` was sent as it is now."""
        self._sent[index] = (gradient, _identity(gradient))

    def forget(self, index: int) -> None:
        """A backward has added to the gradient of parameter `index` since."""
        self._sent.pop(index, None)

    def expect_end(self, index: int, parameters: Sequence[paddle.Tensor]) -> None:
        """A backward that runs has added to `index`: read its gradient when the backward ends."""
        self._unread.add(index)
        at_end_of_backward(self, lambda: self._read(parameters))

    def is_changed(self, gradients: Sequence[paddle.Tensor | None]) -> bool:
        """Whether one of `gradients`, those of all parameters, is not what it was."""
        if any(_identity(gradients[i]) != identity for i, (_, identity) in self._sent.items()):
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


def _identity(gradient: paddle.Tensor | None) -> tuple[int, int] | None:
    return None if gradient is None else (gradient.data_ptr(), gradient.inplace_version)


@paddle.no_grad()
def _extremes(gradient: paddle.Tensor) -> paddle.Tensor:
    """The largest and the smallest element, which no order of summation can change."""
    flat = gradient.astype("float64").flatten()
    return paddle.stack([flat.max(), flat.min()])
