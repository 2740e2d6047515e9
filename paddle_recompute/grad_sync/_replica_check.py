"""Whether the ranks' parameters are still the same, compared after every few steps."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import paddle

from paddle_recompute.distributed import Scope, buffers_of, first_that_differs
from paddle_recompute.errors import SyncError
from paddle_recompute.grad_sync._parameters import ParameterList

_logger = logging.getLogger("paddle_recompute")


@dataclass(eq=False)
class ReplicaCheck:
    """Compares what is trained on all ranks, bit by bit, and the buffers of a Layer.

    Attributes:
        parameters: Which of them take part.
        model: Has the buffers; None: there is no Layer.
        scope: The ranks.
        every: Steps from one comparison to the next.
    """

    parameters: ParameterList
    model: paddle.nn.Layer | None
    scope: Scope
    every: int
    _has_warned: bool = False

    def after(self, step: int) -> None:
        """Compare, if it is due after the synchronization of `step`.

        Raises:
            SyncError: A parameter differs.
        """
        if step % self.every == 0:
            self._compare_parameters(step)
            if self.model is not None and not self._has_warned:
                self._compare_buffers(self.model, step)

    def _compare_parameters(self, step: int) -> None:
        trained = self.parameters.trained
        parameters = [self.parameters.parameters[index] for index in trained]
        names = [self.parameters.names[index] for index in trained]
        for owner in self.parameters.offloaded.values():
            parameters += owner.parameters
            names += [parameter.name for parameter in owner.parameters]
        difference = first_that_differs(parameters, self.scope)
        if difference is not None:
            index, ranks = difference
            raise SyncError(
                f"'{names[index]}' differs between the ranks: before "
                f"the update of step {step} it differs on rank {', '.join(map(str, ranks))} "
                f"(check_every is {self.every}). Something changes it on some ranks only: "
                "an update outside of the optimizer, an optimizer's state or a learning rate that "
                "differs, or a weight loaded on one rank."
            )

    def _compare_buffers(self, model: paddle.nn.Layer, step: int) -> None:
        """A warning, once: BatchNorms give each rank statistics of its own."""
        buffers = buffers_of(model)
        difference = first_that_differs(list(buffers.values()), self.scope) if buffers else None
        if difference is not None:
            self._has_warned = True
            index, ranks = difference
            _logger.warning(
                "gradient sync: the buffer '%s' differs between the ranks: in step %d on rank %s. "
                "Before you evaluate or save, call equal_buffers(model) "
                "(paddle_recompute.distributed) on all ranks, as Trainer does.",
                list(buffers)[index],
                step,
                ", ".join(map(str, ranks)),
            )
