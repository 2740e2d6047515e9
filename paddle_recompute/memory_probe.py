"""How much memory one training step takes, with recompute and without, measured before training.

The steps are made on a model of their own, which is thrown away: the model that is to be trained
is not built yet, so nothing about it (weights, moments, hooks) can be changed.
"""

from __future__ import annotations

import gc

import numpy as np
import paddle

from paddle_recompute import _memory
from paddle_recompute.config import AmpConfigs, Config
from paddle_recompute.grad_sync import GradientSync
from paddle_recompute.models import build_model
from paddle_recompute.optimizer import build_optimizer
from paddle_recompute.recompute import apply_recompute
from paddle_recompute.train_step import LossFn, TrainStep


def measure_step(config: Config, loss_fn: LossFn, *, vocab_size: int, recompute: bool) -> int:
    """Peak bytes of one optimizer step on texts of full length.

    The second of two steps is measured, because AdamW makes its moments in the first. The texts
    have ``max_query_tokens`` and ``max_positive_tokens`` tokens, the most that a batch can have,
    so that the figures with and without recompute are those of the same, the dearest, step.

    On CPU, Paddle 2.6 knows only the peak since the process began: measure the smaller one first.

    Args:
        config: Of the run. Every rank must call, as a step sends gradients to all of them.
        loss_fn: As for `TrainStep`.
        vocab_size: Rows of the word embedding.
        recompute: Whether `config.recompute` is applied to the model.

    Returns:
        The peak on this rank, in bytes, with parameters, gradients and moments in it.
    """
    gc.collect()  # layers and their hooks hold each other: without this a dead model takes memory
    paddle.seed(config.train.seed)
    model = build_model(config.model, vocab_size)
    model.train()
    if recompute:
        apply_recompute(model, config.recompute)
    optimizer = build_optimizer(config, model, config.learning_rate)
    step = TrainStep(
        model,
        optimizer,
        loss_fn=loss_fn,
        sync=GradientSync.from_config(model, config),
        accumulate_steps=config.strategy.gradient_merge_configs.k_steps,
        clip_grad_norm=config.train.clip_grad_norm,
        amp=_unscaled(config.strategy.amp_configs) if config.strategy.amp else None,
    )
    micro_batches = [
        _full_length_batch(config, vocab_size)
        for _ in range(config.strategy.gradient_merge_configs.k_steps)
    ]
    step(micro_batches)
    if _memory.can_reset_peak():
        _memory.reset_peak()
    step(micro_batches)
    peak = _memory.peak_bytes()
    del step, optimizer, model, micro_batches
    gc.collect()
    return peak


def _unscaled(amp: AmpConfigs) -> AmpConfigs:
    """A step that overflows would be skipped, and AdamW would not make its moments in it."""
    return amp.model_copy(update={"init_loss_scaling": 1.0, "use_dynamic_loss_scaling": False})


def _full_length_batch(config: Config, vocab_size: int) -> dict[str, paddle.Tensor]:
    random = np.random.default_rng(config.train.seed)
    lengths = {
        "query": config.data.max_query_tokens,
        "positive": config.data.max_positive_tokens,
    }
    return {
        side: paddle.to_tensor(
            random.integers(1, vocab_size, (config.micro_batch, length), dtype=np.int64)
        )
        for side, length in lengths.items()
    }
