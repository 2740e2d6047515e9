"""Time and peak memory of the steps of a run."""

from __future__ import annotations

import time

from paddle_recompute._paddle import memory as _memory


class Meter:
    """Time and peak memory of the steps, without logging and saving between them.

    ``start()`` before a step (it includes reading the batch), ``stop()`` after it.

    Attributes:
        steps: Number of steps.
        seconds: Their total time.
        peak_bytes: The largest peak of a step on this rank; None before the first step, and if
            Paddle cannot measure the peak of a single step (2.6 on CPU).
    """

    def __init__(self) -> None:
        self.steps = 0
        self.seconds = 0.0
        self.peak_bytes: int | None = None
        self._started = 0.0

    def start(self) -> None:
        """Call before a step."""
        if _memory.can_reset_peak():
            _memory.reset_peak()
        self._started = time.perf_counter()

    def stop(self) -> None:
        """Call after a step."""
        self.seconds += time.perf_counter() - self._started
        self.steps += 1
        if _memory.can_reset_peak():
            self.peak_bytes = max(self.peak_bytes or 0, _memory.peak_bytes())

    def rate(self, examples_per_step: int) -> float:
        """Examples per second; 0 before the first step."""
        return self.steps * examples_per_step / self.seconds if self.steps else 0.0
