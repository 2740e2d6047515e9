"""The training objective of a configuration: its contrastive loss, with or without GradCache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import paddle
from numpy.typing import NDArray

from paddle_recompute.app.config import Config, sync_arguments
from paddle_recompute.app.data import Pair
from paddle_recompute.contrastive import ContrastiveLoss, GradCache, text_ids
from paddle_recompute.grad_sync import GradientSync
from paddle_recompute.train_step import LOSS_PREFIX, TrainStep

Batch = dict[str, paddle.Tensor]


@dataclass(frozen=True)
class Chunks:
    """How much of its pairs a rank encodes at once.

    Attributes:
        size: Pairs per chunk.
        tokens: Tokens per chunk, padding included; texts are sorted by length.

    If both are None, all pairs are encoded at once, without a gradient cache.
    """

    size: int | None = None
    tokens: int | None = None

    def __bool__(self) -> bool:
        return self.size is not None or self.tokens is not None

    def __str__(self) -> str:
        if self.size is not None:
            return f"{self.size} pairs at a time"
        return "all pairs at once" if self.tokens is None else f"{self.tokens} tokens at a time"

    def to_dict(self) -> dict[str, int | None]:
        """JSON values; ``Chunks(**values)`` reads them back."""
        return asdict(self)


def positive_ids(config: Config, pairs: Sequence[Pair]) -> NDArray[np.int64] | None:
    """Ids of equal positives for the loss, ``[pairs]``; None if the loss does not use ids."""
    if not config.contrastive.mask_false_negatives:
        return None
    ids: NDArray[np.int64] = text_ids(pair.positive for pair in pairs).numpy()
    return ids


class Objective:
    """The contrastive loss of one training run. It scales the vectors to length 1 itself.

    A batch is a dict: ``query`` and ``positive``, ids ``[pairs, length]``, int64; with
    ``contrastive.mask_false_negatives`` also ``positive_ids``, ``[pairs]``, int64.

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
        )

    def loss_of(self, model: paddle.nn.Layer, batch: Batch) -> paddle.Tensor:
        """The loss of all pairs of `batch`, encoded at once: a scalar, float32."""
        ids = {name: batch[name] for name in batch.keys() - {"query", "positive"}}
        return self.loss(model(batch["query"]), model(batch["positive"]), **ids)

    def parameters(self) -> dict[str, paddle.Tensor]:
        """The trained parameters besides the encoder's, by structured name: ``loss/logit_scale`` if
        the temperature is learned.
        """
        return {f"{LOSS_PREFIX}{name}": one for name, one in self.loss.named_parameters()}

    def synchronization(self, model: paddle.nn.Layer) -> GradientSync:
        """A new synchronization of all that is trained; all ranks make it together."""
        trained = model
        if self.loss.parameters():
            trained = paddle.nn.LayerDict({"encoder": model, "loss": self.loss})
        return GradientSync(trained, **sync_arguments(self._config))

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
