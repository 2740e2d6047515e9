"""The training objective of a configuration: its contrastive loss, with or without GradCache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import paddle
from pydantic import PositiveInt

from paddle_recompute.app.config import Config, sync_arguments
from paddle_recompute.contrastive import ContrastiveLoss, GradCache
from paddle_recompute.grad_sync import GradientSync
from paddle_recompute.train_step import LOSS_PREFIX, TrainStep, inputs_of_cache

Batch = dict[str, paddle.Tensor]


@dataclass(frozen=True)
class Chunks:
    """How much of its pairs a rank encodes at once.

    Attributes:
        size: Pairs per chunk.
        tokens: Tokens per chunk, padding included; texts are sorted by length.

    If both are None, all pairs are encoded at once, without a gradient cache.
    """

    size: PositiveInt | None = None
    tokens: PositiveInt | None = None

    def __bool__(self) -> bool:
        return self.size is not None or self.tokens is not None

    def __str__(self) -> str:
        if self.size is not None:
            return f"{self.size} pairs at a time"
        return "all pairs at once" if self.tokens is None else f"{self.tokens} tokens at a time"


class Objective:
    """The contrastive loss of one training run. It scales the vectors to length 1 itself.

    A batch is a dict: ``query`` and ``positive``, ids ``[pairs, length]``, int64; with
    ``contrastive.hard_negatives`` also ``negatives``, ``[pairs, hard_negatives, length]``; with
    ``contrastive.mask_false_negatives`` also ``positive_ids``, ``[pairs]``, int64, and
    ``negative_ids``, ``[pairs, hard_negatives]``.

    Args:
        config: The configuration of the run.
        chunks: The chunks of each rank.

    Attributes:
        loss: The loss Layer; a learnable temperature is its parameter.
        chunks: The chunks of each rank.
    """

    def __init__(self, config: Config, chunks: Chunks) -> None:
        section = config.contrastive
        self._config = config
        self.chunks = chunks
        self.loss = ContrastiveLoss(
            temperature=section.temperature,
            symmetric=section.symmetric,
            negatives=section.negatives,
            learnable_temperature=section.learnable_temperature,
            label_smoothing=section.label_smoothing,
            tile=section.tile,
            mask_false_negatives=section.mask_false_negatives,
            normalize=True,
            matryoshka_dims=section.matryoshka_dims,
        )

    def loss_of(self, model: paddle.nn.Layer, batch: Batch) -> paddle.Tensor:
        """The loss of all pairs of `batch`, encoded at once: a scalar, float32."""
        inputs, ids = inputs_of_cache(batch)
        query, positive, *negatives = [model(one) for one in inputs]
        if negatives:
            shape = [*batch["negatives"].shape[:2], query.shape[-1]]
            negatives = [negatives[0].reshape(shape)]
        return self.loss(query, positive, *negatives, **ids)

    def parameters(self) -> dict[str, paddle.Tensor]:
        """The trained parameters beside the encoder's, by structured name: ``loss/logit_scale`` if
        the temperature is learned.
        """
        return {f"{LOSS_PREFIX}{name}": one for name, one in self.loss.named_parameters()}

    def synchronization(self, model: paddle.nn.Layer) -> GradientSync:
        """A new synchronization of all that is trained; all ranks make it together."""
        return GradientSync(self.trained(model), **sync_arguments(self._config))

    def trained(self, model: paddle.nn.Layer) -> paddle.nn.Layer:
        """`model`, with the loss where that has parameters."""
        if not self.loss.parameters():
            return model
        return paddle.nn.LayerDict({"encoder": model, "loss": self.loss})

    def cache(self, model: paddle.nn.Layer) -> GradCache:
        """What computes the gradient of a batch in `chunks`; without them, of all pairs at once."""
        size, tokens = self.chunks.size, self.chunks.tokens
        return GradCache(model, self.loss, chunk_size=size, chunk_tokens=tokens)

    def train_step(
        self, model: paddle.nn.Layer, optimizer: paddle.optimizer.Optimizer, **options: Any
    ) -> TrainStep:
        """A `TrainStep` in `chunks`; without chunks the encoders' backwards run one after another.

        Args:
            model: The encoder of both sides.
            optimizer: The optimizer of its parameters and those of `loss`.
            **options: Options of `TrainStep`.
        """
        options["sync"] = self.synchronization(model)
        return TrainStep(model, optimizer, grad_cache=self.cache(model), **options)
