"""Pending metrics: losses and gradient norms not yet copied to the host.

To read a number of a step, the host must wait for the device, and queues no work meanwhile. So
numbers are copied only when they are read, and decisions are made on the device: if loss or norm of
a step is not finite, neither this step nor later ones change the parameters. The error is raised
when the result of one of these steps is read.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import paddle

from paddle_recompute.errors import DivergenceError

READ_EVERY = 64
"""`TrainStep` reads them itself in the first step and then every so many steps."""


@dataclass(eq=False)
class Outcome:
    """Loss and gradient norm of one step of this rank.

    Attributes:
        losses: Of each micro-batch, one number.
        divisors: What the loss of each is divided by; its inverse is its weight.
        norm: Of the gradient, one number.
        agreed_loss: The loss of all ranks, where there are several: float64, ``[1]``.
        figures: (loss, norm), where they were read.
        error: Why the update of this step was not made, where that is known.
    """

    losses: Sequence[paddle.Tensor]
    divisors: Sequence[float]
    norm: paddle.Tensor
    agreed_loss: paddle.Tensor | None = None
    figures: tuple[float, float] | None = None
    error: DivergenceError | None = None

    @paddle.no_grad()
    def is_finite(self) -> paddle.Tensor:
        """Bool ``[1]``, on the device."""
        return functools.reduce(paddle.logical_and, map(paddle.isfinite, self._parts()))

    def _parts(self) -> list[paddle.Tensor]:
        return [*(self.losses if self.agreed_loss is None else [self.agreed_loss]), self.norm]

    @paddle.no_grad()
    def _numbers(self) -> paddle.Tensor:
        return paddle.concat([part.astype("float64").reshape([1]) for part in self._parts()])

    def _understand(self, values: Sequence[float]) -> tuple[float, float]:
        *losses, norm = values
        if self.agreed_loss is not None:
            return losses[0], norm
        # On the host, in float64: the sum of K losses has the bits that it has always had.
        loss = sum(
            micro_loss / divisor for micro_loss, divisor in zip(losses, self.divisors, strict=True)
        )
        return float(loss), norm


def read_all(outcomes: Sequence[Outcome]) -> list[tuple[float, float]]:
    """(loss, norm) of each: waits for the device, once for all."""
    unread = [outcome for outcome in outcomes if outcome.figures is None]
    if unread:
        values = paddle.concat([outcome._numbers() for outcome in unread]).tolist()
        for outcome in unread:
            count = (len(outcome.losses) if outcome.agreed_loss is None else 1) + 1
            outcome.figures, values = outcome._understand(values[:count]), values[count:]
    return [outcome.figures for outcome in outcomes if outcome.figures is not None]


class PendingMetrics:
    """The steps whose loss and norm the host has not read.

    Args:
        raise_known_cause: Raises the error that has made a loss or a gradient NaN, if it is known.
    """

    def __init__(self, raise_known_cause: Callable[[], None]) -> None:
        self._raise_known_cause = raise_known_cause
        self._outcomes: list[Outcome] = []
        self._all_finite: paddle.Tensor | None = None
        self._num_steps = 0

    @paddle.no_grad()
    def add(self, outcome: Outcome) -> paddle.Tensor:
        """Whether to make the update of this step: bool ``[1]``, on the device."""
        finite = outcome.is_finite()
        if self._all_finite is not None:
            finite = paddle.logical_and(finite, self._all_finite)
        self._all_finite = finite
        self._outcomes.append(outcome)
        return finite

    def read_if_due(self) -> None:
        """Read all that is pending in the first step and then in every `READ_EVERY`-th.

        Raises:
            DivergenceError: As `read_until` does.
        """
        self._num_steps += 1
        if self._num_steps % READ_EVERY == 1:
            self.read_pending()

    def read_pending(self) -> None:
        """Read all that is pending.

        Raises:
            DivergenceError: As `read_until` does.
        """
        if self._outcomes:
            self.read_until(self._outcomes[-1])

    def read_until(self, outcome: Outcome) -> tuple[float, float]:
        """Read the pending steps up to that of `outcome`; returns its (loss, norm).

        Raises:
            DivergenceError: A loss or a norm of these steps is not finite.
        """
        if outcome.error is not None:
            raise outcome.error
        if outcome not in self._outcomes:
            return read_all([outcome])[0]
        index = self._outcomes.index(outcome)
        figures = read_all(self._outcomes[: index + 1])
        for position, (loss, norm) in enumerate(figures):
            if not (math.isfinite(loss) and math.isfinite(norm)):
                self._diverged(loss, norm, position, index - position)
        del self._outcomes[: index + 1]
        if not self._outcomes:
            self._all_finite = None
        return figures[-1]

    def _diverged(self, loss: float, norm: float, place: int, steps_ago: int) -> None:
        # Those before `place` were applied; what came after it was not.
        for later, outcome in enumerate(self._outcomes[place:]):
            outcome.error = divergence(loss, norm, later)
        self._outcomes, self._all_finite = [], None
        self._raise_known_cause()
        raise divergence(loss, norm, steps_ago)


def divergence(loss: float, norm: float, steps_ago: int = 0) -> DivergenceError:
    """The error of a step without a loss scale that was not made."""
    when = f" of the step {steps_ago} before the one whose result was read" if steps_ago else ""
    error = DivergenceError(
        f"the loss is {loss} and the gradient norm {norm}{when}; the parameters are as they were "
        "before this step. Lower the learning rate, lengthen its warm-up, or set clip_grad_norm"
    )
    error.steps_ago = steps_ago
    return error
