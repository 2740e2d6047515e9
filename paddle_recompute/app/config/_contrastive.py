"""The section ``contrastive``: the batch, its loss, and the chunks that bound the memory."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from paddle_recompute.app.config._section import Section, Values
from paddle_recompute.app.config._types import ByteCount, Count, Probability
from paddle_recompute.options import Fault

# As in CLIP, and as paddle_recompute.contrastive.loss.MAX_SCALE, which needs Paddle to be imported.
SMALLEST_LEARNED_TEMPERATURE = 0.01


class ContrastiveConfig(Section):
    """The contrastive loss (InfoNCE) over the global batch, and the gradient cache.

    Each of `chunk_size`, `chunk_tokens` and `memory_budget` turns the gradient cache on: a rank
    encodes its pairs chunk by chunk, twice, and computes one loss over all of them. The activations
    in memory are those of one chunk, whatever the batch size is. Without these fields, all pairs
    are encoded at once.
    """

    @staticmethod
    def _chunks_are_named_once(v: Values) -> Iterator[Fault]:
        if v["chunk_size"] is not None and v["chunk_tokens"] is not None:
            yield Fault(
                "chunk_size",
                v["chunk_size"],
                f"cannot be combined with chunk_tokens = {v['chunk_tokens']}: a chunk is measured "
                "in pairs or in tokens; remove one of the two",
            )

    @staticmethod
    def _budget_names_the_chunks(v: Values) -> Iterator[Fault]:
        if v["memory_budget"] is None:
            return
        for name in ("chunk_size", "chunk_tokens"):
            if v[name] is not None:
                words = "cannot be combined with memory_budget, which measures it; remove either"
                yield Fault(name, v[name], words)

    @staticmethod
    def _learned_temperature_starts_in_its_range(v: Values) -> Iterator[Fault]:
        if v["learnable_temperature"] and v["temperature"] < SMALLEST_LEARNED_TEMPERATURE:
            yield Fault(
                "temperature",
                v["temperature"],
                f"must be at least {SMALLEST_LEARNED_TEMPERATURE} with learnable_temperature, "
                "which never goes below that",
            )

    @staticmethod
    def _fills_hard_negatives(v: Values) -> Iterator[Fault]:
        if v["fill"] == "random" and not v["hard_negatives"]:
            yield Fault("fill", "random", "has no effect without hard_negatives; set it")

    @staticmethod
    def _dims_differ(v: Values) -> Iterator[Fault]:
        dims = v["matryoshka_dims"] or []
        if len(set(dims)) < len(dims):
            yield Fault("matryoshka_dims", dims, "must be different numbers")

    rules = (
        _dims_differ,
        _fills_hard_negatives,
        _chunks_are_named_once,
        _budget_names_the_chunks,
        _learned_temperature_starts_in_its_range,
    )

    global_batch: Count = Field(
        description="pairs per optimizer step, over all ranks and micro-batches"
    )
    temperature: float = Field(0.05, gt=0, description="the cosine similarities are divided by it")
    learnable_temperature: bool = Field(
        False,
        description="true: the temperature is trained; it starts at `temperature` and stays at "
        "0.01 or above (as in CLIP)",
    )
    symmetric: bool = Field(
        True, description="true: mean of query-to-positive and positive-to-query losses"
    )
    hard_negatives: Annotated[int, Field(ge=0, le=2**20)] = Field(
        0,
        description="negatives of each pair in a batch, drawn anew in each epoch from those in "
        "data.train_file; they are candidates for all queries of the batch; 0: none",
    )
    fill: Literal["none", "random"] = Field(
        "none",
        description="random: positives of other queries take the place of hard negatives that a "
        "pair lacks; none: such a line is refused",
    )
    negatives: Literal["global", "local"] = Field(
        "global",
        description="global: the negatives of a pair are the other pairs of all ranks (of the "
        "same micro-batch, if there are several); local: the other pairs of its own rank",
    )
    label_smoothing: Probability = Field(
        0.0, description="share of the label that is spread evenly over all candidates; 0: none"
    )
    mask_false_negatives: bool = Field(
        False,
        description="true: a pair with the same positive text does not count as a negative; "
        "false: it does",
    )
    matryoshka_dims: Annotated[list[Count], Field(min_length=1)] | None = Field(
        None,
        description="mean of the losses of the vectors' first d numbers, for these d, so that "
        "shortened vectors can be used; the largest is the whole vector; none: the whole vector "
        "only",
    )
    tile: Count | None = Field(
        None,
        description="pairs per side of a tile; the scores are computed tile by tile, and no "
        "matrix of all scores is kept; none: one matrix per rank, [pairs of the rank, pairs of "
        "all ranks]",
    )
    chunk_size: Count | None = Field(
        None, description="pairs that a rank encodes at once; none: see chunk_tokens"
    )
    chunk_tokens: Count | None = Field(
        None,
        description="tokens that a rank encodes at once, padding included; texts are sorted by "
        "length, which keeps the padding small; none: see memory_budget",
    )
    memory_budget: ByteCount | None = Field(
        None,
        description="bytes that a training step may need on a rank, as in 2GiB; the largest "
        "chunk that fits is measured before training; none: all pairs are encoded at once",
    )

    @property
    def negatives_of_a_line(self) -> tuple[float, float]:
        """The least and the largest number of negatives that a training pair may have."""
        if not self.hard_negatives:
            return 0, 0
        return (self.hard_negatives if self.fill == "none" else 0), math.inf

    @property
    def is_chunked(self) -> bool:
        """Whether the gradient cache is on. With `memory_budget` it is used only if needed."""
        return any((self.chunk_size, self.chunk_tokens, self.memory_budget))
