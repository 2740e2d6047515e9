"""`TrainStep`: one optimizer step from several micro-batches, on one or many ranks."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import paddle

from paddle_recompute import _paddle
from paddle_recompute._nested import tensors_in
from paddle_recompute.config import AmpConfigs
from paddle_recompute.contrastive import ContrastiveLoss, GradCache
from paddle_recompute.distributed import mean_over_ranks
from paddle_recompute.errors import ConfigError, DataError, DivergenceError
from paddle_recompute.grad_sync import GradientSync, SyncMode
from paddle_recompute.train_step.mixed_precision import MixedPrecision, to_float32

LossFn = Callable[[Any, Any], paddle.Tensor]


@dataclass(frozen=True)
class StepResult:
    """What one optimizer step did.

    Attributes:
        loss: Mean loss over the examples of all micro-batches and ranks.
        grad_norm: Euclidean norm of the synchronized gradient of all parameters, without the loss
            scale and before clipping.
        seconds: Wall-clock time of ``forward_backward``, ``sync`` (what of it came after the
            backward; 0 in a single process) and ``update``.
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
    whatever K is: accumulation adds no negatives. A `GradCache` in the place of `loss_fn` does: one
    micro-batch, as large as one likes, in the memory of a chunk of it.

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
        optimizer: paddle.optimizer.Optimizer,
        *,
        loss_fn: LossFn | None = None,
        grad_cache: GradCache | None = None,
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
            grad_cache: Instead of `loss_fn`: runs forward and backward of a micro-batch chunk by
                chunk. Its encoders are `model`, or in it. A micro-batch is then
                ``(query, positive, *negatives)``, or a dict with ``query``, ``positive`` and
                perhaps ``negatives`` (a list of them), in which everything else is a keyword
                argument of its loss, such as ``positive_ids``. It synchronizes with `sync`; one
                that has a `GradientSync` already keeps that.
            sync: How gradients are synchronized, a mode or a `GradientSync` of one's own. A mode
                is for all that `model` trains and `optimizer` updates: a learnable temperature of
                the loss too.
            accumulate_steps: Number of micro-batches per optimizer step.
            clip_grad_norm: Scale the gradient down to this norm where it is larger; None: never.
            amp: Mixed precision, ``AmpConfigs(dtype="bfloat16")`` for instance; None: none. Level
                O2 casts the parameters of `model` here. On a CPU, where Paddle has none in
                dygraph, it is refused.
            num_examples: ``num_examples(micro_batch)`` is the number of examples that its loss is
                the mean of, or any other weight greater than 0; None: the length of the first axis
                of the first Tensor in it. A loss that weighs the ranks' batches itself, as
                ``ContrastiveLoss(negatives="global")`` does, is not to be weighed again where they
                differ in size: ``num_examples=lambda micro_batch: 1``, which is the default where
                it is the loss of `grad_cache`.

        Raises:
            ConfigError: `accumulate_steps` or `clip_grad_norm` is not positive, not one of
                `loss_fn` and `grad_cache` is given, `sync` is not a mode or is not over all that
                is trained, or `amp` cannot be honoured on this device.
            SyncError: The ranks' parameters differ.
        """
        if accumulate_steps < 1:
            raise ConfigError(f"accumulate_steps is {accumulate_steps}; it must be at least 1")
        if clip_grad_norm is not None and not clip_grad_norm > 0:
            raise ConfigError(
                f"clip_grad_norm is {clip_grad_norm}; it must be positive, or None for no clipping"
            )
        if (loss_fn is None) == (grad_cache is None):
            raise ConfigError(
                f"received {'neither' if loss_fn is None else 'both'} of loss_fn and grad_cache; "
                "give one of them: a gradient cache has a loss of its own"
            )
        self._model = model
        self._optimizer = optimizer
        self._loss_fn = loss_fn
        self._cache = grad_cache
        self._amp = MixedPrecision(amp, model, optimizer) if amp is not None else None
        self._scaler = self._amp.scaler if self._amp is not None else None
        self._parameters = _trained(model, optimizer)
        self._sync = _synchronization(sync, model, self._parameters, grad_cache)
        self._accumulate_steps = accumulate_steps
        self._clip_grad_norm = clip_grad_norm
        self._num_examples = num_examples or _default_count(grad_cache)

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
        began = time.perf_counter()
        counts = [self._count(micro_batch) for micro_batch in micro_batches]
        per_rank = mean_over_ranks(math.fsum(counts), self._sync.group)
        # The mean and not the sum, as the synchronization divides by the number of ranks. Exactly
        # accumulate_steps where all counts are equal: then it is the plain mean, to the bit.
        divisors = [per_rank / count for count in counts]
        run = self._forward_backward if self._cache is None else self._cached
        last = self._accumulate_steps - 1
        losses = [
            run(micro_batch, divisors[place], place == last)
            for place, micro_batch in enumerate(micro_batches)
        ]
        synchronized = time.perf_counter()
        timeline = self._sync.timeline
        computed = timeline.backward_ended if timeline is not None else synchronized
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
        seconds = {
            "forward_backward": computed - began,
            "sync": synchronized - computed,
            "update": time.perf_counter() - synchronized,
        }
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

    def _forward_backward(self, micro_batch: Any, divisor: float, last: bool) -> float:
        assert self._loss_fn is not None
        with self._sync.last_backward() if last else self._sync.no_sync():
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

    def _cached(self, micro_batch: Any, divisor: float, last: bool) -> float:
        assert self._cache is not None
        inputs, loss_arguments = _inputs_of_cache(micro_batch)
        scale = self._scaler.scale if self._scaler is not None else 1.0
        with self.autocast():
            loss = self._cache.backward(
                *inputs, last=last, loss_scale=scale / divisor, loss_arguments=loss_arguments
            )
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


def _trained(model: paddle.nn.Layer, optimizer: paddle.optimizer.Optimizer) -> list[paddle.Tensor]:
    """What `model` trains and what `optimizer` updates besides, each once."""
    both = [*model.parameters(), *_paddle.parameters_of_optimizer(optimizer)]
    return list({id(p): p for p in both if not p.stop_gradient}.values())


def _synchronization(
    given: SyncMode | GradientSync,
    model: paddle.nn.Layer,
    parameters: list[paddle.Tensor],
    cache: GradCache | None,
) -> GradientSync:
    """The one that is used for all of `parameters`, by `cache` too."""
    in_model = {id(parameter) for parameter in model.parameters()}
    besides = [parameter for parameter in parameters if id(parameter) not in in_model]
    if isinstance(given, GradientSync):
        sync = given
    elif cache is not None and cache.sync is not None:
        sync = cache.sync
    elif not besides:
        sync = GradientSync(model, mode=given)
    elif isinstance(model, paddle.DataParallel) and cache is None:
        raise ConfigError(
            f"the optimizer updates {', '.join(p.name for p in besides)}, and the model in "
            "paddle.DataParallel does not have it; pass the bare Layer, which is synchronized here"
        )
    else:
        sync = GradientSync(parameters, mode=given)
    if cache is not None:
        if cache.sync is not None and cache.sync is not sync:
            raise ConfigError(
                "grad_cache has a GradientSync, and sync is another one; leave one of them out"
            )
        cache.sync = sync
    synchronized = {id(parameter) for parameter in sync.parameters}
    missing = [p.name for p in parameters if id(p) not in synchronized]
    if missing:
        raise ConfigError(
            f"sync does not synchronize {', '.join(missing)}, which the optimizer updates or the "
            "model trains, so the ranks would drift apart; make it over all of them: "
            "GradientSync([*model.parameters(), *loss.parameters()])"
        )
    return sync


def _default_count(cache: GradCache | None) -> Callable[[Any], float]:
    loss = cache.loss if cache is not None else None
    if isinstance(loss, ContrastiveLoss) and loss.negatives == "global":
        return lambda micro_batch: 1  # the loss weighs the ranks' batches by their sizes itself
    return _length_of_first_axis


def _inputs_of_cache(micro_batch: Any) -> tuple[list[Any], dict[str, Any]]:
    """(query, positive and negatives; keyword arguments of the loss)."""
    if isinstance(micro_batch, (tuple, list)) and len(micro_batch) >= 2:
        return list(micro_batch), {}
    if isinstance(micro_batch, Mapping) and {"query", "positive"} <= micro_batch.keys():
        rest = dict(micro_batch)
        inputs = [rest.pop("query"), rest.pop("positive"), *rest.pop("negatives", ())]
        return inputs, rest
    raise DataError(
        "a micro-batch of a TrainStep with grad_cache is (query, positive, *negatives) or a dict "
        f"with 'query' and 'positive'; received {type(micro_batch).__name__}"
        + (f" with {', '.join(map(repr, micro_batch))}" if isinstance(micro_batch, dict) else "")
    )
