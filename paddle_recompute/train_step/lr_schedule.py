"""The learning-rate schedule: warm-up, then decay."""

from __future__ import annotations

import math
from typing import Literal

from paddle.optimizer import lr


def build_schedule(
    peak: float,
    total_steps: int,
    *,
    warmup_steps: int = 0,
    decay: Literal["linear", "cosine", "constant"] = "linear",
) -> lr.LRScheduler:
    r"""The learning rate of every step: a linear warm-up, then a decay.

    With the peak p, W = max(1, `warmup_steps`) and T steps in all, step s has the rate

    .. math::

        p \cdot s / W                                  \quad & 1 \le s \le W

        p \cdot x, \; x = (T + 1 - s) / (T + 1 - W)   \quad & W \le s \le T, \text{ linear}

        p \cdot (1 - \cos \pi x) / 2                 \quad & W \le s \le T, \text{ cosine}

        p                                              \quad & W \le s \le T, \text{ constant}

    So the first step has ``p / W``, not 0; step W has the peak, and no other has it but with
    ``constant``; the decay would reach 0 in step T + 1, one after the last, and no step is made at
    rate 0. ``warmup_steps`` of 0 and of 1 are the same: the first step has the peak. A warm-up that
    is longer than the run (W > T) ends at ``p * T / W``.

    Args:
        peak: The highest rate.
        total_steps: Optimizer steps of the whole run.
        warmup_steps: Optimizer steps until the peak.
        decay: What follows the warm-up.

    Returns:
        A scheduler at the first step; ``step()`` is to be called after each optimizer step.
    """
    warmup = max(1, warmup_steps)

    def share_of_peak(steps_done: int) -> float:
        step = steps_done + 1
        if step <= warmup:
            return step / warmup
        # 0 beyond the last step, where nothing is trained: a scheduler is stepped once more there.
        left = max(0, total_steps + 1 - step) / max(1, total_steps + 1 - warmup)
        if decay == "cosine":
            return (1 - math.cos(math.pi * left)) / 2
        return left if decay == "linear" else 1.0

    return lr.LambdaDecay(peak, share_of_peak)
