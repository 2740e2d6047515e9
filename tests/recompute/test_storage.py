"""The slots that keep the bytes of offloaded tensors."""

from __future__ import annotations

import gc
import threading
import weakref
from typing import Any

import paddle
import pytest

from paddle_recompute.recompute import _storage


@pytest.mark.parametrize("device", ["cpu", "another"])
def test_the_thread_that_reads_ahead_keeps_the_memory_that_it_writes_to(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the slot is dropped meanwhile, with its model or because a step has failed."""
    monkeypatch.setattr(_storage.paddle, "get_device", lambda: device)
    dropped = threading.Event()
    kept = []

    def read_into(self: Any, data: memoryview, offset: int) -> None:
        dropped.wait()
        kept.append(is_alive() is not None)

    monkeypatch.setattr(_storage._File, "read_into", read_into)
    slot = _storage.slots("disk", None)()
    slot.write(paddle.arange(1000.0))
    slot.prefetch()
    is_alive = weakref.ref(slot._arriving[0])  # a Tensor of the CPU, or else an array
    del slot
    gc.collect()
    dropped.set()
    _storage._reader.submit(int).result()  # what was under way is over
    assert kept == [True]
    gc.collect()
    assert is_alive() is None
