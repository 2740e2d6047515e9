"""What it costs that Paddle's executor draws random numbers in the same order in every run.

    python -m benchmarks.speed.executor_order

Two towers with dropout, trained by a Program in an executor of one's own (Paddle 3.3). Blocks of
runs without and with ``FLAGS_enable_pir_in_executor_trace_run`` alternate in one process; the
figures are the process's CPU time. Takes about a minute.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import numpy as np
import paddle
from paddle import nn

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


def runs_of(width: int, depth: int, rows: int) -> Callable[[], float]:
    """A function that trains `RUNS` steps and returns their CPU time, in seconds."""
    main, startup = paddle.static.Program(), paddle.static.Program()
    with paddle.static.program_guard(main, startup):
        x = paddle.static.data("x", [rows, width])
        loss = TwoTowers(width, depth)(x).square().mean()
        paddle.optimizer.SGD(0.01).minimize(loss)
    executor, scope = paddle.static.Executor(), paddle.static.Scope()
    feed = {"x": np.random.default_rng(0).standard_normal((rows, width)).astype("float32")}

    def run() -> float:
        started = time.process_time()
        with paddle.static.scope_guard(scope):
            for _ in range(RUNS):
                executor.run(main, feed=feed, fetch_list=[loss])
        return time.process_time() - started

    with paddle.static.scope_guard(scope):
        executor.run(startup)
    return run


def main() -> None:
    """Measure a small and a larger Program, and print the quotients."""
    paddle.enable_static()
    for width, depth, rows in ((32, 8, 32), (256, 4, 64)):
        run = runs_of(width, depth, rows)
        times: dict[bool, list[float]] = {False: [], True: []}
        for pair in range(PAIRS + 1):
            for is_set in (False, True) if pair % 2 else (True, False):
                paddle.set_flags({FLAG: is_set})
                seconds = run()
                if pair:
                    times[is_set].append(seconds / RUNS)
        quotients = sorted(b / a for a, b in zip(times[False], times[True], strict=True))
        print(
            f"width {width}, {depth} layers, {rows} rows: "
            f"{1e3 * statistics.median(times[False]):.2f} ms of CPU time a run without the flag, "
            f"{1e3 * statistics.median(times[True]):.2f} ms with it; quotient "
            f"{statistics.median(quotients):.3f} (quartiles {quotients[len(quotients) // 4]:.3f} "
            f"to {quotients[3 * len(quotients) // 4]:.3f} of {PAIRS} pairs)"
        )


if __name__ == "__main__":
    main()
