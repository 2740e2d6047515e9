"""Compare a wrapped model with the plain one, on one batch, before training."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import paddle

from paddle_recompute import _paddle
from paddle_recompute.contrastive import GradCache
from paddle_recompute.distributed import is_distributed, values_of_ranks
from paddle_recompute.doctor import across_ranks, checks
from paddle_recompute.doctor.idle_parts import Idle, idle_parts
from paddle_recompute.doctor.observation import LossError, Observation, State, observe
from paddle_recompute.doctor.report import DoctorReport
from paddle_recompute.errors import PaddleRecomputeError
from paddle_recompute.grad_sync import GradientSync
from paddle_recompute.options import RecomputeConfig
from paddle_recompute.recompute import apply_recompute, called_plainly, wrapped_layers

CHUNKED = 1e-4
"""Tolerance for gradients that are summed over chunks."""
SENT_IN_BFLOAT16 = 2e-2
"""Tolerance for gradients that are sent as bfloat16."""


def doctor(
    model: paddle.nn.Layer,
    batch: Any,
    loss_fn: Callable[[paddle.nn.Layer, Any], paddle.Tensor],
    *,
    optimizer: paddle.optimizer.Optimizer | None = None,
    recompute: RecomputeConfig | None = None,
    sync: GradientSync | None = None,
    grad_cache: GradCache | Callable[[Any], paddle.Tensor] | None = None,
    settings: dict[str, Any] | None = None,
) -> DoctorReport:
    """Compare steps of the plain and the wrapped model on one batch.

    Every step starts from the same parameters, buffers and random streams, which are put back at
    the end. The plain step calls the same model with recompute of every kind switched off. All
    ranks call this together. Every tensor is read on the host: it takes the time of ten steps.

    Args:
        model: Any Layer, wrapped already or not.
        batch: What `loss_fn` takes; this rank's own.
        loss_fn: ``loss_fn(model, batch)`` returns a scalar Tensor, not multiplied by a loss scale.
        optimizer: Its parameters are compared with the model's; it makes no step.
        recompute: Applied to `model` for the examination; it stays wrapped.
        sync: With several ranks: its gradients are compared with those of an explicit gather.
        grad_cache: A `GradCache` for batches that are pairs (``backward(*batch)`` is called), or
            any function of the batch that makes the backward and returns the loss.
        settings: Values by name that must be equal on all ranks, such as the loss scale.

    Returns:
        The report. ``report.ok`` says whether the model is sound; each finding names the first
        sublayer that differs. Warnings (`DoctorReport.warnings`) leave it sound.

    Raises:
        ConfigError: A parameter has a sparse gradient from an earlier step.
    """
    report = DoctorReport()
    with State(model) as state:
        distributed = is_distributed()
        if distributed:
            across_ranks.check_agreement(report, settings or {})
            across_ranks.check_start(report, model)
            across_ranks.check_data(report, batch)
            if any(one.kind == "ranks_differ" for one in report.findings):
                return report
        checks.check_mode(report, model)
        if recompute is not None:
            apply_recompute(model, recompute)
        with called_plainly():
            plain = observe(model, state, lambda: loss_fn(model, batch), backward=True)
            again = observe(model, state, lambda: loss_fn(model, batch), backward=True)
        if _fails_somewhere(report, plain):
            return report
        idle = Idle()
        if any(values_of_ranks(_leaves_out(model, plain), "what is left out")):
            with called_plainly():
                idle = idle_parts(model, state, plain, lambda: loss_fn(model, batch))
        optimized = _paddle.parameters_of_optimizer(optimizer) if optimizer is not None else None
        checks.check_parameters(report, model, plain, optimized, idle)
        # If one rank cannot compare, none does: the loss may contain a collective of all ranks.
        if all(values_of_ranks(checks.check_plain(report, plain, again), "the plain steps")):
            _compare(report, model, state, plain, batch, loss_fn, grad_cache, idle)
            if distributed:
                _compare_ranks(report, model, state, plain, batch, loss_fn, sync)
        wrapped = wrapped_layers(model)
        report.notes.insert(
            0, f"{len(plain.outputs)} calls of sublayers, {len(wrapped)} recomputed"
        )
        return report


def _fails_somewhere(report: DoctorReport, plain: Observation) -> bool:
    """Whether the plain step fails on any rank; then all ranks end the examination."""
    own = None
    if isinstance(plain.error, LossError):
        own = "loss_not_scalar", "the loss", f"loss_fn: {plain.error}"
    elif plain.error is not None:
        own = "error", "", f"the plain step fails: {_line(plain.error)}"
    faults = values_of_ranks(own, "the plain step")
    for rank, fault in enumerate(faults):
        if fault is not None:
            kind, place, message = fault
            report.add(kind, f"rank {rank}" if is_distributed() else place, message)
    return any(faults)


def _leaves_out(model: paddle.nn.Layer, plain: Observation) -> bool:
    """Whether the plain step leaves out a parameter, or a part that is to be recomputed."""
    calls = plain.calls()
    return any(gradient is None for gradient in plain.gradients.values()) or any(
        name not in calls for name in wrapped_layers(model)
    )


def _compare(
    report: DoctorReport,
    model: paddle.nn.Layer,
    state: State,
    plain: Observation,
    batch: Any,
    loss_fn: Callable[[paddle.nn.Layer, Any], paddle.Tensor],
    grad_cache: GradCache | Callable[[Any], paddle.Tensor] | None,
    idle: Idle,
) -> None:
    seen = observe(model, state, lambda: loss_fn(model, batch), backward=True)
    # Recompute may repeat a layer before the backward, if its output is freed by then.
    first = len(plain.outputs)
    seen.repeated = seen.outputs[first:] + seen.repeated
    seen.outputs = seen.outputs[:first]
    checks.check_second_forward(report, seen)
    if seen.error is not None:
        _add_error(report, seen.error, "recompute")
    else:
        checks.check_equal(report, model, plain, seen, what="recompute")
        called = [name for name in wrapped_layers(model) if not idle.has(name)]
        checks.check_calls(report, plain, seen, called)
    if grad_cache is None:
        return
    checks.check_chunks(report, model)

    def in_chunks() -> paddle.Tensor:
        if isinstance(grad_cache, GradCache):
            return grad_cache.backward(*batch)
        return grad_cache(batch)

    cached = observe(model, state, in_chunks, backward=False)
    if cached.error is not None:
        _add_error(report, cached.error, "the gradient cache")
    else:
        # Dropout draws other masks for chunks than for the whole batch; nothing can be compared.
        if _draws(plain, state):
            report.notes.append("gradient cache: not compared, as the model draws random numbers")
            checks.check_backward(report, plain, cached, what="the gradient cache")
        else:
            checks.check_equal(
                report, model, plain, cached, what="the gradient cache", tolerance=CHUNKED,
                has_outputs=False,
            )  # fmt: skip


def _compare_ranks(
    report: DoctorReport,
    model: paddle.nn.Layer,
    state: State,
    plain: Observation,
    batch: Any,
    loss_fn: Callable[[paddle.nn.Layer, Any], paddle.Tensor],
    sync: GradientSync | None,
) -> None:
    finds = sync is None or sync.find_unused_parameters
    across_ranks.check_unused(report, plain.gradients, finds_unused=finds)
    faults = sum(values_of_ranks(len(report.findings), "the findings so far"))
    if sync is None or faults:
        return

    def synchronized() -> paddle.Tensor:
        with sync.last_backward():
            loss = loss_fn(model, batch)
            loss.backward()
        return loss

    expected = dataclasses.replace(plain, gradients=across_ranks.mean_of_ranks(plain.gradients))
    before = sync.state_dict()
    seen = observe(model, state, synchronized, backward=False)
    sync.set_state_dict(before)
    if seen.error is not None:
        _add_error(report, seen.error, "gradient synchronization")
    else:
        sends_bfloat16 = sync.compression != "none"
        checks.check_equal(
            report, model, expected, seen, what="gradient synchronization",
            tolerance=SENT_IN_BFLOAT16 if sends_bfloat16 else checks.CLOSE, has_outputs=False,
        )  # fmt: skip


def _add_error(report: DoctorReport, error: BaseException, what: str) -> None:
    if isinstance(error, LossError):
        report.add("loss_not_scalar", what, str(error))
    elif isinstance(error, PaddleRecomputeError):
        report.add("refused", "", f"the step with {what} is refused: {_line(error)}")
    else:
        report.add(
            "error", "", f"the step with {what} fails, and the plain one does not: {_line(error)}"
        )


def _draws(plain: Observation, state: State) -> bool:
    """Whether the plain step took numbers of the random stream."""
    state.restore()
    untouched = paddle.rand([4]).numpy()
    return bool((untouched != plain.next_random).any())


def _line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    telling = [
        line for line in lines if not line.startswith(("[Hint", "---", "C++ ", "Error Mess"))
    ]
    return f"{type(error).__name__}: {(telling or lines or [''])[0][:300]}"
