"""What `chunk_tokens` is worth where names say which tensors are texts, and where widths do.

python -m benchmarks.distill_contrastive
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import numpy as np
import paddle

from paddle_recompute import ContrastiveLoss, GradCache
from paddle_recompute._paddle import memory

ROWS, WIDTH, LENGTH, TOKENS, ROUNDS = 128, 64, 128, 1024, 5


class Encoder(paddle.nn.Layer):
    """Two transformer layers over tokens, and the mean."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = paddle.nn.Embedding(1000, WIDTH)
        layer = paddle.nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, dropout=0.0)
        self.layers = paddle.nn.TransformerEncoder(layer, 2)

    def forward(self, input_ids: paddle.Tensor, token_type_ids: paddle.Tensor) -> paddle.Tensor:
        """``[batch, dim]``, float32."""
        there = (input_ids != 0).astype("float32").unsqueeze(-1)
        hidden = self.layers(self.tokens(input_ids) + token_type_ids.unsqueeze(-1) * 0.01)
        return (hidden * there).sum(1) / there.sum(1)


def texts(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Ids and types of texts of a log-normal length, the median 20 tokens, padded to `LENGTH`."""
    rng = np.random.default_rng(seed)
    lengths = np.clip(rng.lognormal(3.0, 0.7, ROWS).astype(int), 1, LENGTH)
    there = np.arange(LENGTH) < lengths[:, None]
    return rng.integers(1, 1000, [ROWS, LENGTH]) * there, np.zeros([ROWS, LENGTH], "int64")


def main() -> None:
    """Measure and print the rows."""
    names = ("input_ids", "token_type_ids")
    sides = [texts(seed) for seed in (1, 2)]
    named: list[Any] = [dict(zip(names, side, strict=True)) for side in sides]
    cases = {
        "named, chunk_tokens": (named, {"chunk_tokens": TOKENS}),
        "tuple, chunk_tokens": (sides, {"chunk_tokens": TOKENS}),
        "tuple, chunk_size": (sides, {"chunk_size": TOKENS // LENGTH}),
    }
    paddle.seed(1)
    encoder = Encoder()
    caches = {
        name: (GradCache(encoder, ContrastiveLoss(0.1, normalize=True), **options), batch)
        for name, (batch, options) in cases.items()
    }
    seconds: dict[str, list[float]] = {name: [] for name in caches}
    peaks: dict[str, float] = {}
    for number in range(ROUNDS + 1):
        for name, (cache, batch) in caches.items():
            memory.reset_peak()
            base, start = memory.current_bytes(), time.process_time()
            cache.backward(*batch)
            if number:
                seconds[name].append(time.process_time() - start)
                peaks[name] = (memory.peak_bytes() - base) / 2**20
            encoder.clear_gradients(False)
    for name, taken in seconds.items():
        first = seconds["tuple, chunk_size"]
        ratio = statistics.median(one / other for one, other in zip(taken, first, strict=True))
        chunks = caches[name][0].num_chunks
        print(
            f"| {name} | {chunks} | {statistics.median(taken):.2f} | {ratio:.2f} | "
            f"{peaks[name]:.1f} |"
        )


if __name__ == "__main__":
    main()
