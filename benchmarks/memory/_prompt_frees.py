"""Peaks of Programs that do not depend on when the executor's collector thread gets the processor.

The executor of Paddle (2.6, 3.x) frees on a CPU in a thread of its own, after the operator: the
peaks of one Program scatter by up to a third. Where the operators run in the main thread and all
other threads come before it on the only processor of the process, what an operator was the last to
use is freed before the next one begins, and every step has the same peak: what the Program needs.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import paddle

from paddle_recompute._paddle import memory


def run_in_order() -> None:
    """One processor for this process, and all operators of a Program in the main thread.

    ``FLAGS_enable_pir_in_executor_trace_run`` (3.x); by default they run in threads of the
    executor's.
    """
    for thread in _threads():
        os.sched_setaffinity(thread, {min(os.sched_getaffinity(0))})
    paddle.set_flags({"FLAGS_enable_pir_in_executor_trace_run": True})


def peak_of(run: Callable[[], object]) -> int:
    """The peak of one `run` of a Program whose threads have been started, in bytes.

    Where the system does not let a thread come first (``SCHED_FIFO`` takes the right CAP_SYS_NICE),
    it is the least of eight runs.
    """
    others = [thread for thread in _threads() if thread != os.getpid()]
    try:
        for thread in others:
            os.sched_setscheduler(thread, os.SCHED_FIFO, os.sched_param(1))
    except PermissionError:
        return min(_one_peak(run) for _ in range(8))
    try:
        return _one_peak(run)
    finally:
        for thread in others:
            os.sched_setscheduler(thread, os.SCHED_OTHER, os.sched_param(0))


def _one_peak(run: Callable[[], object]) -> int:
    memory.reset_peak()
    run()
    return int(memory.peak_bytes())


def _threads() -> list[int]:
    return [int(name) for name in os.listdir("/proc/self/task")]
