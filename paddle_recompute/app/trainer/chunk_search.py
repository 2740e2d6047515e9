"""How much of its pairs a rank encodes at once, and what a step takes then."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

from paddle_recompute._paddle.memory import format_bytes
from paddle_recompute.app.config import Config
from paddle_recompute.app.trainer.peak_memory import (
    largest_of_ranks,
    longest_text,
    measure_peak,
)
from paddle_recompute.app.trainer.setup import with_recompute
from paddle_recompute.app.trainer.step import Chunks
from paddle_recompute.errors import ConfigError
from paddle_recompute.planner import largest_that_fits

CLOSE_CHUNKS = 8
"""Chunks may be smaller than the largest that fit by one part in so many."""


class MemoryProbe:
    """Measures the steps of one run and reports the result. All ranks call it together.

    Args:
        config: The configuration of the run.
        vocab_size: Rows of the word embedding.
        say: Shows the user a sentence, on rank 0 only.
    """

    def __init__(self, config: Config, vocab_size: int, *, say: Callable[[str], None]) -> None:
        self._config = config
        self._vocab_size = vocab_size
        self._say = say
        self._measured: dict[tuple[Chunks, bool], int | None] = {}

    def choose_chunks(self, earlier: Chunks | None = None) -> Chunks:
        """The chunks of a rank: as configured, or as large as the configured budget allows.

        Args:
            earlier: The chunks that were measured before the run was interrupted; a resumed run
                keeps them, so a repeated run is bitwise identical.

        Raises:
            ConfigError: A step with chunks of one text exceeds the budget.
        """
        section = self._config.contrastive
        if section.memory_budget is None:
            return Chunks(section.chunk_size, section.chunk_tokens)
        budget = f"contrastive.memory_budget: {format_bytes(section.memory_budget)}"
        if earlier is not None:
            self._say(f"{budget}: each rank encodes {earlier}, as before")
            return earlier
        self._say("Measuring the memory of a step")
        chunks, peak = self._within_budget(section.memory_budget)
        setting = f" (contrastive.chunk_tokens: {chunks.tokens})" if chunks else ""
        self._say(
            f"{budget}: each rank encodes {chunks}{setting}; a step takes {format_bytes(peak)}"
        )
        return chunks

    def _within_budget(self, budget: int) -> tuple[Chunks, int]:
        """The largest chunks, and the peak of a step with them."""
        chunks = largest_chunks(self._config, budget, self._peak)
        if chunks is not None and (peak := self._peak(chunks)) is not None:
            return chunks, peak
        one_text = self._peak(Chunks(tokens=longest_text(self._config)))
        takes = "more than there is" if one_text is None else format_bytes(one_text)
        tile = "" if self._config.contrastive.tile else ", or set contrastive.tile"
        raise ConfigError(
            f"contrastive.memory_budget: {format_bytes(budget)} is too little; a step that "
            f"encodes one text at a time takes {takes}: parameters, gradients and moments, and the "
            f"vectors and scores of {self._config.local_batch} pairs per rank. Raise it, lower "
            f"contrastive.global_batch{tile}, or train a smaller model"
        )

    def measure(self, chunks: Chunks) -> tuple[int | None, int]:
        """Peak bytes of the largest step on the largest rank: (plain, as configured).

        The first figure is None if a step without recompute does not fit, or is not asked for.

        Raises:
            ConfigError: A step as configured does not fit.
        """
        self._say("Measuring the memory of a step")
        configured = self._peak(chunks)
        if configured is None:
            raise ConfigError(_does_not_fit(self._config, chunks))
        said, plain = f"A step takes {format_bytes(configured)}", None
        if not self._config.recompute.enable:
            self._say(f"{said}; nothing is recomputed")
            return configured, configured
        said += " as configured"
        if self._config.train.measure_plain:
            plain = self._peak(chunks, plain=True)
            if plain is None:
                said += "; without recompute, more than there is"
        if plain is not None:
            said += f", {format_bytes(plain)} without recompute"
        self._say(said)
        return plain, configured

    def _peak(self, chunks: Chunks, *, plain: bool = False) -> int | None:
        """The largest measured peak of all ranks; None if the step does not fit on one."""
        if (chunks, plain) not in self._measured:
            config = self._config
            if plain:
                off = {"enable": False, "offload_parameters": "none", "num_shards": 1}
                config = with_recompute(config, **off)
            peak: int | None = None
            with suppress(MemoryError):  # the other ranks wait for the comparison
                peak = measure_peak(config, self._vocab_size, chunks)
            self._measured[chunks, plain] = largest_of_ranks(peak)
        return self._measured[chunks, plain]


def largest_chunks(
    config: Config, budget: int, peak_of: Callable[[Chunks], int | None]
) -> Chunks | None:
    """The largest chunks of whole texts whose step stays within `budget`.

    Sizes that a straight line through the last two peaks puts beyond the budget are not tried: a
    step of the search takes little more than the budget. More could make the system kill the
    process.

    Args:
        config: The configuration of the run.
        budget: In bytes.
        peak_of: The peak of a step with such chunks, in bytes, the same on all ranks; None if it
            does not fit into the memory, or is not known.

    Returns:
        No chunks if the whole batch fits at once; None: not even chunks of one text do.
    """
    longest, pairs = longest_text(config), config.local_batch
    known: list[tuple[int, int]] = []

    def fits(texts: int) -> bool:
        if len(known) > 1:
            (fewer, less), (last, peak) = known[-2:]
            if (budget - peak) * (last - fewer) < (peak - less) * (texts - last):
                return False
        found = peak_of(Chunks(tokens=texts * longest))
        if found is None or found > budget:
            return False
        known.append((texts, found))
        return True

    texts = largest_that_fits(fits, pairs, close=CLOSE_CHUNKS)
    if texts is None:
        return None
    if pairs - texts <= texts // CLOSE_CHUNKS:
        at_once = peak_of(Chunks())
        if at_once is not None and at_once <= budget:
            return Chunks()
    return Chunks(tokens=texts * longest)


def _does_not_fit(config: Config, chunks: Chunks) -> str:
    verb = "lower" if chunks else "set"
    tile = "set contrastive.tile, " if config.contrastive.tile is None else ""
    return (
        f"a step that encodes {chunks}, of {config.micro_batch} pairs per rank and micro-batch, "
        f"does not fit into the memory; {verb} contrastive.chunk_size or chunk_tokens "
        f"(memory_budget measures what fits), {tile}or lower contrastive.global_batch"
    )
