"""The section ``contrastive``: the batch, its loss, and the chunks that bound the memory."""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import Field

from paddle_recompute.app.config._section import Broken, Section, Values
from paddle_recompute.app.config._types import ByteCount, Count, Probability
from paddle_recompute.options import apart, needs

# As in CLIP, and as paddle_recompute.contrastive.loss.MAX_SCALE, which needs Paddle to be imported.
SMALLEST_LEARNED_TEMPERATURE = 0.01


def _learned_temperature_starts_in_its_range(v: Values) -> Broken:
    if v["learnable_temperature"] and v["temperature"] < SMALLEST_LEARNED_TEMPERATURE:
        yield (
            "temperature",
            f"must be at least {SMALLEST_LEARNED_TEMPERATURE} with learnable_temperature, which "
            "never goes below that",
        )


def _dims_differ(v: Values) -> Broken:
    dims = v["matryoshka_dims"] or []
    if len(set(dims)) < len(dims):
        yield "matryoshka_dims", "must be different numbers"


class ContrastiveConfig(Section):
    """The contrastive loss (InfoNCE) over the global batch, and the gradient cache.

    Each of `chunk_size`, `chunk_tokens` and `memory_budget` turns the gradient cache on: a rank
    encodes its pairs chunk by chunk, twice, and computes one loss over all of them. The activations
    in memory are those of one chunk, whatever the batch size is. Without these fields, all pairs
    are encoded at once.

    Attributes:
        global_batch: Pairs per optimizer step, over all ranks and micro-batches.
        temperature: The cosine similarities are divided by it.
        learnable_temperature: True: the temperature is trained; it starts at `temperature` and
            stays at 0.01 or above (as in CLIP).
        symmetric: True: mean of query-to-positive and positive-to-query losses.
        hard_negatives: Negatives of each pair in a batch, drawn anew in each epoch from those in
            data.train_file; they are candidates for all queries of the batch.
        fill: Random: positives of other queries take the place of hard negatives that a pair lacks;
            none: such a line is refused.
        negatives: Global: the negatives of a pair are the other pairs of all ranks (of the same
            micro-batch, if there are several); local: the other pairs of its own rank; given: its
            hard negatives alone, with symmetric: false.
        positives: Of other pairs of the same query in a batch: one: they are negatives like any;
            mask: they are no candidates; sum: they are answers, too.
        label_smoothing: Share of the label that is spread evenly over all candidates.
        mask_false_negatives: True: a pair with the same positive text does not count as a negative.
        matryoshka_dims: Mean of the losses of the vectors' first d numbers, for these d, so that
            shortened vectors can be used; the largest is the whole vector.
        tile: Pairs per side of a tile; the scores are computed tile by tile, and no matrix of all
            scores is kept; None: one matrix per rank, [pairs of the rank, pairs of all ranks].
        chunk_size: Pairs that a rank encodes at once.
        chunk_tokens: Tokens that a rank encodes at once, padding included; texts are sorted by
            length, which keeps the padding small.
        memory_budget: Bytes that a training step may need on a rank; the largest chunk that fits is
            measured before training.
    """

    rules = (
        _dims_differ,
        _learned_temperature_starts_in_its_range,
        *needs("hard_negatives", "fill", "negatives=given"),
        *needs("symmetric=false", "negatives=given"),
        *apart("negatives=given", "positives", "tile", because="it has no pairs as candidates"),
        *apart("positives=sum", "tile", because="its sum is not computed in tiles"),
        *apart("chunk_tokens", "chunk_size", because="a chunk is measured in either"),
        *apart("memory_budget", "chunk_size", "chunk_tokens", because="it measures them"),
    )

    global_batch: Count = Field(
        description="pairs per optimizer step, over all ranks and micro-batches"
    )
    temperature: float = Field(0.05, gt=0)
    learnable_temperature: bool = False
    symmetric: bool = True
    hard_negatives: int = Field(0, ge=0, le=2**20)
    fill: Literal["none", "random"] = "none"
    negatives: Literal["global", "local", "given"] = "global"
    positives: Literal["one", "mask", "sum"] = "one"
    label_smoothing: Probability = 0.0
    mask_false_negatives: bool = False
    matryoshka_dims: Annotated[list[Count], Field(min_length=1)] | None = None
    tile: Count | None = None
    chunk_size: Count | None = None
    chunk_tokens: Count | None = None
    memory_budget: ByteCount | None = None

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
