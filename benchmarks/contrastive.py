"""Peak memory and time of contrastive steps with `GradCache`, against the plain step.

The encoder and its optimizer are those of fleet_configs/contrastive_ernie-tiny_2cpu.yaml (4 layers,
hidden 128, dropout 0.1, AdamW), in one process. The peak is Paddle's exact count of the bytes
allocated during one whole step (forward, loss, backward, update), with parameters, gradients,
moments and the batch in it, each batch in a process of its own; texts have 32 tokens. The time is
per pair, on CC-CEDICT with the lengths that its texts have, in rounds that train on the same pairs.

    python -m benchmarks.contrastive [--rounds N] [--largest N]
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from typing import Any

import numpy as np
import paddle

from benchmarks._record import (
    RESULTS,
    hardware_tag,
    in_own_process,
    paired_seconds,
    ratios,
    table,
    write_record,
)
from paddle_recompute import ContrastiveLoss, GradCache, _memory, load_config
from paddle_recompute.config import Config
from paddle_recompute.data import build_loader, prepare_data
from paddle_recompute.models import build_model
from paddle_recompute.optimizer import build_optimizer

CONFIG = "fleet_configs/contrastive_ernie-tiny_2cpu.yaml"
LENGTH, CHUNK, TILE = 32, 64, 512
PLAIN = (64, 256, 1024)
CACHED = (64, 256, 1024, 4096, 16384)
REFERENCE = 64  # the batch of the plain step whose memory is the limit
TIMED_PAIRS, CHUNK_TOKENS = 1024, 1024

Step = Callable[[Any, Any], float]


def make_step(config: Config, vocab_size: int, **chunks: int) -> Step:
    """A training step of a fresh model: with GradCache where `chunks` are given, plain otherwise.

    Both have the loss in tiles, so that it is the encoder's memory that is compared.
    """
    paddle.seed(0)
    model = build_model(config.model, vocab_size)
    optimizer = build_optimizer(config, model, 1e-4)
    loss = ContrastiveLoss(config.contrastive.temperature, tile=TILE, normalize=True)
    cache = GradCache(model, loss, **chunks) if chunks else None

    def step(query: paddle.Tensor, positive: paddle.Tensor) -> float:
        if cache is not None:
            value = cache.backward(query, positive)
        else:
            value = loss(model(query), model(positive))
            value.backward()
        optimizer.step()
        optimizer.clear_grad()
        return float(value)

    return step


def full_texts(rows: int, vocab_size: int) -> paddle.Tensor:
    """``[rows, LENGTH]`` ids without padding."""
    return paddle.to_tensor(np.random.default_rng(rows).integers(5, vocab_size, (rows, LENGTH)))


def peak_of(rows: int, cached: bool) -> dict[str, float]:
    """Bytes at the peak of one step with `rows` pairs; the moments were made by a smaller one.

    Paddle 2.6 knows the peak since the start of the process only, which is this step's all the
    same: nothing before it is larger.
    """
    config = load_config(CONFIG)
    vocab_size = config.data.vocab_size
    step = make_step(config, vocab_size, **({"chunk_size": CHUNK} if cached else {}))
    few = min(rows, CHUNK)
    step(full_texts(few, vocab_size), full_texts(few, vocab_size))
    query, positive = full_texts(rows, vocab_size), full_texts(rows, vocab_size)
    held = _memory.current_bytes()
    if _memory.can_reset_peak():
        _memory.reset_peak()
    loss = step(query, positive)
    return {"rows": rows, "peak": _memory.peak_bytes(), "held": held, "loss": loss}


def measured(rows: int, *, cached: bool) -> dict[str, float]:
    """`peak_of` in a process of its own."""
    kind = "cached" if cached else "plain"
    result: dict[str, float] = in_own_process(
        "benchmarks.contrastive", "--peak-of", str(rows), "--kind", kind
    )
    print(f"{kind} {rows}: {_memory.format_bytes(result['peak'])}", flush=True)
    return result


def largest_within(limit: float, known: dict[int, float], highest: int) -> tuple[int, bool]:
    """The most pairs whose step stays below `limit` bytes, each try a real step.

    Doubled until it is too much, then halved to within an eighth.

    Returns:
        The number, and whether it ended at `highest` rather than at `limit`.
    """
    peak = dict(known)

    def fits(rows: int) -> bool:
        if rows not in peak:
            peak[rows] = measured(rows, cached=True)["peak"]
        return peak[rows] <= limit

    low = max(rows for rows in peak if peak[rows] <= limit)
    while fits(2 * low):
        low *= 2
        if 2 * low > highest:
            return low, True
    high = 2 * low
    while high - low > low // 8:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low, False


def cedict_batches(config: Config, count: int) -> tuple[list[Any], int]:
    """`count` batches of `TIMED_PAIRS` pairs, padded to their longest, and the vocabulary size."""
    data = prepare_data(config.data, seed=0, is_main_rank=True, barrier=lambda: None)
    loader = build_loader(
        data.train,
        data.tokenizer,
        local_batch=TIMED_PAIRS,
        rank=0,
        num_ranks=1,
        seed=0,
        max_query_tokens=LENGTH,
        max_positive_tokens=LENGTH,
        num_workers=0,
    )
    return [
        batch for batch, _ in zip(loader, range(count), strict=False)
    ], data.tokenizer.vocab_size


def time_per_pair(rounds: int) -> tuple[dict[str, Any], dict[str, float]]:
    """Ratios within a round of ways to train on the same pairs, and what the texts are like."""
    config = load_config(CONFIG)
    warm_up = 1
    batches, vocab_size = cedict_batches(config, warm_up + rounds)
    steps = {
        "plain": make_step(config, vocab_size),
        f"chunk_tokens={CHUNK_TOKENS}": make_step(config, vocab_size, chunk_tokens=CHUNK_TOKENS),
        f"chunk_size={REFERENCE}": make_step(config, vocab_size, chunk_size=REFERENCE),
    }
    turn = dict.fromkeys(steps, 0)

    def run(name: str) -> None:
        batch = batches[turn[name]]
        turn[name] += 1
        query, positive = batch["query"], batch["positive"]
        size = REFERENCE if name == "plain" else TIMED_PAIRS
        for first in range(0, TIMED_PAIRS, size):
            # As a loader of smaller batches would make them: padded to the longest of their own.
            rows = slice(first, first + size)
            steps[name](unpadded(query[rows]), unpadded(positive[rows]))

    seconds = paired_seconds(
        {name: (lambda n=name: run(n)) for name in steps}, warm_up=warm_up, rounds=rounds
    )
    tokens = {
        side: float(np.mean([(batch[side] != 0).sum().item() / TIMED_PAIRS for batch in batches]))
        for side in ("query", "positive")
    }
    return ratios(seconds, "plain"), tokens


def unpadded(ids: paddle.Tensor) -> paddle.Tensor:
    """Without the columns that are padding in every row."""
    return ids[:, : int((ids != 0).any(axis=0).sum().item())]


def draw(plain: dict[int, float], cached: dict[int, float], largest: int, path: str) -> None:
    """Peak against batch, both logarithmic."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5))
    mib = 2**20
    axes.plot([*plain], [peak / mib for peak in plain.values()], "o-", color="#999999")
    axes.plot([*cached], [peak / mib for peak in cached.values()], "o-", color="#1f77b4")
    axes.annotate(
        "plain step", (max(plain), max(plain.values()) / mib), (-75, -5), textcoords="offset points"
    )
    axes.annotate(
        f"GradCache, chunks of {CHUNK}",
        (max(cached), cached[max(cached)] / mib),
        (-150, 10),
        textcoords="offset points",
    )
    axes.axhline(plain[REFERENCE] / mib, color="#d62728", linewidth=0.8, linestyle="--")
    axes.annotate(
        f"plain step with {REFERENCE} pairs; GradCache reaches it at {largest:,}",
        (REFERENCE, plain[REFERENCE] / mib),
        (0, 6),
        textcoords="offset points",
        color="#d62728",
    )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_xlabel("pairs in the batch, each with all others as negatives")
    axes.set_ylabel("peak memory of a step, MiB")
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def memory_report(highest: int) -> list[str]:
    """Measure the peaks; returns the table and what it says."""
    plain = {rows: measured(rows, cached=False) for rows in PLAIN}
    cached = {rows: measured(rows, cached=True) for rows in CACHED}
    peaks = {rows: result["peak"] for rows, result in cached.items()}
    limit = plain[REFERENCE]["peak"]
    largest, stopped = largest_within(limit, peaks, highest)
    rows = [
        (
            kind,
            f"{batch:,}",
            f"{result['peak'] / 2**20:.1f}",
            f"{(result['peak'] - result['held']) / 2**20:.1f}",
            f"{result['peak'] / limit:.2f}",
            f"{result['peak'] / peaks[256]:.3f}" if kind != "plain" else "",
        )
        for kind, results in (("plain", plain), (f"GradCache, chunks of {CHUNK}", cached))
        for batch, result in results.items()
    ]
    header = (
        "step",
        "pairs",
        "peak, MiB",
        "of it above what is held between steps, MiB",
        f"peak / plain with {REFERENCE}",
        "peak / GradCache with 256",
    )
    picture = RESULTS / f"contrastive_{hardware_tag()}.png"
    RESULTS.mkdir(exist_ok=True)
    draw({n: r["peak"] for n, r in plain.items()}, peaks, largest, str(picture))
    return [
        *table(header, rows),
        "",
        f"At the peak memory of a plain step with {REFERENCE} pairs, GradCache trains "
        f"**{largest:,} pairs: {largest / REFERENCE:.0f} times as many**"
        + (" (the largest tried)." if stopped else " (to within an eighth)."),
        "",
        f"![peak against batch]({picture.name})",
    ]


def time_report(rounds: int) -> list[str]:
    """Measure the times; returns the table and what it says."""
    times, tokens = time_per_pair(rounds)
    header = ("step", "time per pair / plain (quartiles)")
    rows = [
        (
            f"plain, batches of {REFERENCE}" if name == "plain" else f"GradCache, {name}",
            "{:.3f} ({:.3f} to {:.3f})".format(*values),
        )
        for name, values in times.items()
    ]
    return [
        f"CC-CEDICT has {tokens['query']:.1f} tokens per query and {tokens['positive']:.1f} per "
        f"positive. A round trains on the same {TIMED_PAIRS:,} pairs: the plain step in batches of "
        f"{REFERENCE}, each padded to its longest text, with an update each; GradCache in one "
        f"batch and one update. {rounds} rounds after one to warm up.",
        "",
        *table(header, rows),
    ]


def main() -> None:
    """Measure everything and write the record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--largest", type=int, default=65536, help="stop doubling there")
    parser.add_argument("--peak-of", type=int, help="internal: the peak with so many pairs")
    parser.add_argument("--kind", choices=("plain", "cached"), help="internal: of which step")
    options = parser.parse_args()
    if options.peak_of:
        print(json.dumps(peak_of(options.peak_of, options.kind == "cached")))
        return
    path = write_record(
        "contrastive",
        "Contrastive steps with GradCache: peak memory and time",
        "python -m benchmarks.contrastive",
        [
            *(__doc__ or "").strip().splitlines()[2:7],
            "",
            *memory_report(options.largest),
            "",
            *time_report(options.rounds),
        ],
    )
    print(path.read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
