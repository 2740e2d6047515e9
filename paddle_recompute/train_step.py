"""`TrainStep`: one optimizer step from several micro-batches, on one or many ranks."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import paddle

from paddle_recompute.errors import ConfigError
from paddle_recompute.grad_sync import GradientSync, mean_over_ranks
from paddle_recompute.grad_sync.gradient_sync import SyncMode

LossFn = Callable[[Any, Any], paddle.Tensor]


@dataclass(frozen=True)
class StepResult:
    """What one optimizer step did.

    Attributes:
        loss: Mean loss over the micro-batches of all ranks.
        grad_norm: Euclidean norm of the synchronized gradient of all parameters, before clipping.
        seconds: Wall-clock time of ``forward_backward``, ``sync`` and ``update``.
    """

    loss: float
    grad_norm: float
    seconds: dict[str, float]


class TrainStep:
    """Forward and backward of every micro-batch, one gradient synchronization, one update.

    The gradient is that of the mean of all micro-batches' losses over all ranks: K micro-batches
    of b examples are one batch of K * b where `loss_fn` is a mean over examples. A loss that
    relates the examples of a batch to each other (contrastive with in-batch negatives) sees the
    examples of one micro-batch of one rank at a time.

    Examples:
        >>> import paddle
        >>> from paddle_recompute import TrainStep
        >>> model = paddle.nn.Linear(4, 1)
        >>> optimizer = paddle.optimizer.AdamW(parameters=model.parameters())
        >>> step = TrainStep(model, optimizer, loss_fn=lambda model, x: model(x).square().mean())
        >>> step([paddle.ones([8, 4])]).grad_norm > 0
        True
    """

    def __init__(
        self,
        model: paddle.nn.Layer,
        optimizer: paddle.optimizer.Optimizer,
        *,
        loss_fn: LossFn,
        sync: SyncMode | GradientSync = "auto",
        accumulate_steps: int = 1,
        clip_grad_norm: float | None = None,
    ) -> None:
        """Set up the step; with several ranks they agree here on the parameters.

        Args:
            model: The Layer to train, bare or in ``paddle.DataParallel``.
            optimizer: An optimizer over its parameters. Its learning-rate scheduler is the
                caller's to step.
            loss_fn: ``loss_fn(model, micro_batch)`` returns a scalar Tensor.
            sync: How gradients are synchronized, a mode or a `GradientSync` of one's own.
            accumulate_steps: Number of micro-batches per optimizer step.
            clip_grad_norm: Scale the gradient down to this norm where it is larger; None: never.

        Raises:
            ConfigError: `accumulate_steps` or `clip_grad_norm` is not positive, or `sync` is not
                a mode.
            SyncError: The ranks' parameters differ.
        """
        if accumulate_steps < 1:
            raise ConfigError(f"accumulate_steps is {accumulate_steps}; it must be at least 1")
        if clip_grad_norm is not None and not clip_grad_norm > 0:
            raise ConfigError(
                f"clip_grad_norm is {clip_grad_norm}; it must be positive, or None for no clipping"
            )
        self._model = model
        self._optimizer = optimizer
        self._loss_fn = loss_fn
        self._sync = sync if isinstance(sync, GradientSync) else GradientSync(model, mode=sync)
        self._accumulate_steps = accumulate_steps
        self._clip_grad_norm = clip_grad_norm
        self._parameters = [p for p in model.parameters() if not p.stop_gradient]

    def __call__(self, micro_batches: Sequence[Any]) -> StepResult:
        """Run one optimizer step.

        Args:
            micro_batches: `accumulate_steps` micro-batches, each passed on to ``loss_fn``.

        Returns:
            Loss, gradient norm and times. The gradients are cleared.

        Raises:
            ConfigError: Another number of micro-batches was given, or a loss is not a scalar.
        """
        if len(micro_batches) != self._accumulate_steps:
            raise ConfigError(
                f"TrainStep got {len(micro_batches)} micro-batches; accumulate_steps is "
                f"{self._accumulate_steps}"
            )
        *earlier, last = micro_batches
        times = [time.perf_counter()]
        with self._sync.no_sync():
            losses = [self._forward_backward(micro_batch) for micro_batch in earlier]
        with self._sync.last_backward():
            losses.append(self._forward_backward(last))
            times.append(time.perf_counter())
        times.append(time.perf_counter())
        grad_norm = self._clip()
        self._optimizer.step()
        self._optimizer.clear_grad()
        loss = mean_over_ranks(math.fsum(losses) / len(losses), self._sync.group)
        times.append(time.perf_counter())
        parts = ("forward_backward", "sync", "update")
        durations = [after - before for before, after in itertools.pairwise(times)]
        seconds = dict(zip(parts, durations, strict=True))
        return StepResult(loss, grad_norm, seconds)

    def _forward_backward(self, micro_batch: Any) -> float:
        loss = self._loss_fn(self._model, micro_batch)
        if loss.size != 1:
            raise ConfigError(f"loss_fn must return a scalar Tensor; its shape is {loss.shape}")
        (loss / self._accumulate_steps).backward()
        return float(loss.item())

    @paddle.no_grad()
    def _clip(self) -> float:
        """Scale gradients as ``paddle.nn.ClipGradByGlobalNorm`` does; returns the norm before."""
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        if not gradients:
            return 0.0
        squares = [gradient.astype("float32").square().sum() for gradient in gradients]
        norm = float(paddle.add_n(squares).sqrt().item())
        if self._clip_grad_norm is not None and norm > self._clip_grad_norm:
            for gradient in gradients:
                gradient.scale_(self._clip_grad_norm / norm)
        return norm
