"""The peak memory of a training step, measured; the step as the planner takes it.

The steps run on a separate model, which is then discarded. The model to train is not built yet, so
its weights, moments and hooks cannot change.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import paddle

from paddle_recompute._nested import tensors_in
from paddle_recompute._paddle import memory as _memory
from paddle_recompute.app.config import Config
from paddle_recompute.app.encoder import build_model
from paddle_recompute.app.trainer.setup import with_recompute, wrap
from paddle_recompute.app.trainer.step import (
    Batch,
    Chunks,
    Objective,
    build_step,
    compile_as_configured,
)
from paddle_recompute.distributed import is_distributed, reduce_numbers
from paddle_recompute.options import AUTO
from paddle_recompute.planner import (
    BUCKETS,
    PLAIN,
    Job,
    RecomputePlan,
    StepCosts,
    simulate,
    uniform,
)
from paddle_recompute.train_step import build_optimizer

SHORTEST_TEXT = 2
"""Tokens of an empty text: [CLS] and [SEP]."""
WAITING_BATCHES = 1
"""Batches in memory beside a step's micro-batches: the one that was divided into them."""
PROGRAM_STEPS = 3
"""Steps of a Program whose least peak counts on a CPU, where its executor is late to free."""


def measure_peak(
    config: Config, vocab_size: int, chunks: Chunks, plan: RecomputePlan | None = None
) -> int:
    """Peak bytes of one optimizer step on texts of full length. All ranks call it.

    The second of two steps is measured, because AdamW creates its moments in the first one, which
    has eight pairs. (Of a Program on a CPU: the least of `PROGRAM_STEPS` more.) The texts have
    ``max_query_tokens`` and ``max_positive_tokens`` tokens, the most that a batch can have, so the
    figures with and without recompute are of the same, largest step.

    With `chunks` of tokens, one chunk of each side has the longest texts and the next one the most
    texts, short ones. A chunk between these two takes no more than the larger of them: some of its
    bytes grow with the tokens, some with tokens times length (attention), some with the number of
    texts (vectors). Two chunks also make the step short. With chunks of pairs, two have the longest
    texts and the rest short ones: the peak is within 2 % of that of the step, in less time.

    On CPU, Paddle 2.6 knows only the peak since the process began: measure the smaller one first.

    Args:
        config: What is measured. With ``policy: budget`` and no plan all blocks are recomputed.
        vocab_size: Rows of the word embedding.
        chunks: The chunks of each rank.
        plan: What is recomputed, with ``policy: budget``.

    Returns:
        The peak on this rank, in bytes, including parameters, gradients and moments.
    """
    gc.collect()  # Layers and their hooks are reference cycles; free the models of earlier steps
    if plan is None and config.recompute.policy == "budget":
        config = with_recompute(config, policy="all", memory_budget=None)
    config = _without_overflow(config)
    paddle.seed(config.train.seed)
    model = bare_model(config, vocab_size)
    wrap(model, config, plan)
    full = 1
    if chunks.size is not None and config.mode == "dygraph":
        # In the second full chunk all gradients are there; the others take as much as it.
        chunks, full = Chunks(tokens=chunks.size * longest_text(config)), 2
    objective = Objective(config, chunks)
    step = build_step(config, objective, model, 0.0, vocab_size, plan)
    compile_as_configured(config, model, step)
    steps = [
        [
            largest_batch(config, vocab_size, chunks, full=full)
            for _ in range(config.strategy.gradient_merge_configs.k_steps)
        ]
        for _ in range(1 + WAITING_BATCHES)
    ]
    step([{name: rows[:8] for name, rows in batch.items()} for batch in steps[0]])
    peak = _peak_of(partial(step, steps[0]), repeats=PROGRAM_STEPS if frees_late(config) else 1)
    del step, objective, model, steps
    gc.collect()
    gc.collect()  # shards of ranks: what the first one frees has held them where it cannot see
    return peak


def _without_overflow(config: Config) -> Config:
    """`config` with a loss scale of 1: a skipped step would let AdamW create no moments."""
    amp = config.strategy.amp_configs
    if not config.strategy.amp or amp.dtype == "bfloat16":
        return config
    unscaled = replace(amp, init_loss_scaling=1.0)
    strategy = config.strategy.model_copy(update={"amp_configs": unscaled})
    return config.model_copy(update={"strategy": strategy})


def frees_late(config: Config) -> bool:
    """Whether a step is a Program on a CPU.

    There the executor (2.6, 3.x) frees in a thread of its own, after the operator: on a loaded
    machine the same Program took 14.1 to 26.8 MiB. The least of some steps is what it needs.
    """
    return config.mode == "static" and str(paddle.get_device()) == "cpu"


def _peak_of(run: Callable[[], object], *, repeats: int) -> int:
    """The peak of `run`; the least of a few, as many on every rank."""
    if not _memory.can_reset_peak():
        run()
        return _memory.peak_bytes()
    peaks = []
    for _ in range(repeats):
        _memory.reset_peak()
        run()
        peaks.append(_memory.peak_bytes())
    return min(peaks)


def largest_of_ranks(peak: int | None) -> int | None:
    """The largest of the ranks' peaks, on every rank; None if a rank has none."""
    if not is_distributed():
        return peak
    largest, missing = reduce_numbers([peak or 0, peak is None], "max", "the comparison of memory")
    return None if missing else int(largest)


def bare_model(config: Config, vocab_size: int) -> paddle.nn.Layer:
    """The model of a run without the weights of ``init_from``: bytes and times ignore them."""
    model = build_model(config.model.without_weights(), vocab_size)
    model.train()
    return model


def longest_text(config: Config) -> int:
    """Tokens of the longest text of both sides."""
    return max(config.data.max_query_tokens, config.data.max_positive_tokens)


def largest_batch(config: Config, vocab_size: int, chunks: Chunks, *, full: int = 1) -> Batch:
    """A micro-batch of full texts, or with `chunks` of tokens `full` chunks of full texts, the rest
    short ones.
    """
    random = np.random.default_rng(config.train.seed)
    pairs, count = config.micro_batch, config.contrastive.hard_negatives
    sides = {
        "query": ([pairs], config.data.max_query_tokens),
        "positive": ([pairs], config.data.max_positive_tokens),
    }
    if count:
        sides["negatives"] = [pairs, count], config.data.max_positive_tokens
    batch = {}
    for side, (rows, length) in sides.items():
        texts = int(np.prod(rows))
        ids = random.integers(1, vocab_size, (texts, length), dtype=np.int64)
        if chunks.tokens is not None:
            long = full * max(1, chunks.tokens // length)
            short = max(SHORTEST_TEXT, chunks.tokens // max(1, texts - long))
            ids[long:, short:] = config.model.pad_token_id
        batch[side] = paddle.to_tensor(ids.reshape(*rows, length))
    if config.contrastive.positives != "one":
        batch["query_ids"] = paddle.arange(pairs, dtype="int64")
    if config.contrastive.mask_false_negatives:
        batch["positive_ids"] = paddle.arange(pairs, dtype="int64")
        if count:
            batch["negative_ids"] = pairs + paddle.arange(pairs * count).reshape([pairs, count])
    return batch


def job_of(config: Config, vocab_size: int, chunks: Chunks) -> Job:
    """The step of a run for the planner, on a model and a batch of its own.

    Args:
        config: Of the run.
        vocab_size: Rows of the word embedding.
        chunks: What a rank encodes at once.
    """
    gc.collect()
    paddle.seed(config.train.seed)
    model = bare_model(config, vocab_size)
    objective = Objective(config, chunks)
    batch = largest_batch(config, vocab_size, chunks)
    of_batch = sum(int(tensor.size * tensor.element_size()) for tensor in tensors_in(batch))
    k_steps = config.strategy.gradient_merge_configs.k_steps
    extra_bytes = {"batches that wait": of_batch * (k_steps * (1 + WAITING_BATCHES) - 1)}
    if config.world_size > 1:
        extra_bytes[BUCKETS] = min(
            config.strategy.fuse_grad_size_in_MB * 2**20,
            sum(int(p.size * p.element_size()) for p in model.parameters()),
        )
    return Job(
        model,
        batch,
        None,
        build_optimizer(config.optimizer, model, config.learning_rate, objective.loss.parameters()),
        objective.cache(model),
        optimizer_ranks=config.world_size if config.strategy.sharding else 1,
        extra_bytes=extra_bytes,
        keeps_gradients=k_steps > 1,
        checkpoints=_of_every_encoder(config, config.recompute.checkpoints),
        autocast=lambda: _autocast(config),
        preserve_rng_state=config.recompute.preserve_rng_state,
        keep=_of_every_encoder(config, config.recompute.keep),
    )


def _of_every_encoder(config: Config, patterns: list[str]) -> list[str]:
    """`patterns` over the names of an encoder, as patterns over those of the model."""
    prefix = "" if config.model.towers == "shared" or patterns == [AUTO] else "*."
    return [prefix + pattern for pattern in patterns]


def _autocast(config: Config) -> Any:
    amp = config.strategy.amp_configs
    return paddle.amp.auto_cast(
        enable=config.strategy.amp and config.mode == "dygraph", level=amp.level, dtype=amp.dtype
    )


def plain_peak(costs: StepCosts) -> int:
    """The estimated peak of a step without recompute, in bytes."""
    return simulate(costs, uniform(costs, PLAIN)).peak.bytes
