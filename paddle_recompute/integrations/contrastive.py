"""`ContrastiveTrainerMixin`: a gradient cache in ``training_step`` of the trainer of others."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import paddle

from paddle_recompute.contrastive import ContrastiveLoss, GradCache
from paddle_recompute.errors import DataError
from paddle_recompute.integrations.trainer import RecomputeTrainerMixin

_SIDES = ("query", "positive", "negative")


class ContrastiveTrainerMixin(RecomputeTrainerMixin):
    """Put before the ``Trainer`` of PaddleNLP or PaddleFormers to train with `GradCache`.

    A batch of their loader is a dict. By default its keys say which side a tensor belongs to:
    ``query_input_ids`` and ``positive_input_ids`` (and ``negative_...``) are given to the encoder
    as ``input_ids``. The encoder is the model, or its method ``encode`` if it has one; it must
    return one vector per row. Override `contrastive_inputs` and `contrastive_encoders` for others.

    ``per_device_train_batch_size`` is the batch of one loss. ``gradient_accumulation_steps`` add up
    several losses, each with the negatives of its own batch.

    Args:
        *args: As for `RecomputeTrainerMixin`.
        contrastive_loss: The loss over all vectors; `ContrastiveLoss` by default. Its own
            parameters, such as a learned temperature, must be in the optimizer.
        chunk_size: Rows that are encoded at once.
        chunk_tokens: Instead: tokens that are encoded at once.
        **kwargs: As for `RecomputeTrainerMixin`.

    Raises:
        ConfigError: See `RecomputeTrainerMixin` and `GradCache`.
    """

    def __init__(
        self,
        *args: Any,
        contrastive_loss: Callable[..., paddle.Tensor] | None = None,
        chunk_size: int | None = None,
        chunk_tokens: int | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.contrastive_loss = contrastive_loss or ContrastiveLoss()
        self._chunks = {"chunk_size": chunk_size, "chunk_tokens": chunk_tokens}
        self._cache = self._cache_of(self.model)
        self._cached_model = self.model

    def contrastive_encoders(self, model: Any) -> Any:
        """The encoder of both sides, or a pair, for `GradCache`."""
        return getattr(model, "encode", model)

    def contrastive_inputs(self, inputs: Mapping[str, Any]) -> tuple[Any, ...]:
        """The inputs of the query, the positive and, if there are any, the negatives."""
        sides: dict[str, dict[str, Any]] = {side: {} for side in _SIDES}
        for key, value in inputs.items():
            side, _, name = key.partition("_")
            if side not in sides or not name:
                raise DataError(
                    f"the batch has the key {key!r}; ContrastiveTrainerMixin knows keys that begin "
                    "with query_, positive_ or negative_. Rename it, or override contrastive_inputs"
                )
            sides[side][name] = value
        missing = [side for side in _SIDES[:2] if not sides[side]]
        if missing:
            raise DataError(
                f"the batch has no key that begins with {missing[0]}_; it has "
                f"{', '.join(inputs)}. Rename them, or override contrastive_inputs"
            )
        return tuple(sides[side] for side in _SIDES if sides[side])

    def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """One step of `GradCache` on a batch; returns the loss for their log."""
        model.train()
        cache = self._cache_for(model)
        batch = self.contrastive_inputs(self._prepare_inputs(inputs))
        share = 1.0 / self.args.gradient_accumulation_steps
        scale: Any = self.loss_scale()
        if self.do_grad_scaling:
            scale = self.scaler.scale(paddle.full([], scale))
        with self._micro_batch() as is_last, self.autocast_smart_context_manager():
            loss = cache.backward(*batch, last=is_last, loss_scale=scale, sync=self._sync)
        return loss * share

    def prediction_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """The loss of a batch, for ``evaluate()``; there are no logits and no labels."""
        batch = self.contrastive_inputs(self._prepare_inputs(inputs))
        with self.autocast_smart_context_manager():
            return self._cache_for(model).evaluate(*batch), None, None

    def loss_scale(self) -> float:
        """The factor of one loss: their loop scales the sum of the gradients, or leaves it to this.

        PaddleFormers divides the gradients by ``gradient_accumulation_steps`` itself before the
        optimizer's step; PaddleNLP divides each loss.
        """
        divides_itself = any(
            kind.__module__.partition(".")[0] == "paddleformers" for kind in type(self).__mro__
        )
        return 1.0 if divides_itself else 1.0 / self.args.gradient_accumulation_steps

    def _cache_for(self, model: Any) -> GradCache:
        if isinstance(model, paddle.distributed.fleet.meta_parallel.ShardingParallel):
            model = model._layers  # stage 1; the wrapper has no method `encode`
        if model is not self._cached_model:
            self._cache, self._cached_model = self._cache_of(model), model
        return self._cache

    def _cache_of(self, model: Any) -> GradCache:
        return GradCache(
            self.contrastive_encoders(model),
            self.contrastive_loss,
            chunk_size=self._chunks["chunk_size"],
            chunk_tokens=self._chunks["chunk_tokens"],
        )
