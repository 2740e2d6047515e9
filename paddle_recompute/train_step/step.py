"""What a step is, in either mode: `Step`, and the `StepResult` that each call of it returns."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

LOSS_PREFIX = "loss/"
"""Begins the structured name of a parameter of the loss; no parameter of a model has a slash."""
NOT_UPDATED = "not_updated"
"""``"pooler.weight:not_updated"`` in an optimizer state: never updated, so it has no moments."""


class StepResult:
    """What one optimizer step did.

    Loss and norm stay on the device until one of them is looked at: that waits for the device to
    have made the step. They are of this step, however many have been made since.

    Args:
        loss: See the attribute.
        grad_norm: See the attribute.
        seconds: Wall-clock time of ``forward_backward``, ``sync`` (what of it came after the
            backward; 0 in a single process) and ``update``. On a device, which computes while the
            host goes on, that of putting the work into its queue.
        skipped: Whether the parameters were left alone, because loss or gradient is not finite in
            float16. It is the same on all ranks.
        loss_scale: What the loss was multiplied with; None where it is not scaled.
    """

    def __init__(
        self,
        loss: float | None,
        grad_norm: float | None,
        seconds: dict[str, float],
        skipped: bool = False,
        loss_scale: float | None = None,
    ) -> None:
        self._figures = None if loss is None or grad_norm is None else (loss, grad_norm)
        self._read: Callable[[], tuple[float, float]] | None = None
        self.seconds = seconds
        self.skipped = skipped
        self.loss_scale = loss_scale

    @classmethod
    def unread(
        cls, read: Callable[[], tuple[float, float]], seconds: dict[str, float]
    ) -> StepResult:
        """Loss and norm are what `read` returns, which is called when one is looked at."""
        result = cls(None, None, seconds)
        result._read = read
        return result

    @property
    def loss(self) -> float:
        """Mean loss over the examples of all micro-batches and ranks.

        Raises:
            DivergenceError: It is not finite, or the norm is not, in this step or in one before
                whose loss was not read.
        """
        return self._known()[0]

    @property
    def grad_norm(self) -> float:
        """Euclidean norm of the synchronized gradient of all parameters that the optimizer
        updates, without the loss scale and before clipping. Computed in float32; in float64 where
        one of the gradients is.

        Raises:
            DivergenceError: As `loss` does.
        """
        return self._known()[1]

    def __repr__(self) -> str:
        shown = "" if self._figures is None else "loss={}, grad_norm={}, ".format(*self._figures)
        return (
            f"StepResult({shown}seconds={self.seconds}, skipped={self.skipped}, "
            f"loss_scale={self.loss_scale})"
        )

    def __getstate__(self) -> dict[str, Any]:
        """The numbers, read now: another process cannot look at the device of this one."""
        self._known()
        return self.__dict__

    def _known(self) -> tuple[float, float]:
        if self._figures is None:
            assert self._read is not None
            self._figures, self._read = self._read(), None
        return self._figures


class Step(Protocol):
    """One optimizer step. `TrainStep` is it in dygraph, `StaticTrainStep` in a static graph.

    State is under structured names, ``"encoder.layers.0.linear1.weight"``, in both modes; those of
    the loss begin with `LOSS_PREFIX`: ``"loss/logit_scale"``. So either mode continues the other.
    """

    def __call__(self, micro_batches: Sequence[Any]) -> StepResult:
        """Run one optimizer step on the micro-batches."""

    def state_dict(self, *, keep: bool = True) -> dict[str, Any]:
        """What the next step depends on beside the model.

        Args:
            keep: False: this rank needs no optimizer state. It gets none where the state is
                gathered from the ranks, as that of a `ShardedOptimizer`.

        Returns:
            ``"optimizer"``: moments and master weights, ``"<parameter>:moment1"``, Tensors or
            arrays. ``"loss_scaler"``, where the loss is scaled: plain numbers. ``"sync"``, where
            this rank synchronizes gradients: as `GradientSync.state_dict` has it.
        """

    def set_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state_dict` gave, in either mode; what is not there starts anew."""

    def autocast(self) -> contextlib.AbstractContextManager[None]:
        """The mixed precision in which the model is to be evaluated."""

    def write_back(self) -> None:
        """Bring the model, and the loss, up to date with the steps that were made."""

    @property
    def num_skipped(self) -> int:
        """How many steps were skipped so far, before a resumption too."""

    @property
    def synchronization(self) -> str:
        """How gradients are synchronized and why, in words."""
