"""The section ``contrastive``: the batch, its loss, and how it is cut to fit into the memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from paddle_recompute.config._section import Broken, Section, Values
from paddle_recompute.config._types import ByteCount, Count, Probability

# As in CLIP, and as paddle_recompute.contrastive.loss.MAX_SCALE, which needs Paddle to be imported.
SMALLEST_LEARNED_TEMPERATURE = 0.01


class ContrastiveConfig(Section):
    """The contrastive loss (InfoNCE) over the global batch, and the gradient cache.

    `chunk_size`, `chunk_tokens` or `memory_budget` turns the cache on: a rank's pairs are encoded
    chunk by chunk, twice, and the loss is still one over all of them, so the batch is as large as
    one likes in the memory of a chunk. Without any of them all pairs are encoded at once.
    """

    @staticmethod
    def _chunks_are_named_once(v: Values) -> Iterator[Broken]:
        if v["chunk_size"] is not None and v["chunk_tokens"] is not None:
            yield Broken(
                "chunk_size",
                v["chunk_size"],
                f"does not go with chunk_tokens = {v['chunk_tokens']}: a chunk is so many pairs or "
                "so many tokens; remove one of them",
            )

    @staticmethod
    def _budget_names_the_chunks(v: Values) -> Iterator[Broken]:
        if v["memory_budget"] is None:
            return
        for name in ("chunk_size", "chunk_tokens"):
            if v[name] is not None:
                yield Broken(
                    name, v[name], "follows from memory_budget where that is given; remove either"
                )

    @staticmethod
    def _learned_temperature_starts_in_its_range(v: Values) -> Iterator[Broken]:
        if v["learnable_temperature"] and v["temperature"] < SMALLEST_LEARNED_TEMPERATURE:
            yield Broken(
                "temperature",
                v["temperature"],
                f"must be at least {SMALLEST_LEARNED_TEMPERATURE} with learnable_temperature, "
                "which is kept from going below",
            )

    rules = (
        _chunks_are_named_once,
        _budget_names_the_chunks,
        _learned_temperature_starts_in_its_range,
    )

    global_batch: Count = Field(
        description="pairs per optimizer step, over all ranks and micro-batches"
    )
    temperature: float = Field(0.05, gt=0, description="divides the cosine similarities")
    learnable_temperature: bool = Field(
        False, description="true: it is trained, from `temperature` on and never below 0.01 (CLIP)"
    )
    symmetric: bool = Field(
        True, description="true: mean of query-to-positive and positive-to-query losses"
    )
    negatives: Literal["global", "local"] = Field(
        "global",
        description="global: a pair's negatives are the other pairs of all ranks (of the same "
        "micro-batch, if there are several); local: those of its own rank alone",
    )
    label_smoothing: Probability = Field(
        0.0, description="share of the label that is spread over all candidates; 0: none"
    )
    mask_false_negatives: bool = Field(
        False,
        description="true: a pair with the same positive text is no negative; false: it is one",
    )
    tile: Count | None = Field(
        None,
        description="scores are computed in tiles of so many pairs a side, and no matrix of all "
        "of them is kept; none: one matrix per rank, [pairs of the rank, pairs of all ranks]",
    )
    chunk_size: Count | None = Field(
        None, description="pairs that a rank encodes at once; none: see chunk_tokens"
    )
    chunk_tokens: Count | None = Field(
        None,
        description="tokens that a rank encodes at once, padding included; texts are sorted by "
        "length, so there is little; none: see memory_budget",
    )
    memory_budget: ByteCount | None = Field(
        None,
        description="bytes that a step may take on a rank, as in 2GiB: the largest chunk that "
        "stays within them is measured before training; none: all pairs are encoded at once",
    )

    @property
    def is_chunked(self) -> bool:
        """Whether the gradient cache is asked for; with `memory_budget` only as far as needed."""
        return any((self.chunk_size, self.chunk_tokens, self.memory_budget))
