"""`sync.mode: fleet`: Paddle's own synchronization, as a reference to compare with.

``fused_allreduce_gradients`` (2.6, 3.x) joins the gradients that a rank has, in the order of its
list, and averages them after the backward. It does not look at what the other ranks have. What it
would get wrong without an error is mended or refused here:

- the ranks agree first on the parameters, their order, shapes and dtypes, and on which gradients
  there are; where another rank has a gradient, None becomes zeros;
- refused are sparse gradients, float16 on gloo, a gradient of a frozen parameter, ``main_grad``,
  and the flag with which Paddle 3.x sums instead of averaging.
"""

from __future__ import annotations

import time

import paddle
import paddle.distributed as dist
from paddle.distributed.communication.group import Group

from paddle_recompute.distributed import run_collective
from paddle_recompute.errors import SyncError
from paddle_recompute.grad_sync._all_reduce import AllReducer
from paddle_recompute.grad_sync._communication_trace import CommunicationTrace
from paddle_recompute.grad_sync._consistency_check import (
    Agreed,
    ConsistencyCheck,
    StepFlags,
    StepReport,
)
from paddle_recompute.grad_sync._parameters import ParameterList, refuse_main_grad
from paddle_recompute.grad_sync._start import StartValues

_ADVICE = "Use sync mode 'fused' or 'overlap', which synchronize it."


class FleetReduction:
    """The mean over the ranks of the gradients of `listed`, one call of `finish` per step."""

    num_early = 0
    """Nothing is sent before the backward has ended."""
    scale = 1.0

    def __init__(self, listed: ParameterList, group: Group | None, start: StartValues) -> None:
        self._listed = listed
        self._group = group
        all_reducer = AllReducer(group)
        self._is_gloo = all_reducer.is_gloo
        self._consistency_check = ConsistencyCheck(listed, group, all_reducer, start)
        self.timeline: CommunicationTrace | None = None
        """The last step's times; without buckets, as Paddle does not tell about them."""
        self._refuse_unsupported()

    def arm(self, step: int, report: StepReport) -> None:
        """The backward that follows is the last one before the optimizer's step number `step`."""
        self._step = step
        self._began = time.perf_counter()

    def disarm(self) -> None:
        """The backward failed."""

    def finish(self, report: StepReport) -> Agreed:
        """Replace every gradient by the mean over the ranks."""
        backward_ended = time.perf_counter()
        self._listed.read()
        _, agreed = self._consistency_check.reach(StepFlags(), report, self._label)
        self._refuse_unsupported()
        if agreed.counts_differ and report.count is not None:
            with paddle.no_grad():
                for gradient in self._listed.gradients:
                    if gradient is not None:
                        gradient.scale_(report.count / agreed.count)
        parameters = self._with_gradient_anywhere()
        if parameters:
            self._average(parameters)
        self.timeline = CommunicationTrace(
            self._began, None, backward_ended, time.perf_counter(), ()
        )
        return agreed

    def _refuse_unsupported(self) -> None:
        listed = self._listed
        for index in listed.trained:
            parameter, name = listed.parameters[index], listed.names[index]
            refuse_main_grad(parameter, name)
            if not hasattr(parameter, "trainable"):
                raise SyncError(
                    f"'{name}' is a Tensor and not a Parameter; fused_allreduce_gradients takes "
                    f"Parameters only. {_ADVICE}"
                )
            if self._is_gloo and parameter.dtype == paddle.float16:
                raise SyncError(
                    f"'{name}' is float16: gloo's sum of float16 is wrong, and sync mode 'fleet' "
                    f"sends gradients as they are. {_ADVICE}"
                )
            gradient = listed.gradients[index]
            if gradient is not None and gradient.dtype != parameter.dtype:
                raise SyncError(
                    f"the gradient of '{name}' is {gradient.dtype}, and the parameter "
                    f"{parameter.dtype}; the ranks sum gradients of one dtype. {_ADVICE}"
                )
            if parameter.stop_gradient:  # it takes part, so it has a gradient
                raise SyncError(
                    f"'{name}' has stop_gradient=True and a gradient, which "
                    f"fused_allreduce_gradients leaves out. {_ADVICE}"
                )

    def _with_gradient_anywhere(self) -> list[paddle.Tensor]:
        """The parameters that have a gradient on any rank, now on every rank."""
        listed, found = self._listed, []
        without = self._consistency_check.without_gradient(self._label("which gradients there are"))
        for index in listed.trained:
            parameter = listed.parameters[index]
            if index in without or not parameter.size:
                continue
            if parameter.grad is None:
                parameter.grad = paddle.zeros(parameter.shape, parameter.dtype)
            elif not parameter.grad.is_contiguous():
                parameter.grad = parameter.grad.contiguous()
            found.append(parameter)
        return found

    def _average(self, parameters: list[paddle.Tensor]) -> None:
        is_summing = getattr(dist, "in_auto_parallel_align_mode", None)  # 3.x
        if is_summing is not None and is_summing():
            raise SyncError(
                "FLAGS_enable_auto_parallel_align_mode is set: fused_allreduce_gradients would sum "
                "the gradients of the ranks instead of averaging them. Unset the flag."
            )
        label = self._label("fused_allreduce_gradients")
        run_collective(lambda: self._call(parameters), label, self._group)

    def _call(self, parameters: list[paddle.Tensor]) -> None:
        from paddle.distributed.fleet.utils import hybrid_parallel_util as fleet

        if self._group is None:
            fleet.fused_allreduce_gradients(parameters, None)
        else:
            fleet.fused_allreduce_gradients_with_group(parameters, self._group)

    def _label(self, what: str) -> str:
        return f"gradient sync of step {self._step}: {what}"
