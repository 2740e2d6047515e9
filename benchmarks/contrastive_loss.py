"""Peak memory, gradient error and time of the contrastive loss alone, whole and in tiles.

Symmetric InfoNCE of B pairs of normalised vectors of 256 numbers, float32, temperature 0.05. The
peak is Paddle's exact count of the bytes allocated beyond the two inputs during the loss and its
backward, the two gradients included, each case in a process of its own. The error is the norm of
the difference to the gradient in float64 (NumPy), divided by the norm of that one; the larger of
both sides. The time is the ratio within a round of one forward and backward of each variant.

    python -m benchmarks.contrastive_loss [--rounds N] [--largest B] [--largest-whole B]
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from typing import Any

import numpy as np
import paddle
from numpy.typing import NDArray

from benchmarks._record import in_own_process, paired_seconds, ratios, table, write_record
from paddle_recompute._paddle import memory as _memory
from paddle_recompute.contrastive import ContrastiveLoss

DIM, TEMPERATURE = 256, 0.05
BATCHES = (256, 1024, 4096, 16384)
TILES = (256, 512, 1024)
LIMIT = 64 * 2**20  # bytes for B = 16384
Array = NDArray[Any]


def vectors(batch: int) -> tuple[Array, Array]:
    """Queries, and positives that are near them."""
    random = np.random.default_rng(batch)
    query, noise = (random.normal(size=(batch, DIM)) for _ in range(2))
    query, positive = (
        (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)
        for rows in (query, query + 3 * noise)
    )
    return query, positive


def in_double(query: Array, positive: Array, block: int = 1024) -> tuple[float, Array, Array]:
    """Loss and gradients in float64, in blocks of rows, from the textbook's formulas."""
    query, positive = query.astype(np.float64), positive.astype(np.float64)
    batch = len(query)
    own = (query * positive).sum(axis=1) / TEMPERATURE
    blocks = [slice(first, first + block) for first in range(0, batch, block)]

    def of_rows(rows: slice) -> Any:
        return query[rows] @ positive.T / TEMPERATURE

    by_row = np.concatenate([np.logaddexp.reduce(of_rows(rows), axis=1) for rows in blocks])
    by_column = np.full(batch, -np.inf)
    for rows in blocks:
        by_column = np.logaddexp(by_column, np.logaddexp.reduce(of_rows(rows), axis=0))
    query_gradient, positive_gradient = np.empty_like(query), np.zeros_like(positive)
    for rows in blocks:
        scores = of_rows(rows)
        weights = np.exp(scores - by_row[rows, None]) + np.exp(scores - by_column)
        weights[np.arange(len(scores)), np.arange(batch)[rows]] -= 2.0
        query_gradient[rows] = weights @ positive
        positive_gradient += weights.T @ query[rows]
    factor = 1 / (2 * batch * TEMPERATURE)
    loss = (by_row - own).mean() / 2 + (by_column - own).mean() / 2
    return float(loss), query_gradient * factor, positive_gradient * factor


def make_step(batch: int, tile: int | None) -> Callable[[], float]:
    """One forward and backward of the loss."""
    sides = [paddle.to_tensor(side, stop_gradient=False) for side in vectors(batch)]
    criterion = ContrastiveLoss(TEMPERATURE, tile=tile)

    def step() -> float:
        for side in sides:
            side.clear_gradient(set_to_zero=False)
        loss = criterion(*sides)
        loss.backward()
        return float(loss)

    step.sides = sides  # type: ignore[attr-defined]
    return step


def measure(batch: int, tile: int | None) -> dict[str, Any]:
    """Peak, loss and gradient error of one case; the first thing that its process computes."""
    step = make_step(batch, tile)
    before = _memory.current_bytes()
    if _memory.can_reset_peak():
        _memory.reset_peak()
    loss = step()
    peak = _memory.peak_bytes() - before
    gradients = [side.grad.numpy() for side in step.sides]  # type: ignore[attr-defined]
    right_loss, *right = in_double(*vectors(batch))
    errors = [
        np.linalg.norm(got - want) / np.linalg.norm(want)
        for got, want in zip(gradients, right, strict=True)
    ]
    return {
        "peak": peak,
        "loss": loss,
        "loss_error": abs(loss - right_loss) / right_loss,
        "error": float(max(errors)),
    }


def name_of(tile: int | None) -> str:
    """How a variant is called in the tables."""
    return "whole" if tile is None else f"tile={tile}"


def main() -> None:
    """Measure everything and write the record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--largest", type=int, default=BATCHES[-1], help="largest B in tiles")
    parser.add_argument("--largest-whole", type=int, default=4096, help="largest B without")
    parser.add_argument("--measure", nargs=2, type=int, help="internal: B and tile, 0: whole")
    options = parser.parse_args()
    if options.measure:
        batch, tile = options.measure
        print(json.dumps(measure(batch, tile or None)))
        return

    rows: list[tuple[object, ...]] = []
    for batch in (one for one in BATCHES if one <= options.largest):
        for tile in (None, *TILES):
            if tile is None and batch > options.largest_whole:
                continue
            found = in_own_process(
                "benchmarks.contrastive_loss", "--measure", str(batch), str(tile or 0)
            )
            mebibytes = found["peak"] / 2**20
            gradients = 2 * batch * DIM * 4 / 2**20
            rows.append(
                (
                    batch,
                    name_of(tile),
                    f"{mebibytes:.1f}",
                    f"{mebibytes - gradients:.1f}",
                    f"{found['error']:.1e}",
                    f"{found['loss_error']:.1e}",
                    f"{found['loss']:.6f}",
                )
            )
            if batch == BATCHES[-1] and tile == 512 and found["peak"] >= LIMIT:
                raise SystemExit(f"B={batch}, tile={tile}: {mebibytes:.1f} MiB is not under 64")
    times: list[tuple[object, ...]] = []
    for batch in (one for one in BATCHES if one <= min(options.largest, options.largest_whole)):
        steps: dict[str, Callable[[], object]] = {
            name_of(tile): make_step(batch, tile) for tile in (None, *TILES)
        }
        seconds = paired_seconds(steps, warm_up=1, rounds=options.rounds)
        for name, (middle, low, high) in ratios(seconds, "whole").items():
            times.append((batch, name, f"{middle:.2f} ({low:.2f} to {high:.2f})"))
    path = write_record(
        "contrastive_loss",
        "The contrastive loss alone: memory, error, time",
        "python -m benchmarks.contrastive_loss",
        [
            *(__doc__ or "").strip().splitlines()[:8],
            "",
            f"Warm-up 1 round, measured {options.rounds} rounds.",
            "",
            *table(
                (
                    "B",
                    "variant",
                    "peak, MiB",
                    "peak without the gradients, MiB",
                    "gradient error",
                    "loss error",
                    "loss",
                ),
                rows,
            ),
            "",
            *table(("B", "variant", "time / whole (quartiles)"), times),
        ],
    )
    print(path.read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
