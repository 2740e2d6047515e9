"""With GradCache the peak does not grow with the batch, but for the embeddings.

Each figure is the largest so far, because Paddle 2.6 cannot start a new peak: so the smaller batch
comes first, and the plain step last.
"""

from __future__ import annotations

import gc
from typing import Any

import paddle

from paddle_recompute import GradCache
from paddle_recompute._paddle import memory as _memory
from tests.contrastive.encoders import WIDTH, Encoder, gradients, one_shot, texts
from tests.ranks import run_ranks

ROWS, CHUNK, LENGTH = 16, 8, 32
EMBEDDINGS = 4 * WIDTH


def pull_together(query: paddle.Tensor, positive: paddle.Tensor) -> paddle.Tensor:
    return (query * positive).mean()  # a loss that takes no memory of its own worth naming


class FirstToken(Encoder):
    """Its output is a view of the hidden states."""

    def forward(self, ids: paddle.Tensor) -> paddle.Tensor:
        return self.encoder(self.words(ids))[:, 0]


def rise_of(step: Any) -> int:
    """How far the largest peak so far is above what is held now."""
    gc.collect()
    before = _memory.current_bytes()
    step()
    return _memory.peak_bytes() - before


def peaks() -> dict[str, list[int]]:
    """Of a step with the smaller batch and with the larger one."""
    paddle.seed(1)
    encoder = FirstToken()
    cache = GradCache(encoder, pull_together, chunk_size=CHUNK)
    batches = [(texts(1, rows, LENGTH), texts(2, rows, LENGTH)) for rows in (ROWS, 8 * ROWS)]
    found = {"evaluated": [rise_of(lambda b=b: cache.evaluate(*b)) for b in batches]}
    cache.backward(*batches[0])  # makes the gradients
    found["trained"] = [rise_of(lambda b=b: cache.backward(*b)) for b in batches]
    gradients(encoder)
    found["plain"] = [rise_of(lambda: one_shot(encoder, pull_together, *batches[1]))]
    return found


def test_the_peak_is_that_of_one_chunk() -> None:
    [found] = run_ranks(peaks, num_ranks=1)
    for kind in ("evaluated", "trained"):
        small, large = found[kind]
        # Two sides, each: the chunks' embeddings, all of them together, their gradients.
        assert large - small <= 6 * 7 * ROWS * EMBEDDINGS, kind
        assert large < 0.1 * found["plain"][0]
