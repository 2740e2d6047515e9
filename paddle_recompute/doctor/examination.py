"""Compare a wrapped model with the plain one, on one batch, before training."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import paddle

from paddle_recompute._paddle.cpu_settings import advice, missing_cpu_settings
from paddle_recompute._paddle.layers import parameters_of_optimizer
from paddle_recompute.comparison import Array, StepState
from paddle_recompute.contrastive import GradCache
from paddle_recompute.distributed import is_distributed, values_of_ranks
from paddle_recompute.doctor import across_ranks, model_checks, step_comparison
from paddle_recompute.doctor.observation import LossError, Observation, observe
from paddle_recompute.doctor.report import DoctorReport
from paddle_recompute.errors import ConfigError, first_sentence
from paddle_recompute.grad_sync import GradientSync
from paddle_recompute.options import RecomputeConfig
from paddle_recompute.recompute import apply_recompute, without_recompute, wrapped_layers

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

    Every step starts from the same parameters, buffers and RNG state, which are restored at the
    end. The plain step calls the same model with recompute of every kind switched off. All
    ranks call this together. Every tensor is read on the host: it takes the time of ten steps.

    Args:
        model: Any Layer, wrapped already or not.
        batch: What `loss_fn` takes; this rank's own.
        loss_fn: ``loss_fn(model, batch)`` returns a scalar Tensor, not multiplied by a loss scale.
        optimizer: Its parameters are compared with the model's; it makes no step.
        recompute: Applied to `model` for the examination; it stays wrapped.
        sync: With several ranks: its gradients are compared with those of an explicit mean.
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
    _refuse_sparse_gradients(model)
    distributed = is_distributed()
    if distributed:
        across_ranks.check_agreement(report, settings or {})
        across_ranks.check_start(report, model)
        across_ranks.check_data(report, batch)
        if any(finding.kind == "ranks_differ" for finding in report.findings):
            return report
    model_checks.check_mode(report, model)
    if recompute is not None:
        apply_recompute(model, recompute)
    state = StepState(model, whole=True)
    try:
        examined = _Examined(report, model, state, batch, loss_fn)
        with without_recompute():
            plain, repeated = examined.step(), examined.step()
        if _fails_somewhere(report, plain):
            return report
        optimized = parameters_of_optimizer(optimizer) if optimizer is not None else None
        model_checks.check_parameters(report, model, plain, optimized)
        # If one rank cannot compare, none does: the loss may contain a collective of all ranks.
        if all(
            values_of_ranks(step_comparison.check_plain(report, plain, repeated), "the plain steps")
        ):
            examined.compare_recompute(plain)
            if grad_cache is not None:
                examined.compare_cache(plain, grad_cache)
            if distributed:
                examined.compare_ranks(plain, sync)
        wrapped = wrapped_layers(model)
        report.notes.insert(
            0, f"{len(plain.outputs)} calls of sublayers, {len(wrapped)} recomputed"
        )
        missing = missing_cpu_settings()
        if missing.set or missing.late:
            report.notes.append(advice({**missing.set, **missing.late}))
        return report
    finally:
        state.restore()


def _refuse_sparse_gradients(model: paddle.nn.Layer) -> None:
    for name, parameter in model.named_parameters():
        if parameter.grad is not None and parameter.grad.is_selected_rows():
            raise ConfigError(
                f"the parameter '{name}' has a sparse gradient, which would be lost; call the "
                "doctor after optimizer.clear_grad(set_to_zero=False)"
            )


def _fails_somewhere(report: DoctorReport, plain: Observation) -> bool:
    """Whether the plain step fails on any rank; then all ranks end the examination."""
    own = None
    if isinstance(plain.error, LossError):
        own = "loss_not_scalar", "the loss", f"loss_fn: {plain.error}"
    elif plain.error is not None:
        own = "error", "", f"the plain step fails: {first_sentence(plain.error)}"
    faults = values_of_ranks(own, "the plain step")
    for rank, fault in enumerate(faults):
        if fault is not None:
            kind, place, message = fault
            report.add(kind, f"rank {rank}" if is_distributed() else place, message)
    return any(faults)


@dataclass(frozen=True)
class _Examined:
    """The model that is examined; each step starts from `state`."""

    report: DoctorReport
    model: paddle.nn.Layer
    state: StepState
    batch: Any
    loss_fn: Callable[[paddle.nn.Layer, Any], paddle.Tensor]

    def step(self) -> Observation:
        """Forward and backward."""
        return observe(
            self.model, self.state, lambda: self.loss_fn(self.model, self.batch), backward=True
        )

    def compare_recompute(self, plain: Observation) -> None:
        """Compare a step with recompute."""
        seen = self.step()
        # Recompute may repeat a layer before the backward, if its output is freed by then.
        first = len(plain.outputs)
        seen.repeated = seen.outputs[first:] + seen.repeated
        seen.outputs = seen.outputs[:first]
        step_comparison.check_second_forward(self.report, seen)
        step_comparison.check_equal(self.report, plain, seen, "recompute", has_outputs=True)
        if seen.error is None:
            model_checks.check_calls(self.report, plain, seen, wrapped_layers(self.model))

    def compare_cache(
        self, plain: Observation, grad_cache: GradCache | Callable[[Any], paddle.Tensor]
    ) -> None:
        """Compare a step in chunks."""
        batch, tolerance = self.batch, CHUNKED
        model_checks.check_chunks(self.report, self.model)

        def in_chunks() -> paddle.Tensor:
            if isinstance(grad_cache, GradCache):
                return grad_cache.backward(*batch)
            return grad_cache(batch)

        cached = observe(self.model, self.state, in_chunks, backward=False)
        # Dropout draws other masks for chunks than for the whole batch: no number can be compared,
        # but what has a gradient must have one.
        if cached.error is None and _draws(plain, self.state):
            note = "gradient cache: not compared, as the model draws random numbers"
            self.report.notes.append(note)
            some: dict[str, Array | None] = {
                name: gradient for name, gradient in plain.gradients.items() if gradient is not None
            }
            plain, tolerance = dataclasses.replace(plain, gradients=some), math.inf
        step_comparison.check_equal(self.report, plain, cached, "the gradient cache", tolerance)

    def compare_ranks(self, plain: Observation, sync: GradientSync | None) -> None:
        """Compare the gradients that `sync` leaves with the mean over the ranks."""
        report = self.report
        finds = sync is None or sync.find_unused_parameters
        across_ranks.check_unused(report, plain.gradients, finds_unused=finds)
        faults = sum(values_of_ranks(len(report.findings), "the findings so far"))
        if sync is None or faults:
            return

        def synchronized() -> paddle.Tensor:
            with sync.last_backward():
                loss = self.loss_fn(self.model, self.batch)
                loss.backward()
            return loss

        means = across_ranks.mean_of_ranks(self.model, plain.gradients)
        before = sync.state_dict()
        seen = observe(self.model, self.state, synchronized, backward=False)
        sync.set_state_dict(before)
        plain = dataclasses.replace(plain, gradients=means)
        tolerance = step_comparison.CLOSE if sync.compression == "none" else SENT_IN_BFLOAT16
        step_comparison.check_equal(report, plain, seen, "gradient synchronization", tolerance)


def _draws(plain: Observation, state: StepState) -> bool:
    """Whether the plain step took numbers of the random stream."""
    state.restart()
    untouched = paddle.rand([4]).numpy()
    return bool((untouched != plain.next_random).any())
