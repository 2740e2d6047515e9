"""`TrainStep`: one optimizer step from several micro-batches, on one or many ranks."""

from __future__ import annotations

import contextlib
import itertools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import paddle

from paddle_recompute._nested import tensors_in
from paddle_recompute.config import AmpConfigs
from paddle_recompute.errors import ConfigError, DivergenceError
from paddle_recompute.grad_sync import GradientSync, mean_over_ranks
from paddle_recompute.grad_sync.gradient_sync import SyncMode
from paddle_recompute.mixed_precision import MixedPrecision, to_float32

LossFn = Callable[[Any, Any], paddle.Tensor]


@dataclass(frozen=True)
class StepResult:
    """What one optimizer step did.

    Attributes:
        loss: Mean loss over the examples of all micro-batches and ranks.
        grad_norm: Euclidean norm of the synchronized gradient of all parameters, without the loss
            scale and before clipping.
        seconds: Wall-clock time of ``forward_backward``, ``sync`` and ``update``.
        skipped: Whether the parameters were left alone, because loss or gradient is not finite in
            float16. It is the same on all ranks.
        loss_scale: What the loss was multiplied with; None where it is not scaled.
    """

    loss: float
    grad_norm: float
    seconds: dict[str, float]
    skipped: bool = False
    loss_scale: float | None = None


class TrainStep:
    """Forward and backward of every micro-batch, one gradient synchronization, one update.

    The gradient is that of the mean over all examples of all micro-batches and ranks, however many
    each of them has, where `loss_fn` is a mean over the examples of its micro-batch: with n_i
    examples in micro-batch i of N in total, its loss L_i counts n_i / N. A loss that relates the
    examples of a batch to each other (contrastive with in-batch negatives) is one of a micro-batch,
    whatever K is: accumulation adds no negatives.

    The order within a step, which is what makes loss scaling and several ranks go together:

    1. the loss is multiplied by the loss scale (float16 only; see `mixed_precision`),
    2. backward,
    3. the ranks' gradients are averaged, still scaled: an overflow on one rank reaches all,
    4. gradients become float32 and are divided by the scale,
    5. the ranks agree on whether loss and gradient are finite everywhere,
    6. if they are: clipping, by the norm of the whole synchronized gradient, and the update; if
       not, neither, on any rank,
    7. the loss scale moves.

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
        amp: AmpConfigs | None = None,
        num_examples: Callable[[Any], float] | None = None,
    ) -> None:
        """Set up the step; with several ranks they agree here on the parameters.

        Args:
            model: The Layer to train, bare or in ``paddle.DataParallel``.
            optimizer: An optimizer over its parameters. Its learning-rate scheduler is the
                caller's to step.
            loss_fn: ``loss_fn(model, micro_batch)`` returns a scalar Tensor, a mean over the
                examples of the micro-batch.
            sync: How gradients are synchronized, a mode or a `GradientSync` of one's own.
            accumulate_steps: Number of micro-batches per optimizer step.
            clip_grad_norm: Scale the gradient down to this norm where it is larger; None: never.
            amp: Mixed precision, ``AmpConfigs(dtype="bfloat16")`` for instance; None: none. Level
                O2 casts the parameters of `model` here. On a CPU, where Paddle has none in
                dygraph, it is refused.
            num_examples: ``num_examples(micro_batch)`` is the number of examples that its loss is
                the mean of, or any other weight greater than 0; None: the length of the first axis
                of the first Tensor in it. A loss that weighs the ranks' batches itself, as
                ``ContrastiveLoss(negatives="global")`` does, is not to be weighed again where they
                differ in size: ``num_examples=lambda micro_batch: 1``.

        Raises:
            ConfigError: `accumulate_steps` or `clip_grad_norm` is not positive, `sync` is not
                a mode, or `amp` cannot be honoured on this device.
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
        self._amp = MixedPrecision(amp, model, optimizer) if amp is not None else None
        self._scaler = self._amp.scaler if self._amp is not None else None
        self._sync = sync if isinstance(sync, GradientSync) else GradientSync(model, mode=sync)
        self._accumulate_steps = accumulate_steps
        self._clip_grad_norm = clip_grad_norm
        self._num_examples = num_examples or _length_of_first_axis
        self._parameters = [p for p in model.parameters() if not p.stop_gradient]

    def __call__(self, micro_batches: Sequence[Any]) -> StepResult:
        """Run one optimizer step.

        Args:
            micro_batches: `accumulate_steps` micro-batches, each passed on to ``loss_fn``. They
                may differ in size, on this rank and between ranks.

        Returns:
            Loss, gradient norm, times and what else there is to know. The gradients are cleared.

        Raises:
            ConfigError: Another number of micro-batches was given, a loss is not a scalar, or the
                number of examples cannot be told.
            DivergenceError: Loss or gradient is not finite, and no loss scale is to blame: there
                is none, or it was lowered in vain. The parameters are as they were.
        """
        if len(micro_batches) != self._accumulate_steps:
            raise ConfigError(
                f"TrainStep got {len(micro_batches)} micro-batches; accumulate_steps is "
                f"{self._accumulate_steps}"
            )
        if self._amp is not None:
            self._amp.advise(micro_batches[0])
        times = [time.perf_counter()]
        counts = [self._count(micro_batch) for micro_batch in micro_batches]
        per_rank = mean_over_ranks(math.fsum(counts), self._sync.group)
        # The mean and not the sum, as the synchronization divides by the number of ranks. Exactly
        # accumulate_steps where all counts are equal: then it is the plain mean, to the bit.
        divisors = [per_rank / count for count in counts]
        losses = []
        with self._sync.no_sync():
            for micro_batch, divisor in zip(micro_batches[:-1], divisors, strict=False):
                losses.append(self._forward_backward(micro_batch, divisor))
        with self._sync.last_backward():
            losses.append(self._forward_backward(micro_batches[-1], divisors[-1]))
            times.append(time.perf_counter())
        times.append(time.perf_counter())
        own_loss = sum(loss / divisor for loss, divisor in zip(losses, divisors, strict=True))
        loss_scale = self._scaler.scale if self._scaler is not None else None
        grad_norm = self._unscale()
        loss, finite = self._agree(own_loss, grad_norm)
        if finite:
            self._clip(grad_norm)
            self._optimizer.step()
        elif self._scaler is None:
            raise DivergenceError(
                f"the loss is {loss} and the gradient norm {grad_norm}; the parameters are as they "
                "were before this step. Lower the learning rate, lengthen its warm-up, or set "
                "clip_grad_norm"
            )
        # Not set_to_zero: a parameter that has no gradient in the next step must not be decayed.
        self._optimizer.clear_grad(set_to_zero=False)
        if self._scaler is not None and loss_scale is not None:
            self._scaler.update(finite)
            self._scale_residuals(self._scaler.scale / loss_scale)
        times.append(time.perf_counter())
        parts = ("forward_backward", "sync", "update")
        durations = [after - before for before, after in itertools.pairwise(times)]
        seconds = dict(zip(parts, durations, strict=True))
        return StepResult(loss, grad_norm, seconds, not finite, loss_scale)

    def autocast(self) -> contextlib.AbstractContextManager[None]:
        """The mixed precision of the forward pass, for an evaluation of the model; without `amp`
        it does nothing. A model at level O2 needs it.
        """
        return self._amp.autocast() if self._amp is not None else contextlib.nullcontext()

    @property
    def num_skipped(self) -> int:
        """How many steps were skipped so far, before a resumption too."""
        return self._scaler.num_skipped if self._scaler is not None else 0

    def state_dict(self) -> dict[str, Any]:
        """What the next step depends on beside model and optimizer: the loss scale and its
        counters, plain numbers; empty where the loss is not scaled.
        """
        return {"loss_scaler": self._scaler.state_dict()} if self._scaler is not None else {}

    def set_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from what `state_dict` gave. Without a loss scale there is nothing to restore;
        where there was none before, it starts anew.
        """
        if self._scaler is not None and "loss_scaler" in state:
            self._scaler.set_state_dict(state["loss_scaler"])

    def _count(self, micro_batch: Any) -> float:
        count = self._num_examples(micro_batch)
        if not (math.isfinite(count) and count > 0):
            raise ConfigError(
                f"a micro-batch has {count} examples; allowed is a number greater than 0"
            )
        return count

    def _forward_backward(self, micro_batch: Any, divisor: float) -> float:
        with self.autocast():
            loss = self._loss_fn(self._model, micro_batch)
        if loss.size != 1:
            raise ConfigError(f"loss_fn must return a scalar Tensor; its shape is {loss.shape}")
        weighted = loss / divisor
        if self._scaler is not None:
            # In float32: a float16 loss times its scale could be infinite on its own.
            weighted = weighted.astype("float32") * self._scaler.scale
        weighted.backward()
        return float(loss.item())

    @paddle.no_grad()
    def _unscale(self) -> float:
        """Divide the gradients by the loss scale; returns their norm.

        The norm is the test for overflow too: it is finite only if every element is.
        """
        if self._amp is not None:
            to_float32(self._parameters)
        gradients = self._gradients()
        if self._scaler is not None:
            for gradient in gradients:
                gradient.scale_(1.0 / self._scaler.scale)
        if not gradients:
            return 0.0
        squares = [gradient.astype("float32").square().sum() for gradient in gradients]
        return float(paddle.add_n(squares).sqrt().item())

    @paddle.no_grad()
    def _clip(self, norm: float) -> None:
        """Scale gradients as ``paddle.nn.ClipGradByGlobalNorm`` does."""
        if self._clip_grad_norm is not None and norm > self._clip_grad_norm:
            for gradient in self._gradients():
                gradient.scale_(self._clip_grad_norm / norm)

    def _scale_residuals(self, ratio: float) -> None:
        """What bfloat16 rounding still owes was owed under the loss scale of before."""
        if ratio != 1.0:
            state = self._sync.state_dict()
            residuals = {name: value * ratio for name, value in state["residuals"].items()}
            if residuals:
                self._sync.set_state_dict({**state, "residuals": residuals})

    def _gradients(self) -> list[paddle.Tensor]:
        return [p.grad for p in self._parameters if p.grad is not None]

    def _agree(self, own_loss: float, grad_norm: float) -> tuple[float, bool]:
        """The loss over all ranks, and whether it and all ranks' gradients are finite."""
        overflow = 0.0 if math.isfinite(grad_norm) else 1.0
        overflows = mean_over_ranks(overflow, self._sync.group)
        # Infinities of both signs on two ranks have no mean.
        own_loss = math.nan if own_loss == -math.inf else own_loss
        loss = mean_over_ranks(own_loss, self._sync.group)
        return loss, math.isfinite(loss) and overflows == 0


def _length_of_first_axis(micro_batch: Any) -> int:
    tensor = next(tensors_in(micro_batch), None)
    if tensor is None or tensor.ndim == 0:
        found = "no Tensor" if tensor is None else "a Tensor without axes first"
        raise ConfigError(
            f"the number of examples cannot be told from a micro-batch with {found} in it; give "
            "TrainStep num_examples=..., a function from the micro-batch to that number"
        )
    return int(tensor.shape[0])
