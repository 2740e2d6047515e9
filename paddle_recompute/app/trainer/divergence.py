"""Checks of a run: weights that are not finite, the first NaN or infinity, no gain by training."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import paddle

from paddle_recompute.app.config import Config
from paddle_recompute.distributed import buffers_of, values_of_ranks
from paddle_recompute.errors import CheckpointError, DivergenceError

_FEWEST_STEPS = 10
"""Fewer are a trial."""
_NEAR_CHANCE = 0.99
"""A loss below this share of `loss_of_chance` has found something; collapsed runs had 0.999."""


def first_not_finite(tensors: Mapping[str, paddle.Tensor]) -> str | None:
    """The name of the first of `tensors` that holds NaN or an infinity."""
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not bool(
            np.isfinite(tensor.astype("float32").numpy()).all()
        ):
            return str(name)
    return None


def check_weights(model: paddle.nn.Layer, source: object) -> None:
    """Refuse weights of the file `source` that cannot be trained.

    Raises:
        CheckpointError: One of them is not finite.
    """
    name = first_not_finite(model.state_dict())
    if name is not None:
        raise CheckpointError(
            f"model.init_from: {source}: {name} holds NaN or an infinity; the run that wrote the "
            "file had diverged. Take an earlier checkpoint of it"
        )


def explained(error: DivergenceError, step: int, model: paddle.nn.Layer) -> DivergenceError:
    """`error` of all ranks in `step`, with what was not finite first and on which rank.

    Every rank calls this; the weights are those from before the step.
    """
    buffers = buffers_of(model)  # a forward has written them: they tell nothing of before the step
    weights = {name: tensor for name, tensor in model.state_dict().items() if name not in buffers}
    everywhere = values_of_ranks(first_not_finite(weights), "what is not finite")
    bad = [(rank, name) for rank, name in enumerate(everywhere) if name is not None]
    if bad:
        rank, name = bad[0]
        where = f" on rank {rank}" if len(everywhere) > 1 else ""
        first = (
            f"The weights were not finite before this step: {name}{where}. Go on from an earlier "
            "checkpoint"
        )
    elif "the loss is nan" in str(error) or "the loss is inf" in str(error):
        first = "The weights are finite; the loss is the first that is not"
    else:
        first = "The weights and the loss are finite; the gradient is the first that is not"
    if written := first_not_finite(buffers):
        first += f". The buffer {written}, which a forward has written, is not finite either"
    return DivergenceError(f"step {step}: {error}. {first}. The last checkpoint is as it was")


def without_gain(config: Config, record: dict[str, Any]) -> list[str]:
    """Warnings, in sentences for the user, where the figures of a run show no gain by training.

    Args:
        config: Of the run.
        record: Its final record: ``loss``, ``steps``, ``mrr``, ``untrained_mrr``.
    """
    notes = []
    chance, loss = loss_of_chance(config), record["loss"]
    if record["steps"] >= _FEWEST_STEPS and loss is not None and loss >= _NEAR_CHANCE * chance:
        advice = "model.pooling: mean, or a lower train.learning_rate with train.warmup_steps"
        if config.model.init_from is not None:
            advice = "another contrastive.temperature or train.learning_rate"
        notes.append(
            f"The loss {loss:.4f} is no better than that of chance ({chance:.4f}), where all "
            f"scores of a batch, divided by contrastive.temperature, are equal. Try {advice}"
        )
    before = record["untrained_mrr"]
    if before is not None and record["mrr"] < before:
        notes.append(
            "The trained model finds less than the model before training. Train longer, with more "
            "pairs, or with a lower train.learning_rate"
        )
    return notes


def loss_of_chance(config: Config) -> float:
    """The contrastive loss if all scores are equal and no negative is masked."""
    contrastive = config.contrastive
    ranks = config.world_size if contrastive.negatives == "global" else 1
    positives = config.micro_batch * ranks
    rivals = 1 if contrastive.negatives == "given" else positives
    of_query = math.log(rivals * (1 + contrastive.hard_negatives))
    return (of_query + math.log(positives)) / 2 if contrastive.symmetric else of_query
