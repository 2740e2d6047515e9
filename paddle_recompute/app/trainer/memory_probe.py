"""Measure the memory of a training step before training, and choose chunks that fit a budget.

The steps run on a separate model, which is then discarded. The model to train is not built yet, so
its weights, moments and hooks cannot change.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np
import paddle

from paddle_recompute._paddle import memory as _memory
from paddle_recompute.app.config import Config
from paddle_recompute.app.encoder import build_model
from paddle_recompute.app.trainer.build import build_step, compile_as_configured
from paddle_recompute.app.trainer.objective import Batch, Chunks, Objective
from paddle_recompute.distributed import is_distributed, reduce_numbers
from paddle_recompute.errors import ConfigError
from paddle_recompute.offload import offload_layers
from paddle_recompute.options import AmpConfigs
from paddle_recompute.planner import RecomputePlan
from paddle_recompute.recompute import apply_recompute

SHORTEST_TEXT = 2
"""Tokens of an empty text: [CLS] and [SEP]."""
BATCHES_BESIDES = 1
"""Batches that are held beside a step's micro-batches: the one that was divided into them."""
PROGRAM_STEPS = 3
"""Steps of a Program whose least peak counts on a CPU, where its executor is late to free."""
MOST_VERIFICATIONS = 3
"""Steps that are measured for chunks that were found by estimates, before all are measured."""
CLOSE_ESTIMATE = 0.01
"""An estimate that differs from the measured peak by no more than this part of it is right."""
CLOSE_ENOUGH = 8
"""The search ends when the next chunk would be larger by less than this fraction of it."""


class Peaks(NamedTuple):
    """Peak bytes of a step: without recompute, and as configured."""

    plain: int
    configured: int


class MemoryProbe:
    """Measures the steps of one run and reports the result. All ranks call it together.

    Args:
        config: The configuration of the run.
        vocab_size: Rows of the word embedding.
        say: Shows the user a sentence, on rank 0 only.
        estimate: The peaks of a step with such chunks without running it, or None if they cannot
            be told; None: steps are measured.
    """

    def __init__(
        self,
        config: Config,
        vocab_size: int,
        *,
        say: Callable[[str], None],
        estimate: Callable[[Chunks], Peaks | None] | None = None,
    ) -> None:
        self._estimate = estimate
        self._config = config
        self._vocab_size = vocab_size
        self._say = say
        self._peaks: dict[tuple[Chunks, bool], int | None] = {}
        self._estimates: dict[Chunks, Peaks | None] = {}

    def choose_chunks(self, earlier: Chunks | None = None) -> Chunks:
        """The chunks of a rank: as configured, or as large as the configured budget allows.

        Args:
            earlier: The chunks that were measured before the run was interrupted; a resumed run
                keeps them to repeat the same bits.

        Raises:
            ConfigError: A step with chunks of one text exceeds the budget.
        """
        section = self._config.contrastive
        if section.memory_budget is None:
            return Chunks(section.chunk_size, section.chunk_tokens)
        budget = f"contrastive.memory_budget: {_memory.format_bytes(section.memory_budget)}"
        if earlier is not None:
            self._say(f"{budget}: each rank encodes {earlier}, as before")
            return earlier
        recompute = self._config.recompute.enable
        found = self._estimated_chunks(recompute=recompute)
        chunks, peak = found or chunks_within_budget(
            self._config, lambda chunks: self._peak_of_a_step(chunks, recompute=recompute)
        )
        setting = f" (contrastive.chunk_tokens: {chunks.tokens})" if chunks else ""
        self._say(
            f"{budget}: each rank encodes {chunks}{setting}; a step takes "
            f"{_memory.format_bytes(peak)}"
        )
        return chunks

    def _estimated_chunks(self, *, recompute: bool) -> tuple[Chunks, int] | None:
        """Chunks that were found by estimates and verified by a step; None: estimates do not do."""

        def estimate(chunks: Chunks) -> int | None:
            found = self._estimated(chunks)
            return None if found is None else found.configured

        budget, more = self._config.contrastive.memory_budget, 0
        assert budget is not None
        for _ in range(MOST_VERIFICATIONS):
            tighter = self._config.contrastive.model_copy(update={"memory_budget": budget - more})
            try:
                chunks, estimated = chunks_within_budget(
                    self._config.model_copy(update={"contrastive": tighter}), estimate
                )
            except ConfigError:
                return None  # measured steps tell whether it is so, and what is too much
            peak = self._peak_of_a_step(chunks, recompute=recompute)
            if peak is not None and peak <= budget:
                return chunks, peak
            more = max(more + 1, (peak or 2 * budget) - estimated)
        return None

    def _estimated(self, chunks: Chunks) -> Peaks | None:
        if self._estimate is not None and chunks not in self._estimates:
            self._estimates[chunks] = self._estimate(chunks)
        return self._estimates.get(chunks)

    def measure(self, chunks: Chunks) -> tuple[int | None, int]:
        """Peak bytes of the largest step on the largest rank: (plain, as configured).

        The step as configured is measured. Where its estimate is right, so is that of the plain
        step, which then need not be run; else it is measured too. The first figure is None if a
        step without recompute is measured and does not fit, or is not asked for.

        Raises:
            ConfigError: A step as configured does not fit.
        """
        enable, measure_plain = self._config.recompute.enable, self._config.train.measure_plain
        configured = self._peak_of_a_step(chunks, recompute=enable)
        if configured is None:
            raise ConfigError(_does_not_fit(self._config, chunks))
        plain: int | None = configured
        if enable:
            plain = self._plain_peak(chunks, configured) if measure_plain else None
        said = f"A step takes {_memory.format_bytes(configured)} as configured"
        if plain is not None:
            said += f", {_memory.format_bytes(plain)} without recompute"
        elif measure_plain:
            said += "; without recompute, more than there is"
        self._say(said)
        return plain, configured

    def _plain_peak(self, chunks: Chunks, configured: int) -> int | None:
        # An estimate is of a step in dygraph; that of a Program may be right by chance.
        found = self._estimated(chunks) if self._config.mode == "dygraph" else None
        if found is not None and abs(found.configured - configured) <= CLOSE_ESTIMATE * configured:
            return found.plain
        return self._peak_of_a_step(chunks, recompute=False)

    def _peak_of_a_step(self, chunks: Chunks, *, recompute: bool) -> int | None:
        """The largest peak of all ranks, on every rank; None if the step does not fit on one."""
        if (chunks, recompute) not in self._peaks:
            try:
                peak = measure_step(
                    self._config, vocab_size=self._vocab_size, recompute=recompute, chunks=chunks
                )
            except MemoryError:
                peak = 0
            self._peaks[chunks, recompute] = largest_peak_of_ranks(peak)
        return self._peaks[chunks, recompute]


def largest_of_ranks(count: int) -> int:
    """The largest of the ranks' values, on every rank."""
    if not is_distributed():
        return count
    return int(reduce_numbers([count], "max", "the comparison of memory")[0])


def largest_peak_of_ranks(peak: int) -> int | None:
    """The largest of the ranks' peaks, on every rank; None if one of them has none, which is 0."""
    if not is_distributed():
        return peak or None
    largest, least = reduce_numbers([peak, -peak], "max", "the comparison of memory")
    return int(largest) if least < 0 else None


def measure_step(
    config: Config,
    *,
    vocab_size: int,
    recompute: bool,
    chunks: Chunks,
    plan: RecomputePlan | None = None,
) -> int:
    """Peak bytes of one optimizer step on texts of full length.

    The second of two steps is measured, because AdamW creates its moments in the first one, which
    has eight pairs. (Of a Program on a CPU: the least of `PROGRAM_STEPS` more.) The texts have
    ``max_query_tokens`` and ``max_positive_tokens`` tokens, the most that a batch can have, so the
    figures with and without recompute are of the same, largest step.

    With `chunks` of tokens, one chunk of each side has the longest texts and the next one the most
    texts, short ones. A chunk between these two takes no more than the larger of them: some of its
    bytes grow with the tokens, some with tokens times length (attention), some with the number of
    texts (vectors). Two chunks also make the step short.

    On CPU, Paddle 2.6 knows only the peak since the process began: measure the smaller one first.

    Args:
        config: The configuration of the run. Every rank must call this, because a step synchronizes
            gradients.
        vocab_size: Rows of the word embedding.
        recompute: Whether `config.recompute` is applied to the model.
        chunks: The chunks of each rank.
        plan: What is recomputed, with ``policy: budget``.

    Returns:
        The peak on this rank, in bytes, including parameters, gradients and moments.
    """
    gc.collect()  # Layers and their hooks are reference cycles; free the models of earlier steps
    paddle.seed(config.train.seed)
    model = bare_model(config, vocab_size)
    if recompute and config.recompute.offload_parameters != "none":
        offload_layers(model, config.recompute)
    elif recompute:
        if plan is None:
            if config.recompute.policy == "budget":  # the plan is made when the chunks are known
                config = _with_all_blocks(config)
            apply_recompute(model, config.recompute)
        elif config.mode == "dygraph":
            plan.apply(model)
    objective = Objective(config, chunks)
    # A Program takes recompute from its configuration, not from the wrapping of this model.
    section = replace(config.recompute, enable=recompute)
    as_measured = config.model_copy(update={"recompute": section})
    amp = _unscaled(config.strategy.amp_configs) if config.strategy.amp else None
    step = build_step(
        as_measured,
        objective,
        model,
        0.0,
        vocab_size=vocab_size,
        amp=amp,
        plan=plan if recompute else None,
    )
    compile_as_configured(config, model, step)
    steps = [
        [
            largest_batch(config, vocab_size, chunks)
            for _ in range(config.strategy.gradient_merge_configs.k_steps)
        ]
        for _ in range(1 + BATCHES_BESIDES)
    ]
    step([{name: rows[:8] for name, rows in batch.items()} for batch in steps[0]])
    peak = _peak_of(partial(step, steps[0]), repeats=PROGRAM_STEPS if _frees_late(config) else 1)
    del step, objective, model, steps
    gc.collect()
    gc.collect()  # shards of ranks: what the first one frees has held them where it cannot see
    return peak


def _frees_late(config: Config) -> bool:
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


def chunks_within_budget(
    config: Config, peak_of: Callable[[Chunks], int | None]
) -> tuple[Chunks, int]:
    """The largest chunks within ``contrastive.memory_budget``, found by measuring steps.

    The search starts with one text per chunk. The next chunk is at most twice as large, and not
    larger than where a straight line through the last two peaks meets the budget. So a step takes
    little more than the budget during the search; more could make the system kill the process.

    Args:
        config: The configuration of the run, with a ``memory_budget``.
        peak_of: The peak of a step with such chunks on the largest rank, in bytes, the same on all
            ranks; None if it does not fit into the memory.

    Returns:
        The chunks, and the peak of a step with them; no chunks if the whole batch fits at once.

    Raises:
        ConfigError: A step with chunks of one text exceeds the budget.
    """
    budget, pairs = config.contrastive.memory_budget, config.local_batch
    assert budget is not None
    longest = _longest(config)
    texts, peak = 1, peak_of(Chunks(tokens=longest))
    if peak is None or peak > budget:
        raise _too_small(config, budget, peak)
    before = 0, 0
    while texts < pairs:
        more = _next_size(before, (texts, peak), budget, pairs)
        if more - texts < max(1, texts // CLOSE_ENOUGH):
            break
        found = peak_of(Chunks(tokens=more * longest))
        if found is None or found > budget:
            break
        before, texts, peak = (texts, peak), more, found
    if texts == pairs:
        at_once = peak_of(Chunks())
        if at_once is not None and at_once <= budget:
            return Chunks(), at_once
    return Chunks(tokens=texts * longest), peak


def _longest(config: Config) -> int:
    return max(config.data.max_query_tokens, config.data.max_positive_tokens)


def _next_size(before: tuple[int, int], now: tuple[int, int], budget: int, largest: int) -> int:
    """Texts of the chunk to measure next: twice as many, or fewer near the budget."""
    (fewer, less), (texts, peak) = before, now
    bound = min(2 * texts, largest)
    if fewer and peak > less:
        bound = min(bound, texts + (budget - peak) * (texts - fewer) // (peak - less))
    return bound


def _too_small(config: Config, budget: int, peak: int | None) -> ConfigError:
    takes = "more than there is" if peak is None else _memory.format_bytes(peak)
    tile = "" if config.contrastive.tile else ", or set contrastive.tile"
    return ConfigError(
        f"contrastive.memory_budget: {_memory.format_bytes(budget)} is too little; a step that "
        f"encodes one text at a time takes {takes}: parameters, gradients and moments, and the "
        f"vectors and scores of {config.local_batch} pairs per rank. Raise it, lower "
        f"contrastive.global_batch{tile}, or train a smaller model"
    )


def _does_not_fit(config: Config, chunks: Chunks) -> str:
    tile = "set contrastive.tile, " if config.contrastive.tile is None else ""
    if chunks:
        name = "chunk_tokens" if chunks.size is None else "chunk_size"
        return (
            f"a step that encodes {chunks} does not fit into the memory; lower contrastive.{name}, "
            f"{tile}or lower contrastive.global_batch"
        )
    return (
        f"a step with {config.micro_batch} pairs per rank and micro-batch does not fit into the "
        "memory; set contrastive.chunk_size or chunk_tokens to encode fewer at a time (or "
        f"memory_budget, which measures how many), {tile}or lower contrastive.global_batch"
    )


def _with_all_blocks(config: Config) -> Config:
    section = replace(config.recompute, policy="all", memory_budget=None)
    return config.model_copy(update={"recompute": section})


def _unscaled(amp: AmpConfigs) -> AmpConfigs:
    """AMP without overflow: an overflow would skip the step, and AdamW would create no moments."""
    if amp.dtype == "bfloat16":
        return amp
    return AmpConfigs(
        amp.dtype,
        amp.level,
        init_loss_scaling=1.0,
        use_dynamic_loss_scaling=False,
        custom_white_list=amp.custom_white_list,
        custom_black_list=amp.custom_black_list,
    )


def bare_model(config: Config, vocab_size: int) -> paddle.nn.Layer:
    """The model of a run without the weights of ``init_from``: bytes and times ignore them."""
    model = build_model(config.model.model_copy(update={"init_from": None}), vocab_size)
    model.train()
    return model


def largest_batch(config: Config, vocab_size: int, chunks: Chunks) -> Batch:
    """A micro-batch of full texts, or with `chunks` of the two largest kinds of chunks."""
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
            long = max(1, chunks.tokens // length)
            short = max(SHORTEST_TEXT, chunks.tokens // max(1, texts - long))
            ids[long:, short:] = 0  # padding
        batch[side] = paddle.to_tensor(ids.reshape(*rows, length))
    if config.contrastive.mask_false_negatives:
        batch["positive_ids"] = paddle.arange(pairs, dtype="int64")
        if count:
            batch["negative_ids"] = pairs + paddle.arange(pairs * count).reshape([pairs, count])
    return batch
