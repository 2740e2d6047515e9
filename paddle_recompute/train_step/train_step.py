"""`TrainStep`: one optimizer step from several micro-batches, on one or many ranks."""

from __future__ import annotations

import contextlib
import functools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import paddle

from paddle_recompute._paddle.cpu_settings import log_missing_cpu_settings
from paddle_recompute._paddle.flat import Gradients, scale_all
from paddle_recompute._paddle.updates import (
    keeps_parameters_at_rate_0,
    learning_rate_times,
    zero_if,
)
from paddle_recompute.contrastive import GradCache
from paddle_recompute.distributed import ends_all_ranks, mean_over_ranks
from paddle_recompute.errors import ConfigError
from paddle_recompute.grad_sync import CommunicationTrace, GradientSync, StepReport, SyncMode
from paddle_recompute.offload import OffloadOptimizer, OnComplete
from paddle_recompute.options import AmpConfigs
from paddle_recompute.sharding import ShardedOptimizer, inner_of
from paddle_recompute.train_step.backward import (
    Backward,
    CachedBackward,
    LossFn,
    PlainBackward,
    checked_count,
)
from paddle_recompute.train_step.gradients import scale_to_norm, unscale
from paddle_recompute.train_step.mixed_precision import MixedPrecision
from paddle_recompute.train_step.optimizer_state import (
    set_state_of,
    state_of,
    structured_parameters,
)
from paddle_recompute.train_step.options import check_options
from paddle_recompute.train_step.parameters import (
    TrainedParameters,
    check_sharded,
    offload_optimizer,
    synchronization_of,
)
from paddle_recompute.train_step.pending_metrics import (
    Outcome,
    PendingMetrics,
    divergence,
    read_all,
)
from paddle_recompute.train_step.step import LOSS_PREFIX, StepResult

SLOW = 0.2
"""Seconds; after a longer step, missing CPU settings are logged (`use_cpu_settings`)."""


class TrainStep:
    """Forward and backward of every micro-batch, one gradient synchronization, one update.

    The gradient is that of the mean over all examples of all micro-batches and ranks: if
    micro-batch i has n_i of N examples, its loss L_i, a mean over its examples, has the weight n_i
    / N. A contrastive loss with in-batch negatives sees one micro-batch at a time: accumulation
    adds no negatives. With a `GradCache` instead of `loss_fn`, one micro-batch of any size takes
    the memory of one chunk.

    Each step lists the trained parameters anew: a parameter that is unfrozen, added to `model` or
    given to `optimizer` is trained from then on. Norm and clipping cover the parameters of
    `optimizer`. Other parameters of `model` are not updated, and their gradients are cleared.
    Freeze them (``stop_gradient``) to save their part of the backward.

    The order within a step, on which loss scaling on several ranks depends:

    1. the loss is multiplied by the loss scale (float16 only; see `mixed_precision`),
    2. backward,
    3. the ranks' gradients are averaged, still scaled: an overflow on one rank reaches all,
    4. gradients become float32 and are divided by the scale,
    5. loss and gradient are checked for NaN and infinity; all ranks come to the same result,
       because they have averaged the loss and their mean gradients are bitwise identical,
    6. if all are finite, the gradient is clipped by the norm of the whole synchronized gradient,
       and the parameters are updated; else no rank updates. Buffers that the forward has written,
       such as the statistics of a BatchNorm, keep their new values,
    7. the loss scale is raised or lowered.

    Copying a number to the host makes the host wait for the device. With SGD, Momentum, Adam or
    AdamW only the first step and every 64th do that: clipping and the decision of 6. run on the
    device, and loss and norm are copied when the result is read. With a loss scale or another
    optimizer each step copies once. Several ranks wait for each other once per step, in the
    consistency check at the end of the backward.

    Examples:
        >>> import paddle
        >>> from paddle_recompute import TrainStep
        >>> model = paddle.nn.Linear(4, 1)
        >>> optimizer = paddle.optimizer.AdamW(parameters=model.parameters())
        >>> step = TrainStep(model, optimizer, loss_fn=lambda model, x: model(x).square().mean())
        >>> step([paddle.ones([8, 4])]).grad_norm > 0
        True

        With a gradient cache, 16 rows at a time:

        >>> from paddle_recompute import ContrastiveLoss, GradCache
        >>> cache = GradCache(model, ContrastiveLoss(temperature=0.1), chunk_size=16)
        >>> step = TrainStep(model, optimizer, grad_cache=cache)
        >>> step([(paddle.randn([64, 4]), paddle.randn([64, 4]))]).loss > 0
        True
    """

    def __init__(
        self,
        model: paddle.nn.Layer,
        optimizer: paddle.optimizer.Optimizer | OffloadOptimizer | ShardedOptimizer,
        *,
        loss_fn: LossFn | None = None,
        grad_cache: GradCache | None = None,
        sync: SyncMode | GradientSync = "auto",
        accumulate_steps: int = 1,
        clip_grad_norm: float | None = None,
        amp: AmpConfigs | None = None,
        num_examples: Callable[[Any], float] | None = None,
        loss: paddle.nn.Layer | None = None,
        broadcast_parameters: bool = False,
    ) -> None:
        """Set up the step; several ranks agree here on the parameters.

        In the first step the ranks compare parameters and buffers of model and loss; see
        `GradientSync`.

        Args:
            model: The Layer to train, bare or in ``paddle.DataParallel``.
            optimizer: An optimizer over its parameters, or some of them. The caller steps its
                learning-rate scheduler.
            loss_fn: ``loss_fn(model, micro_batch)`` returns a scalar Tensor, a mean over the
                examples of the micro-batch.
            grad_cache: Instead of `loss_fn`: runs forward and backward of a micro-batch chunk by
                chunk. Its encoders are `model`, or in it. A micro-batch is then
                ``(query, positive, *negatives)``, or a dict with ``query``, ``positive`` and
                perhaps ``negatives`` (a list of them, or one array ``[batch, n, ...]``), in which
                everything else is a keyword argument of its loss, such as ``positive_ids``. It
                synchronizes with its own `GradientSync`, or else with `sync`.
            sync: How gradients are synchronized: a mode or your own `GradientSync`. A mode
                synchronizes all trained parameters of `model` and `optimizer`, a learnable
                temperature of the loss too.
            accumulate_steps: Number of micro-batches per optimizer step.
            clip_grad_norm: Scale the gradient down to this norm where it is larger; None: never.
            amp: Mixed precision, ``AmpConfigs(dtype="bfloat16")`` for instance; None: none. Level
                O2 casts the parameters of `model` here. It is refused on a CPU, where Paddle has no
                mixed precision in dygraph.
            num_examples: ``num_examples(micro_batch)`` returns the weight of a micro-batch: the
                number of examples that its loss is the mean of. None: the length of the first axis
                of its first Tensor. ``ContrastiveLoss(negatives="global")`` weighs the ranks'
                batches itself; give ``num_examples=lambda micro_batch: 1`` with such a loss. This
                is the default for a loss of `grad_cache` of that kind.
            loss: The Layer of the loss, if it has parameters of its own (a learnable temperature):
                `state_dict` names them ``loss/...``. The loss of `grad_cache` need not be given.
            broadcast_parameters: See `GradientSync`. Do not give it together with a `GradientSync`
                in `sync`, which has its own.

        Raises:
            ConfigError: `accumulate_steps` or `clip_grad_norm` is not positive, neither or both of
                `loss_fn` and `grad_cache` are given, `sync` is an unknown mode or leaves out a
                trained parameter, gradients are kept in ``main_grad``, or `amp` cannot be honoured
                on this device.
            SyncError: The ranks' parameters differ.
        """
        check_options(accumulate_steps, clip_grad_norm, loss_fn, grad_cache, optimizer)
        self._model = model
        self._optimizer = optimizer
        self._offloaded = offload_optimizer(model, optimizer)
        self._amp = MixedPrecision(amp, model, optimizer) if amp is not None else None
        self._scaler = self._amp.scaler if self._amp is not None else None
        self._parameters = TrainedParameters(model, optimizer)
        self._loaded: dict[str, Any] = {}
        self._sync = synchronization_of(
            sync,
            model,
            optimizer,
            self._parameters.trained,
            grad_cache,
            broadcast_parameters=broadcast_parameters,
        )
        check_sharded(model, optimizer, self._sync)
        self._backward: Backward
        if grad_cache is not None:
            self._backward = CachedBackward(grad_cache, self._sync, self.autocast)
            loss = grad_cache.loss if isinstance(grad_cache.loss, paddle.nn.Layer) else loss
        else:
            assert loss_fn is not None
            self._backward = PlainBackward(model, loss_fn, self._sync, self.autocast)
        self._loss = loss
        self._sync.add_start_values(model)
        if loss is not None:
            self._sync.add_start_values(loss, LOSS_PREFIX)
        self.is_updating = False
        """Whether the optimizer is updating parameters; stays true after an update that failed."""
        self._accumulate_steps = accumulate_steps
        self._clip_grad_norm = clip_grad_norm
        self._num_examples = num_examples or self._backward.count
        self._unread = PendingMetrics(self._backward.raise_known_cause)
        self._has_logged_cpu_settings = False

    @ends_all_ranks()
    def __call__(self, micro_batches: Sequence[Any]) -> StepResult:
        """Run one optimizer step. With several ranks, an error on one of them ends the run on all.

        Args:
            micro_batches: `accumulate_steps` micro-batches, each passed on to ``loss_fn``. They
                may differ in size, on this rank and between ranks.

        Returns:
            Loss, gradient norm and times. All gradients are cleared, also those of parameters that
            the optimizer does not update.

        Raises:
            ConfigError: Another number of micro-batches was given, a loss is not a scalar or needs
                no gradient, the number of examples cannot be determined, the optimizer has
                parameters that `sync` does not synchronize, a gradient is sparse, or gradients are
                disabled.
            DivergenceError: Loss or gradient is not finite; with a loss scale only if that holds
                for many steps in a row, or if the scale cannot go lower. The parameters are
                unchanged. If the step copies nothing to the host, the error is raised when the
                result is read, in `state_dict`, or at most 64 steps later; neither this step nor
                later ones have changed the parameters then.
            RecomputeError: A second forward of `grad_cache` differs from the first; raised at the
                same time as `DivergenceError`.
        """
        self._check_call(micro_batches)
        self._sync.take_start_values()
        began = time.perf_counter()
        loss_scale = self._scaler.scale if self._scaler is not None else None
        divisors = self._divisors(micro_batches)
        if self._offloaded is not None:
            self._set_up_offloaded(self._offloaded, loss_scale)
        finite = True
        try:
            losses = self._forward_backward(micro_batches, divisors, loss_scale)
            synchronized = time.perf_counter()
            self._parameters.note_trained(self._sync)
            gradients, norm = unscale(
                self._parameters.updated,
                loss_scale,
                upcast=self._amp is not None,
                offloaded=self._offloaded,
            )
            agreed = self._sync.agreed
            outcome = Outcome(losses, divisors, norm, agreed.loss if agreed else None)
            must_read = self._must_read
            if must_read:
                finite = self._update_if_finite(outcome, gradients)
            else:
                self._update_on_device(outcome, gradients)
        except BaseException:  # the next step would add to these gradients
            self._parameters.clear_gradients(after_error=True)
            raise
        finally:
            if self._offloaded is not None:
                self._offloaded.set_on_complete(OnComplete())  # back to the default
        self._parameters.clear_gradients()
        if self._scaler is not None and loss_scale is not None:
            self._scaler.update(finite)
            self._scale_residuals(self._scaler.scale / loss_scale)
        seconds = self._seconds(began, synchronized)
        if not self._has_logged_cpu_settings and seconds["forward_backward"] > SLOW:
            self._has_logged_cpu_settings = True
            log_missing_cpu_settings()
        if must_read:
            [(loss, grad_norm)] = read_all([outcome])
            return StepResult(loss, grad_norm, seconds, not finite, loss_scale)
        self._unread.read_if_due()
        return StepResult.unread(functools.partial(self._unread.read_until, outcome), seconds)

    # ------------------------------------------------------------------- the phases of a step

    def _check_call(self, micro_batches: Sequence[Any]) -> None:
        if len(micro_batches) != self._accumulate_steps:
            raise ConfigError(
                f"TrainStep got {len(micro_batches)} micro-batches; accumulate_steps is "
                f"{self._accumulate_steps}"
            )
        if not paddle.is_grad_enabled():
            raise ConfigError(
                "TrainStep was called under paddle.no_grad(), where nothing gets a gradient; call "
                "it outside"
            )

    def _divisors(self, micro_batches: Sequence[Any]) -> list[float]:
        """The divisor of each micro-batch's loss, from the numbers of examples.

        If all numbers are equal, it is exactly `accumulate_steps`, so the mean is bitwise that of a
        plain loop. If they differ between ranks, the synchronization weighs the ranks.
        """
        counts = [self._count(micro_batch) for micro_batch in micro_batches]
        total = math.fsum(counts)
        self._sync.report = StepReport(total, self._settings_to_agree())
        return [total / count for count in counts]

    def _set_up_offloaded(self, offloaded: OffloadOptimizer, loss_scale: float | None) -> None:
        """Set how gradients of offloaded parameters are processed before they leave the device
        during the backward.
        """
        is_double = any(p.dtype == paddle.float64 for p in self._parameters.trained)
        norm_dtype = paddle.float64 if is_double else paddle.float32
        offloaded.set_on_complete(
            OnComplete(loss_scale, upcast=self._amp is not None, norm_dtype=norm_dtype)
        )

    def _forward_backward(
        self, micro_batches: Sequence[Any], divisors: Sequence[float], loss_scale: float | None
    ) -> list[paddle.Tensor]:
        """The loss of each micro-batch; the gradients are synchronized in the last backward."""
        last = self._accumulate_steps - 1
        losses = []
        for number, micro_batch in enumerate(micro_batches):
            divisor = self._sync.report.divisor = divisors[number]
            losses.append(
                self._backward(
                    micro_batch, divisor=divisor, loss_scale=loss_scale, last=number == last
                )
            )
        return losses

    def _seconds(self, began: float, synchronized: float) -> dict[str, float]:
        timeline = self._sync.timeline
        computed = timeline.backward_ended if timeline is not None else synchronized
        return {
            "forward_backward": computed - began,
            "sync": synchronized - computed,
            "update": time.perf_counter() - synchronized,
        }

    def autocast(self) -> contextlib.AbstractContextManager[None]:
        """The mixed precision of the forward, for an evaluation of the model; without `amp` a null
        context. A model at level O2 needs it.
        """
        return self._amp.autocast() if self._amp is not None else contextlib.nullcontext()

    @property
    def num_skipped(self) -> int:
        """Number of steps that were skipped so far, those before a resumption too."""
        return self._scaler.num_skipped if self._scaler is not None else 0

    @property
    def synchronization(self) -> str:
        """How gradients are synchronized and why, in words."""
        return f"{self._sync.mode}, {self._sync.reason}"

    @property
    def timeline(self) -> CommunicationTrace | None:
        """When the last step's gradients were ready and sent; see `GradientSync.timeline`."""
        return self._sync.timeline

    def state_dict(self, *, keep: bool = True) -> dict[str, Any]:
        """The state of optimizer, loss scaler and synchronization; see `Step.state_dict`.

        The tensors are not copied. A `ShardedOptimizer` gathers the state of other ranks; then all
        ranks must call this.

        Raises:
            CheckpointError: The optimizer updates a parameter that is neither of `model` nor of
                `loss`; or it has only a part of its state, as under fleet's sharding.
            DivergenceError: A step whose result was not read was not finite.
            SyncError: An update of a `ShardedOptimizer` did not reach all ranks, or a rank failed.
        """
        self._unread.read_pending()
        moments = state_of(
            self._optimizer,
            structured_parameters(self._model, self._loss),
            updated=self._parameters.stepped,
            loaded=self._loaded,
            keep=keep,
        )
        state: dict[str, Any] = {"optimizer": moments, "sync": self._sync.state_dict()}
        if self._scaler is not None:
            state["loss_scaler"] = self._scaler.state_dict()
        return state

    def set_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a `state_dict`, before the first step of the optimizer.

        At level O2 the constructor has cast the parameters. Parts that `state` lacks start anew;
        its loss scaler is ignored if the loss is not scaled.

        Raises:
            CheckpointError: `state` is of another model, or lacks moments of a parameter.
        """
        if "optimizer" in state:
            parameters = structured_parameters(self._model, self._loss)
            self._loaded = set_state_of(self._optimizer, parameters, state["optimizer"])
        if "sync" in state:
            self._sync.set_state_dict(state["sync"])
        if self._scaler is not None and "loss_scaler" in state:
            self._scaler.set_state_dict(state["loss_scaler"])

    def write_back(self) -> None:
        """Nothing to do: the steps train the model itself."""

    def _count(self, micro_batch: Any) -> float:
        return checked_count(self._num_examples(micro_batch))

    @property
    def _must_read(self) -> bool:
        """Whether the host must read loss and norm before the update: for the next loss scale, or
        because the optimizer changes parameters even at a learning rate of 0.
        """
        return (
            self._scaler is not None
            or self._offloaded is not None
            or not keeps_parameters_at_rate_0(inner_of(self._optimizer))
        )

    def _is_finite_everywhere(self, loss: float, norm: float) -> bool:
        """With a loss scale the ranks compare their results: if one rank alone skipped a step, the
        loss scales would differ from then on.
        """
        finite = math.isfinite(loss) and math.isfinite(norm)
        if self._scaler is None:
            return finite
        return mean_over_ranks(float(finite), self._sync.group) == 1

    @paddle.no_grad()
    def _update_if_finite(self, outcome: Outcome, gradients: Gradients) -> bool:
        """Read loss and norm; clip and update if both are finite on all ranks."""
        [(loss, norm)] = read_all([outcome])
        finite = self._is_finite_everywhere(loss, norm)
        if not finite:
            self._backward.raise_known_cause()
            if self._scaler is None:
                raise divergence(loss, norm)
            return False
        if self._clip_grad_norm is not None and norm > self._clip_grad_norm:
            for same_dtype in gradients.values():
                scale_all(same_dtype, self._clip_grad_norm / norm)
            if self._offloaded is not None:
                self._offloaded.scale_gradients(self._clip_grad_norm / norm)
        self._update()
        return True

    @paddle.no_grad()
    def _update_on_device(self, outcome: Outcome, gradients: Gradients) -> None:
        """As `_update_if_finite`, without a read on the host; bitwise identical if all is finite.

        Otherwise the parameters keep their values, and the optimizer's moments decay as with a
        gradient of 0.
        """
        finite = self._unread.add(outcome)
        zero_if(paddle.logical_not(finite), gradients)
        if self._clip_grad_norm is not None:
            scale_to_norm(gradients, outcome.norm, self._clip_grad_norm)
        factor = finite.astype("float32").reshape([])
        with learning_rate_times(inner_of(self._optimizer), factor):
            self._update()

    def _update(self) -> None:
        if self._offloaded is None:
            self._parameters.note_stepped()
        self.is_updating = True
        self._optimizer.step()
        self.is_updating = False

    def _scale_residuals(self, ratio: float) -> None:
        """Rescale the accumulated rounding errors to the new loss scale."""
        if ratio != 1.0:
            state = self._sync.state_dict()
            residuals = {name: value * ratio for name, value in state["residuals"].items()}
            if residuals:
                self._sync.set_state_dict({**state, "residuals": residuals})

    def _settings_to_agree(self) -> dict[str, Any]:
        """Settings that must be the same on all ranks in this step."""
        rate = self._optimizer.get_lr()
        return {
            "accumulate_steps": self._accumulate_steps,
            "clip_grad_norm": self._clip_grad_norm,
            "the loss scale": self._scaler.scale if self._scaler is not None else None,
            "the learning rate": rate if isinstance(rate, (int, float)) else None,
        }
