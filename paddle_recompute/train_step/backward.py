"""Forward and backward of one micro-batch: `PlainBackward`, or `CachedBackward` chunk by chunk."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np
import paddle

from paddle_recompute._nested import tensors_in
from paddle_recompute.contrastive import ContrastiveLoss, GradCache
from paddle_recompute.errors import ConfigError, DataError
from paddle_recompute.grad_sync import GradientSync

LossFn = Callable[[Any, Any], paddle.Tensor]
Autocast = Callable[[], contextlib.AbstractContextManager[None]]


class Backward(Protocol):
    """Adds the gradient of one micro-batch's loss to ``.grad``."""

    def __call__(
        self, micro_batch: Any, *, divisor: float, loss_scale: float | None, last: bool
    ) -> paddle.Tensor:
        """Run forward and backward; returns the loss, neither divided nor scaled, a copy of it
        without a graph, on the device.

        Args:
            micro_batch: What the loss is of.
            divisor: What the loss is divided by.
            loss_scale: What it is multiplied by, in float32; None: nothing.
            last: Whether the gradients are synchronized in this backward.
        """

    def count(self, micro_batch: Any) -> float:
        """The number of examples of a micro-batch, where the caller does not say it."""

    def raise_known_cause(self) -> None:
        """Raise the error that has made a loss or a gradient NaN, if it is known."""


class PlainBackward:
    """``loss_fn(model, micro_batch)``, all at once."""

    def __init__(
        self, model: paddle.nn.Layer, loss_fn: LossFn, sync: GradientSync, autocast: Autocast
    ) -> None:
        self._model = model
        self._loss_fn = loss_fn
        self._sync = sync
        self._autocast = autocast

    def __call__(
        self, micro_batch: Any, *, divisor: float, loss_scale: float | None, last: bool
    ) -> paddle.Tensor:
        with self._sync.last_backward() if last else self._sync.no_sync():
            with self._autocast():
                loss = self._loss_fn(self._model, micro_batch)
            if fault := fault_of_loss(loss):
                raise ConfigError(fault)
            weighted = loss / divisor if divisor != 1 else loss
            if loss_scale is not None:
                # In float32: a float16 loss times its scale could be infinite on its own.
                weighted = weighted.astype("float32") * loss_scale
            weighted.backward()
            self._sync.add_loss(loss)
            return loss.detach().clone()

    def count(self, micro_batch: Any) -> float:
        return _length_of_first_axis(micro_batch)

    def raise_known_cause(self) -> None:
        """Nothing is known of it here."""


class CachedBackward:
    """A `GradCache`, which encodes the micro-batch chunk by chunk."""

    def __init__(self, cache: GradCache, sync: GradientSync, autocast: Autocast) -> None:
        self._cache = cache
        self._sync = sync
        self._autocast = autocast

    def __call__(
        self, micro_batch: Any, *, divisor: float, loss_scale: float | None, last: bool
    ) -> paddle.Tensor:
        inputs, loss_arguments = inputs_of_cache(micro_batch)
        with self._autocast():
            loss = self._cache.backward(
                *inputs,
                last=last,
                loss_scale=(1.0 if loss_scale is None else loss_scale) / divisor,
                loss_arguments=loss_arguments,
                sync=self._sync,
            )
        return loss.clone()

    def count(self, micro_batch: Any) -> float:
        loss = self._cache.loss
        if isinstance(loss, ContrastiveLoss) and loss.negatives == "global":
            return 1  # the loss weighs the ranks' batches by their sizes itself
        return _length_of_first_axis(micro_batch)

    def raise_known_cause(self) -> None:
        self._cache.check_repetition()


def fault_of_loss(loss: Any) -> str | None:
    """Why what ``loss_fn`` returned cannot be trained on; None: it can."""
    if not isinstance(loss, paddle.Tensor):
        return f"loss_fn must return a scalar Tensor; it returned {type(loss).__name__}"
    if loss.size != 1:
        return f"loss_fn must return a scalar Tensor; its shape is {loss.shape}"
    if loss.stop_gradient or not loss.is_floating_point():
        return (
            "the loss of loss_fn needs no gradient, so nothing would be trained: is it detached, "
            "of integers, made under no_grad, or the model frozen? Where a batch has nothing to "
            "train on, return model(...).sum() * 0"
        )
    return None


def checked_count(count: float) -> float:
    """`count` if it can be the number of examples of a micro-batch.

    Raises:
        ConfigError: It is not a number above 0.
    """
    if not (math.isfinite(count) and count > 0):
        raise ConfigError(f"a micro-batch has {count} examples; allowed is a number greater than 0")
    return count


def _length_of_first_axis(micro_batch: Any) -> int:
    tensor = next(tensors_in(micro_batch), None)
    if tensor is None or tensor.ndim == 0:
        found = "no Tensor" if tensor is None else "a Tensor without axes first"
        raise ConfigError(
            f"the number of examples cannot be told from a micro-batch with {found} in it; give "
            "TrainStep num_examples=..., a function from the micro-batch to that number"
        )
    return int(tensor.shape[0])


def inputs_of_cache(micro_batch: Any) -> tuple[list[Any], dict[str, Any]]:
    """(query, positive and negatives; keyword arguments of the loss).

    Negatives that are one array, ``[batch, negatives, ...]``, are one input with the rows
    ``[batch * negatives, ...]``.
    """
    if isinstance(micro_batch, (tuple, list)) and len(micro_batch) >= 2:
        return list(micro_batch), {}
    if isinstance(micro_batch, Mapping) and {"query", "positive"} <= micro_batch.keys():
        rest = dict(micro_batch)
        negatives = rest.pop("negatives", ())
        if isinstance(negatives, np.ndarray):
            negatives = (negatives.reshape(-1, *negatives.shape[2:]),)
        elif hasattr(negatives, "flatten"):  # a Tensor, or a variable of a Program
            negatives = (negatives.flatten(0, 1),)
        return [rest.pop("query"), rest.pop("positive"), *negatives], rest
    raise DataError(
        "a micro-batch of a TrainStep with grad_cache is (query, positive, *negatives) or a dict "
        f"with 'query' and 'positive'; received {type(micro_batch).__name__}"
        + (f" with {', '.join(map(repr, micro_batch))}" if isinstance(micro_batch, dict) else "")
    )
