"""Step time of each way to synchronize gradients, over rate-limited links between real ranks.

Two ranks, one core each, in two network namespaces whose links are limited to 100, 200 and
1000 Mbit/s in each direction; an encoder of 20 million parameters, every block recomputed. The ways
take turns in one run, so that ratios are between neighbours. In the same run the computation alone
(nothing is synchronized) and the communication alone (buffers of the same sizes are summed) are
timed: no way to synchronize can be faster than the longer of the two.

The batch is such that at 200 Mbit/s the computation takes somewhat longer than the communication.
Where they were equal, nobody could come within 10 % of the longer one: the forward, a quarter of
the computation under recompute, has no gradients to send beside it. The bound "behind the backward"
takes that into account: forward + max(backward + last bucket, first bucket ready + communication)
+ update.

    python -m benchmarks.ranks.sync            # as root; about 9 minutes
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from typing import Any

from tqdm import tqdm

from benchmarks.harness.network import CONGESTION_CONTROL, rate_limited, require_root_and_iproute2
from benchmarks.harness.ranks import run_ranks
from benchmarks.harness.record import RESULTS, hardware_tag, table, write_record
from benchmarks.harness.timing import quartiles, shown
from benchmarks.ranks._sync_picture import draw_timeline
from benchmarks.ranks._sync_step import (
    ALL,
    ARTICLE,
    COMMUNICATION,
    COMMUNICATION_BF16,
    COMPUTATION,
    EXACT,
    FUSED,
    OVERLAP,
    OVERLAP_BF16,
    STEP_DONE,
    StepTimes,
    Workload,
    measure,
)

GOAL_RATE = 200.0
GOAL_OF_FUSED, GOAL_OF_LIMIT = 0.70, 1.10
ROUNDS = {100.0: 3, 200.0: 5, 1000.0: 3}


class AtRate:
    """What was measured at one rate: of each way and rank, the steps of all rounds."""

    def __init__(self, by_rank: list[dict[str, list[StepTimes]]]) -> None:
        self.by_rank = by_rank

    def seconds(self, way: str) -> list[float]:
        """Of each round the time of the slower rank."""
        rounds = zip(*(times[way] for times in self.by_rank), strict=True)
        return [max(step.seconds for step in ranks) for ranks in rounds]

    def median(self, way: str) -> float:
        """The median of `seconds`."""
        return statistics.median(self.seconds(way))

    def ratios(self, way: str, to: Sequence[float]) -> list[float]:
        """Round by round."""
        return [a / b for a, b in zip(self.seconds(way), to, strict=True)]

    def limits(self, communication: str = COMMUNICATION) -> list[float]:
        """Of each round the longer of computation and communication."""
        return list(map(max, self.seconds(COMPUTATION), self.seconds(communication)))

    def behind_the_backward(self, way: str, communication: str) -> float:
        """The shortest step that `way` could take with its buckets, for medians of the parts.

        Gradients exist during the backward only, so the forward and the update stand beside no
        communication; and the last bucket is ready when the backward ends, not before.
        """
        alone = [step for times in self.by_rank for step in times[COMPUTATION]]
        forward = statistics.median(step.forward_ended - step.began for step in alone)
        backward = statistics.median(step.backward_ended - step.forward_ended for step in alone)
        update = statistics.median(step.ended - step.synchronized for step in alone)
        steps = [step for times in self.by_rank for step in times[way]]
        first = statistics.median(step.buckets[0][1] - step.forward_ended for step in steps)
        sizes = [num_bytes for num_bytes, *_ in steps[0].buckets]
        sending = self.median(communication)
        last = sending * sizes[-1] / sum(sizes)
        return forward + max(backward + last, first + sending) + update


def rate_table(at: AtRate) -> list[str]:
    """Every way at one rate."""
    fused, limits = at.seconds(ARTICLE), at.limits()
    rows = []
    for way in ALL:
        seconds = at.seconds(way)
        own_limits = at.limits(COMMUNICATION_BF16) if way == OVERLAP_BF16 else limits
        of_fused, of_limit = at.ratios(way, fused), at.ratios(way, own_limits)
        alone = way in (COMPUTATION, COMMUNICATION, COMMUNICATION_BF16)
        rows.append(
            (
                way,
                shown(quartiles(seconds), 2),
                shown(quartiles(of_fused)),
                "" if alone else shown(quartiles(of_limit)),
            )
        )
    header = ("way", "seconds", "of no_sync + fused", "of max(computation, communication)")
    return table(header, rows)


def bounds(at: AtRate) -> list[str]:
    """The physical limits at one rate and the distance to them."""
    lines = []
    for way, communication in ((OVERLAP, COMMUNICATION), (OVERLAP_BF16, COMMUNICATION_BF16)):
        limit = max(at.median(COMPUTATION), at.median(communication))
        bound = at.behind_the_backward(way, communication)
        taken = at.median(way)
        lines.append(
            f"- {way}: {taken:.2f} s; max(computation, communication) = {limit:.2f} s "
            f"({taken / limit - 1:+.1%}); the bound behind the backward = {bound:.2f} s "
            f"({taken / bound - 1:+.1%})"
        )
    return lines


def verdict(at: AtRate) -> list[str]:
    """Whether the goals are reached."""
    of_fused = statistics.median(at.ratios(OVERLAP, at.seconds(ARTICLE)))
    of_limit = statistics.median(at.ratios(OVERLAP, at.limits()))
    return [
        f"- {what}: {value:.3f}, the goal is at most {goal:.2f}: "
        + ("reached" if value <= goal else "**missed**")
        for what, value, goal in (
            ("overlap against no_sync + fused", of_fused, GOAL_OF_FUSED),
            ("overlap against max(computation, communication)", of_limit, GOAL_OF_LIMIT),
        )
    ]


def unequal(results: list[dict[str, Any]]) -> list[str]:
    """The ways and ranks whose parameters are not those of `ARTICLE` on rank 0."""
    wanted = results[0]["digests"][ARTICLE]
    return [
        f"{way} on rank {rank}"
        for rank, result in enumerate(results)
        for way in EXACT
        if result["digests"][way] != wanted
    ]


def middle_round(at: AtRate, way: str) -> int:
    """The number of the round with the median time."""
    seconds = at.seconds(way)
    return sorted(range(len(seconds)), key=seconds.__getitem__)[len(seconds) // 2]


def main() -> None:
    """Measure everything and write the record."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, help="at each rate, instead of 3, 5 and 3")
    parser.add_argument("--warm-up", type=int, default=1, help="rounds that do not count")
    parser.add_argument("--batch", type=int, default=Workload.batch, help="texts per rank")
    parser.add_argument("--layers", type=int, default=Workload.num_layers)
    parser.add_argument("--hidden", type=int, default=Workload.hidden_size)
    parser.add_argument("--no-record", action="store_true", help="no picture and no record")
    options = parser.parse_args()
    require_root_and_iproute2()
    if options.warm_up < 1:
        raise SystemExit("--warm-up must be at least 1: overlap learns its buckets in a first step")
    rounds = {rate: options.rounds or number for rate, number in ROUNDS.items()}
    workload = Workload(options.layers, options.hidden, batch=options.batch)
    total = (options.warm_up + sum(rounds.values())) * len(ALL)
    with tqdm(total=total, unit="step", file=sys.stderr, mininterval=5) as bar:

        def show(line: str) -> None:
            if line.startswith(STEP_DONE):
                bar.set_postfix_str(line.removeprefix(STEP_DONE).strip(), refresh=False)
                bar.update()

        with rate_limited(2, GOAL_RATE) as hosts:
            results = run_ranks(
                measure,
                hosts,
                timeout=60 + 60.0 * total,
                on_line=show,
                workload=workload,
                ways=ALL,
                links=hosts,
                rounds=rounds,
                warm_up=options.warm_up,
            )
    report(workload, results, rounds, options.warm_up, record=not options.no_record)


def report(
    workload: Workload,
    results: list[dict[str, Any]],
    rounds: dict[float, int],
    warm_up: int,
    *,
    record: bool,
) -> None:
    """Write the record and the picture, print it, and fail if parameters differ."""
    at = {rate: AtRate([result["times"][rate] for result in results]) for rate in rounds}
    differing = unequal(results)
    picture = RESULTS / f"sync_timeline_{hardware_tag()}.png"
    drawn = at[GOAL_RATE]
    if record:
        RESULTS.mkdir(exist_ok=True)
        draw_timeline(
            {way: drawn.by_rank[0][way][middle_round(drawn, way)] for way in (FUSED, OVERLAP)},
            f"One step at {GOAL_RATE:.0f} Mbit/s, {results[0]['num_parameters'] / 1e6:.1f} "
            "million parameters, two ranks",
            picture,
        )
    steps = warm_up + sum(rounds.values())
    body = [
        *(__doc__ or "").strip().splitlines()[:16],
        "",
        f"Model: {workload}, {results[0]['num_parameters']:,} parameters, AdamW, dropout 0.1; "
        f"{[size for size, *_ in drawn.by_rank[0][OVERLAP][0].buckets]} bytes in the buckets. "
        f"Each rank: OMP_NUM_THREADS=1, on AMD MKL_DEBUG_CPU_TYPE=5. Links: veth, tbf, "
        f"TCP {CONGESTION_CONTROL}. Warm-up {warm_up} round, then {rounds} rounds (rate in "
        "Mbit/s: number). Medians, in brackets the quartiles; a round's time is the slower rank's.",
        "",
        f"**Parameters after {steps} steps**: "
        + (
            f"differ: {', '.join(differing)}."
            if differing
            else f"bit-equal on both ranks for {', '.join(EXACT)}."
        ),
        f"{OVERLAP_BF16}: {results[0]['bf16_error']:.4f} from these, relative to how far they "
        "moved (root mean squares).",
        "",
        f"**Goals at {GOAL_RATE:.0f} Mbit/s**:",
        "",
        *verdict(drawn),
    ]
    for rate, measured in at.items():
        body += ["", f"## {rate:.0f} Mbit/s", "", *rate_table(measured), "", *bounds(measured)]
    body += ["", "## One step's timeline", "", f"![timeline of a step]({picture.name})"]
    if record:
        write_record("sync", "Gradient synchronization over slow links", "make bench-sync", body)
    else:
        print("\n".join(body))
    if differing:
        raise SystemExit(f"parameters differ: {', '.join(differing)}")


if __name__ == "__main__":
    main()
