"""Whether the second forwards of an encoder return what its first ones returned.

All is computed on the device. The host reads the answer in one of many steps only, so where it is
no, the gradient is made NaN at once.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import paddle

from paddle_recompute.contrastive._chunks import padded
from paddle_recompute.errors import RecomputeError

# Both forwards of a chunk run the same operations on the same numbers. GPU kernels may sum in
# another order (a difference of 1 % in bfloat16); another dropout mask makes a larger difference.
REPETITION_TOLERANCE = 0.05
"""Relative to the largest number of a row."""

COMPARED_BYTES = 64 * 1024
"""Outputs of second forwards are kept up to this size, to be compared in one go: small ones, whose
kernels take less time than their launch."""

_TINY, _HUGE = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)
_HALF = (paddle.float16, paddle.bfloat16)


def check_repetition(repeated: Sequence[tuple[str, paddle.Tensor]]) -> None:
    """Check that the second forwards returned what the first ones did; waits for the device.

    Args:
        repeated: Names of inputs, each with what `RecomputationCheck.answer` returned.

    Raises:
        RecomputeError: One returned other numbers.
    """
    if not repeated:
        return
    with paddle.no_grad():
        answers = paddle.stack([answer for _, answer in repeated]).tolist()
    for (name, _), is_equal in zip(repeated, answers, strict=True):
        if not is_equal:
            raise RecomputeError(
                f"the encoder of {name} returned other values in the second forward of a chunk, so "
                "its gradient was made NaN. An encoder must do the same thing twice: look for "
                "state that it changes, a global that it reads, or randomness outside Paddle, "
                "NumPy and Python's random."
            )


@paddle.no_grad()
def nan_unless(is_equal: paddle.Tensor, gradient: paddle.Tensor) -> paddle.Tensor:
    """`gradient`, bit by bit; NaN if `is_equal`, one bool, is False."""
    one = is_equal.astype("float32")
    factor = one / one
    if gradient.dtype == paddle.float16:  # a CPU does not multiply them
        return (gradient.astype("float32") * factor).astype("float16")
    return gradient * factor.astype(gradient.dtype)


class RecomputationCheck:
    """Compares the outputs of an encoder's second forwards with those of its first ones.

    Args:
        name: The name of the input in errors.
        firsts: By the place among the outputs: all rows of the first forwards, in the order of the
            chunks.
        cut: By place: the axes that are as long as a chunk.
    """

    def __init__(
        self, name: str, firsts: dict[int, paddle.Tensor], cut: dict[int, tuple[int, ...]]
    ) -> None:
        self._name = name
        self._firsts, self._cut = firsts, cut
        self._num_compared = 0  # rows
        self._seconds: dict[int, list[paddle.Tensor]] = {}  # of the rows behind them, by place
        self._num_bytes = 0
        self._answer: paddle.Tensor | None = None

    def note(self, place: int, path: str, output: paddle.Tensor) -> None:
        """Keep what the second forward of the next chunk returned."""
        first, axes = self._firsts[place], self._cut[place]
        # A copy: the output may be a view, hidden[:, 0], of something large.
        kept = output.detach().clone()
        if axes:
            kept = padded(kept, axes, first.shape[axes[0]])
        if kept.shape[1:] != first.shape[1:]:
            raise RecomputeError(
                f"the encoder of {self._name} returned {path} of shape {list(output.shape)} in the "
                "second forward of a chunk, another one than in the first; an encoder must do the "
                "same thing twice"
            )
        self._seconds.setdefault(place, []).append(kept)
        self._num_bytes += kept.size * kept.element_size()

    def compare_if_due(self) -> None:
        """To be called before the activations of a chunk are there, which need the memory."""
        if self._num_bytes > COMPARED_BYTES:
            self.answer()

    def answer(self) -> paddle.Tensor | None:
        """Whether all that was noted is equal: one bool on the device; None: nothing was."""
        start, end = self._num_compared, self._num_compared
        while self._seconds:
            place, parts = self._seconds.popitem()
            now = paddle.concat(parts) if len(parts) > 1 else parts[0]
            del parts
            end = start + len(now)
            found, before = _are_equal(self._firsts[place][start:end], now), self._answer
            self._answer = found if before is None else paddle.logical_and(before, found)
        self._num_compared, self._num_bytes = end, 0
        return self._answer

    def end(self) -> None:
        """Free the first outputs, after the last `answer`."""
        self._firsts = {}


@paddle.no_grad()
def _are_equal(then: paddle.Tensor, now: paddle.Tensor) -> paddle.Tensor:
    """One bool: whether all rows are equal, within the tolerance; NaN is equal to NaN.

    `now` is written to.
    """
    if now.size == 0:
        return paddle.to_tensor(True)
    if now.dtype in _HALF:
        then, now = then.astype("float32"), now.astype("float32")
    if now.ndim != 2:
        then, now = (rows.reshape([len(now), -1]) for rows in (then, now))
    largest = then.abs().max(axis=1, keepdim=True).clip(max=_HUGE)
    # Of two numbers fmax takes the one that is not NaN; 0 / 0 would be NaN, too.
    largest = paddle.fmax(largest, paddle.full([1], _TINY, largest.dtype))
    return paddle.allclose(
        now.divide_(largest), then / largest, rtol=0.0, atol=REPETITION_TOLERANCE, equal_nan=True
    )
