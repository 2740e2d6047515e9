"""Peak memory and time of contrastive steps with `GradCache`, against the plain step.

The encoder and its optimizer are those of fleet_configs/contrastive_ernie-tiny_2cpu.yaml (4 layers,
hidden 128, dropout 0.1, AdamW), in one process. The peak is Paddle's exact count of the bytes
allocated during one whole step (forward, loss, backward, update), with parameters, gradients and
moments in it, plus the batch's ids (NumPy, int16), each batch in a process of its own; texts have
32 tokens, and the loss is in tiles of 512. The time is per pair, on CC-CEDICT with the lengths that
its texts have, in rounds that train on the same pairs; the plain loss is not in tiles there.

    python -m benchmarks.contrastive [--only memory|time] [--rounds N] [--largest N]
"""

from __future__ import annotations

import argparse
import functools
import json
from collections.abc import Callable
from typing import Any

import numpy as np
import paddle

from benchmarks.harness.record import in_own_process, picture, table, write_record
from benchmarks.harness.timing import paired_seconds, ratios, shown
from paddle_recompute import ContrastiveLoss, GradCache, load_config
from paddle_recompute._paddle import memory as _memory
from paddle_recompute.app.config import Config
from paddle_recompute.app.data import build_loader, prepare_data
from paddle_recompute.app.encoder import build_model
from paddle_recompute.train_step.optimizer import build_optimizer

CONFIG = "fleet_configs/contrastive_ernie-tiny_2cpu.yaml"
LENGTH, CHUNK, TILE = 32, 64, 512
SMALL_CHUNK = 16  # for the largest batch: the fewer activations, the more embeddings
PLAIN = (64, 256, 1024)
CACHED = (64, 256, 1024, 4096, 16384)
REFERENCE = 64  # the batch of the plain step whose memory is the limit
TIMED_PAIRS, WARM_UP = 1024, 1
PLAIN_WAY = f"plain, batches of {REFERENCE}"
WAYS: dict[str, dict[str, int]] = {
    PLAIN_WAY: {},
    "GradCache, chunk_tokens=1024": {"chunk_tokens": 1024},
    f"GradCache, chunk_size={REFERENCE}": {"chunk_size": REFERENCE},
}

Step = Callable[[Any, Any], float]


def make_step(
    config: Config,
    vocab_size: int,
    *,
    chunk_size: int | None = None,
    chunk_tokens: int | None = None,
    tile: int | None = TILE,
    update: bool = True,
) -> Step:
    """A training step of a fresh model: with GradCache where chunks are wanted, plain otherwise.

    Where memory is compared both have the loss in tiles, so that it is that of the encoder.
    """
    paddle.seed(0)
    model = build_model(config.model, vocab_size)
    optimizer = build_optimizer(config.optimizer, model, 1e-4)
    loss = ContrastiveLoss(config.contrastive.temperature, tile=tile, normalize=True)

    def encode(ids: paddle.Tensor) -> Any:
        return model(ids.astype("int64"))

    cache = None
    if chunk_size or chunk_tokens:
        cache = GradCache(encode, loss, chunk_size=chunk_size, chunk_tokens=chunk_tokens)

    def step(query: Any, positive: Any) -> float:
        if cache is not None:
            value = cache.backward(query, positive)
        else:
            value = loss(*(encode(as_tensor(side)) for side in (query, positive)))
            value.backward()
        if update:
            optimizer.step()
        optimizer.clear_grad()
        return float(value)

    return step


def as_tensor(ids: Any) -> paddle.Tensor:
    """`ids` if it is one already."""
    return ids if isinstance(ids, paddle.Tensor) else paddle.to_tensor(ids)


def full_texts(rows: int, vocab_size: int) -> Any:
    """``[rows, LENGTH]`` ids without padding."""
    return np.random.default_rng(rows).integers(5, vocab_size, (rows, LENGTH), np.int16)


def peak_of(rows: int, chunk_size: int) -> dict[str, float]:
    """Bytes at the peak of one step with `rows` pairs, `chunk_size` 0 for the plain one.

    The moments were made by a step with a batch of one chunk. Paddle 2.6 knows the peak since the
    start of the process only, which is this step's all the same: nothing before it is larger.
    """
    config = load_config(CONFIG)
    vocab_size = config.data.vocab_size
    step = make_step(config, vocab_size, chunk_size=chunk_size or None)
    few = min(rows, chunk_size or rows)
    step(full_texts(few, vocab_size), full_texts(few, vocab_size))
    query, positive = full_texts(rows, vocab_size), full_texts(rows, vocab_size)
    held = _memory.current_bytes()
    if _memory.can_reset_peak():
        _memory.reset_peak()
    loss = step(query, positive)
    inputs = query.nbytes + positive.nbytes
    return {"peak": _memory.peak_bytes() + inputs, "held": held, "inputs": inputs, "loss": loss}


def measured(rows: int, chunk_size: int) -> dict[str, float]:
    """`peak_of` in a process of its own."""
    result: dict[str, float] = in_own_process(
        "benchmarks.contrastive", "--peak-of", str(rows), "--chunk-size", str(chunk_size)
    )
    shown = f"{rows} pairs, {f'chunks of {chunk_size}' if chunk_size else 'plain'}"
    print(f"{shown}: {_memory.format_bytes(result['peak'])}", flush=True)
    return result


def largest_within(limit: float, highest: int) -> tuple[int, dict[str, float], bool]:
    """A number of pairs whose step stays below `limit` bytes, but above 95% of it.

    Each try is a real step. The peak is close to a straight line there, so the next try is just
    before the place where the line through the last two meets the limit.

    Returns:
        The number, what was measured there, and whether it ended at `highest` instead.
    """
    one, other = highest // 16, highest // 8
    tried = {rows: measured(rows, SMALL_CHUNK) for rows in (one, other)}
    while not 0.95 * limit <= tried[other]["peak"] <= limit:
        slope = (tried[other]["peak"] - tried[one]["peak"]) / (other - one)
        guess = other + (0.99 * limit - tried[other]["peak"]) / slope
        rows = min(highest, int(guess) // SMALL_CHUNK * SMALL_CHUNK)
        if rows in tried:
            break
        one, other = other, rows
        tried[rows] = measured(rows, SMALL_CHUNK)
    best = max(rows for rows in tried if tried[rows]["peak"] <= limit)
    return best, tried[best], best == highest


def cedict_batches(config: Config, count: int) -> tuple[list[Any], int]:
    """`count` batches of `TIMED_PAIRS` pairs, padded to their longest, and the vocabulary size."""
    data = prepare_data(config, 0, lambda: None)
    loader = build_loader(config, data, 0, local_batch=TIMED_PAIRS)
    batches = [
        {side: batch[side] for side in ("query", "positive", "index")}
        for batch, _ in zip(loader, range(count), strict=False)
    ]
    return batches, data.tokenizer.vocab_size


def time_per_pair(rounds: int) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """Ratios within a round of ways to train on the same pairs, and what the texts are like.

    Returns:
        Of each way its time against plain, of whole steps and of their gradients alone; and the
        mean number of tokens of each side.
    """
    limits = [f"data.max_{side}_tokens={LENGTH}" for side in ("query", "positive")]
    config = load_config(CONFIG, ["launch.num_ranks=1", *limits])
    batches, vocab_size = cedict_batches(config, WARM_UP + rounds)
    steps = {
        (update, name): make_step(
            config, vocab_size, **chunks, tile=TILE if chunks else None, update=update
        )
        for update in (True, False)
        for name, chunks in WAYS.items()
    }
    turn = dict.fromkeys(steps, 0)

    def run(way: tuple[bool, str]) -> None:
        batch = batches[turn[way]]
        turn[way] += 1
        query, positive = batch["query"], batch["positive"]
        size = TIMED_PAIRS if WAYS[way[1]] else REFERENCE
        for first in range(0, TIMED_PAIRS, size):
            # As a loader of smaller batches would make them: padded to the longest of their own.
            rows = slice(first, first + size)
            steps[way](unpadded(query[rows]), unpadded(positive[rows]))

    seconds = paired_seconds(
        {str(way): functools.partial(run, way) for way in steps}, warm_up=WARM_UP, rounds=rounds
    )
    found = []
    for update in (True, False):
        of_update = {name: seconds[str((update, name))] for name in WAYS}
        found.append(ratios(of_update, PLAIN_WAY))
    tokens = {
        side: float(np.mean([(batch[side] != 0).sum().item() / TIMED_PAIRS for batch in batches]))
        for side in ("query", "positive")
    }
    return found, tokens


def unpadded(ids: paddle.Tensor) -> paddle.Tensor:
    """Without the columns that are padding in every row."""
    return ids[:, : int((ids != 0).any(axis=0).sum().item())]


def draw(plain: dict[int, float], cached: dict[int, float], largest: tuple[int, float]) -> str:
    """Peak in MiB against batch, both logarithmic; `largest` is a point of its own."""
    with picture("contrastive") as (axes, name):
        axes.plot([*plain], [*plain.values()], "o-", color="#999999", label="plain step")
        label = f"GradCache, chunks of {CHUNK}"
        axes.plot([*cached], [*cached.values()], "o-", color="#1f77b4", label=label)
        label = f"GradCache, chunks of {SMALL_CHUNK}: {largest[0]:,} pairs"
        axes.plot(*largest, "o", color="#1f77b4", markerfacecolor="none", label=label)
        label = f"plain step with {REFERENCE} pairs"
        axes.axhline(plain[REFERENCE], color="#d62728", linewidth=0.8, linestyle="--", label=label)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log", base=2)
        axes.set_xlabel("pairs in the batch, each with all others as negatives")
        axes.set_ylabel("peak memory of a step, MiB")
        axes.legend()
    return name


def memory_report(highest: int) -> list[str]:
    """Measure the peaks; returns the table and what it says."""
    plain = {rows: measured(rows, 0) for rows in PLAIN}
    cached = {rows: measured(rows, CHUNK) for rows in CACHED}
    limit = plain[REFERENCE]["peak"]
    largest, there, stopped = largest_within(limit, highest)
    peaks = {rows: result["peak"] for rows, result in cached.items()}
    rows = [
        (
            kind,
            f"{batch:,}",
            f"{result['peak'] / 2**20:.1f}",
            f"{result['peak'] / limit:.3f}",
            f"{result['peak'] / peaks[256]:.3f}" if kind.endswith(f" {CHUNK}") else "",
        )
        for kind, results in (
            ("plain", plain),
            (f"GradCache, chunks of {CHUNK}", cached),
            (f"GradCache, chunks of {SMALL_CHUNK}", {largest: there}),
        )
        for batch, result in results.items()
    ]
    header = ("step", "pairs", "peak, MiB", f"peak / plain with {REFERENCE}")
    header += ("peak / GradCache with 256",)
    mib = [
        {number: one["peak"] / 2**20 for number, one in results.items()}
        for results in (plain, cached)
    ]
    drawn = draw(mib[0], mib[1], (largest, there["peak"] / 2**20))
    vectors = 2 * load_config(CONFIG).model.hidden_size * 4
    return [
        *table(header, rows),
        "",
        f"Between steps {there['held'] / 2**20:.1f} MiB are held: parameters and moments.",
        "",
        f"At the peak memory of a plain step with {REFERENCE} pairs, GradCache in chunks of "
        f"{SMALL_CHUNK} trains **{largest:,} pairs: {largest / REFERENCE:.0f} times as many**"
        + (
            " (the largest tried)."
            if stopped
            else f", at {there['peak'] / limit:.3f} of it. What grows with the batch is what a "
            f"loss over all pairs needs: the vectors of a pair, {vectors} bytes, as many for their "
            f"gradients, and {there['inputs'] / largest:.0f} bytes of ids."
        ),
        "",
        f"![peak against batch]({drawn})",
    ]


def time_report(rounds: int) -> list[str]:
    """Measure the times; returns the table and what it says."""
    (whole, gradients), tokens = time_per_pair(rounds)
    header = ("step", "time per pair / plain", "the same without updates")
    rows = [(name, *(shown(found[name]) for found in (whole, gradients))) for name in WAYS]
    return [
        f"CC-CEDICT has {tokens['query']:.1f} tokens per query and {tokens['positive']:.1f} per "
        f"positive. A round trains on the same {TIMED_PAIRS:,} pairs: the plain step in batches of "
        f"{REFERENCE}, each padded to its longest text, with an update each; GradCache in one "
        f"batch and one update. Because {TIMED_PAIRS // REFERENCE} updates cost more than one, the "
        "last column leaves them out on both sides: gradients alone. Median and quartiles of "
        f"{rounds} rounds after {WARM_UP} to warm up.",
        "",
        *table(header, rows),
    ]


def main() -> None:
    """Measure, write the records and print them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=("memory", "time"))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--largest", type=int, default=2**18, help="search up to that many pairs")
    parser.add_argument("--peak-of", type=int, help="internal: the peak with so many pairs")
    parser.add_argument("--chunk-size", type=int, help="internal: of that step; 0: plain")
    options = parser.parse_args()
    if options.peak_of:
        print(json.dumps(peak_of(options.peak_of, options.chunk_size)))
        return
    about = (__doc__ or "").strip().splitlines()[2:-2]
    reports: dict[str, Callable[[], list[str]]] = {
        "memory": lambda: memory_report(options.largest),
        "time": lambda: time_report(options.rounds),
    }
    for kind in [options.only] if options.only else reports:
        write_record(
            f"contrastive_{kind}",
            f"Contrastive steps with GradCache: {kind}",
            f"python -m benchmarks.contrastive --only {kind}",
            [*about, "", *reports[kind]()],
        )


if __name__ == "__main__":
    main()
