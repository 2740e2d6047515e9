"""The model of a synchronized step's cost against measured steps, and what it says beyond them.

The link (latency and bandwidth) is fitted to all-reduces between *two* ranks over rate-limited
links. With it, steps of two and of four ranks are predicted from the computation alone and from the
times at which buckets were ready, and compared with measured steps. On a machine with two cores
four ranks share them in pairs, which their computation alone, measured in the same way, contains.

Then the model is asked about 8 to 1024 ranks with an accelerator each, and faster networks. Those
figures are the model's, not measured: the computation follows from an assumed speed.

    python -m benchmarks.sync_scaling    # as root; about 6 minutes
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

import paddle
import paddle.distributed as dist
from tqdm import tqdm

from benchmarks._network import Host, rate_limited, require_root_and_iproute2
from benchmarks._ranks import run_ranks_patiently
from benchmarks._record import table, write_record
from benchmarks._sync_step import (
    COMPUTATION,
    FUSED,
    OVERLAP,
    STEP_DONE,
    StepTimes,
    Workload,
    measure,
    meet,
)
from benchmarks.sync_cost_model import (
    Bucket,
    Encoder,
    Link,
    Step,
    communication_seconds,
    encoder_step,
    fit_link,
    fused_seconds,
    overlap_seconds,
)

RATE = 200.0
RANKS = (2, 4)
WAYS = (FUSED, OVERLAP, COMPUTATION)
FIT_BYTES = (2**18, 2**20, 2**22, 2**24)  # several times what a token bucket lets through at once
FIT_REPEATS = 5
ATTEMPTS = 5

ENCODERS = {
    "ERNIE base": Encoder(12, 768, 3072, embeddings=40000 + 2048 + 4),
    "ERNIE large": Encoder(24, 1024, 4096, embeddings=30522 + 512 + 4),
}
MODEL_RANKS = (8, 16, 32, 64, 128, 256, 512, 1024)
MODEL_GBITS = (10, 25, 100, 400)
MIB = 2**20


def measure_rank(
    workload: Workload, links: Sequence[Host], rounds: int, warm_up: int
) -> dict[str, Any]:
    """All-reduces of several sizes, then steps; on every rank."""
    reduced = []
    for size in FIT_BYTES:
        buffer = paddle.zeros([size // 4])
        dist.all_reduce(buffer)
        for _ in range(FIT_REPEATS):
            began = meet()
            dist.all_reduce(buffer)
            reduced.append((size, time.perf_counter() - began))
    return {"reduced": reduced, **measure(workload, WAYS, links, {RATE: rounds}, warm_up)}


def link_of(results: list[dict[str, Any]]) -> Link:
    """The link fitted to the median all-reduce of each size."""
    by_size: dict[int, list[float]] = {}
    for size, seconds in results[0]["reduced"]:
        by_size.setdefault(size, []).append(seconds)
    return fit_link(
        (len(results), size, statistics.median(seconds)) for size, seconds in by_size.items()
    )


def step_of(results: list[dict[str, Any]]) -> Step:
    """What the model needs to know of the measured workload; medians over rounds and ranks."""
    alone = [step for one in results for step in one["times"][RATE][COMPUTATION]]
    overlapped = [step for one in results for step in one["times"][RATE][OVERLAP]]
    # Ready times are recorded beside a communication that slows the backward down somewhat.
    ready = [
        [bucket[1] - step.forward_ended for bucket in step.buckets]
        for step in overlapped
    ]  # fmt: skip
    sizes = [size for size, *_ in overlapped[0].buckets]
    return Step(
        forward=_median(alone, "began", "forward_ended"),
        backward=_median(alone, "forward_ended", "backward_ended"),
        update=_median(alone, "synchronized", "ended"),
        buckets=tuple(
            Bucket(size, statistics.median(times))
            for size, times in zip(sizes, zip(*ready, strict=True), strict=True)
        ),
    )


def compare(num_ranks: int, results: list[dict[str, Any]], link: Link) -> list[tuple[str, ...]]:
    """Rows: predicted and measured, with the error of the prediction."""
    step = step_of(results)
    rows = []
    for way, predict in ((FUSED, fused_seconds), (OVERLAP, overlap_seconds)):
        rounds = zip(*(one["times"][RATE][way] for one in results), strict=True)
        measured = statistics.median(max(taken.seconds for taken in ranks) for ranks in rounds)
        predicted = predict(step, num_ranks, link)
        rows.append(
            (
                str(num_ranks),
                way,
                f"{step.computation:.2f}",
                f"{communication_seconds(step, num_ranks, link):.2f}",
                f"{predicted:.2f}",
                f"{measured:.2f}",
                f"{predicted / measured - 1:+.1%}",
            )
        )
    return rows


def model_tables(tokens: int, teraflops: float, alpha: float) -> list[str]:
    """What the model says about many ranks; figures of the model, not measurements."""
    lines = []
    for name, encoder in ENCODERS.items():
        matrices = encoder.num_layers * encoder.block_parameters
        computation = 8 * matrices * tokens / (teraflops * 1e12)
        step = encoder_step(encoder, computation, bucket_bytes=25 * MIB, first_bucket_bytes=1 * MIB)
        rows = []
        for num_ranks in MODEL_RANKS:
            cells = [str(num_ranks)]
            for gbits in MODEL_GBITS:
                link = Link(alpha, gbits * 1e9 / 8)
                fused = fused_seconds(step, num_ranks, link)
                overlap = overlap_seconds(step, num_ranks, link)
                cells.append(f"{fused * 1e3:.0f} / {overlap * 1e3:.0f} ({overlap / fused - 1:.0%})")
            rows.append(cells)
        lines += [
            f"### {name}: {encoder.parameters / 1e6:.0f} million parameters, computation "
            f"{computation * 1e3:.0f} ms (assumed)",
            "",
            *table(["ranks", *(f"{gbits} Gbit/s" for gbits in MODEL_GBITS)], rows),
            "",
        ]
    return lines


def _median(steps: Sequence[StepTimes], begin: str, end: str) -> float:
    return statistics.median(getattr(step, end) - getattr(step, begin) for step in steps)


def main() -> None:
    """Measure, compare, extrapolate and write the record."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3, help="measured rounds per world size")
    parser.add_argument("--batch", type=int, default=16, help="texts per rank, measured part")
    parser.add_argument("--layers", type=int, default=Workload.num_layers)
    parser.add_argument("--hidden", type=int, default=Workload.hidden_size)
    parser.add_argument("--tokens", type=int, default=8192, help="per rank and step, model part")
    parser.add_argument("--teraflops", type=float, default=60.0, help="sustained, model part")
    parser.add_argument("--alpha", type=float, default=20e-6, help="seconds a round, model part")
    parser.add_argument("--no-record", action="store_true", help="print only")
    options = parser.parse_args()
    require_root_and_iproute2()
    workload = Workload(options.layers, options.hidden, batch=options.batch)
    warm_up = 1
    rows, attempts, fitted = [], [], None
    total = (warm_up + options.rounds) * len(WAYS) * len(RANKS)
    with tqdm(total=total, unit="step", file=sys.stderr, mininterval=5) as bar:
        for num_ranks in RANKS:
            with rate_limited(num_ranks, RATE) as hosts:
                results, failures = run_ranks_patiently(
                    measure_rank,
                    hosts,
                    attempts=ATTEMPTS,
                    timeout=60 + 60.0 * total,
                    on_line=lambda line: line.startswith(STEP_DONE) and bar.update(),
                    workload=workload,
                    links=hosts,
                    rounds=options.rounds,
                    warm_up=warm_up,
                )
            if fitted is None:
                fitted = link_of(results)
            rows += compare(num_ranks, results, fitted)
            attempts.append(f"{num_ranks} ranks: {len(failures) + 1}")
    assert fitted is not None
    header = ("ranks", "way", "computation", "communication", "predicted", "measured", "error")
    body = [
        *(__doc__ or "").strip().splitlines()[:9],
        "",
        "## Predicted and measured",
        "",
        f"{RATE:.0f} Mbit/s; {workload}; warm-up {warm_up} round, then {options.rounds} rounds; "
        f"medians, seconds. Fitted to two ranks: {fitted.alpha * 1e3:.2f} ms a round, "
        f"{fitted.bytes_per_second * 8 / 1e6:.1f} Mbit/s. Attempts until the ranks were "
        f"connected: {', '.join(attempts)}.",
        "",
        *table(header, rows),
        "",
        "## What the model says about more ranks (not measured)",
        "",
        "Milliseconds a step, fused / overlap, and in brackets what overlap saves. Assumed: "
        f"{options.tokens} tokens per rank and step; 8 floating-point operations per token and "
        f"parameter of a block (forward, second forward, backward) at {options.teraflops:.0f} "
        f"TFLOP/s sustained; float32 gradients in buckets of 25 MiB, the first of 1 MiB; one flat "
        f"ring over links of the full rate, {options.alpha * 1e6:.0f} microseconds a round; the "
        "agreement of the ranks at the end of the backward included. With "
        "hundreds of ranks the rounds of a flat ring dominate, where a library would take a tree "
        "or a hierarchy.",
        "",
        *model_tables(options.tokens, options.teraflops, options.alpha),
    ]
    if options.no_record:
        print("\n".join(body))
        return
    path = write_record(
        "sync_scaling", "What a synchronized step costs", "make bench-sync_scaling", body
    )
    print(path.read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
