"""What it costs that Paddle's executor draws random numbers in the same order in every run.

    python -m benchmarks.speed.executor_order

Two towers with dropout, trained by a Program in an executor of one's own (Paddle 3.3). Blocks of
20 runs without and with ``FLAGS_enable_pir_in_executor_trace_run`` alternate in one process; the
figures are the process's CPU time. Takes about a minute.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import numpy as np
import paddle
from paddle import nn

from benchmarks.harness.timing import paired_seconds, ratios, shown

FLAG = "FLAGS_enable_pir_in_executor_trace_run"
PAIRS, RUNS = 15, 20


class TwoTowers(nn.Layer):
    """Two MLPs with dropout; returns the products of their vectors."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.towers = nn.LayerList(
            nn.Sequential(
                *(
                    nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Dropout(0.1))
                    for _ in range(depth)
                )
            )
            for _ in range(2)
        )

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        one, other = (tower(x) for tower in self.towers)
        return (one * other).sum(axis=1)


def runs_of(width: int, depth: int, rows: int, *, is_set: bool) -> Callable[[], None]:
    """A function that trains `RUNS` steps, with or without the flag."""
    main, startup = paddle.static.Program(), paddle.static.Program()
    with paddle.static.program_guard(main, startup):
        x = paddle.static.data("x", [rows, width])
        loss = TwoTowers(width, depth)(x).square().mean()
        paddle.optimizer.SGD(0.01).minimize(loss)
    executor, scope = paddle.static.Executor(), paddle.static.Scope()
    feed = {"x": np.random.default_rng(0).standard_normal((rows, width)).astype("float32")}

    def run() -> None:
        paddle.set_flags({FLAG: is_set})
        with paddle.static.scope_guard(scope):
            for _ in range(RUNS):
                executor.run(main, feed=feed, fetch_list=[loss])

    with paddle.static.scope_guard(scope):
        executor.run(startup)
    return run


def main() -> None:
    """Measure a small and a larger Program, and print the quotients."""
    paddle.enable_static()
    for shape in ((32, 8, 32), (256, 4, 64)):
        steps = {name: runs_of(*shape, is_set=name == "with") for name in ("without", "with")}
        seconds = paired_seconds(steps, warm_up=1, rounds=PAIRS, clock=time.process_time)
        taken = {name: 1e3 * statistics.median(one) / RUNS for name, one in seconds.items()}
        print(
            f"width {shape[0]}, {shape[1]} layers, {shape[2]} rows: {taken['without']:.2f} ms of "
            f"CPU time a run without the flag, {taken['with']:.2f} ms with it; quotient "
            f"{shown(ratios(seconds, 'without')['with'])} of {PAIRS} pairs"
        )


if __name__ == "__main__":
    main()
