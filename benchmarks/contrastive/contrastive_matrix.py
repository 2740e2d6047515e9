"""Gradients of contrastive steps, however the batch is cut: into chunks, over ranks, into tiles.

A batch of 48 pairs of texts of 1 to 12 tokens, an encoder of two Transformer layers for both sides
(tied) or one for each (a pair), the symmetric loss over all pairs with a learned temperature.

One process: `GradCache` against the plain step. With dropout 0.1 and the plain step's loss over the
same chunks: equal to the bit or not. Without dropout, against one call of the encoder on the whole
batch: the norm of the difference of all gradients divided by the norm of all.

1, 2 and 4 real ranks: what `GradientSync` leaves on every rank against one process with the joined
batch, the loss whole or in tiles of 7, as many pairs on every rank or not. Not above 1e-5; all
ranks to the same bits, with one synchronization per step.

    python -m benchmarks.contrastive.contrastive_matrix [--ranks N ...]
"""

from __future__ import annotations

import argparse
import functools
import itertools
from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist
from numpy.typing import NDArray

from benchmarks.harness.network import loopback
from benchmarks.harness.ranks import run_ranks_patiently
from benchmarks.harness.record import table, write_record
from paddle_recompute import ContrastiveLoss, GradCache, GradientSync, load_config
from paddle_recompute.app.encoder import build_model

CONFIG = "fleet_configs/contrastive_ernie-tiny_2cpu.yaml"
PAIRS, LENGTH, WORDS, TILE = 48, 12, 500, 7
CHUNKS: dict[str, dict[str, int]] = {
    "chunk_size=1": {"chunk_size": 1},
    "chunk_size=12, a divisor": {"chunk_size": 12},
    "chunk_size=11, uneven": {"chunk_size": 11},
    "chunk_size=48, whole": {"chunk_size": 48},
    "chunk_tokens=60, by length": {"chunk_tokens": 60},
}
RANKS, ATTEMPTS, TIMEOUT = (1, 2, 4), 8, 600.0
LIMIT = 1e-5
Array = NDArray[Any]
Case = tuple[int, str, int | None, bool]


def make(num_towers: int, dropout: float, tile: int | None = None) -> tuple[Any, Any]:
    """Encoders and loss, always with the same weights."""
    config = load_config(
        CONFIG,
        [
            "model.num_layers=2",
            "model.hidden_size=64",
            f"model.hidden_dropout={dropout}",
            f"model.attention_dropout={dropout}",
        ],
    )
    paddle.seed(7)
    towers = tuple(build_model(config.model, WORDS) for _ in range(num_towers))
    loss = ContrastiveLoss(0.05, tile=tile, normalize=True, learnable_temperature=True)
    return (towers if num_towers == 2 else towers[0]), loss


def texts() -> list[paddle.Tensor]:
    """Ids of both sides, ``[PAIRS, LENGTH]``, 0 where there is padding."""
    sides = []
    for seed in (1, 2):
        random = np.random.default_rng(seed)
        ids = random.integers(5, WORDS, (PAIRS, LENGTH))
        ids[np.arange(LENGTH) >= random.integers(1, LENGTH + 1, PAIRS)[:, None]] = 0
        sides.append(paddle.to_tensor(ids))
    return sides


def gradients(encoders: Any, loss: Any) -> Array:
    """All of them, one behind the other."""
    layers = [*(encoders if isinstance(encoders, tuple) else (encoders,)), loss]
    parts = [p.grad.numpy().ravel() for layer in layers for p in layer.parameters()]
    return np.concatenate(parts)


def plain(num_towers: int, dropout: float, chunk_size: int = PAIRS) -> Array:
    """Of one loss over all pairs, encoded with a graph, `chunk_size` texts in a call."""
    encoders, loss = make(num_towers, dropout)
    pair = encoders if num_towers == 2 else (encoders, encoders)
    paddle.seed(11)
    vectors = [
        paddle.concat([one(ids[i : i + chunk_size]) for i in range(0, PAIRS, chunk_size)])
        for one, ids in zip(pair, texts(), strict=True)
    ]
    loss(*vectors).backward()
    return gradients(encoders, loss)


def cached(num_towers: int, dropout: float, chunks: dict[str, int]) -> Array:
    """The same by `GradCache`."""
    encoders, loss = make(num_towers, dropout)
    cache = GradCache(
        encoders,
        loss,
        chunk_size=chunks.get("chunk_size"),
        chunk_tokens=chunks.get("chunk_tokens"),
    )
    paddle.seed(11)
    cache.backward(*texts())
    return gradients(encoders, loss)


def difference(found: Array, expected: Array) -> float:
    """Of the whole vector, relative."""
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


def own_rows(uneven: bool) -> slice:
    """This rank's pairs; uneven: 5 more than their share on the first, 5 fewer on the last."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    bounds = [PAIRS * number // num_ranks for number in range(num_ranks + 1)]
    if uneven:
        bounds[1:-1] = [bound + 5 for bound in bounds[1:-1]]
    return slice(bounds[rank], bounds[rank + 1])


def cases() -> list[Case]:
    """Number of towers, name of the chunks, tile, uneven."""
    return list(itertools.product((1, 2), CHUNKS, (None, TILE), (False, True)))


def synchronized() -> list[tuple[Array, int]]:
    """On each rank and for each case: the gradients, and how often they were synchronized."""
    found = []
    for num_towers, name, tile, uneven in cases():
        encoders, loss = make(num_towers, 0.0, tile)
        layers = [*(encoders if num_towers == 2 else (encoders,)), loss]
        sync = GradientSync([p for layer in layers for p in layer.parameters()])
        chunks = CHUNKS[name]
        cache = GradCache(
            encoders,
            loss,
            chunk_size=chunks.get("chunk_size"),
            chunk_tokens=chunks.get("chunk_tokens"),
            sync=sync,
        )
        rows = own_rows(uneven)
        cache.backward(*(ids[rows] for ids in texts()))
        found.append((gradients(encoders, loss), sync.num_synchronized))
    return found


def over_ranks(num_ranks: int) -> tuple[dict[Case, float], int]:
    """The worst difference of each case on real ranks, and how often connecting them was tried."""
    by_rank, failures = run_ranks_patiently(
        synchronized, loopback(num_ranks), attempts=ATTEMPTS, timeout=TIMEOUT
    )
    expected = functools.cache(lambda num_towers: plain(num_towers, 0.0))
    found = {}
    for number, case in enumerate(cases()):
        ranks = [one[number] for one in by_rank]
        if any(not np.array_equal(ranks[0][0], other) for other, _ in ranks):
            raise SystemExit(f"{num_ranks} ranks, {case}: the ranks' gradients differ")
        if num_ranks > 1 and {times for _, times in ranks} != {1}:
            raise SystemExit(f"{num_ranks} ranks, {case}: not synchronized once")
        found[case] = difference(ranks[0][0], expected(case[0]))
    return found, len(failures) + 1


def main() -> None:
    """Measure everything and write the record."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=RANKS, help="numbers of ranks")
    options = parser.parse_args()
    alone = []
    for num_towers, (name, chunks) in itertools.product((1, 2), CHUNKS.items()):
        same = ""
        if "chunk_size" in chunks:
            expected = plain(num_towers, 0.1, chunks["chunk_size"])
            found = cached(num_towers, 0.1, chunks)
            same = "equal" if np.array_equal(found, expected) else "**differs**"
        error = difference(cached(num_towers, 0.0, chunks), plain(num_towers, 0.0))
        alone.append((("tied", "pair")[num_towers - 1], name, same, f"{error:.1e}"))
    columns, attempts = {}, []
    for num_ranks in options.ranks:
        columns[num_ranks], tries = over_ranks(num_ranks)
        attempts.append(f"with {num_ranks}: {tries}")
    together = [
        (
            ("tied", "pair")[case[0] - 1],
            case[1],
            "whole" if case[2] is None else f"tile={case[2]}",
            "uneven" if case[3] else "even",
            *(f"{columns[num_ranks][case]:.1e}" for num_ranks in options.ranks),
        )
        for case in cases()
    ]
    about = (__doc__ or "").strip().splitlines()[2:-2]
    numbers = ("1 rank" if n == 1 else f"{n} ranks" for n in options.ranks)
    path = write_record(
        "contrastive_matrix",
        "Equal gradients, however a contrastive batch is cut",
        "python -m benchmarks.contrastive.contrastive_matrix",
        [
            *about,
            "",
            *table(("encoders", "chunks", "dropout 0.1, same chunks", "no dropout"), alone),
            "",
            f"Attempts until the ranks were connected: {', '.join(attempts)}.",
            "",
            *table(
                ("encoders", "chunks", "loss", "pairs", *numbers),
                together,
            ),
        ],
    )
    print(path.read_text(encoding="utf-8"))
    worst = max(error for column in columns.values() for error in column.values())
    if worst > LIMIT or any("**" in row[2] or float(row[3]) > LIMIT for row in alone):
        raise SystemExit(f"not equal: see {path.name}")


if __name__ == "__main__":
    main()
