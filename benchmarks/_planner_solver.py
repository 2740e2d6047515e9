"""The solver alone: against brute force, against the clock, and at half of the plain peak."""

from __future__ import annotations

import statistics
import time
from typing import Any

import paddle

from benchmarks._planner_models import square
from benchmarks.recompute_cost import BATCH, HIDDEN, LAYERS, LENGTH
from paddle_recompute.planner import (
    PLAIN,
    Job,
    make_plan,
    next_faster,
    simulate,
    smallest,
    solve,
    uniform,
    within_budget,
)
from paddle_recompute.planner.planning import measured_peak
from tests.planner.chains import OPTIONS, chain, every_choice

CALLS = 7
SEEDS = 6


def brute_force() -> list[float]:
    """Budgets, and the largest excess of seconds over the best of all choices."""
    budgets, worst = 0, 0.0
    for seed in range(SEEDS):
        costs = chain(CALLS, seed)
        every = [
            (timeline.peak.bytes, timeline.seconds)
            for choices in every_choice(CALLS, OPTIONS)
            for timeline in [simulate(costs, choices)]
        ]
        low = min(peak for peak, _ in every)
        high = simulate(costs, uniform(costs, PLAIN)).peak.bytes
        for tenth in range(11):
            budget = low + (high - low) * tenth // 10
            solution = solve(costs, budget)
            assert solution is not None
            best = min(seconds for peak, seconds in every if peak <= budget)
            budgets, worst = budgets + 1, max(worst, solution.seconds / best - 1)
    return [budgets, worst]


def seconds_of_96() -> float:
    """The longest of some solutions of 96 calls."""
    longest = 0.0
    for alike in (True, False):
        costs = chain(96, 3, alike=alike)
        plain = simulate(costs, uniform(costs, PLAIN)).peak.bytes
        for share in (0.3, 0.4, 0.5, 0.6, 0.8):
            began = time.process_time()
            solve(costs, int(plain * share))
            longest = max(longest, time.process_time() - began)
    return longest


def at_half(rounds: int) -> dict[str, Any]:
    """The 12-layer model of `benchmarks.recompute_cost` at half of its plain peak."""
    paddle.seed(0)
    block = paddle.nn.TransformerEncoderLayer(HIDDEN, 4, 4 * HIDDEN, 0.1, activation="gelu")
    model = paddle.nn.TransformerEncoder(block, LAYERS)
    optimizer = paddle.optimizer.AdamW(parameters=model.parameters())
    job = Job(model, paddle.randn([BATCH, LENGTH, HIDDEN]), square, optimizer)
    costs = job.measure()
    plain = simulate(costs, uniform(costs, PLAIN))
    budget = plain.peak.bytes // 2
    made = make_plan(costs, budget, signature=job.signature())
    made = within_budget(made, lambda one: measured_peak(job, one))
    front = []
    at = smallest(costs)
    while at is not None and len(front) < 40:
        front.append([at.peak / plain.peak.bytes, at.seconds / plain.seconds])
        at = next_faster(costs, at.seconds * 0.99, at.peak)  # type: ignore[assignment]
    times: dict[bool, list[float]] = {False: [], True: []}
    for _ in range(rounds):
        for planned in (False, True):
            if planned:
                made.apply(model)
            for _ in range(2):  # the first one after a change of the model is slower
                began = time.process_time()
                job.step()
                seconds = time.process_time() - began
                job.clear_gradients()
            times[planned].append(seconds)
            if planned:
                made.remove(model)
    pairs = zip(times[True], times[False], strict=True)
    return {
        "plain": plain.peak.bytes,
        "budget": budget,
        "predicted": made.peak_bytes,
        "measured": made.measured_bytes,
        "predicted ratio": made.seconds / costs.seconds,
        "ratio": statistics.median(a / b for a, b in pairs) if rounds else None,
        "front": front,
    }


def figures(rounds: int) -> dict[str, Any]:
    """All of this module, for the record."""
    return {"brute force": brute_force(), "96 calls": seconds_of_96(), "half": at_half(rounds)}


def lines_of(found: dict[str, Any]) -> list[str]:
    """The section of the record."""
    half = found["half"]
    share = [f"{peak:.2f}: {seconds:.3f}" for peak, seconds in half["front"]]
    measured = "" if half["ratio"] is None else f", measured {half['ratio']:.3f}"
    cheap = [peak for peak, seconds in half["front"] if seconds <= 1.10]
    return [
        "## The solver alone",
        "",
        f"- Against brute force: {found['brute force'][0]} budgets, at most "
        f"{found['brute force'][1]:.4%} slower than the best of all choices.",
        f"- 96 calls: at most {found['96 calls']:.2f} s.",
        "",
        f"At half of the plain peak of the model of `benchmarks.recompute_cost` (12 blocks, hidden "
        f"{HIDDEN}, {BATCH} x {LENGTH}): budget {half['budget'] / 2**20:.1f} MiB, predicted "
        f"{half['predicted'] / 2**20:.1f}, measured {half['measured'] / 2**20:.1f}; time to plain, "
        f"predicted {half['predicted ratio']:.3f}{measured}. With at most 1.10 of the plain time "
        f"the smallest peak is {min(cheap):.2f} of plain.",
        "",
        "Front (peak : time, both to plain): " + "; ".join(share) + ".",
        "",
    ]
