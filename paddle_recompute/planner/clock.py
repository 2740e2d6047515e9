"""The clock of the measurements."""

from __future__ import annotations

import time

import paddle


def now() -> float:
    """Seconds; only differences mean something.

    On a CPU the time that this process has computed, on all its threads: a machine that others use
    too would make one option look slower than another by chance. On a device, the time that has
    passed when its kernels are done.
    """
    if str(paddle.get_device()) == "cpu":
        return time.process_time()
    paddle.device.synchronize()
    return time.perf_counter()
